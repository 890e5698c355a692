"""Losses with gradients alone: products by differences, and a solver that asks for none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevel
from bilevel._core.compilation import arithmetic
from bilevel.oracles import DifferenceOracles
from tests import cases


@jax.custom_jvp
def once(values):
    """The values, in a place where they cannot be differentiated."""
    return values


@once.defjvp
def _refuse(primals, tangents):
    raise TypeError("no derivative of this gradient is known")


@jax.custom_vjp
def logistic(margin):
    return jnp.logaddexp(0.0, -margin)


logistic.defvjp(lambda margin: (logistic(margin), margin), lambda margin, out: (-out * once(jax.nn.sigmoid(-margin)),))


def outer_loss(z, x, row):
    return logistic(row @ z)


def inner_loss(z, x, row):
    return outer_loss(z, x, row) + jnp.sum(jnp.exp(x) * z**2) / 2


FIRST_ORDER = bilevel.Differentiation(second_derivatives=False)


def build(*losses, **kwargs):
    rows, labels, outer_rows, outer_labels = cases.logistic_data()
    data = rows * labels[:, None], outer_rows * outer_labels[:, None]
    start = {"inner_var": np.zeros(4), "outer_var": np.zeros(4)}
    return bilevel.BilevelProblem.from_losses(*losses, *data, **start, dtype="float64", **kwargs)


def point(v):
    return bilevel.Point(np.linspace(-1, 1, 4), np.linspace(0, -1, 4), v)


def test_differences_are_second_derivatives_to_the_power_two_thirds_of_rounding():
    known = cases.by_autodiff("logistic", cases.logistic_selection())
    samples = {"inner_samples": known.inner_samples, "outer_samples": known.outer_samples}
    losses = {"inner_loss": known.inner_loss, "outer_loss": known.outer_loss}
    found = DifferenceOracles(**samples, outer_bounds=known.outer_bounds, **losses)
    with arithmetic("float64"):
        for size in (1e-6, 1.0, 1e6):
            at = point(size * np.array([1.0, -2.0, 0.5, 3.0]))
            for kind, wanted in cases.every_kind(known, at).items():
                # The step for a pair of directions is chosen by the length of both.
                atol = 1e-10 * max(size, 1) if kind == "inner_tangents" else 0
                cases.assert_trees_close(cases.every_kind(found, at)[kind], wanted, rtol=1e-7, atol=atol)
        assert not np.any(cases.every_kind(found, point(np.zeros(4)))["hvp"]), "along v = 0"


def test_a_loss_without_second_derivatives_is_refused_with_the_way_out():
    with pytest.raises(
        ValueError, match=r"no derivative of this gradient.*say `Differentiation\(second_derivatives=False\)`"
    ):
        build(inner_loss, outer_loss)
    with pytest.raises(ValueError, match=r"`second_derivatives=False`: exact solutions.*leave one of the two out"):
        build(inner_loss, outer_loss, differentiation=FIRST_ORDER, strongly_convex=True)
    with pytest.raises(ValueError, match=r"`second_derivatives=0`: must be True or False"):
        bilevel.Differentiation(second_derivatives=0)


@pytest.mark.slow
def test_fde_hbo_steps_alike_with_and_without_second_derivatives():
    problems = build(inner_loss, outer_loss, differentiation=FIRST_ORDER), build(*cases.LOSSES["logistic"])
    without, given = (bilevel.run(one, bilevel.FdeHBO(0.2, 0.5, 8), max_steps=50) for one in problems)
    cases.assert_trees_close(without.point, given.point, rtol=1e-9)
    assert without.calls == given.calls and without.calls.hvp == without.calls.cross == 0
    np.testing.assert_allclose(without.history["v_residual_sq"], given.history["v_residual_sq"], rtol=1e-6)

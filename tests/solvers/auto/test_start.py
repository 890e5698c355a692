"""The checks at the start: negative curvature, and losses out of the range of the arithmetic."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevel
from bilevel._core.compilation import arithmetic
from bilevel.solvers.auto.start import has_negative_curvature
from tests import cases
from tests.solvers.auto.problems import regression
from tests.solvers.test_networks import problems


def curved_loss(z, x, sample):
    row, hessian = sample
    return z @ hessian @ z / 2 + row @ z + x @ x


def with_curvatures(curvatures, dtype="float64", seed=0):
    """Inner losses whose mean is a quadratic with these eigenvalues."""
    size, rng = len(curvatures), np.random.default_rng(seed)
    basis = np.linalg.qr(rng.standard_normal((size, size)))[0]
    hessian = (basis * curvatures) @ basis.T

    rows = rng.standard_normal((6, size)), np.broadcast_to(hessian, (6, size, size))
    build = bilevel.BilevelProblem.from_losses
    return build(curved_loss, curved_loss, rows, rows, np.zeros(size), np.zeros(2), dtype=dtype), hessian


def found(problem, dtype="float64"):
    with arithmetic(dtype):
        return has_negative_curvature(problem.oracles, problem.start)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [1, 3, pytest.param(12, marks=pytest.mark.slow), 60])
def test_negative_curvature_is_found_only_if_there_is_any(size, dtype):
    positive = np.geomspace(1e-4, 1, size)
    assert not found(with_curvatures(positive, dtype)[0], dtype)
    assert not found(with_curvatures(np.where(positive < 1e-2, 0, positive), dtype)[0], dtype)
    for least in (-2.0, -0.1):
        assert found(with_curvatures(np.append(least, positive[1:]), dtype)[0], dtype)


def test_a_hessian_of_zeros_has_no_negative_curvature():
    assert not found(with_curvatures(np.zeros(3))[0])


def test_products_that_are_not_finite_show_no_negative_curvature():
    def loss(z, x, sample):
        return curved_loss(z, x, sample) + jnp.nan * (z @ z)

    problem, _ = with_curvatures(np.array([-1.0, 1.0]))
    assert not found(replace(problem, oracles=replace(problem.oracles, inner_loss=loss)))


def test_a_network_gets_adam_and_the_norm_and_a_convex_loss_the_low_rank_metric():
    network, _ = problems()
    solver = bilevel.AutoSRBA(batch_size=cases.BATCH)
    chosen = solver.configure(network)
    assert (chosen.step_size, chosen.preconditioner, chosen.inner_optimizer) == (0.1, "norm", "adam")
    assert (chosen.outer_optimizer, chosen.least_progress) == ("adam", None)
    with arithmetic(network.dtype):
        state = jax.eval_shape(chosen.init, network.oracles.with_batches(cases.BATCH, "blocks"), network.start)
    assert all(leaf.shape == () for leaf in jax.tree.leaves(state.preconditioner.diagonal))
    convex, _ = with_curvatures(np.array([0.5, 1.0]))
    assert bilevel.AutoSRBA(batch_size=3).configure(convex).preconditioner == "low_rank"


def test_curvature_is_not_examined_if_the_preconditioner_is_given_or_the_problem_is_convex(monkeypatch):
    def fail(*_):
        raise AssertionError("examined")

    monkeypatch.setattr("bilevel.solvers.auto.solver.has_negative_curvature", fail)
    network, _ = problems()
    given = bilevel.AutoSRBA(preconditioner="diagonal", batch_size=cases.BATCH)
    assert given.configure(network).preconditioner == "diagonal"
    assert bilevel.AutoSRBA(batch_size=cases.BATCH).configure(cases.logistic_selection()).preconditioner == "low_rank"
    with pytest.raises(AssertionError, match="examined"):
        bilevel.AutoSRBA(batch_size=cases.BATCH).configure(network)


def test_a_network_is_trained_without_a_rollback_or_a_warning():
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((64, 3))
    data = rows, np.sin(rows.sum(axis=1))

    def outer_loss(z, x, sample):
        return (jnp.tanh(sample[0] @ z["in"]) @ z["out"] - sample[1]) ** 2 / 2

    def inner_loss(z, x, sample):
        return outer_loss(z, x, sample) + sum(jnp.exp(x[name]) * jnp.sum(z[name] ** 2) for name in z) / 2

    start = {"in": rng.standard_normal((3, 8)) / 2, "out": rng.standard_normal(8) / 2}
    logs = {name: np.array(-4.0) for name in start}
    problem = bilevel.BilevelProblem.from_losses(inner_loss, outer_loss, data, data, start, logs, dtype="float32")
    history = bilevel.run(problem, bilevel.AutoSRBA(batch_size=16), max_steps=1500, eval_every=1500).history
    assert history["outer_value"][-1] < history["outer_value"][0] / 2 and history["rollbacks"][-1] == 0


@pytest.mark.parametrize(
    ("units", "message"),
    [
        ({"of_outer": 1e-34}, "outer loss is .*e-3.* at the start, too small in float32: scale the loss or the data"),
        ({"of_outer": 1e-44}, "outer loss is .*e-4.* at the start, too small in float32"),
        ({"of_inner": 1e-43}, "inner loss is .*e-4.* at the start, too small in float32"),
        ({"of_outer": 4e36}, r"outer loss is .*e\+.* at the start, too large in float32"),
        ({"of_outer": 3e38}, "outer loss is not finite at the start, in float32.*dtype='float64'"),
    ],
)
def test_losses_out_of_range_are_refused(units, message):
    with pytest.raises(ValueError, match=message):
        bilevel.run(regression(**units), bilevel.AutoSRBA(), max_steps=3)

"""Inner steps by an optax transformation: every compiled solver accepts one or gives the reason why it does not."""

from dataclasses import replace

import jax
import numpy as np
import optax
import pytest

import bilevel
from bilevel._core.compilation import arithmetic
from tests import cases

# The plain steps of z decrease like t to minus these powers.
DECAYS = {"SOBA": 1 / 2, "MASOBA": 1 / 2, "FdeHBO": 1 / 3, "TTSA": 2 / 5, "BSA": 1 / 2, "ALSET": 1 / 2}
# AutoSRBA has no plain steps of z to compare with.
ADMITTED = [name for name, solver in cases.SOLVERS.items() if solver.needs_plain_step is None and name != "AutoSRBA"]
REFUSED = [name for name, solver in cases.SOLVERS.items() if solver.needs_plain_step is not None]
STEP = 0.05


def plain(name, **changes):
    return cases.short(type(cases.SOLVERS[name]), STEP, 20.0, cases.BATCH, **changes)


def as_sgd(name):
    """The plain steps of a solver as a transformation."""
    times = getattr(plain(name), "n_inner_steps", 1)
    return optax.sgd(lambda count: STEP * (count // times + 1.0) ** -DECAYS.get(name, 0.0))


def test_the_solvers_that_accept_a_transformation_are_as_expected():
    assert set(DECAYS) <= set(ADMITTED)
    assert {"SRBA", "SABA", "SOBA", "StocBiO", "AmIGO", "NeumannAID", "SPABA", "PnPBO", "LancBiO", "ITD"} <= set(
        ADMITTED
    )
    assert {"PZOBO", "NBO", "QNBO", "MRBO", "SUSTAIN", "F2SA"} <= set(REFUSED)


@pytest.mark.parametrize("name", cases.marked(ADMITTED))
def test_gradient_descent_by_optax_equals_the_plain_step(name, tmp_path):
    problem, solver = cases.quadratic(), plain(name)
    given = replace(solver, inner_optimizer=as_sgd(name))
    expected = bilevel.run(problem, solver, max_steps=30, eval_every=30)
    found = bilevel.run(problem, given, max_steps=30, eval_every=30)
    cases.assert_trees_close(found.point, expected.point, rtol=1e-9, atol=1e-11)
    assert found.calls == expected.calls
    bilevel.run(problem, given, max_steps=11, eval_every=11).save(tmp_path / "run.npz")
    resumed = bilevel.resume(tmp_path / "run.npz", problem, solver=given, max_steps=30, eval_every=30)
    cases.assert_trees_equal(resumed.state, found.state)
    with pytest.raises(ValueError, match=rf"was made by {name} with a transformation of optax; pass it as `solver=`"):
        bilevel.resume(tmp_path / "run.npz", problem, max_steps=30)


@pytest.mark.parametrize("name", REFUSED)
def test_solvers_that_require_plain_steps_refuse_a_transformation(name):
    with pytest.raises(ValueError, match=rf"`{name}\(inner_optimizer=…\)`: .*; leave it out, or use a solver such as"):
        plain(name, inner_optimizer="adam")


def test_adam_moves_z_as_in_a_loop_of_optax_updates():
    problem, rate = cases.quadratic(), 0.03
    solver = bilevel.SOBA(STEP, 1e15, sampling="full", inner_optimizer=optax.adam(rate))
    found = bilevel.run(problem, solver, max_steps=25, eval_every=25).point
    with arithmetic("float64"), jax.numpy_dtype_promotion("standard"):
        z, optimizer = problem.start.inner_var, optax.adam(rate)
        state = optimizer.init(z)
        for _ in range(25):
            updates, state = optimizer.update(problem.oracles.inner_grad(problem.start._replace(inner_var=z)), state, z)
            z = optax.apply_updates(z, updates)
    np.testing.assert_allclose(found.inner_var, z, rtol=1e-9)
    assert np.abs(found.v).max() > 0.01, "v keeps its own step"


@pytest.mark.parametrize("name", ["SRBA", "SABA", "SOBA"])
def test_a_program_without_a_transformation_contains_no_code_for_it(name):
    problem, solver = cases.quadratic("float32"), plain(name)
    with arithmetic(problem.dtype):
        oracles = problem.oracles.with_batches(cases.BATCH, "blocks")
        off, on = (
            cases.lowered_steps(problem, one.configure(problem).cast(problem.dtype), oracles).as_text()
            for one in (solver, replace(solver, inner_optimizer=optax.adam(0.1)))
        )
    assert off.count("stablehlo.sqrt") < on.count("stablehlo.sqrt")


def test_bad_transformations_are_named():
    with pytest.raises(ValueError, match=r"`SOBA\(inner_optimizer='sgd'\)`: must be None, 'adam' or an optax"):
        bilevel.SOBA(inner_optimizer="sgd")
    with pytest.raises(
        ValueError, match=r"`SOBA\(inner_optimizer=…\)`: the transformation requires more than gradients"
    ):
        bilevel.run(cases.quadratic(), plain("SOBA", inner_optimizer=optax.polyak_sgd()), max_steps=1)
    with pytest.raises(ValueError, match=r"`BSA\(inner_optimizer=…, warm_start=False\)`"):
        plain("BSA", inner_optimizer="adam", warm_start=False)

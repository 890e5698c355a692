"""MAID: its steps, the decrease that each of them proves, and how its runs end."""

import dataclasses
import functools
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import bilevel
from tests import cases
from tests.problems import small
from tests.solvers.test_convergence import tiny
from tests.solvers.test_deterministic import assert_same_path_and_calls, path
from tests.transcription.maid import maid

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def certified_descent(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import certified_descent

    yield certified_descent
    sys.modules.pop("certified_descent")


@pytest.mark.parametrize("name", cases.marked(cases.PROBLEMS, quick=["quadratic"]))
def test_iterates_and_calls_equal_the_transcription(name):
    assert_same_path_and_calls(name, bilevel.MAID(), maid, {})


@pytest.mark.parametrize("name", cases.PROBLEMS)
@pytest.mark.slow
def test_steps_accuracies_and_bounds_equal_the_transcription(name):
    problem, steps = cases.PROBLEMS[name](), 20
    start = [np.asarray(part) for part in problem.start[:2]]
    settings = {"outer_step": 5.0, "accuracy": 1e-3}
    expected = maid(cases.in_numpy(name, problem), *start, range(steps), **settings)
    for state, row in zip(path(problem, bilevel.MAID(**settings), steps), expected, strict=True):
        np.testing.assert_allclose([state.outer_step, state.accuracy], [row["step"], row["accuracy"]], rtol=1e-10)
        np.testing.assert_allclose(state.value_bound, row["upper"], rtol=1e-12)
        np.testing.assert_allclose(state.point.outer_var, row["outer_var"], rtol=1e-9)


@pytest.mark.parametrize("family", ["logistic", "quadratics", "ridge", "softmax"])
@pytest.mark.slow
def test_each_accepted_step_decreases_h_as_proved(family, certified_descent):
    found = certified_descent.count(family, 60, np.random.default_rng(1))
    assert found.steps >= 60 and found.failures == 0


@pytest.mark.parametrize("family", ["quadratics", "logistic"])
@pytest.mark.parametrize("kind", ["l1", "simplex"])
@pytest.mark.slow
def test_each_accepted_step_decreases_h_and_an_outer_term_as_proved(family, kind, certified_descent):
    rng, pairs, wide = np.random.default_rng(2), [], certified_descent.WIDE

    def objective(exact, z, x):
        return exact(z, x) + (0 if kind == "simplex" else wide(0.1) * np.abs(x, dtype=wide).sum())

    while len(pairs) < 60:
        problem, exact = certified_descent.FAMILIES[family](rng)
        if kind == "simplex":
            x = rng.dirichlet(np.ones(problem.start.outer_var.size))
            problem = dataclasses.replace(problem, start=problem.start._replace(outer_var=x))
        problem = problem.with_outer_term(bilevel.Simplex() if kind == "simplex" else bilevel.L1(0.1))
        pairs += certified_descent.follow(problem, functools.partial(objective, exact))[0]
    decreases, proved = np.array(pairs).T
    assert np.all(decreases >= proved) and np.median(proved) > 0


def test_the_check_of_decreases_finds_steps_that_are_not_proved(certified_descent, monkeypatch):
    """Without error bounds, and with a step that is too long, some accepted steps do not decrease h enough."""
    monkeypatch.setattr("bilevel.solvers.maid._ROUNDING", 0.0)
    monkeypatch.setattr("bilevel.solvers.maid._MARGIN", 0.0)
    monkeypatch.setattr(certified_descent, "MOST_STEPS", 40)
    assert certified_descent.count("quadratics", 30, np.random.default_rng(1)).failures > 0


def test_a_run_ends_at_the_solution_with_a_reason():
    result = bilevel.run(tiny(0), bilevel.MAID(), max_steps=5000)
    assert result.status == "converged" and result.history["step"][-1] < 200
    assert result.reason.startswith("No further decrease of h can be proved in float64")
    assert result.history["hypergrad_norm_sq"][-1] < 1e-10
    calls = result.calls
    run = bilevel.Run(tiny(0), bilevel.MAID())
    run.advance(300)
    assert run.calls == calls, "steps after the end make no calls"


@pytest.mark.slow
def test_the_hypergradient_falls_with_the_inner_gradients_as_measured():
    """The orders of magnitude are those of another implementation on a similar problem."""
    problem = bilevel.problems.quadratic(512, 256, 8, 4, 1, common_linear=2.0, dtype="float64")
    history = bilevel.run(problem, bilevel.MAID(), max_steps=40, eval_every=10).history
    norms, passes = history["hypergrad_norm_sq"], history["calls_inner_grad"] / 512
    assert 100 < norms[0] < 1000 and np.all(norms[[1, 2, 4]] < [100, 1, 1e-3])
    assert np.all(passes[[1, 2, 4]] < [400, 1000, 5000])


@pytest.mark.slow
def test_the_bound_of_h_in_the_history_holds_and_decreases():
    history = bilevel.run(cases.logistic_selection(), bilevel.MAID(), max_steps=60, eval_every=1).history
    bounds = history["value_bound"][1:]
    assert np.all(np.diff(bounds) < 0) and np.all(history["value"][1:] <= bounds)
    assert np.isnan(history["value_bound"][0])
    assert bounds[-1] - history["value"][-1] < 1e-4


@pytest.mark.slow
def test_steps_within_bounds_decrease_h_and_end_at_the_bounded_solution():
    problem = cases.logistic_selection(outer_var=np.zeros(4), outer_bounds=(-0.5, 0.5))
    history = bilevel.run(problem, bilevel.MAID(outer_step=10.0), max_steps=200, eval_every=1).history
    exact = bilevel.run(problem, bilevel.Exact(), max_steps=50).history["value"][-1]
    assert np.all(np.diff(history["value"]) < 1e-15)
    np.testing.assert_allclose(history["value"][-1], exact, rtol=1e-9)


@pytest.mark.parametrize("make", [small.cleaning, small.logistic_folds, small.softmax_folds])
@pytest.mark.slow
def test_h_decreases_on_other_families(make):
    history = bilevel.run(make(dtype="float64"), bilevel.MAID(), max_steps=15, eval_every=1).history
    assert np.all(np.diff(history["value"]) < 0) and np.all(history["value"][1:] <= history["value_bound"][1:])


def own_losses():
    """z* = mean row + x, with F a distance from x and from a target: h is a quadratic."""

    def inner_loss(z, x, row):
        return jnp.sum((z - x - row) ** 2) / 2

    def outer_loss(z, x, row):
        return jnp.sum((z - 3 * row) ** 2) / 2 + jnp.sum(x**2) / 4

    rows = np.random.default_rng(0).standard_normal((20, 3)) + 1
    return bilevel.BilevelProblem.from_losses(
        inner_loss, outer_loss, rows, rows, np.zeros(3), np.zeros(3), dtype="float64", strongly_convex=True
    )


CONSTANTS = {"mu_G": 1.0, "L1_F": 1.0, "L1_G": 1.0, "L2_G": 0.0}


@pytest.mark.parametrize("given", [{}, {"mu_G": 1.0}])
def test_losses_without_constants_are_refused(given):
    with pytest.raises(
        ValueError, match=r"`MAID` proves its steps by certificates: give all of `mu_G`, .*not for custom"
    ):
        bilevel.run(own_losses(), bilevel.MAID(**given), max_steps=1)


@pytest.mark.slow
def test_losses_with_constants_are_solved():
    problem = own_losses()
    result = bilevel.run(problem, bilevel.MAID(**CONSTANTS), max_steps=200)
    mean = np.asarray(problem.oracles.inner_samples.leaves).mean(axis=int(problem.oracles.inner_samples.axes[0]))
    assert result.status == "converged"
    np.testing.assert_allclose(result.point.outer_var, 4 / 3 * mean, rtol=1e-5)


@pytest.mark.parametrize(("name", "value"), [("mu_G", 0.0), ("L1_F", -1.0), ("L2_G", np.inf)])
def test_impossible_constants_are_refused(name, value):
    with pytest.raises(ValueError, match=rf"`MAID\({name}={value}\)`: must be a finite number above 0"):
        bilevel.MAID(**CONSTANTS | {name: value})


@pytest.mark.slow
def test_a_float32_problem_is_certified_in_float64():
    problem = cases.quadratic("float32")
    result = bilevel.run(problem, bilevel.MAID(), max_steps=200)
    assert result.status == "converged" and result.point.outer_var.dtype == np.float32
    assert result.state.point.outer_var.dtype == np.float64
    np.testing.assert_allclose(result.state.point.outer_var, problem.exact_solver.minimizer, rtol=1e-5)


@pytest.mark.slow
def test_a_solver_of_another_run_can_be_used_again():
    first = bilevel.run(cases.quadratic(), bilevel.MAID(), max_steps=3)
    again = bilevel.run(cases.quadratic(seed=2), first.solver, max_steps=3)
    fresh = bilevel.run(cases.quadratic(seed=2), bilevel.MAID(), max_steps=3)
    assert dataclasses.asdict(first.solver) == dataclasses.asdict(bilevel.MAID())
    cases.assert_trees_equal(again.point, fresh.point)

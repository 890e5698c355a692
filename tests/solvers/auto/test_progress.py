"""What full-batch passes decide: whether x moves, whether a run returns to its best pass, and when it ends."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize

import bilevel
from bilevel._core.compilation import arithmetic
from bilevel.engine.driver import sweep
from bilevel.solvers.auto.preconditioner import Preconditioner
from bilevel.solvers.auto.progress import Reading, check_following, init_progress, return_to_best
from bilevel.solvers.auto.rollback import Rollback, init_rollback
from bilevel.solvers.moves import MovesState
from tests import cases
from tests.solvers.auto.problems import selection, shifted
from tests.solvers.auto.test_start import with_curvatures

AUTO = bilevel.AutoSRBA()


# x is frozen


def x_moves(lag, passes, first):
    """Whether x moves after each of some passes at which z and v do not move, and F lags behind h."""
    zero = jnp.zeros(())
    rollback = Rollback(*[None] * 4, sizes=(zero + 1, zero + 1), scale=zero, streak=zero, rollbacks=zero)
    reading = Reading(zero + 1, zero, zero + lag, zero)
    progress = init_progress(zero, 10.0, rollback)._replace(reading=reading, first=(zero + first, zero + first))
    moves = []
    for _ in range(passes):
        progress = check_following(progress, [zero + 1, zero + 1], [zero, zero], rollback)
        moves.append(bool(progress.x_moves))
    return moves


def test_x_is_frozen_while_z_is_far_behind_but_at_the_start_for_at_most_fifty_passes():
    assert x_moves(lag=0.05, passes=3, first=0.0) == [True] * 3
    assert not any(x_moves(lag=0.5, passes=200, first=0.0))
    assert x_moves(lag=0.5, passes=60, first=1.0).index(True) == 49


# Return to the best pass


def after(readings, errors=0.0):
    """The smallest upper bound, the pace and whether each pass was undone, for passes with these values of h."""
    point = bilevel.Point(np.zeros(1), np.zeros(1), np.zeros(1))
    found = []
    with arithmetic("float64"):
        zero = jnp.zeros(())
        here = init_rollback(point, Preconditioner(np.ones(1)), MovesState(), zero)
        progress = init_progress(zero, 10.0, here)._replace(first=(zero, zero), waited=zero)
        for number, h in enumerate(readings):
            progress = progress._replace(reading=Reading(zero + h, zero + errors, zero, zero))
            at = here._replace(point=jax.tree.map(lambda leaf, number=number: leaf + number, point))
            progress, back = return_to_best(progress, at)
            undone = float(back.point.outer_var[0]) != number
            found.append((float(sum(progress.best_reading[:2])), float(progress.pace), undone))
    return found


def test_if_h_rises_x_returns_to_its_best_pass_and_its_steps_are_halved():
    assert after([5.0, 4.0, 4.003, 4.5]) == [(5.0, 1, False), (4.0, 1, False), (4.0, 1, False), (4.0, 0.5, True)]


def test_after_a_return_h_is_estimated_again():
    assert after([4.0, 4.5, 4.2, 4.201])[2:] == [(4.2, 0.525, False), (4.2, 0.525, False)]


def test_a_rise_within_the_error_of_the_estimate_is_ignored():
    assert not any(undone for _, _, undone in after([4.0, 4.5], errors=0.3))
    assert after([4.0, 4.7], errors=0.3)[-1][2]


# The end


@pytest.fixture(scope="module")
def ended():
    """A run without a budget, on columns with a mean of 200."""
    return bilevel.run(shifted(200))


def test_a_run_without_a_budget_ends_at_the_minimum_that_other_starts_find(ended):
    problem, exact = shifted(200), None

    def value(x):
        nonlocal exact
        exact = problem.exact_solver(x, exact)
        return float(exact.value), exact.hypergrad

    starts = np.full(10, -2.0), np.full(10, -6.0), ended.point.outer_var.astype(float)
    found = [minimize(value, start, jac=True, method="L-BFGS-B", bounds=[(-20, 20)] * 10).fun for start in starts]
    assert ended.history["value"][-1] <= 1.001 * min(found)
    assert ended.history["outer_value"][-1] == pytest.approx(ended.history["value"][-1], rel=1e-3)


def test_the_reason_contains_the_measurements_of_the_last_passes(ended):
    last = {name: column[-1] for name, column in ended.history.items()}
    assert ended.status == "converged" and last["quiet_windows"] >= 2 and last["h_change"] <= 3e-5
    for shown in ("h has stopped decreasing", f"{last['h_change']:.2g} of h", f"{last['h_gradient']:.2g} of h"):
        assert shown in ended.reason and shown in ended.summary()
    assert "own criterion" in ended.status.sentence and "nearly stationary" in ended.reason
    assert last["hypergrad_norm_sq"] < 1e-4 * ended.history["hypergrad_norm_sq"][0]


def test_the_reason_of_a_run_that_uses_up_its_budget_is_that_h_was_still_decreasing():
    result = bilevel.run(shifted(200), AUTO, max_steps=200)
    assert result.status == "out_of_budget"
    assert result.reason.startswith("A budget was used up. h was still decreasing: ")


def test_a_run_that_a_tolerance_ends_says_so():
    result = bilevel.run(cases.quadratic(), bilevel.Exact(), max_steps=200, stop=1e-2)
    assert result.status == "converged" and "fell to the tolerance" in result.reason


def test_a_resumed_run_ends_like_an_uninterrupted_one(ended, tmp_path):
    part = bilevel.run(shifted(200), AUTO, max_steps=700)
    part.save(tmp_path / "run.npz")
    resumed = bilevel.resume(tmp_path / "run.npz", shifted(200), max_steps=300_000)
    assert (resumed.status, resumed.reason) == (ended.status, ended.reason)
    cases.assert_trees_equal(resumed.point, ended.point)


@pytest.mark.slow
def test_a_sweep_ends_where_a_run_does(ended):
    (cells,) = sweep(shifted(200), [ended.solver], [0], int(1.2 * ended.history["calls"][-1]))
    assert cells[0].status == "converged" and cells[0].rows[-1]["step"] == ended.history["step"][-1]


def test_a_solver_that_does_not_end_by_itself_requires_a_budget():
    with pytest.raises(ValueError, match="no budget"):
        bilevel.run(selection(), bilevel.SRBA(0.1, batch_size=cases.BATCH))


@pytest.mark.parametrize("preconditioner", [None, "norm"])
def test_least_progress_is_refused_for_an_inner_loss_that_is_not_convex(preconditioner):
    problem, _ = with_curvatures(np.array([-1.0, 1.0]))
    solver = bilevel.AutoSRBA(batch_size=3, preconditioner=preconditioner, least_progress=1e-3)
    with pytest.raises(ValueError, match=r"AutoSRBA\(least_progress=0.001\)`: h is not measured"):
        bilevel.run(problem, solver, max_steps=3)


@pytest.mark.parametrize("problem", [selection, lambda: replace(selection(), exact_solver=None)])
def test_the_norm_is_refused_for_an_inner_loss_that_is_known_to_be_convex(problem):
    with pytest.raises(ValueError, match=r"`AutoSRBA\(preconditioner='norm'\)`: .* known to be strongly convex"):
        bilevel.run(problem(), bilevel.AutoSRBA(preconditioner="norm"), max_steps=3)

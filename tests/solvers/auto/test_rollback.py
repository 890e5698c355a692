"""Rollback: which full-batch passes are accepted, how steps shrink and grow again, and which point is evaluated."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import bilevel
from bilevel._core import trees
from bilevel._core.compilation import arithmetic
from bilevel.engine.driver import sweep
from bilevel.solvers.auto.preconditioner import Preconditioner
from bilevel.solvers.auto.rollback import check_pass, init_rollback, point_to_evaluate
from bilevel.solvers.moves import MovesState
from tests import cases
from tests.solvers.auto.problems import BOUNDED, PERIOD, PLAIN, selection

HUGE = 400.0


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
def test_growth_is_detected_and_undone(dtype):
    problem = selection(dtype=dtype)
    plain = bilevel.run(problem, replace(PLAIN, step_size=HUGE), max_steps=600)
    assert plain.status == "diverged" or plain.history["outer_value"][-1] > 10, "the step was meant to be too large"
    result = bilevel.run(problem, replace(BOUNDED, step_size=HUGE), max_steps=200, eval_every=1)
    history = result.history
    assert result.status == "out_of_budget"
    assert history["rollbacks"][-1] >= 5
    assert np.all(np.diff(history["rollbacks"]) >= 0)
    assert history["step_scale"].min() <= 2.0**-5
    assert np.all(np.isfinite(history["outer_value"])) and np.all(np.isfinite(history["value"]))
    assert history["outer_value"][-1] < history["outer_value"][0]
    assert history["inner_residual_sq"][-1] < history["inner_residual_sq"][0]
    assert trees.is_finite(result.point)


def test_a_stable_run_is_never_rolled_back():
    history = bilevel.run(selection(), BOUNDED, max_steps=300).history
    assert np.all(history["rollbacks"] == 0) and np.all(history["step_scale"] == 1)


def test_if_the_iterate_is_not_finite_the_last_accepted_one_is_evaluated():
    problem = selection(dtype="float32")
    run = cases.trajectory(problem, replace(BOUNDED, step_size=1e30), PERIOD)
    state = run.states[-1]
    assert not trees.is_finite(state.point), "the step was meant to overflow between two passes"
    with arithmetic("float32"):
        evaluated = run.solver.monitor.evaluation_point(state)
    cases.assert_trees_equal(trees.to_numpy(evaluated), trees.to_numpy(problem.start))


def test_steps_grow_again_after_accepted_passes():
    point = bilevel.Point(np.ones(3), np.zeros(2), np.ones(3))
    preconditioner, moves = Preconditioner(np.ones(3)), MovesState()
    with arithmetic("float64"):
        last = init_rollback(point, preconditioner, moves, np.ones(()))

        def after(last, size, first=False):
            exact = jax.tree.map(lambda leaf: size * np.ones_like(leaf), point)
            return check_pass(last, point, exact, preconditioner, moves, 0.1, np.array(first))

        last = after(last, 1.0, first=True)
        scales = [float(last.scale)]
        for size in (1e9, np.nan, *[1.0] * 100):
            last = after(last, size)
            scales.append(float(last.scale))
    assert scales[:3] == [1, 0.5, 0.25] and float(last.rollbacks) == 2
    assert scales.index(0.5, 3) == 2 + 31 and scales.index(1, 3) == 2 + 62 and scales[-1] == 1
    cases.assert_trees_equal(trees.to_numpy(last.point), point)


def after_pass(last=None, *, z=3.0, v=3.0, D_z=0.0, D_v=0.0, first=False):
    """The state after a pass with M = 4 and step 0.1: |z| is 2 z, and a move along D has length 0.05 D."""
    at, exact = (bilevel.Point(*(np.array([part]) for part in (a, 0.0, b))) for a, b in ((z, v), (D_z, D_v)))
    preconditioner, moves = Preconditioner(np.array([4.0])), MovesState()
    with arithmetic("float64"):
        last = init_rollback(at, preconditioner, moves, np.ones(())) if last is None else last
        return check_pass(last, at, exact, preconditioner, moves, 0.1, np.array(first))


def test_the_first_pass_is_accepted_and_sets_the_sizes():
    assert [float(size) for size in after_pass(D_z=8.0, D_v=40.0, first=True).sizes] == [6, 20]  # |z|, ten moves of v


@pytest.mark.parametrize("part", ["D_z", "D_v"])
def test_a_pass_is_accepted_up_to_half_the_size(part):
    good = after_pass(first=True)
    assert float(after_pass(good, **{part: 59.9}).rollbacks) == 0
    back = after_pass(good, **{part: 60.1})
    assert (float(back.rollbacks), float(back.scale), float(back.streak)) == (1, 0.5, 0)
    assert float(after_pass(back, **{part: 119.9}).rollbacks) == 1, "halved steps make moves half as long"
    assert float(after_pass(back, **{part: 120.1}).scale) == 0.25


def test_sizes_at_most_double_and_never_decrease():
    good = after_pass(first=True)
    sizes = [[float(size) for size in after_pass(good, z=z, v=3.0).sizes] for z in (1.0, 5.0, 500.0)]
    assert sizes == [[6, 6], [10, 6], [12, 6]]


def test_points_a_million_times_farther_away_are_not_evaluated():
    good = after_pass(first=True)  # at a distance of √18 from 0
    for z, evaluated in ((4.3e6, 4.3e6), (4.5e6, 3.0)):
        with arithmetic("float64"):
            point = point_to_evaluate(good, bilevel.Point(np.array([z]), np.zeros(1), np.array([3.0])))
        assert float(point.inner_var[0]) == evaluated


def test_a_sweep_equals_single_runs_even_if_another_setting_is_rolled_back():
    problem = selection(dtype="float32")
    settings = [replace(BOUNDED, step_size=step) for step in (0.05, 0.1, HUGE)]
    calls = 60_000
    (together,) = sweep(problem, settings, [3], calls)
    for setting, cell in zip(settings, together, strict=True):
        alone = bilevel.run(problem, setting, seed=3, max_calls=calls)
        assert cell.status == alone.status == "out_of_budget"
        last = cell.rows[-1]
        assert last["step"] == alone.history["step"][-1]
        assert last["rollbacks"] == alone.history["rollbacks"][-1]
        np.testing.assert_allclose(last["value"], alone.history["value"][-1], rtol=2e-4)
    assert together[2].rows[-1]["rollbacks"] > 0


@pytest.mark.slow
def test_data_in_other_units_need_no_rollback():
    rows, signs, val, val_signs = cases.logistic_data(400, 300, dim=6, seed=2)
    values = []
    for scale in (1e-3, 1.0, 1e3):
        start = {"outer_var": np.full(6, -1.0) + 2 * np.log(scale), "inner_var": np.ones(6) / scale}
        data = scale * rows, signs, scale * val, val_signs
        problem = bilevel.problems.penalty_selection(*data, **start, dtype="float32")
        bounds = tuple(2 * np.log(scale) + bound for bound in (-10, 10))
        history = bilevel.run(problem, bilevel.AutoSRBA(outer_bounds=bounds), max_steps=2000).history
        assert history["rollbacks"][-1] == 0
        values.append(history["value"][-1])
    np.testing.assert_allclose(values, values[1], rtol=1e-3)

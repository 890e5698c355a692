"""Runs that are advanced by the user equal those of `run` bit for bit; best points; metrics that fail."""

import doctest
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from jax.tree_util import Partial

import bilevel
from bilevel.engine.driver import sweep
from tests import cases

SRBA = cases.SOLVERS["SRBA"]
HOST = {"Exact": bilevel.Exact(), "HOAG": bilevel.HOAG()}
STEPS = {"SRBA": 100, "SABA": 100, "Exact": 4, "HOAG": 4}


def solver_of(name):
    return HOST.get(name) or cases.SOLVERS[name]


@pytest.mark.parametrize("name", STEPS)
def test_advance_takes_the_same_steps_as_run(name):
    problem, solver, steps = cases.quadratic("float32"), solver_of(name), STEPS[name]
    whole = bilevel.run(problem, solver, seed=3, max_steps=steps)
    run = bilevel.Run(problem, solver, seed=3)
    for part in (1, 0, steps - 2, 1):
        run.advance(part)
    assert run.step == steps and run.calls == whole.calls and not run.diverged
    cases.assert_trees_equal(run.point, whole.point)
    cases.assert_trees_equal(run.state, whole.state)
    result = run.result()
    assert result.status == whole.status == "out_of_budget"
    assert result.solver == whole.solver and result.compile_seconds > 0
    for column, values in result.history.items():
        if column not in ("seconds", "inner_distance_sq", "v_distance_sq") and not column.startswith("exact_"):
            np.testing.assert_allclose(values, whole.history[column][-1:], rtol=1e-12, err_msg=column)


def test_advance_continues_beyond_a_page_of_draws():
    problem = cases.quadratic("float32")
    run = bilevel.Run(problem, SRBA)
    run.advance(9000)
    cases.assert_trees_equal(run.point, bilevel.run(problem, SRBA, max_steps=9000).point)


def test_evaluate_adds_a_row_and_does_not_change_the_run():
    run, unevaluated = (bilevel.Run(cases.quadratic("float32"), SRBA) for _ in range(2))
    assert run.evaluate()["step"] == 0
    run.advance(30)
    assert run.evaluate() == run.evaluate()
    run.advance(20)
    unevaluated.advance(50)
    assert run.result().history["step"].tolist() == [0, 30, 50]
    assert unevaluated.result().history["step"].tolist() == [50]
    cases.assert_trees_equal(run.state, unevaluated.state)


@pytest.mark.parametrize("name", ["SRBA", "Exact"])
def test_a_restarted_run_equals_a_new_run(name):
    run = bilevel.Run(cases.quadratic("float32"), solver_of(name))
    run.advance(3)
    first, calls = run.point, run.calls
    run.evaluate()
    run.restart()
    assert run.step == 0
    cases.assert_trees_equal(run.point, run.problem.start)
    run.advance(3)
    cases.assert_trees_equal(run.point, first)
    assert run.calls == calls and run.result().history["step"].tolist() == [3]


def test_advance_stops_at_the_last_finite_point():
    problem, solver = cases.quadratic("float32"), bilevel.SRBA(50.0, 1.0, cases.BATCH)
    run = bilevel.Run(problem, solver)
    run.advance(1000)
    at = run.step
    assert run.diverged and at < 1000 and all(np.all(np.isfinite(part)) for part in run.point)
    run.advance(5)
    assert run.step == at
    expected = bilevel.run(problem, solver, max_steps=1000, eval_every=1000)
    cases.assert_trees_equal(run.result().point, expected.point)
    assert run.result().status == expected.status == "diverged"


def test_a_saved_run_can_be_loaded_and_advanced(tmp_path):
    problem = cases.quadratic("float32")
    run = bilevel.Run(problem, SRBA, seed=5)
    run.advance(40)
    run.result().save(tmp_path / "run.npz")
    again = bilevel.Run.load(tmp_path / "run.npz", problem)
    again.advance(60)
    cases.assert_trees_equal(again.point, bilevel.run(problem, SRBA, seed=5, max_steps=100).point)
    assert again.result().history["step"].tolist() == [40, 100]


@pytest.mark.parametrize("n_steps", [-1, 1.5, True, None])
def test_advance_checks_the_number_of_steps(n_steps):
    with pytest.raises(ValueError, match=r"n_steps=.*integer of at least 0"):
        bilevel.Run(cases.quadratic("float32"), SRBA).advance(n_steps)


def test_the_arguments_of_a_run_are_checked():
    with pytest.raises(TypeError, match=r"BilevelProblem"):
        bilevel.Run(None, SRBA)
    with pytest.raises(ValueError, match=r"seed=-1"):
        bilevel.Run(cases.quadratic("float32"), SRBA, seed=-1)
    with pytest.raises(ValueError, match=r"batch_size=32.*exceeds the data"):
        bilevel.Run(cases.quadratic("float32"), bilevel.SRBA(batch_size=32))


def test_the_best_point_is_the_one_with_the_smallest_exact_value(tmp_path):
    visited = []
    problem = cases.quadratic("float32")
    noisy = bilevel.SOBA(0.05, 1.0, cases.BATCH)
    followed = replace(problem, metrics={"seen": lambda point: visited.append(point) or 0.0})
    result = bilevel.run(followed, noisy, max_steps=60, eval_every=1)
    values = result.history["value"]
    best = int(np.nanargmin(values))
    assert 0 < best < len(values) - 1, "the test requires a best point between the first and the last"
    assert result.best_value == values[best] and result.best_row == best
    cases.assert_trees_equal(result.best_point, visited[best])
    assert values[-1] > 1.001 * values[best]
    assert f"lowest value      {values[best]:.6g} after {best} steps: `best_point`" in result.summary()
    result.save(tmp_path / "run.npz")
    resumed = bilevel.resume(tmp_path / "run.npz", problem, max_steps=61)
    assert resumed.best_value == result.best_value and resumed.best_row == best
    cases.assert_trees_equal(resumed.best_point, result.best_point)


def test_a_resumed_run_finds_a_better_point(tmp_path):
    problem = cases.quadratic("float32")
    bilevel.run(problem, SRBA, max_steps=20).save(tmp_path / "run.npz")
    resumed = bilevel.resume(tmp_path / "run.npz", problem, max_steps=2000)
    assert resumed.best_row == int(np.argmin(resumed.history["value"])) > 0


def test_without_exact_values_there_is_no_best_point(tmp_path):
    problem = cases.quadratic("float32")
    plain = bilevel.BilevelProblem(problem.oracles, problem.start)
    result = bilevel.run(plain, SRBA, max_steps=5)
    assert result.best_point is None and result.best_value == np.inf and "lowest value" not in result.summary()
    result.save(tmp_path / "run.npz")
    assert bilevel.resume(tmp_path / "run.npz", plain, max_steps=6).best_point is None


def fail(point):
    raise KeyError("no such thing")


def test_a_metric_that_raises_gives_a_column_of_nan_and_the_run_continues():
    problem = cases.quadratic("float32")
    metrics = {"broken": fail, "first": lambda point: point.outer_var[0]}
    with pytest.warns(RuntimeWarning, match=r"`metrics`: 'broken' failed.*no such thing.*the run continues") as caught:
        result = bilevel.run(replace(problem, metrics=metrics), SRBA, max_steps=50, eval_every=10)
    assert [warning.filename for warning in caught] == [__file__], "one warning, at the line of the user"
    whole = bilevel.run(problem, SRBA, max_steps=50, eval_every=10)
    assert np.all(np.isnan(result.history["broken"])) and np.all(np.isfinite(result.history["first"]))
    cases.assert_trees_equal(result.point, whole.point)
    for name in set(whole.history) - {"seconds"}:
        np.testing.assert_array_equal(result.history[name], whole.history[name], err_msg=name)
    assert "SRBA" in result.summary() and result.plot("first").axes[0].get_ylabel() == "first"


@pytest.mark.parametrize("together", [False, True])
def test_a_sweep_accepts_metrics_that_can_and_cannot_be_traced(together):
    problem = cases.quadratic("float64")
    metrics = {
        "broken": fail,
        "traced": Partial(lambda point: point.outer_var[0]),
        "in_numpy": lambda point: float(np.asarray(point.outer_var)[0]),
        "untraceable": Partial(lambda point: float(point.outer_var[0])),
    }
    settings = [replace(cases.SOLVERS["SOBA"], step_size=step) for step in (0.05, 0.02)]
    with pytest.warns(RuntimeWarning, match=r"'broken' failed") as caught:
        results = sweep(replace(problem, metrics=metrics), settings, (0, 1), 2000, together=together)
    assert len(caught) == (1 if together else 2)
    expected = sweep(problem, settings, (0, 1), 2000, together=together)
    for found, plain in zip(chain(*results), chain(*expected), strict=True):
        for row, plain_row in zip(found.rows, plain.rows, strict=True):
            assert np.isnan(row["broken"]) and row["traced"] == row["in_numpy"] == row["untraceable"]
            assert {name: row[name] for name in plain_row} == plain_row


def test_the_docstring_example_runs():
    examples = doctest.DocTestFinder(recurse=False).find(bilevel.Run, "Run")
    assert [doctest.DocTestRunner().run(example).failed for example in examples] == [0]

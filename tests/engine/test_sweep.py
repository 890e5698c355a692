"""A sweep gives the same results as separate runs, and its runs do not affect each other."""

import functools
from contextlib import nullcontext
from dataclasses import replace

import jax
import numpy as np
import pytest

import bilevel
from bilevel._core.compilation import arithmetic
from bilevel._core.types import Calls
from bilevel.engine import steps as module
from bilevel.engine.driver import sweep
from bilevel.engine.metrics import cheap_metrics
from tests import cases
from tests.problems import small

PROBLEMS = {"quadratic": cases.quadratic, "cleaning": small.cleaning}
SEEDS = (0, 1, 7)
MAX_CALLS = 4000
COSTS = ("step", "calls", *(f"calls_{kind}" for kind in Calls._fields))
EXACT = ("value", "hypergrad_norm_sq", "inner_distance_sq", "v_distance_sq")


@functools.cache
def problem_of(name):
    return PROBLEMS[name](dtype="float64")


def grid(name, *step_sizes):
    problem, solver = problem_of("quadratic"), cases.SOLVERS[name]
    resolved = solver.configure(problem)
    return [replace(resolved, step_size=step_size) for step_size in step_sizes]


@functools.cache
def alone(problem, solver, seed, max_calls=MAX_CALLS):
    """Return the rows, the status and the state of a single run."""
    result = bilevel.run(problem_of(problem), solver, seed=seed, max_calls=max_calls)
    history = result.history.items()
    rows = [{name: column[i] for name, column in history} for i in range(len(result.history["step"]))]
    return rows, result.status, result.state


def assert_rows_equal(found, expected, names, rtol=1e-9):
    for name in COSTS:
        assert [row[name] for row in found] == [row[name] for row in expected], name
    for name in names:
        pairs = [row[name] for row in found], [row[name] for row in expected]
        np.testing.assert_allclose(*pairs, rtol=rtol, atol=1e-12, err_msg=name)


def assert_same_run(cell, expected, rtol=1e-9):
    """Compare all rows, in the columns that a sweep computes."""
    rows, status, state = expected
    own = ("epochs", *(name for name in rows[0] if name not in (*COSTS, *EXACT, "seconds", "value_gap")))
    cheap = [name for name in own if not name.startswith("exact_")]
    assert_rows_equal(cell.rows, rows, cheap, rtol)
    assert_rows_equal(cell.rows[-1:], rows[-1:], EXACT, rtol)
    assert cell.status == status == "out_of_budget"
    assert cell.memory_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(state))


# If the inner variable is a matrix, one solver of each kind: recursive, with tables, plain, two loops, first-order.
ON_MATRICES = ("SRBA", "SABA", "SOBA", "AmIGO", "F2SA")
# Sweeps of AutoSRBA, whose start alone costs more than this budget, are in tests/solvers/auto.
ON_VECTORS = [name for name in cases.SOLVERS if name != "AutoSRBA"]
CASES = [*((name, "quadratic") for name in ON_VECTORS), *((name, "cleaning") for name in ON_MATRICES)]


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def marked(*quick):
    """Return the cases, marked as slow except for ``quick``, since each requires two compilations."""
    return [case if case in quick else slow(*case) for case in CASES]


@pytest.mark.parametrize(
    ("name", "problem"),
    marked(("SRBA", "quadratic"), ("SABA", "quadratic"), ("SOBA", "quadratic"), ("SOBA", "cleaning")),
)
def test_a_sweep_equals_separate_runs(name, problem):
    solvers = grid(name, 0.05, 0.02)
    results = sweep(problem_of(problem), solvers, SEEDS, MAX_CALLS)
    assert len(results) == len(SEEDS)
    for seed, cells in zip(SEEDS, results, strict=True):
        for solver, cell in zip(solvers, cells, strict=True):
            assert_same_run(cell, alone(problem, solver, seed))


@pytest.mark.parametrize(("name", "problem"), marked(("SRBA", "quadratic"), ("SOBA", "quadratic")))
def test_seeds_that_step_together_end_like_separate_runs(name, problem):
    solvers = grid(name, 0.05, 0.02)
    results = sweep(problem_of(problem), solvers, SEEDS, MAX_CALLS, together=True)
    for seed, cells in zip(SEEDS, results, strict=True):
        for solver, cell in zip(solvers, cells, strict=True):
            rows, status, _ = alone(problem, solver, seed)
            assert_rows_equal(cell.rows[-1:], rows[-1:], ("outer_value", "direction_norm_sq", *EXACT))
            assert cell.status == status
            assert cell.rows[-1]["calls"] <= MAX_CALLS
            steps = {row["step"]: row for row in rows}
            common = [row for row in cell.rows if row["step"] in steps]
            assert len(common) >= 2
            assert_rows_equal(common, [steps[row["step"]] for row in common], ("outer_value", "v_residual_sq"))
            assert np.all(np.diff([row["step"] for row in cell.rows]) > 0)
    for solver, cell in zip(solvers, results[0], strict=True):
        assert_same_run(cell, alone(problem, solver, SEEDS[0]))


def test_the_seeds_of_these_tests_differ_in_their_last_step():
    lasts = {alone("quadratic", grid("SOBA", 0.05)[0], seed)[0][-1]["step"] for seed in SEEDS}
    assert len(lasts) > 1, "the tests above require different numbers of steps"


@pytest.mark.parametrize("together", [slow(False), True])
def test_random_refreshes_of_a_sweep_equal_those_of_runs(together):
    solvers = grid("SPABA", 0.05, 0.02)
    results = sweep(problem_of("quadratic"), solvers, SEEDS, MAX_CALLS, together=together)
    for seed, cells in zip(SEEDS, results, strict=True):
        for solver, cell in zip(solvers, cells, strict=True):
            assert_same_run(cell, alone("quadratic", solver, seed))


@pytest.mark.parametrize("together", [False, slow(True)])
def test_the_length_of_pages_does_not_change_results(monkeypatch, together):
    solvers = grid("SOBA", 0.05, 0.02)
    monkeypatch.setattr(module, "PAGE_LENGTH", 33)
    results = sweep(problem_of("quadratic"), solvers, SEEDS[:2], MAX_CALLS, together=together)
    ends = [alone("quadratic", solvers[0], seed)[0][-1]["step"] for seed in SEEDS[:2]]
    assert min(ends) > 66
    for seed, cells in zip(SEEDS, results, strict=False):
        for solver, cell in zip(solvers, cells, strict=True):
            rows = alone("quadratic", solver, seed)[0]
            assert_rows_equal(cell.rows[-1:], rows[-1:], ("outer_value", *EXACT))
    assert_same_run(results[0][0], alone("quadratic", solvers[0], SEEDS[0]))


def test_a_budget_that_ends_with_a_page_is_met_exactly(monkeypatch):
    """The last step within the budget is the last step of its page, so the next page takes no step."""
    monkeypatch.setattr(module, "PAGE_LENGTH", 33)
    solvers = grid("SOBA", 0.05, 0.02)
    result = bilevel.run(problem_of("quadratic"), solvers[0], max_steps=33)
    budget = int(result.history["calls"][-1])
    for solver, cell in zip(solvers, sweep(problem_of("quadratic"), solvers, [0], budget)[0], strict=True):
        assert cell.rows[-1]["step"] == 33 and cell.rows[-1]["calls"] == budget
        assert_same_run(cell, alone("quadratic", solver, 0, budget))


@pytest.mark.parametrize("budget", [0, 1, 39])
def test_a_budget_too_small_for_one_step_returns_the_start(budget):
    solvers = grid("SOBA", 0.05, 0.02)
    for cell in sweep(problem_of("quadratic"), solvers, [0], budget)[0]:
        assert_same_run(cell, alone("quadratic", solvers[0], 0, budget))
        assert [row["step"] for row in cell.rows] == [0]


@pytest.mark.slow
def test_a_sweep_of_a_float32_problem_computes_in_float32():
    problem, (solver,) = cases.quadratic("float32"), grid("SOBA", 0.05)
    ((cell,),) = sweep(problem, [solver], [0], MAX_CALLS)
    result = bilevel.run(problem, solver, max_calls=MAX_CALLS)
    expected = result.history["outer_value"]
    np.testing.assert_allclose([row["outer_value"] for row in cell.rows], expected, rtol=1e-4)
    assert all(np.float32(row["outer_value"]) == row["outer_value"] for row in cell.rows)
    assert cell.memory_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(result.state))


BUDGETS = {"between two evaluations": MAX_CALLS, "at an evaluation": None}


@pytest.mark.parametrize("absurd", [1e60, 1e200])
@pytest.mark.parametrize("end", BUDGETS)
@pytest.mark.parametrize(
    ("problem", "together"),
    [("quadratic", False), slow("quadratic", True), slow("cleaning", False), slow("cleaning", True)],
)
def test_a_diverging_run_does_not_affect_the_others(problem, end, absurd, together):
    good = grid("SOBA", 0.05, 0.02)
    budget = BUDGETS[end] or int(alone(problem, good[1], SEEDS[0])[0][-2]["calls"])
    mixed = [replace(good[0], step_size=absurd), good[1]]
    for found, expected in zip(
        sweep(problem_of(problem), mixed, SEEDS[:2], budget, together=together),
        sweep(problem_of(problem), good, SEEDS[:2], budget, together=together),
        strict=True,
    ):
        assert [cell.status for cell in found] == ["diverged", "out_of_budget"]
        exact = {name: (found[1].rows[-1].pop(name), expected[1].rows[-1].pop(name)) for name in EXACT}
        for name, pair in exact.items():
            np.testing.assert_allclose(*pair, rtol=1e-9, err_msg=name)
        alike = [name for name in expected[1].rows[-1] if not name.startswith("exact_") and name != "value_gap"]
        assert [[row.get(name) for name in alike] for row in found[1].rows] == [
            [row.get(name) for name in alike] for row in expected[1].rows
        ]


@pytest.mark.parametrize("first", ["diverged", "unsolved", "sound"])
def test_the_exact_solution_of_a_diverged_run_is_not_the_guess_of_the_next(first):
    problem, guesses = problem_of("quadratic"), []

    def exact_solver(outer_var, guess):
        guesses.append(guess)
        reference = problem.exact_solver(outer_var, guess)
        return reference._replace(value=np.nan) if first == "unsolved" else reference

    solvers = grid("SOBA", 1e60 if first == "diverged" else 0.05, 0.02)
    warns = pytest.warns(RuntimeWarning, match="`value` is NaN in 1 of") if first == "unsolved" else nullcontext()
    with warns:
        sweep(replace(problem, exact_solver=exact_solver), solvers, [0], MAX_CALLS)
    assert len(guesses) == 2 and guesses[0] is None
    assert (guesses[1] is not None) == (first == "sound")


def test_a_run_that_is_not_finite_at_its_start_has_no_row():
    problem = problem_of("quadratic")
    far = replace(problem, start=problem.start._replace(inner_var=np.full(5, 1e200)))
    ((cell,),) = sweep(far, grid("SOBA", 0.05), [0], MAX_CALLS)
    assert cell.status == "diverged" and cell.rows == []


@pytest.mark.parametrize("step_size", [100.0, 1e4, 1e200])
def test_a_diverged_run_ends_at_its_last_finite_evaluation(step_size):
    problem, solvers = problem_of("quadratic"), grid("SOBA", step_size, 0.05)
    cell, other = sweep(problem, solvers, [0], 4 * MAX_CALLS)[0]
    assert (cell.status, other.status) == ("diverged", "out_of_budget")
    cheap = ("outer_value", "inner_residual_sq", "v_residual_sq", "direction_norm_sq")
    assert all(np.isfinite(row[name]) for row in cell.rows for name in cheap)
    last = cell.rows[-1]
    assert last["step"] < other.rows[-1]["step"]
    at_last = bilevel.run(problem, solvers[0], max_steps=last["step"])
    for name in (*cheap, *EXACT):
        np.testing.assert_allclose(last[name], at_last.history[name][-1], rtol=1e-6, err_msg=name)
    with arithmetic(np.float64):
        after = next(row["step"] for row in other.rows if row["step"] > last["step"])
        beyond = bilevel.run(problem, solvers[0], max_steps=after)
        metrics = cheap_metrics(problem.oracles, beyond.point)
    assert beyond.status == "diverged" or not all(np.isfinite(float(metrics[name])) for name in cheap)

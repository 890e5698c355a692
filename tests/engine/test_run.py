"""Runs: budgets, clock, oracle calls and statuses; only the seed changes a result."""

import inspect
import itertools
import re
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevel
from bilevel._core.types import Calls
from bilevel.engine import steps as runner
from bilevel.engine.driver import Budget, sweep
from tests import cases

SOLVERS = cases.SOLVERS
SRBA = SOLVERS["SRBA"]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in SOLVERS if name not in ("SRBA", "SABA")]
PACKAGE = str(Path(bilevel.__file__).parent)


@pytest.mark.filterwarnings("ignore:AutoSRBA")  # after so few steps z is far from its solution
@pytest.mark.parametrize("name", ["SRBA", "SABA", *SLOW])
def test_page_length_and_evaluations_do_not_change_a_run(name, monkeypatch):
    problem = cases.quadratic("float32")
    whole = bilevel.run(problem, SOLVERS[name], max_steps=100, eval_every=100)
    often = bilevel.run(problem, SOLVERS[name], max_steps=100, eval_every=7)
    watched = bilevel.run(problem, SOLVERS[name], max_steps=100, max_seconds=1e3)
    monkeypatch.setattr(runner, "PAGE_LENGTH", 33)
    paged = bilevel.run(problem, SOLVERS[name], max_steps=100)
    for other in (often, watched, paged):
        cases.assert_trees_equal(whole.point, other.point)
        assert whole.calls == other.calls


def test_the_seed_determines_the_run():
    problem = cases.quadratic("float32")
    first, again, other = (bilevel.run(problem, SRBA, seed=seed, max_steps=20) for seed in (0, 0, 1))
    cases.assert_trees_equal(first.point, again.point)
    assert not np.array_equal(first.point.inner_var, other.point.inner_var)


def test_the_history_begins_at_the_start_and_its_columns_are_consistent():
    problem = cases.quadratic("float32")
    history = bilevel.run(problem, SRBA, max_steps=200).history
    assert history["step"][0] == history["calls"][0] == 0
    assert history["step"][-1] == 200
    assert np.all(np.diff(history["step"]) > 0) and np.all(np.diff(history["seconds"]) > 0)
    kinds = sum(history[f"calls_{kind}"] for kind in Calls._fields)
    np.testing.assert_array_equal(kinds, history["calls"])
    np.testing.assert_allclose(history["epochs"], history["calls"] / (cases.N_INNER + cases.N_OUTER))
    at_start = problem.exact_solver(problem.start.outer_var)
    np.testing.assert_allclose(history["value"][0], at_start.value)
    np.testing.assert_allclose(history["hypergrad_norm_sq"][0], np.sum(at_start.hypergrad**2))
    np.testing.assert_allclose(history["inner_distance_sq"][0], np.sum(at_start.inner_var**2))


def test_default_evaluations_are_evenly_spaced_in_the_logarithm_of_calls():
    history = bilevel.run(cases.quadratic("float32"), SOLVERS["SOBA"], max_steps=20_000).history
    late = history["calls"][history["calls"] > 4000]
    ratios = late[1:-1] / late[:-2]
    assert ratios.min() > 1.15 and ratios.max() < 1.25


@pytest.mark.parametrize(("calls", "position"), [(0, 100), (99, 100), (100, 119), (118, 119), (119, 142), (200, 238)])
def test_evaluations_begin_at_a_64th_of_an_epoch_and_occur_four_times_per_doubling(calls, position):
    """With one call per step and 6400 calls per epoch: at 100, 118.9, 141.4, 168.2, 200, 237.8, … calls."""
    step, due = Budget(max_steps=1).next_evaluation(6400, calls, calls)
    assert step == np.inf and np.ceil(due) == position


@pytest.mark.parametrize(("step", "due"), [(0, 5), (4, 5), (5, 10), (7, 10)])
def test_eval_every_evaluates_at_its_multiples(step, due):
    assert Budget(max_steps=1, eval_every=5).next_evaluation(6400, step, 0) == (due, np.inf)


def test_progress_is_the_largest_used_share_of_any_budget(monkeypatch):
    shown = []
    bar = contextmanager(lambda *_: iter([lambda share, text: shown.append(round(share, 6))]))
    monkeypatch.setattr("bilevel.engine.run.progress_lines", bar)
    bilevel.run(cases.quadratic("float32"), SRBA, max_steps=40, max_calls=10**9, eval_every=10)
    assert {0.25, 0.5, 0.75} <= set(shown) and shown == sorted(shown)


@pytest.mark.parametrize("name", cases.marked(SOLVERS))
def test_max_calls_is_never_exceeded_and_one_more_step_would_exceed_it(name):
    problem = cases.quadratic("float32")
    budget = 5000
    result = bilevel.run(problem, SOLVERS[name], max_calls=budget)
    assert result.status == "out_of_budget"
    spent, steps = sum(result.calls), int(result.history["step"][-1])
    more = bilevel.run(problem, SOLVERS[name], max_steps=steps + 1)
    assert spent <= budget < sum(more.calls)


def test_a_budget_equal_to_the_calls_of_some_steps_is_used_up():
    problem = cases.quadratic("float32")
    spent = sum(bilevel.run(problem, SRBA, max_steps=7).calls)
    assert bilevel.run(problem, SRBA, max_calls=spent).history["step"][-1] == 7


def test_a_budget_below_the_cost_of_the_first_step_takes_no_step():
    result = bilevel.run(cases.quadratic("float32"), SRBA, max_calls=10)
    assert result.status == "out_of_budget"
    assert result.history["step"].tolist() == [0]
    cases.assert_trees_equal(result.point, cases.quadratic("float32").start)


def test_max_seconds_excludes_compilation_and_evaluation():
    problem = cases.quadratic("float32")
    slow = bilevel.BilevelProblem(
        problem.oracles, problem.start, metrics={"slow": lambda point: time.sleep(0.05) or 0.0}
    )
    result = bilevel.run(slow, SRBA, max_seconds=0.2)
    evaluations = len(result.history["step"])
    assert result.status == "out_of_budget"
    assert evaluations > 10, "the time of evaluations must not be counted"
    assert result.history["seconds"][-1] >= 0.2
    assert result.compile_seconds > 0


@pytest.fixture
def clock_of_waits(monkeypatch):
    """A clock that advances by one second whenever the program waits for a result."""
    clock, wait = SimpleNamespace(now=0.0), jax.block_until_ready

    def count_and_wait(tree):
        clock.now += 1
        return wait(tree)

    monkeypatch.setattr(jax, "block_until_ready", count_and_wait)
    monkeypatch.setattr(runner, "time", SimpleNamespace(perf_counter=lambda: clock.now))


def test_the_clock_includes_the_start_the_draws_and_the_steps(clock_of_waits):
    history = bilevel.run(cases.quadratic("float32"), SRBA, max_steps=2, eval_every=1).history
    # One second for the start, one for the draws, and two for each step: its state and the one before.
    assert history["seconds"].tolist() == [1, 4, 6]


def test_seconds_of_steps_in_python_add_up(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(runner, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    history = bilevel.run(cases.quadratic(), bilevel.Exact(), max_steps=3, eval_every=1).history
    assert history["seconds"].tolist() == [0, 1, 2, 3]


def test_a_run_reads_the_clock_often_enough_to_end_in_time(clock_of_waits):
    """Start and draws take two seconds, and each step two more: the clock is read after each of them."""
    history = bilevel.run(cases.quadratic("float32"), SRBA, max_seconds=6, eval_every=1000).history
    assert (history["seconds"][-1], history["step"][-1]) == (6, 2)


def test_a_run_ends_at_the_first_evaluation_that_reaches_the_tolerance():
    problem = bilevel.problems.quadratic(512, 256, 8, 4, common_linear=0.5, dtype="float64")
    result = bilevel.run(problem, bilevel.SRBA(0.1, 1.0, 16), max_steps=100_000, stop=1e-12)
    norms = result.history["hypergrad_norm_sq"]
    assert result.status == "converged"
    assert norms[-1] <= 1e-12 and np.all(norms[:-1] > 1e-12)


def test_a_run_with_several_criteria_stops_at_the_first_that_is_met():
    problem = bilevel.problems.quadratic(512, 256, 8, 4, common_linear=0.5, dtype="float64")
    solver, options = bilevel.SRBA(0.1, 1.0, 16), {"max_steps": 100_000, "eval_every": 50}
    loose = bilevel.run(problem, solver, stop=1e-4, **options)
    both = bilevel.run(problem, solver, stop=(1e-12, 1e-4), **options)
    assert loose.status == both.status == "converged"
    assert both.history["step"][-1] == loose.history["step"][-1]


def test_a_diverging_run_ends_with_its_last_finite_point():
    problem = cases.quadratic("float32")
    solver = bilevel.SRBA(50.0, 1.0, cases.BATCH)
    result = bilevel.run(problem, solver, max_steps=1000, eval_every=1000)
    last = int(result.history["step"][-1])
    assert result.status == "diverged" and "step_size" in result.status.sentence
    assert all(np.all(np.isfinite(part)) for part in result.point)
    assert np.isfinite(result.history["hypergrad_norm_sq"][0])
    path = cases.trajectory(problem, solver, last + 1)
    cases.assert_trees_equal(result.point, path.states[last - 1].point)
    assert not all(np.all(np.isfinite(part)) for part in path.states[last].point)


def test_an_interrupted_run_returns_its_result(tmp_path):
    problem = cases.quadratic("float32")
    stop_at = 40

    def interrupting(point):
        interrupting.evaluations += 1
        if interrupting.evaluations == 3:
            raise KeyboardInterrupt
        return 0.0

    interrupting.evaluations = 0
    interrupted = bilevel.BilevelProblem(
        problem.oracles, problem.start, problem.exact_solver, metrics={"m": interrupting}
    )
    result = bilevel.run(interrupted, SRBA, max_steps=100, eval_every=stop_at // 2)
    assert result.status == "interrupted" and result.history["step"].tolist() == [0, 20, 40]
    result.save(tmp_path / "run.npz")
    resumed = bilevel.resume(tmp_path / "run.npz", problem, max_steps=100)
    cases.assert_trees_equal(resumed.point, bilevel.run(problem, SRBA, max_steps=100).point)


def test_summary_and_plot_show_the_run(tmp_path):
    result = bilevel.run(cases.quadratic("float32"), SRBA, max_steps=50)
    text = result.summary()
    for word in ("SRBA", "period=5", "out_of_budget", "hypergrad_norm_sq", "epochs", "quadratic"):
        assert word in text
    first, last = result.history["hypergrad_norm_sq"][[0, -1]]
    assert f"{first:.6g} -> {last:.6g}" in text
    figure = result.plot()
    assert [axes.get_yscale() for axes in (*figure.axes, *result.plot("value").axes)] == ["log"] * 2 + ["linear"] * 2
    assert [axes.get_xlabel() for axes in figure.axes] == ["calls", "seconds"]
    np.testing.assert_array_equal(figure.axes[0].lines[0].get_ydata(), result.history["hypergrad_norm_sq"])
    figure.savefig(tmp_path / "run.png")
    with pytest.raises(ValueError, match=r"is not in the history"):
        result.plot("loss")


def test_the_summary_explains_why_there_are_no_exact_metrics():
    problem = cases.quadratic("float32")
    result = bilevel.run(bilevel.BilevelProblem(problem.oracles, problem.start), SRBA, max_steps=5)
    assert "hypergrad_norm_sq" not in result.history
    assert "strongly convex" in result.summary()
    assert result.plot().axes[0].get_ylabel() == "F(z, x)"


def test_progress_prints_lines(capsys):
    bilevel.run(cases.quadratic("float32"), SRBA, max_steps=5000, progress=True)
    first, *others, last = capsys.readouterr().out.splitlines()
    assert first == "SRBA on quadratic: 0 %, compiling"
    assert re.fullmatch(r"SRBA on quadratic: done in 0:\d\d", last)
    assert all(re.fullmatch(r"SRBA on quadratic: \d+ %, .* epochs, .* 0:\d\d left", line) for line in others)


def test_metrics_of_the_user_are_columns_of_the_history():
    problem = cases.quadratic("float32")
    named = bilevel.BilevelProblem(problem.oracles, problem.start, metrics={"first": lambda p: p.outer_var[0]})
    history = bilevel.run(named, SRBA, max_steps=10).history
    assert history["first"][0] == -2 and history["first"][-1] != -2


@pytest.mark.parametrize(
    "name", ["step", "seconds", "calls", "calls_hvp", "epochs", "value", "outer_value", "certified_error", "drift"]
)
def test_a_metric_named_like_another_column_is_refused(name):
    problem = cases.quadratic("float32")
    named = bilevel.BilevelProblem(problem.oracles, problem.start, metrics={"first": np.sum, name: lambda point: 0.0})
    for prepare in (bilevel.Run, lambda *given: sweep(given[0], [given[1]], [0], 100)):
        with pytest.raises(ValueError, match=rf"`metrics`: '{name}' is the name of another column of the history"):
            prepare(named, SRBA)


def test_exact_metrics_are_optional_and_do_not_change_iterates():
    problem = cases.logistic_selection()
    bare, full = (bilevel.run(problem, SRBA, max_steps=5, exact=exact) for exact in (False, True))
    assert "value" not in bare.history and "value" in full.history
    np.testing.assert_array_equal(bare.point.outer_var, full.point.outer_var)
    with pytest.raises(ValueError, match=r"`stop=0\.001` needs `exact=True`"):
        bilevel.run(problem, SRBA, max_steps=5, stop=1e-3, exact=False)


def test_a_problem_may_define_its_own_test_error():
    problem = cases.quadratic("float32")
    named = bilevel.BilevelProblem(problem.oracles, problem.start, metrics={"test_error": lambda point: 0.5})
    assert bilevel.run(named, SRBA, max_steps=5).history["test_error"].tolist()[-1] == 0.5


def test_stationarity_ignores_components_that_push_against_a_bound():
    problem = cases.logistic_selection(outer_var=np.zeros(4), outer_bounds=(-0.5, 0.5))
    result = bilevel.run(problem, bilevel.SRBA(1.0, 0.1, cases.BATCH), max_steps=5000, stop=1e-20)
    grad = problem.exact_solver(result.point.outer_var).hypergrad
    assert result.status == "converged"
    assert np.sum(grad**2) > 1e-6, "the test requires an active bound"
    assert np.all(np.abs(result.point.outer_var) <= 0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "no budget: give at least one of"),
        ({"stop": 1e-3}, "no budget"),
        ({"max_steps": 2**31}, "max_steps=2147483648.*32 bits"),
        ({"max_steps": -1}, "max_steps=-1"),
        ({"max_steps": True}, "max_steps=True.*integer"),
        ({"max_steps": 10.0}, "max_steps=10.0.*integer"),
        ({"max_calls": "many"}, "max_calls='many'"),
        ({"max_seconds": np.inf}, "max_seconds=inf"),
        ({"max_seconds": np.nan}, "max_seconds=nan"),
        ({"max_seconds": 10**400}, "max_seconds=1000.*finite number"),
        ({"max_steps": 5, "stop": -1.0}, "stop=-1.0"),
        ({"max_steps": 5, "eval_every": 0}, "eval_every=0"),
        ({"max_steps": 5, "seed": -1}, "seed=-1"),
        ({"max_steps": 5, "seed": 1.5}, "seed=1.5"),
        ({"max_steps": 5, "exact": np.ones(2)}, r"`exact=array\(\[1., 1.\]\)`: must be True or False"),
        ({"max_steps": 5, "progress": "yes"}, "`progress='yes'`: must be True or False"),
    ],
)
def test_bad_arguments_of_run_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        bilevel.run(cases.quadratic("float32"), SRBA, **arguments)


@pytest.mark.parametrize(
    ("solver", "message"),
    [
        (bilevel.SOBA(1e-50, 1.0, 8), r"`SOBA\(step_size=1e-50\)`: is out of the range of float32"),
        (bilevel.SOBA(1e39, 1.0, 8), r"`SOBA\(step_size=1e\+39\)`: is out of the range of float32"),
        (bilevel.ITD(batch_size=8, n_inner_steps=2**30), r"`ITD\(batch_size=8, n_inner_steps=.*one step draws 4 GiB"),
    ],
    ids=["small", "large", "draws"],
)
def test_parameters_out_of_range_of_the_dtype_or_the_memory_are_refused(solver, message):
    with pytest.raises(ValueError, match=message):
        bilevel.run(cases.quadratic("float32"), solver, max_steps=1)


def test_large_draws_shorten_pages_and_do_not_change_the_run(monkeypatch):
    problem, solver = cases.quadratic("float32"), bilevel.SOBA(0.05, 1.0, 8, sampling="iid")
    whole = bilevel.run(problem, solver, max_steps=20)
    monkeypatch.setattr(runner, "PAGE_BYTES", 3 * 64)
    run = bilevel.Run(problem, solver)
    assert run._steps._page_length == 3
    run.advance(20)
    cases.assert_trees_equal(run.point, whole.point)


@pytest.mark.parametrize("path", [3, "", "a\0b", None, b"x"])
def test_invalid_paths_are_named(path):
    result = bilevel.run(cases.quadratic("float32"), SRBA, max_steps=1)
    for use in (result.save, lambda path: bilevel.resume(path, result.problem, max_steps=2), bilevel.CSVLog):
        with pytest.raises(ValueError, match=r"`path=.*: must be a path, with the name of a file or folder"):
            use(path)


def test_the_arguments_of_resume_and_plot_are_checked(tmp_path):
    result = bilevel.run(cases.quadratic("float32"), SRBA, max_steps=1)
    result.save(tmp_path / "run")
    with pytest.raises(TypeError, match="`solver` must be a solver such as"):
        bilevel.resume(tmp_path / "run", result.problem, solver=np.ones(2), max_steps=2)
    with pytest.raises(ValueError, match="`metric=3` is not in the history"):
        result.plot(3)


def test_an_unknown_keyword_of_run_is_named():
    with pytest.raises(TypeError, match=r"max_step"):
        bilevel.run(cases.quadratic("float32"), SRBA, max_step=5)


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(ValueError, match=r"batch_size=32.*53 inner and 31 outer.*batch_size <= 31.*sampling='full'"):
        bilevel.run(cases.quadratic("float32"), bilevel.SRBA(batch_size=32), max_steps=5)
    bilevel.run(cases.quadratic("float32"), bilevel.SRBA(batch_size=32, sampling="full"), max_steps=5)


def test_a_tolerance_requires_an_exact_solver():
    problem = cases.quadratic("float32")
    with pytest.raises(ValueError, match=r"strongly_convex=True"):
        bilevel.run(bilevel.BilevelProblem(problem.oracles, problem.start), SRBA, max_steps=5, stop=1e-3)


def test_solver_and_problem_are_checked():
    with pytest.raises(TypeError, match=r"solver such as"):
        bilevel.run(cases.quadratic("float32"), bilevel.SRBA, max_steps=5)
    with pytest.raises(TypeError, match=r"BilevelProblem"):
        bilevel.run(None, SRBA, max_steps=5)


def test_drift_gives_a_warning_in_float32_and_none_in_float64():
    # Rows have large gradients that cancel in the mean, so rounding errors of float32 accumulate in the estimate.
    offsets = np.random.default_rng(0).standard_normal((64, 3))
    offsets = 1e5 * (offsets - offsets.mean(axis=0))

    def inner_loss(z, x, offset):
        return jnp.sum((z - x) ** 2) / 2 + offset @ z

    def outer_loss(z, x, offset):
        return jnp.sum((z - 1) ** 2) / 2 + jnp.sum(x**2) / 2 + offset @ z

    def run(dtype):
        data, start = (
            {"inner_data": offsets, "outer_data": offsets},
            {"inner_var": np.zeros(3), "outer_var": np.zeros(3)},
        )
        problem = bilevel.BilevelProblem.from_losses(inner_loss, outer_loss, **data, **start, dtype=dtype)
        return bilevel.run(problem, bilevel.SRBA(0.1, 1.0, 8, period=100), max_steps=401)

    with pytest.warns(RuntimeWarning, match=r"drifted from the full-batch pass.*float64"):
        assert run("float32").history["drift"][-1] > 0.5
    assert run("float64").history["drift"][-1] < 0.1


def test_a_run_whose_metrics_overflow_has_diverged():
    result = bilevel.run(cases.quadratic(), bilevel.SRBA(0.5, 1.0, cases.BATCH), max_steps=100_000)
    assert result.status == "diverged"
    assert all(np.all(np.isfinite(part)) for part in result.point)


def test_at_most_eight_frames_lead_from_run_to_the_step_of_a_solver():
    found = []

    @bilevel.solvers.solver
    class Listed(bilevel.SRBA):
        """SRBA that lists the functions of the package through which its step is called."""

        def step(self, oracles, state, index, draw):
            found.append([frame.function for frame in inspect.stack() if frame.filename.startswith(PACKAGE)])
            return super().step(oracles, state, index, draw)

    bilevel.run(cases.quadratic("float32"), Listed(0.05, 20.0, cases.BATCH, period=5), max_steps=5)
    assert found
    for functions in found:
        assert functions[-1] == "run" and len(functions) <= 7, "the step itself would be one more"

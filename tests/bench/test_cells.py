"""Cells that share a program, and the rows they give."""

from collections import Counter

import numpy as np
import pytest

import bilevel
from bilevel.bench import execute as module
from bilevel.bench.config import build_problem, parameter_types
from bilevel.bench.execute import Task, drop_duplicates, group_tasks, run_task, time_cell
from bilevel.bench.store import Store
from bilevel.solvers import SOLVERS
from tests.bench import tiny
from tests.cases import N_INNER, N_OUTER

EXACT = ("value", "hypergrad_norm_sq", "inner_distance_sq", "v_distance_sq", "value_gap")
VARIED = """
[[solvers]]
name = "SRBA"
step_size = [0.05, 0.02]
outer_ratio = [1.0, 2.0]
period = [5, 7]
batch_size = [4, 8]
sampling = ["blocks", "iid"]
v_radius = [3.0, 5.0]
[[solvers]]
name = "SRBA"
step_size = [0.05, 0.02]
batch_size = [4, 8]
[[solvers]]
name = "SOBA"
step_size = [0.05, 0.02]
batch_size = 8
"""


def static(cell):
    """All that a program is compiled for: every parameter that is no float, and which of the floats there are."""
    kinds = parameter_types(SOLVERS[cell.solver])
    given = dict(cell.parameters)
    fixed = tuple((name, given.get(name)) for name, kind in sorted(kinds.items()) if kind is not float)
    present = tuple(sorted(name for name in given if kinds[name] is float))
    return (cell.solver, fixed, present, cell.problem_arguments, cell.max_calls)


@pytest.mark.parametrize("together", [False, True])
def test_a_task_is_what_one_program_can_run(tmp_path, together):
    short, long = (tiny.cells(tiny.experiment(tmp_path, VARIED, epochs=epochs)) for epochs in (20, 30))
    cells = (*short, *long)
    found = group_tasks(cells, seeds_together=together)
    assert Counter(cell.id for task in found for cell in task.cells) == Counter(cell.id for cell in cells)
    kinds = [{(static(cell), None if together else cell.seed) for cell in task.cells} for task in found]
    assert all(len(kind) == 1 for kind in kinds), "cells of a task share their static parameters"
    assert len(kinds) == len({kind for (kind,) in kinds}), "cells that can share a program do"


def test_a_radius_and_none_never_share_a_program(tmp_path):
    for task in group_tasks(tiny.cells(tiny.experiment(tmp_path, VARIED)), seeds_together=True):
        assert len({"v_radius" in dict(cell.parameters) for cell in task.cells}) == 1


def test_a_new_problem_per_seed_is_a_task_of_its_own(tmp_path):
    text = tiny.HEAD.replace("[problem]", "new_problem_per_seed = true\n[problem]") + tiny.BUDGET + tiny.SOBA
    experiment = bilevel.bench.config.load_config(tiny.write(tmp_path, text))
    found = group_tasks(tiny.cells(experiment), seeds_together=True)
    assert [{cell.seed for cell in task.cells} for task in found] == [{0}, {1}]
    assert all(dict(cell.problem_arguments)["seed"] == cell.seed for task in found for cell in task.cells)


def rows_by_cell(found, **kwargs):
    rows = [row for task in found for row in run_task(task, **kwargs)]
    by_cell = {}
    for row in rows:
        by_cell.setdefault(row["cell"], []).append(row)
    return by_cell


def assert_same_rows(found, expected):
    assert found.keys() == expected.keys()
    for cell, rows in expected.items():
        assert [row["step"] for row in found[cell]] == [row["step"] for row in rows]
        for name in ("calls", "outer_value", "direction_norm_sq"):
            pair = [row[name] for row in found[cell]], [row[name] for row in rows]
            np.testing.assert_allclose(*pair, rtol=1e-9, err_msg=name)
        for name in EXACT:
            np.testing.assert_allclose(found[cell][-1][name], rows[-1][name], rtol=1e-9, atol=1e-12, err_msg=name)


def test_a_group_split_for_memory_gives_the_same_rows(tmp_path, monkeypatch):
    cells = tiny.cells(tiny.experiment(tmp_path))
    whole = group_tasks(cells)
    expected = rows_by_cell(whole)
    (size,) = {row["memory_bytes"] for rows in expected.values() for row in rows if row["final"]}
    monkeypatch.setattr(module, "MAX_STATE_BYTES", int(1.5 * size))
    split = group_tasks(cells)
    assert [len(task.cells) for task in whole] == [2, 2] and [len(task.cells) for task in split] == [1] * 4
    assert_same_rows(rows_by_cell(split), expected)
    monkeypatch.setattr(module, "MAX_STATE_BYTES", 1)
    assert [len(task.cells) for task in group_tasks(cells)] == [1] * 4, "one run always fits"


@pytest.mark.slow
def test_a_group_with_gaps_gives_rows_for_its_cells_alone(tmp_path):
    cells = tiny.cells(tiny.experiment(tmp_path))
    expected = rows_by_cell(group_tasks(cells))
    (task,) = group_tasks(cells[1:], seeds_together=True)
    found = rows_by_cell([task], seeds_together=True)
    assert found.keys() == expected.keys() - {cells[0].id}
    for cell, rows in found.items():
        assert rows[-1]["step"] == expected[cell][-1]["step"]
        np.testing.assert_allclose(rows[-1]["value"], expected[cell][-1]["value"], rtol=1e-9)


@pytest.mark.parametrize("name", ["Exact", *(pytest.param(name, marks=pytest.mark.slow) for name in ("HOAG", "MAID"))])
def test_a_deterministic_solver_runs_once_for_all_seeds(tmp_path, monkeypatch, name):
    asked = []

    def counted(*args, **kwargs):
        asked.append(kwargs)
        return bilevel.run(*args, **kwargs)

    monkeypatch.setattr(module, "run", counted)
    experiment = tiny.experiment(tmp_path, tiny.EXACT.replace("Exact", name), seeds=3, epochs=60)
    (task,) = group_tasks(tiny.cells(experiment))
    rows = run_task(task)
    assert len(asked) == 1
    own = ("cell", "seed", "written_at")
    copies = [[{k: v for k, v in row.items() if k not in own} for row in rows if row["seed"] == i] for i in range(3)]
    assert len(copies[0]) > 1 and copies[0] == copies[1] == copies[2]
    assert {(row["cell"], row["seed"]) for row in rows} == {(cell.id, cell.seed) for cell in task.cells}
    assert not any("seconds" in row for row in rows), "a sweep has no honest seconds"
    store = Store(tmp_path / "store")
    store.write(rows)
    assert store.finished() == {cell.id for cell in task.cells}
    final = store.read()[lambda frame: frame["final"]]
    assert 0 < final["calls"].iloc[0] <= task.cells[0].max_calls, "the step that passes the budget does not count"


def test_rows_fit_the_store_with_defaults_resolved(tmp_path):
    text = tiny.SRBA.replace("period = [5, 7]\n", "")
    (task, _) = group_tasks(tiny.cells(tiny.experiment(tmp_path, text)))
    assert all("period" not in dict(cell.parameters) for cell in task.cells)
    rows = run_task(task)
    store = Store(tmp_path / "store")
    store.write(rows)
    frame = store.read()
    assert set(frame["param_period"]) == {(N_INNER + N_OUTER) // (2 * 8)}
    assert frame["param_v_radius"].isna().all() and frame["seconds"].isna().all()
    assert set(frame["param_step_size"]) == {0.05, 0.02}
    assert store.finished() == {cell.id for cell in task.cells}
    for cell, rows in frame.groupby("cell"):
        assert rows["final"].tolist() == [False] * (len(rows) - 1) + [True], cell
        for name in EXACT:
            assert rows[name].notna().tolist() == rows["final"].tolist(), name
        assert rows["outer_value"].notna().all()
        assert rows["memory_bytes"].notna().tolist() == rows["final"].tolist()
        assert rows["calls"].iloc[-1] <= task.cells[0].max_calls


def test_a_timed_cell_has_seconds_and_exact_metrics_in_every_row(tmp_path):
    experiment = tiny.experiment(tmp_path, seconds=tiny.SECONDS)
    parameters = (("batch_size", 8), ("outer_ratio", 1.0), ("sampling", "blocks"), ("step_size", 0.05))
    cell, _ = experiment.timing_cells([("SOBA", parameters)], N_INNER, N_OUTER)
    store = Store(tmp_path / "store")
    store.write(time_cell(cell))
    frame = store.read("timing")
    assert set(frame["cell"]) == {cell.id} and frame["final"].sum() == 1
    assert frame["seconds"].is_monotonic_increasing and frame["seconds"].iloc[-1] > 0
    assert frame[[*EXACT]].notna().all(axis=None)


def test_an_interrupted_cell_is_discarded(tmp_path, monkeypatch):
    """Ctrl-C in the middle of a run."""

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("bilevel.engine.steps.CompiledSteps.advance", interrupted)
    experiment = tiny.experiment(tmp_path, seconds=tiny.SECONDS)
    parameters = (("batch_size", 8), ("outer_ratio", 1.0), ("sampling", "blocks"), ("step_size", 0.05))
    cell, _ = experiment.timing_cells([("SOBA", parameters)], N_INNER, N_OUTER)
    with pytest.raises(KeyboardInterrupt):
        time_cell(cell)


def test_a_problem_is_built_once_for_many_tasks(tmp_path):
    cells = tiny.cells(tiny.experiment(tmp_path))
    first, second = (build_problem(cell.problem, cell.problem_arguments) for cell in cells[:2])
    assert first is second


def test_the_title_says_what_runs(tmp_path):
    cells = tiny.cells(tiny.experiment(tmp_path))
    assert Task(cells[:1]).title == "SOBA on quadratic, seed 0"
    assert Task(cells).title == "SOBA on quadratic, 2 seeds"


DEFAULT_AND_THE_SAME = """
[[solvers]]
name = "SRBA"
batch_size = 8
step_size = 0.05
[[solvers]]
name = "SRBA"
batch_size = 8
step_size = 0.05
period = PERIOD
"""


def test_a_default_and_the_number_it_comes_to_are_one_cell(tmp_path):
    problem = bilevel.problems.quadratic(N_INNER, N_OUTER, 5, 3, dtype="float64")
    period = bilevel.SRBA(0.05, 1.0, 8).configure(problem).period
    counts = []
    for number in (period, period + 1):
        text = DEFAULT_AND_THE_SAME.replace("PERIOD", str(number))
        counts.append(len(drop_duplicates(tiny.cells(tiny.experiment(tmp_path, text)), problem)))
    assert counts == [2, 4], "two seeds of one setting, then of two"


def test_a_batch_larger_than_the_data_is_refused_before_anything_runs(tmp_path):
    problem = bilevel.problems.quadratic(N_INNER, N_OUTER, 5, 3, dtype="float64")
    cells = tiny.cells(tiny.experiment(tmp_path, tiny.SOBA.replace("batch_size = 8", "batch_size = 40")))
    with pytest.raises(ValueError, match=r"`SOBA\(batch_size=40\)` exceeds the data"):
        drop_duplicates(cells, problem)

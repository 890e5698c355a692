"""The store: what is written is read, by anyone, whatever happens to the writers."""

import dataclasses
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import duckdb
import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest

from bilevel._types import Calls
from bilevel.bench.store import SCHEMA, Store, check_metric_names, list_metrics
from bilevel.engine.result import Status
from bilevel.solvers import SOLVERS

ROOT = Path(__file__).parents[2]
N_ROWS = 3


def cell_id(number):
    return f"{number:016x}"


def cell(number, *, finished=True, **changes):
    """The rows of a cell, the last one final."""
    start = {"cell": cell_id(number), "experiment": "e", "phase": "sweep", "problem": "quadratic"}
    start |= {"problem_arguments": '{"seed": 0}', "solver": "SRBA", "seed": number, "status": "out_of_budget"}
    start |= {"param_step_size": 0.1, "param_period": 7, "param_sampling": "blocks", **changes}
    last = N_ROWS - 1
    return [
        start | {"step": i, "calls": 10 * i, "outer_value": 1.0 / (i + 1), "final": finished and i == last}
        for i in range(N_ROWS)
    ]


def group(*numbers, **changes):
    return [row for number in numbers for row in cell(number, **changes)]


def files(store):
    return sorted(path.name for path in store.folder.iterdir())


def counts(frame):
    return frame.groupby("cell").size().to_dict()


def whole(*numbers):
    return {cell_id(number): N_ROWS for number in numbers}


def test_the_schema_has_each_hyper_parameter_kind_of_call_and_key():
    names = set(SCHEMA().names)
    assert {f"param_{field.name}" for solver in SOLVERS.values() for field in dataclasses.fields(solver)} < names
    assert {f"calls_{kind}" for kind in Calls._fields} < names
    types = {name: str(SCHEMA().field(name).type) for name in ("param_step_size", "param_period", "param_shared_batch")}
    assert types == {"param_step_size": "double", "param_period": "int64", "param_shared_batch": "bool"}
    assert str(SCHEMA().field("param_v_radius").type) == "double", "None is no part of the type"


def test_what_is_written_is_read_by_us_by_pandas_and_by_duckdb(tmp_path):
    store = Store(tmp_path / "new" / "store")
    store.write(group(1, 2))
    store.write(group(3, phase="timing", status=Status.diverged, seconds=np.float32(0.5), value=float("nan")))
    frame = store.read()
    assert counts(frame) == whole(1, 2, 3)
    expected = pandas.DataFrame(group(1, 2, 3))
    for name in ("seed", "step", "calls", "outer_value", "final", "param_step_size", "param_period"):
        assert frame.sort_values(["cell", "step"])[name].tolist() == expected[name].tolist(), name
    theirs = pandas.read_parquet(store.folder)
    assert list(theirs.columns) == SCHEMA().names
    assert counts(theirs) == counts(frame)
    query = f"SELECT cell, count(*) FROM read_parquet('{store.folder}/*.parquet') WHERE final GROUP BY cell"
    assert dict(duckdb.sql(query).fetchall()) == dict.fromkeys(whole(1, 2, 3), 1)


def test_a_phase_can_be_read_alone(tmp_path):
    store = Store(tmp_path)
    store.write(group(1) + group(2, phase="timing"))
    assert counts(store.read("sweep")) == whole(1)
    assert counts(store.read(phase="timing")) == whole(2)
    with pytest.raises(ValueError, match=r"`phase='race'`: must be 'sweep', 'timing' or None."):
        store.read("race")


def test_an_empty_store_has_the_columns_and_no_row(tmp_path):
    store = Store(tmp_path / "nothing")
    assert store.finished() == set()
    assert list(store.read().columns) == SCHEMA().names and len(store.read()) == 0
    assert not store.folder.exists(), "reading makes no folder"


def test_finished_cells_are_those_with_a_final_row(tmp_path):
    store = Store(tmp_path)
    store.write(group(1) + group(2, finished=False))
    assert store.finished() == {cell_id(1)}


def test_cells_that_are_there_are_not_written_again(tmp_path):
    store = Store(tmp_path)
    first = store.write(group(1, 2))
    second = store.write(group(2, 3))
    assert first != second
    assert counts(pandas.read_parquet(tmp_path)) == whole(1, 2, 3)
    assert store.write(group(3, 1)) is None
    assert files(store) == sorted([first.name, second.name])


def test_the_name_of_a_file_follows_from_its_cells(tmp_path):
    names = [Store(tmp_path / str(i)).write(group(*numbers)).name for i, numbers in enumerate([(1, 2), (2, 1), (1, 3)])]
    assert names[0] == names[1] != names[2]


def test_an_unfinished_cell_gives_way_to_a_finished_one(tmp_path):
    for order in (False, True), (True, False):
        store = Store(tmp_path / str(order[0]))
        for finished in order:
            # Another cell beside it, so that the two files have different names.
            store.write(group(1, finished=finished, machine=str(finished)) + group(2 + finished))
        frame = store.read()
        assert counts(frame) == whole(1, 2, 3)
        assert set(frame[frame["cell"] == cell_id(1)]["machine"]) == {"True"}


def test_a_cell_in_two_files_is_read_once(tmp_path):
    store, other = Store(tmp_path / "a"), Store(tmp_path / "b")
    store.write(group(1, 2))
    path = other.write(group(2, 3))
    path.rename(store.folder / path.name)
    assert counts(pandas.read_parquet(store.folder))[cell_id(2)] == 2 * N_ROWS
    assert counts(store.read()) == whole(1, 2, 3)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "`rows` is empty"),
        (group(1, parameters="x"), "column `parameters` holds a value of type str; it must be double."),
        ([{"cell": "a", "final": True}], "a row has no `experiment`; each needs cell, experiment,"),
        (group(1, seed=None), "a row has no `seed`"),
        (group(1, phase="race"), "`phase='race'`: must be one of sweep, timing."),
        (group(1, status="fine"), "`status='fine'`: must be one of converged, out_of_budget, diverged, interrupted."),
        (group(1, 1), f"cell {cell_id(1)} has two final rows; write each cell once."),
        (group(1, seed=1.5), "column `seed` holds a value of type float; it must be int64."),
        (group(1, seed=True), "column `seed` holds a value of type bool; it must be int64."),
        (group(1, value=True), "column `value` holds a value of type bool; it must be double."),
        (group(1, value="0.1"), "column `value` holds a value of type str; it must be double."),
        (group(1, value=np.ones(2)), "column `value` holds a value of type ndarray; it must be double."),
        (group(1, machine=3), "column `machine` holds a value of type int; it must be string."),
        (group(1, param_shared_batch=1), "column `param_shared_batch` holds a value of type int; it must be bool."),
        (group(1, seed=2**70), "column `seed` must be int64: "),
    ],
)
def test_malformed_rows_are_refused_and_nothing_is_written(tmp_path, rows, message):
    store = Store(tmp_path)
    with pytest.raises(ValueError, match=re.escape(message)):
        store.write(rows)
    assert files(store) == []


def truncated(path):
    path.write_bytes(path.read_bytes()[:-100])


def cut_in_the_middle(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flipped(path):
    """A wrong bit that an ordinary read takes for a number."""
    content, whole = path.read_bytes(), pyarrow.parquet.read_table(path)
    column = pyarrow.parquet.ParquetFile(path).metadata.row_group(0).column(SCHEMA().names.index("outer_value"))
    for place in range(column.data_page_offset, column.data_page_offset + column.total_compressed_size):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        try:
            if not pyarrow.parquet.read_table(path).equals(whole):
                return
        except (OSError, pyarrow.ArrowException):
            continue
    raise AssertionError("no such bit")


def rewritten(change):
    def damage(path):
        table = pyarrow.parquet.read_table(path)
        pyarrow.parquet.write_table(change(table), path)

    return damage


DAMAGE = {
    "empty": (lambda path: path.write_bytes(b""), "damaged"),
    "text": (lambda path: path.write_text("cell,final\n1,true\n"), "Parquet magic bytes not found"),
    "truncated": (truncated, "damaged"),
    "half": (cut_in_the_middle, "damaged"),
    "one bit": (flipped, "damaged"),
    "keys": (rewritten(lambda t: t.drop_columns(["value", "seed"])), "it lacks seed"),
    "types": (rewritten(lambda t: t.set_column(0, "cell", pyarrow.array([b"\xff"] * len(t)))), "Invalid UTF8"),
    "other": (rewritten(lambda t: pyarrow.table({"a": [1]})), "it lacks cell, "),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_set_aside_with_a_warning_and_the_rest_is_read(tmp_path, kind):
    damage, message = DAMAGE[kind]
    store = Store(tmp_path)
    good, bad = store.write(group(1)), store.write(group(2))
    damage(bad)
    content = bad.read_bytes()
    with pytest.warns(UserWarning, match=re.escape(message)) as caught:
        frame = store.read()
    assert len(caught) == 1 and bad.name in str(caught[0].message)
    assert counts(frame) == counts(pandas.read_parquet(tmp_path)) == whole(1)
    assert files(store) == sorted([good.name, f"_{bad.name}.damaged"])
    assert (tmp_path / f"_{bad.name}.damaged").read_bytes() == content, "nothing is lost"
    assert store.finished() == {cell_id(1)}
    store.write(group(2))
    assert counts(store.read()) == whole(1, 2)


OWN = pyarrow.array([0.25] * N_ROWS)
TEXT = pyarrow.array(["x"] * N_ROWS)
OTHER_COLUMNS = {
    "fewer": lambda t: t.drop_columns(["value", "param_period", "machine", "outer_value"]),
    "more": lambda t: t.append_column("own", OWN),
    "renamed": lambda t: t.drop_columns(["rollbacks"]).append_column("backoffs", OWN),
    "whole numbers": lambda t: t.append_column("own", pyarrow.array([1] * N_ROWS)),
    "empty": lambda t: t.append_column("own", pyarrow.nulls(N_ROWS)),
    "text": lambda t: t.append_column("own", TEXT).append_column("param_old", TEXT),
    "order": lambda t: t.select(t.column_names[::-1]),
    "narrow types": lambda t: t.cast(t.schema.set(t.schema.get_field_index("step"), pyarrow.field("step", "int32"))),
    "other texts": lambda t: t.cast(t.schema.set(0, pyarrow.field("cell", "large_string"))),
}


@pytest.mark.parametrize("kind", OTHER_COLUMNS)
def test_a_file_with_other_columns_is_read_and_never_renamed(tmp_path, kind):
    store = Store(tmp_path)
    plain, changed = store.write(group(1, own=0.5)), store.write(group(2))
    rewritten(OTHER_COLUMNS[kind])(changed)
    frame = store.read()
    assert files(store) == sorted([plain.name, changed.name])
    assert counts(frame) == whole(1, 2) and store.finished() == {cell_id(1), cell_id(2)}
    lost = set(SCHEMA().names) - set(pyarrow.parquet.read_schema(changed).names)
    assert frame[frame["cell"] == cell_id(2)][sorted(lost)].isna().all(axis=None)
    assert set(SCHEMA().names) | set(pyarrow.parquet.read_schema(changed).names) <= set(frame.columns)
    assert [float(value) for value in frame[frame["cell"] == cell_id(1)]["own"]] == [0.5] * N_ROWS


def test_a_metric_of_the_users_own_is_a_column_more_and_null_elsewhere(tmp_path):
    store = Store(tmp_path)
    store.write(group(1, 2))
    store.write(group(3, fairness=np.float32(0.5)) + group(4, fairness=None, sparsity=3))
    frame = store.read().set_index("cell")
    assert frame["fairness"].dtype == frame["sparsity"].dtype == np.float64
    assert frame["fairness"].dropna().to_dict() == {cell_id(3): 0.5}
    assert frame["sparsity"].dropna().to_dict() == {cell_id(4): 3.0}
    assert list_metrics(frame) == ["outer_value", "fairness", "sparsity"]


def test_a_metric_with_the_name_of_another_column_is_refused():
    check_metric_names(["fairness", "test_error"])
    with pytest.raises(ValueError, match=r"metric `status` has the name of another column of the store; rename it."):
        check_metric_names(["fairness", "status"])


def test_a_damaged_file_that_cannot_be_renamed_is_passed_over(tmp_path, monkeypatch):
    store = Store(tmp_path)
    store.write(group(1)).write_bytes(b"")

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "rename", refuse)
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.warns(UserWarning, match=r"passed over, for it cannot be renamed \(Permission denied\)"):
        assert store.finished() == set()


def test_leftovers_of_killed_writers_are_ignored_and_removed_after_an_hour(tmp_path):
    store = Store(tmp_path)
    old, young = tmp_path / ".old.part", tmp_path / ".young.part"
    for path, age in ((old, 3700), (young, 3500)):
        path.write_bytes(b"PAR1 half a file")
        os.utime(path, (time.time() - age,) * 2)
    store.write(group(1))
    assert counts(store.read()) == counts(pandas.read_parquet(tmp_path)) == whole(1)
    assert young.exists() and not old.exists()


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="file` is a file; a store is a folder"):
        Store(tmp_path / "file")
    with pytest.raises(NotADirectoryError, match="cannot be written to: Not a directory"):
        Store(tmp_path / "file" / "below").write(group(1))


def test_a_folder_without_permission_is_refused_by_name(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.fsync", refuse)  # root may write everywhere
    with pytest.raises(PermissionError, match=rf"`{tmp_path}` cannot be written to: Permission denied."):
        Store(tmp_path).write(group(1))


def started(script, *arguments):
    command = [sys.executable, "-c", "from tests.bench.test_store import *\n" + script, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, cwd=ROOT)


def say_go(*processes):
    """Let processes go on at the same moment, once all have imported what they need."""
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()


def finish(process):
    process.communicate()
    return process.returncode


OVERLAPPING = """
store, first = Store(sys.argv[1]), int(sys.argv[2])
print("ready", flush=True); sys.stdin.readline()
for i in range(0, 60, 3):
    store.write(group(*range(i + first, i + first + 4)))
    store.write(group(1000 + i))
"""


def test_two_processes_may_write_to_one_folder(tmp_path):
    processes = [started(OVERLAPPING, tmp_path, first) for first in (0, 2)]
    say_go(*processes)
    assert [finish(process) for process in processes] == [0, 0]
    expected = {*range(63), *range(1000, 1060, 3)}
    store = Store(tmp_path)
    assert counts(store.read()) == whole(*expected)
    assert store.finished() == {cell_id(number) for number in expected}
    assert all(name.endswith(".parquet") for name in files(store)), "no leftovers"


KILLED = """
def die(*_): os.kill(os.getpid(), signal.SIGKILL)
store = Store(sys.argv[1])
store.write(group(1))
setattr(os, sys.argv[2], die)
store.write(group(2))
"""


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_writer_killed_in_the_middle_of_a_file_leaves_the_files_before_it(tmp_path, moment):
    process = started(KILLED, tmp_path, moment)
    assert finish(process) == -signal.SIGKILL
    assert len(list(tmp_path.glob(".*.part"))) == 1
    store = Store(tmp_path)
    assert counts(store.read()) == counts(pandas.read_parquet(tmp_path)) == whole(1)
    store.write(group(2))
    assert counts(store.read()) == whole(1, 2)


ENDLESS = """
store, first = Store(sys.argv[1]), int(sys.argv[2])
print("ready", flush=True); sys.stdin.readline()
for i in range(first, first + 10**6, 2):
    store.write(group(i, i + 1))
"""


@pytest.mark.slow
def test_writers_killed_at_random_moments_leave_whole_cells(tmp_path):
    processes = [started(ENDLESS, tmp_path, number * 10**6) for number in range(3)]
    say_go(*processes)
    for process in processes:
        time.sleep(random.uniform(0.05, 0.5))
        process.kill()
        assert finish(process) == -signal.SIGKILL
    frame = Store(tmp_path).read()
    assert len(frame) and set(counts(frame).values()) == {N_ROWS}
    assert counts(pandas.read_parquet(tmp_path)) == counts(frame)

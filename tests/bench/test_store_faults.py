"""A store under faults: damaged files, other columns, killed and concurrent writers."""

import dataclasses
import errno
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest

import bilevel.bench.store
from bilevel.bench.config import load_config
from bilevel.bench.store import SCHEMA, Store, check_columns, list_metrics
from tests.bench.test_store import N_ROWS, ROOT, cell_id, counts, files, group, read_files, whole


def truncated(path):
    path.write_bytes(path.read_bytes()[:-100])


def text(path):
    path = path.rename(path.with_name("text.parquet"))
    path.write_text("cell,final\n1,true\n")
    return path


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
                return path
        except (OSError, pyarrow.ArrowException):
            continue
    raise AssertionError("no such bit")


def renamed(path):
    """One bit of the footer, which has no checksum of its own: a column has another name."""
    content = bytearray(path.read_bytes())
    for place in (found.start() for found in re.finditer(rb"outer_value", bytes(content))):
        content[place] ^= 1
    path.write_bytes(content)
    assert "nuter_value" in pyarrow.parquet.read_table(path, page_checksum_verification=True).column_names


def replaced(path, table, **options):
    """Write a table instead of a file, under a name that is no digest."""
    path.unlink()
    path = path.with_name("another.parquet")
    pyarrow.parquet.write_table(table, path, **options)
    return path


def rewritten(change):
    """Written by another program, without a digest."""

    return lambda path: replaced(path, change(pyarrow.parquet.read_table(path)), write_page_checksum=True)


DAMAGE = {
    "empty": (lambda path: path.write_bytes(b""), "damaged"),
    "text": (text, "Parquet magic bytes not found"),
    "truncated": (truncated, "damaged"),
    "half": (cut_in_the_middle, "damaged"),
    "one bit": (flipped, "its contents do not fit its digest"),
    "one bit of an old file": (lambda path: flipped(rewritten(lambda t: t)(path)), "damaged"),
    "a name": (renamed, "its contents do not fit its digest"),
    "keys": (rewritten(lambda t: t.drop_columns(["value", "seed"])), "it lacks seed"),
    "types": (rewritten(lambda t: t.set_column(0, "cell", pyarrow.array([b"\xff"] * len(t)))), "Invalid UTF8"),
    "other": (rewritten(lambda t: pyarrow.table({"a": [1]})), "it lacks cell, "),
    "no rows": (rewritten(lambda t: t.slice(0, 0)), "it has no rows"),
    "two columns of one name": (
        rewritten(lambda t: t.append_column("rollbacks", pyarrow.nulls(len(t)))),
        "it has several columns `rollbacks`",
    ),
    "two keys of one name": (
        rewritten(lambda t: t.append_column("solver", t["solver"])),
        "it has several columns `solver`",
    ),
    "a null": (
        rewritten(lambda t: t.set_column(t.column_names.index("problem"), "problem", [["a", None, "a"]])),
        "it has rows without `problem`",
    ),
    **{
        f"arguments {text[:3]}": (
            rewritten(lambda t, text=text: t.set_column(4, "problem_arguments", [[text] * len(t)])),
            "its `problem_arguments` are not an object in JSON",
        )
        for text in ("{", "[1]", "[" * 10**5)
    },
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_stays_with_a_warning_the_rest_is_read_and_nothing_is_written_over_it(tmp_path, kind):
    damage, message = DAMAGE[kind]
    store = Store(tmp_path)
    good, bad = store.write(group(1)), store.write(group(2))
    damaged = damage(bad)
    bad = damaged if isinstance(damaged, Path) else bad
    content = bad.read_bytes()
    with pytest.warns(UserWarning, match=re.escape(message)) as caught:
        frame = store.read()
    assert len(caught) == 1 and bad.name in str(caught[0].message)
    assert counts(frame) == whole(1)
    with pytest.warns(UserWarning, match="is damaged"):
        assert store.finished() == {cell_id(1)}
    with pytest.warns(UserWarning, match="is damaged"):
        again = store.write(group(2, machine="again"))
    assert files(store) == sorted([good.name, bad.name, again.name])
    assert bad.read_bytes() == content
    assert list(store.damaged()) == [bad] and message.removesuffix("damaged") in store.damaged()[bad]
    (aside,) = store.set_aside(store.damaged())
    assert aside.name == f"_{bad.name}.damaged" and aside.read_bytes() == content, "nothing is lost"
    store.write(group(2))
    assert counts(store.read()) == counts(read_files(tmp_path)) == whole(1, 2)


def grown(table, n_rows):
    """The first row of a table many times over, which takes few bytes in a file."""
    return table.take(pyarrow.array(np.zeros(n_rows, np.int64)))


def in_time(function, *arguments):
    """Return what a function returns, which must not block."""
    future = Future()

    def answer():
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=answer, daemon=True).start()
    return future.result(timeout=10)


@pytest.fixture
def fifo(tmp_path):
    """Make a FIFO, and unblock its readers at the end."""
    made = []

    def make(name):
        os.mkfifo(tmp_path / name)
        made.append(tmp_path / name)
        return made[-1]

    yield make
    for path in made:
        os.close(os.open(path, os.O_RDWR))


@pytest.mark.filterwarnings("ignore:.*is damaged")
def test_a_file_that_is_not_regular_is_reported_without_blocking(tmp_path, fifo):
    store = Store(tmp_path)
    store.write(group(1))
    path = fifo("pipe.parquet")
    assert in_time(store.damaged) == {path: "it is not a regular file"}
    assert counts(in_time(store.read)) == whole(1) and in_time(store.finished) == {cell_id(1)}
    fifo("_pipe.toml")
    with pytest.raises(ValueError, match=r"_pipe\.toml: cannot be read: it is not a regular file"):
        in_time(store.experiments)
    in_time(store.keep_config, dataclasses.replace(load_config("smoke"), name="pipe"))
    assert [one.name for one in store.experiments()] == ["smoke"]


def test_a_small_file_of_very_many_equal_rows_is_refused_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(bilevel.bench.store, "MOST_BYTES", 10**7)
    store = Store(tmp_path)
    path = store.write(group(1))
    table = pyarrow.parquet.read_table(path)
    path = replaced(path, grown(table, 40_000))
    assert path.stat().st_size < 10**6
    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "read", lambda *_, **__: pytest.fail("was read"))
    expected = f"its 40,000 rows of {table.num_columns} columns would take {40_000 * table.num_columns * 8:,} bytes, "
    for read in (store.read, store.finished):
        with pytest.warns(UserWarning, match="is damaged") as caught:
            read()
        (text,) = {str(one.message) for one in caught}
        assert f"`{path}`" in text and expected + "and at most 10,000,000 are read" in text
        assert "try again" not in text
    assert store.damaged()[path].startswith(expected)


def test_a_small_file_of_one_long_text_in_many_rows_is_refused_before_the_text_is_copied(tmp_path):
    store = Store(tmp_path)
    path = store.write(group(1))
    table = grown(pyarrow.parquet.read_table(path), 1500)
    texts = pyarrow.DictionaryArray.from_arrays(np.zeros(1500, np.int32), ["x" * 10**6])
    path = replaced(path, table.set_column(table.column_names.index("machine"), "machine", texts))
    problem = store.damaged()[path]
    assert re.fullmatch(r"its text would take 1,500,\d{3},\d{3} bytes, and at most 1,073,741,824 are read", problem)


@pytest.mark.parametrize("limit", ["bytes of a file", "bytes unpacked"])
def test_a_large_file_is_refused_before_it_is_read(limit, tmp_path, monkeypatch):
    store = Store(tmp_path)
    path = store.write(group(1))
    if limit == "bytes of a file":
        monkeypatch.setattr(bilevel.bench.store, "MOST_BYTES", 100)
        expected = f"it has {path.stat().st_size:,} bytes, and at most 100 are read"
    else:
        table = pyarrow.parquet.read_table(path)
        texts = [[letter * 10**6 for letter in "abc"]]
        table = table.set_column(table.column_names.index("machine"), "machine", texts)
        path = replaced(path, table, compression="zstd")
        monkeypatch.setattr(bilevel.bench.store, "MOST_BYTES", 10**6)
        monkeypatch.setattr(pyarrow.parquet.ParquetFile, "read", lambda *_, **__: pytest.fail("was read"))
        expected = r"its unpacked data would take 3,\d{3},\d{3} bytes, and at most 1,000,000 are read"
    assert re.fullmatch(expected, store.damaged()[path])


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files"), MemoryError()])
def test_errors_of_the_system_are_no_damage(tmp_path, monkeypatch, error):
    def fail(*_):
        raise error

    store = Store(tmp_path)
    store.write(group(1))
    with monkeypatch.context() as patch:
        patch.setattr(bilevel.bench.store, "read_bounded", fail)
        way = "more memory is needed" if isinstance(error, MemoryError) else "nothing is lost: try again"
        with pytest.raises(OSError, match=rf"cannot be read now \(.+\); {way}\."):
            store.finished()
    assert store.finished() == {cell_id(1)}


def test_a_file_of_a_newer_format_is_refused(tmp_path):
    store = Store(tmp_path)
    path = store.write(group(1))
    table = pyarrow.parquet.read_table(path)
    assert table.schema.metadata == {b"bilevel_store": b"2"}
    path = replaced(path, table.replace_schema_metadata({"bilevel_store": "3"}))
    with pytest.raises(
        ValueError, match=r"has the format 3 of stores, and this version of bilevel reads up to 2; upgrade"
    ):
        store.read()
    assert files(store) == [path.name]


def test_a_store_of_the_version_before_is_read_and_grows(tmp_path):
    store = Store(shutil.copytree(Path(__file__).parent / "old_store", tmp_path / "store"))
    contents = {path: path.read_bytes() for path in store.folder.iterdir()}
    experiment, before = load_config(store.configs()[0]), store.read()
    assert [one.name for one in store.experiments()] == [experiment.name]
    assert store.unfinished(experiment.narrow(["SOBA"]).cells(256, 64)) == [], "its cells are known by the same names"
    assert len(store.unfinished(experiment.narrow(["SRBA"]).cells(256, 64))) == 4
    assert len(store.finished()) == 6 and len(before) == 150
    assert before["value_gap"].notna().sum() > 6 and before["columns"].isna().all()
    store.write(group(1, fairness=0.5))
    after = store.read()
    assert len(store.finished()) == 7 and len(after) == len(before) + N_ROWS
    kept = after[after["cell"] != cell_id(1)][before.columns].reset_index(drop=True)
    pandas.testing.assert_frame_equal(kept, before, check_dtype=False)
    assert contents.items() <= {path: path.read_bytes() for path in store.folder.iterdir()}.items()
    assert after["fairness"].notna().sum() == N_ROWS


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
    changed = rewritten(OTHER_COLUMNS[kind])(changed)
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
    check_columns(["fairness", "test_error"], {})
    with pytest.raises(ValueError, match=r"metric `status` has the name of another column of the store; rename it."):
        check_columns(["fairness", "status"], {})


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="file` is a file; a store is a folder"):
        Store(tmp_path / "file")
    with pytest.raises(NotADirectoryError, match="cannot be written to: Not a directory"):
        Store(tmp_path / "file" / "below").write(group(1))


def test_a_folder_without_permission_is_refused_by_name_unless_there_is_nothing_to_write(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    store, experiment = Store(tmp_path / "store"), load_config("smoke")
    store.keep_config(experiment)
    monkeypatch.setattr("os.fsync", refuse)  # root may write everywhere
    store.keep_config(experiment)
    with pytest.raises(PermissionError, match=rf"`{store.folder}` cannot be written to: Permission denied."):
        store.write(group(1))
    with pytest.raises(PermissionError, match=rf"`{store.folder}` cannot be written to: Permission denied."):
        store.keep_config(dataclasses.replace(experiment, text=b"# two"))
    assert store.configs()[0].read_bytes() == experiment.text


def started(script, *arguments):
    command = [
        sys.executable,
        "-c",
        "from tests.bench.test_store_faults import *\n" + script,
        *map(str, arguments),
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, cwd=ROOT)


def say_go(*processes):
    """Make processes continue at the same moment, after all have imported their modules."""
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


@pytest.mark.slow
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
import os
def die(*_): os.kill(os.getpid(), signal.SIGKILL)
store = Store(sys.argv[1])
store.write(group(1))
setattr(os, sys.argv[2], die)
store.write(group(2))
"""


@pytest.mark.parametrize("moment", ["fsync", pytest.param("replace", marks=pytest.mark.slow)])
def test_a_writer_killed_in_the_middle_of_a_file_leaves_the_files_before_it(tmp_path, moment, monkeypatch):
    process = started(KILLED, tmp_path, moment)
    assert finish(process) == -signal.SIGKILL
    assert len(list(tmp_path.glob(".*.part"))) == 1
    store = Store(tmp_path)
    assert counts(store.read()) == counts(read_files(tmp_path)) == whole(1)
    monkeypatch.setattr("bilevel._core.files._FRESH", 0.0)
    store.write(group(2))
    assert counts(store.read()) == whole(1, 2)
    assert all(name.endswith(".parquet") for name in files(store)), "no leftovers"


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
    assert counts(read_files(tmp_path)) == counts(frame)

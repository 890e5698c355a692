"""The store: what is written is read, by anyone, whatever happens to the writers."""

import dataclasses
import hashlib
import re
from pathlib import Path

import duckdb
import numpy as np
import pandas
import pyarrow
import pyarrow.dataset
import pytest

from bilevel._core.types import Calls
from bilevel.bench.config import parameter_types
from bilevel.bench.store import SCHEMA, Store, column_type
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
    return sorted(path.name for path in store.folder.iterdir() if path.name != "HOW-TO-READ.txt")


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


def test_hyper_parameters_of_one_name_have_one_type():
    for solver in SOLVERS.values():
        for name, kind in parameter_types(solver).items():
            assert SCHEMA().field(f"param_{name}").type == column_type(kind), f"{solver.__name__}.{name}"


def read_files(folder):
    """Every row of every file, as another program reads them."""
    return pandas.concat([pandas.read_parquet(path) for path in sorted(folder.glob("*.parquet"))])


def test_what_is_written_is_read_by_us_by_pandas_and_by_duckdb(tmp_path):
    store = Store(tmp_path / "new" / "store")
    store.write(group(1, 2))
    store.write(group(3, phase="timing", status=Status.diverged, seconds=np.float32(0.5), value=float("nan")))
    frame = store.read()
    assert counts(frame) == whole(1, 2, 3)
    expected = pandas.DataFrame(group(1, 2, 3))
    for name in ("seed", "step", "calls", "outer_value", "final", "param_step_size", "param_period"):
        assert frame.sort_values(["cell", "step"])[name].tolist() == expected[name].tolist(), name
    theirs = read_files(store.folder)
    assert list(theirs.columns) == SCHEMA().names
    assert counts(theirs) == counts(frame)
    query = f"SELECT cell, count(*) FROM read_parquet('{store.folder}/*.parquet') WHERE final GROUP BY cell"
    assert dict(duckdb.sql(query).fetchall()) == dict.fromkeys(whole(1, 2, 3), 1)


def test_a_reader_that_would_lose_columns_stops_at_a_text_that_says_how_to_read(tmp_path):
    store = Store(tmp_path)
    store.write(group(1))
    store.write(group(2, fairness=0.5))
    for read in (pandas.read_parquet, lambda folder: pyarrow.dataset.dataset(folder).to_table()):
        with pytest.raises(pyarrow.ArrowInvalid, match=r"HOW-TO-READ\.txt"):
            read(tmp_path)
    text = (tmp_path / "HOW-TO-READ.txt").read_text()
    scope = {}
    exec(
        re.search(r"^    from .*?\n\n", text, re.DOTALL | re.MULTILINE)[0]
        .replace("    ", "")
        .replace("FOLDER", str(tmp_path)),
        scope,
    )
    assert scope["table"]["fairness"].notna().sum() == N_ROWS
    query = re.search(r"`(read_parquet.*)`", text)[1].replace("FOLDER", str(tmp_path))
    assert duckdb.sql(f"SELECT count(fairness) FROM {query}").fetchall() == [(N_ROWS,)]


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
    assert counts(read_files(tmp_path)) == whole(1, 2, 3)
    assert store.write(group(3, 1)) is None
    assert files(store) == sorted([first.name, second.name])


def test_the_name_of_a_file_is_the_digest_of_its_content(tmp_path):
    path = Store(tmp_path).write(group(1, 2))
    assert path.stem == hashlib.sha256(path.read_bytes()).hexdigest()


def test_an_unfinished_cell_gives_way_to_a_finished_one(tmp_path):
    for order in (False, True), (True, False):
        store = Store(tmp_path / str(order[0]))
        for finished in order:
            # With another cell, so that the two files have different names.
            store.write(group(1, finished=finished, machine=str(finished)) + group(2 + finished))
        frame = store.read()
        assert counts(frame) == whole(1, 2, 3)
        assert set(frame[frame["cell"] == cell_id(1)]["machine"]) == {"True"}


def test_a_cell_in_two_files_is_read_once(tmp_path):
    store, other = Store(tmp_path / "a"), Store(tmp_path / "b")
    store.write(group(1, 2))
    path = other.write(group(2, 3))
    path.rename(store.folder / path.name)
    assert counts(read_files(store.folder))[cell_id(2)] == 2 * N_ROWS
    assert counts(store.read()) == whole(1, 2, 3)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (group(1, parameters="x"), "column `parameters` must be double: "),
        (group(1, seed=True), "column `seed` must be int64: "),
        (group(1, value="0.1"), "column `value` must be double: "),
        (group(1, value=np.ones(2)), "column `value` must be double: "),
        (group(1, machine=3), "column `machine` must be string: "),
        (group(1, param_shared_batch=1), "column `param_shared_batch` must be bool: "),
        (group(1, seed=2**70), "column `seed` must be int64: "),
    ],
)
def test_values_of_another_type_are_refused_and_nothing_is_written(tmp_path, rows, message):
    store = Store(tmp_path)
    with pytest.raises(ValueError, match=re.escape(message)):
        store.write(rows)
    assert files(store) == []

"""Results as Parquet files of one schema, one file per group of cells.

Any number of processes may write to a folder: a file appears whole, under a name made of its cells, and is never
changed. Names that begin with a dot or an underscore are passed over by pandas and by DuckDB, so what is being
written and what is set aside have such names, and both read the folder as it is.
"""

import functools
import hashlib
import time
import warnings
from collections.abc import Iterator, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from bilevel._io import replacing
from bilevel._optional import require
from bilevel._types import Calls
from bilevel.bench.cells import SWEEP, TIMING
from bilevel.bench.config import METRICS, Experiment, found, load_config, nearest, parameter_types
from bilevel.engine.result import Status
from bilevel.solvers import SOLVERS

Frame: TypeAlias = Any  # a pandas.DataFrame
Table: TypeAlias = Any  # a pyarrow.Table
Schema: TypeAlias = Any  # a pyarrow.Schema

_KEYS = ("cell", "experiment", "phase", "problem", "problem_arguments", "solver", "seed", "status", "final")
_CHOICES = {"phase": (SWEEP, TIMING), "status": tuple(Status)}
_NAMES = {str: "string", bool: "bool", int: "int64", float: "float64"}
_KINDS: dict[str, Any] = {"string": str, "bool": (bool, np.bool_), "int64": Integral, "double": Real}
_STALE = 3600.0  # seconds; no write takes that long


@functools.cache
def SCHEMA() -> Schema:
    """Return the columns of every file, computed from the registry of solvers."""
    pa = require("pyarrow", "bench")
    return pa.schema([(name, pa.type_for_alias(_NAMES[kind])) for name, kind in _columns().items()])


def _columns() -> dict[str, type]:
    return {
        **dict.fromkeys(("cell", "experiment", "phase", "problem", "problem_arguments", "solver"), str),
        **_parameters(),
        **{"seed": int, "status": str, "final": bool, "step": int, "seconds": float},
        **dict.fromkeys(("calls", *(f"calls_{kind}" for kind in Calls._fields)), int),
        **dict.fromkeys(("epochs", *METRICS, "memory_bytes"), float),
        **dict.fromkeys(("machine", "python", "jax", "bilevel", "revision", "written_at"), str),
    }


def _parameters() -> dict[str, type]:
    found: dict[str, type] = {}
    for solver in SOLVERS.values():
        for name, kind in parameter_types(solver).items():
            if found.setdefault(f"param_{name}", kind) is not kind:
                raise TypeError(f"`{solver.__name__}.{name}` has another type than in other solvers; rename it.")
    return dict(sorted(found.items()))


class Store:
    """A folder of results.

    A file that is no Parquet, is truncated or has another schema is set aside as ``_NAME.damaged``, with a warning.

    Parameters
    ----------
    folder : made by the first `write`
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise NotADirectoryError(f"`{folder}` is a file; a store is a folder.")

    def write(self, rows: Sequence[dict[str, Any]]) -> Path | None:
        """Write rows of whole cells, without the cells that are finished already.

        Parameters
        ----------
        rows : one dict per evaluation; columns that are left out are null

        Returns
        -------
        Path or None
            The new file, or None where every cell was there.
        """
        _check_rows(rows)
        done = self.finished()
        rows = [row for row in rows if row["cell"] not in done]
        if not rows:
            return None
        cells = sorted({row["cell"] for row in rows})
        path = self.folder / (hashlib.sha256(" ".join(cells).encode()).hexdigest()[:32] + ".parquet")
        table = _table(rows)
        try:
            self._remove_leftovers()
            _write(table, path)
        except OSError as error:
            raise type(error)(f"`{self.folder}` cannot be written to: {error.strerror or error}.") from error
        return path

    def keep_config(self, path: str | Path) -> None:
        """Put a copy of an experiment's file beside its results."""
        source = found(path)
        if source.resolve() in (kept.resolve() for kept in self.configs()):
            return
        with replacing(self.folder / f"_{source.stem}.toml") as file:
            file.write(source.read_bytes())

    def configs(self) -> list[Path]:
        """Return the files of the experiments, kept beside the results."""
        return sorted(self.folder.glob("_*.toml"))

    def experiments(self) -> list[Experiment]:
        """Return the experiments whose files lie beside the results."""
        return [load_config(path) for path in self.configs()]

    def finished(self) -> set[str]:
        """Return the ids of the cells that have a final row."""
        return {cell for table in self._tables(["cell", "final"]) for cell in _finished(table)}

    def read(self, phase: str | None = None) -> Frame:
        """Return all rows, those of a cell that two processes wrote once.

        Parameters
        ----------
        phase : "sweep" or "timing"; both by default
        """
        if phase not in (None, SWEEP, TIMING):
            raise ValueError(f"`phase={phase!r}`: must be {SWEEP!r}, {TIMING!r} or None.")
        pa = require("pyarrow", "bench")
        require("pandas", "bench")
        tables = _once(list(self._tables()))
        frame = pa.concat_tables([SCHEMA().empty_table(), *tables]).to_pandas()
        return frame if phase is None else frame[frame["phase"] == phase].reset_index(drop=True)

    def _tables(self, columns: list[str] | None = None) -> Iterator[Table]:
        for path in sorted(self.folder.glob("[!._]*.parquet")):
            table = _read(path, columns)
            if table is not None:
                yield table

    def _remove_leftovers(self) -> None:
        """Remove what killed writers left, and leave alone what may still be written to."""
        for path in self.folder.glob(".*.part"):
            try:
                if time.time() - path.stat().st_mtime > _STALE:
                    path.unlink()
            except FileNotFoundError:
                continue  # another process was faster


def _check_rows(rows: Sequence[dict[str, Any]]) -> None:
    if not rows:
        raise ValueError("`rows` is empty; a group has at least one row.")
    known, finals = SCHEMA().names, set()
    for row in rows:
        _check_row(row, known)
        if row["final"] and row["cell"] in finals:
            raise ValueError(f"cell {row['cell']} has two final rows; write each cell once.")
        finals.update([row["cell"]] if row["final"] else [])


def _check_row(row: dict[str, Any], known: list[str]) -> None:
    for name in row:
        if name not in known:
            raise ValueError(f"unknown column `{name}`; {nearest(name, known)}")
    for name in _KEYS:
        if row.get(name) is None:
            raise ValueError(f"a row has no `{name}`; each needs {', '.join(_KEYS)}.")
    for name, choices in _CHOICES.items():
        if row[name] not in choices:
            raise ValueError(f"`{name}={row[name]!r}`: must be one of {', '.join(choices)}.")


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    pa = require("pyarrow", "bench")
    columns = [_column(field, [row.get(field.name) for row in rows]) for field in SCHEMA()]
    return pa.Table.from_arrays(columns, schema=SCHEMA())


def _column(field: Any, values: list[Any]) -> Any:
    """Return the values as Arrow holds them, refusing those that it would quietly round."""
    pa = require("pyarrow", "bench")
    kind = _KINDS[str(field.type)]
    for given in set(map(type, values)) - {type(None)}:
        if not issubclass(given, kind) or (given is bool and field.type != pa.bool_()):
            raise ValueError(f"column `{field.name}` holds a value of type {given.__name__}; it must be {field.type}.")
    try:
        return pa.array(values, field.type)
    except (pa.ArrowException, OverflowError) as error:
        raise ValueError(f"column `{field.name}` must be {field.type}: {error}") from error


def _write(table: Table, path: Path) -> None:
    pq = require("pyarrow.parquet", "bench")
    with replacing(path) as file:
        pq.write_table(table, file, write_page_checksum=True)


def _read(path: Path, columns: list[str] | None) -> Table | None:
    """Return a file's table, or None where it is damaged or gone."""
    pa, pq = require("pyarrow", "bench"), require("pyarrow.parquet", "bench")
    try:
        with path.open("rb") as file:
            try:
                source = pq.ParquetFile(file, page_checksum_verification=True)
                if source.schema_arrow.equals(SCHEMA()):
                    return source.read(columns)
                problem = _difference(source.schema_arrow)
            except (pa.ArrowException, OSError, ValueError) as error:
                problem = " ".join(str(error).split())
    except FileNotFoundError:
        return None  # set aside by another process
    _set_aside(path, problem)
    return None


def _difference(schema: Schema) -> str:
    ours, theirs = SCHEMA(), set(schema.names)
    missing = [name for name in ours.names if name not in theirs]
    beyond = sorted(theirs - set(ours.names))
    parts = [f"{what} {', '.join(names)}" for what, names in (("lacks", missing), ("has also", beyond)) if names]
    return "another schema: " + ("; ".join(parts) or "types or order of its columns")


def _set_aside(path: Path, problem: str) -> None:
    aside = path.with_name(f"_{path.name}.damaged")
    try:
        path.replace(aside)
        outcome = f"set aside as {aside.name}"
    except OSError as error:
        outcome = f"passed over, for it cannot be renamed ({error.strerror})"
    warnings.warn(f"`{path}` is damaged ({problem}); {outcome}.", stacklevel=2)


def _finished(table: Table) -> list[str]:
    return table.filter(table["final"])["cell"].to_pylist()


def _once(tables: list[Table]) -> list[Table]:
    """Keep each cell in one table: the first where it is finished, or else the first."""
    home: dict[str, int] = {}
    for cells_of in (_finished, lambda table: table["cell"].to_pylist()):
        for place, table in enumerate(tables):
            for cell in cells_of(table):
                home.setdefault(cell, place)
    return [
        table.filter([home[cell] == place for cell in table["cell"].to_pylist()]) for place, table in enumerate(tables)
    ]

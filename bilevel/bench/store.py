"""Results as Parquet files, one file per task.

Any number of processes may write to a folder: a file appears whole, under a name made of its cells, and is never
changed. Names that begin with a dot or an underscore are passed over by pandas and by DuckDB, so what is being
written and what is set aside have such names, and both read the folder as it is.

Files need not have the same columns: a metric of a user's own is a column more, and a column that a file lacks is null.
Each has a digest of its bytes. Reading changes nothing. A file counts as damaged if it cannot be parsed, does not fit
its digest, has no rows, lacks a key, would take more than `MOST_BYTES` of memory, or is not a regular file: all readers
skip it with a warning that names it, and `Store.set_aside` renames it on request. Errors that may be temporary (too
many open files, no memory) are tried again, and are not damage.
"""

import errno
import functools
import hashlib
import io
import itertools
import json
import re
import time
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from bilevel._io import read_bounded, replacing
from bilevel._optional import require
from bilevel._progress import printable
from bilevel._types import Calls
from bilevel.bench.cells import SIZES, SWEEP, TIMING, Cell, parameter_types
from bilevel.bench.config import Statement, read_statement
from bilevel.bench.tables import find_config
from bilevel.engine.metrics import METRICS
from bilevel.engine.result import Status
from bilevel.solvers import SOLVERS, SolverBase

Frame: TypeAlias = Any  # a pandas.DataFrame
Arrow: TypeAlias = Any  # a pyarrow.Table, Schema or DataType
PARAMETER = "param_"  # begins the name of a column of hyper-parameters
_KEYS = ("cell", "experiment", "phase", "problem", "problem_arguments", "solver", "seed", "status", "final")
_CHOICES = {"phase": (SWEEP, TIMING), "status": tuple(Status)}
_NAMES = {str: "string", bool: "bool", int: "int64", float: "float64"}
_KINDS: dict[str, Any] = {"string": str, "bool": (bool, np.bool_), "int64": Integral, "double": Real}
FORMAT, _FORMAT_KEY = 2, b"bilevel_store"  # of a file, in its metadata; files of the first format do not say theirs
# The pages of a file have checksums; its footer, where names and places of columns are, has none of its own.
_DIGEST_KEY, _NO_DIGEST = b"bilevel_digest", b"0" * 64
_DIGEST = re.compile(_DIGEST_KEY + rb".{1,4}?([0-9a-f]{64})", re.DOTALL)
_PASSING = {getattr(errno, name) for name in ("EAGAIN", "EIO", "ENFILE", "EMFILE", "ENOMEM", "EINTR", "EBUSY")}
_PASSING_WORDS = ("temporarily unavailable", "too many open files", "cannot allocate", "out of memory")
_PAUSES = (0.05, 0.2, 0.8)  # seconds between tries
# A small file may hold many equal rows: its size in memory is estimated from its metadata before it is read.
MOST_BYTES, _BYTES_PER_VALUE = 2**30, 8


def SCHEMA() -> Arrow:
    """Return the columns that every new file has; they follow from the registries of solvers and metrics."""
    return _schema(tuple(SOLVERS.values()), tuple(METRICS))


@functools.cache
def _schema(solvers: tuple[type[SolverBase], ...], metrics: tuple[str, ...]) -> Arrow:
    parameters: dict[str, type] = {}
    for solver in solvers:
        for name, kind in parameter_types(solver).items():
            if parameters.setdefault(PARAMETER + name, kind) is not kind:
                raise TypeError(f"`{solver.__name__}.{name}` has another type than in other solvers; rename it.")
    columns = {
        **dict.fromkeys(("cell", "experiment", "phase", "problem", "problem_arguments", "solver"), str),
        **dict(sorted(parameters.items())),
        **dict.fromkeys(SIZES, int),
        **{"columns": str, "seed": int, "status": str, "final": bool, "step": int, "seconds": float},
        **dict.fromkeys(("calls", *(f"calls_{kind}" for kind in Calls._fields)), int),
        **dict.fromkeys(("epochs", *metrics, "memory_bytes"), float),
        **dict.fromkeys(("machine", "python", "jax", "bilevel", "revision", "written_at"), str),
    }
    return require("pyarrow", "bench").schema([(name, column_type(kind)) for name, kind in columns.items()])


def column_type(kind: type) -> Arrow:
    """Return the type of a column of such values."""
    if kind not in _NAMES:
        raise ValueError(f"a parameter is a text, a number, or true or false; not of type {kind!r}.")
    return require("pyarrow", "bench").type_for_alias(_NAMES[kind])


def list_metrics(table: Frame) -> list[str]:
    """Return the metrics with a number in a table: those of the registry in its order, then a user's own."""
    fixed = {*SCHEMA().names} - METRICS.keys()
    own = (name for name in table.columns if name not in fixed and not name.startswith((PARAMETER, "calls_")))
    names = (name for name in dict.fromkeys((*METRICS, *own)) if name in table.columns)
    return [name for name in names if table[name].dtype.kind in "fiu" and table[name].notna().any()]


def list_finished(table: Frame) -> set[str]:
    """Return the ids of the cells that have a final row."""
    return set(table[table["final"].astype(bool)]["cell"])


def check_metric_names(names: Iterable[str]) -> None:
    """Refuse metrics that would take the place of another column."""
    taken = [name for name in names if name in SCHEMA().names and name not in METRICS]
    if taken:
        raise ValueError(f"metric `{taken[0]}` has the name of another column of the store; rename it.")


class Store:
    """A folder of results, made by the first `write`."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise NotADirectoryError(f"`{folder}` is a file; a store is a folder.")

    def write(self, rows: Sequence[dict[str, Any]]) -> Path | None:
        """Write the rows of whole cells that are not finished already, and return the new file, if there is one."""
        _check_rows(rows)
        done = self.finished()
        rows = [row for row in rows if row["cell"] not in done]
        if not rows:
            return None
        cells = " ".join(sorted({row["cell"] for row in rows}))
        path = self._free_path(hashlib.sha256(cells.encode()).hexdigest()[:32])
        content = _seal(_table(rows))
        with self._replacing(path) as file:
            file.write(content)
        return path

    @contextmanager
    def _replacing(self, path: Path) -> Iterator[BinaryIO]:
        try:
            with replacing(path) as file:
                yield file
        except OSError as error:
            raise type(error)(f"`{self.folder}` cannot be written to: {error.strerror or error}.") from error

    def _free_path(self, name: str) -> Path:
        """Return a path of this name that no file has: one that is there does not hold these cells, or is damaged."""
        names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
        return next(path for path in (self.folder / f"{one}.parquet" for one in names) if not path.exists())

    def damaged(self) -> dict[Path, str]:
        """Return the files that cannot be parsed, each with what is wrong."""
        return {path: problem for path in self._paths() if (problem := _read(path, None)[1]) is not None}

    def set_aside(self, paths: Iterable[Path]) -> list[Path]:
        """Rename damaged files to ``_NAME.damaged``, which all readers pass over, and return the new paths."""
        return [path.replace(path.with_name(f"_{path.name}.damaged")) for path in paths]

    def keep(self, path: Path, solver: str | None = None) -> None:
        """Write final rows of the sweep and all rows of the timing, or those of one solver, to a file of a store."""
        rows = self.read()
        rows = rows[rows["final"] | (rows["phase"] == TIMING)].sort_values(["cell", "step"])
        rows = rows if solver is None else rows[rows["solver"] == solver]
        if rows.empty:  # a file without rows counts as damaged
            return
        with np.errstate(over="ignore"):  # seven digits are kept of what was measured
            rows = rows.astype(dict.fromkeys(list_metrics(rows), np.float32))
        table = require("pyarrow", "bench").Table.from_pandas(rows, preserve_index=False)
        with replacing(path) as file:
            file.write(_seal(table, compression="zstd", compression_level=19))

    def keep_config(self, path: str | Path, content: bytes | None = None) -> None:
        """Put a copy of an experiment's file beside its results, or this content under the name of such a file."""
        source = find_config(path) if content is None else Path(path)
        kept, content = self.folder / f"_{source.stem}.toml", source.read_bytes() if content is None else content
        if source.resolve() not in (one.resolve() for one in self.configs()) and not _holds(kept, content):
            with self._replacing(kept) as file:
                file.write(content)

    def configs(self) -> list[Path]:
        return sorted(self.folder.glob("_*.toml"))

    def experiments(self) -> list[Statement]:
        """Return what the configs beside the results state; nothing that they name is imported."""
        return [read_statement(path) for path in self.configs()]

    def keep_plan(self, experiment: str, phase: str, cells: Iterable[Cell], within: Iterable[Cell] = ()) -> None:
        """Record the cells that a phase is to run, and those of earlier plans that are still within its grid."""
        path = self.folder / f"_{experiment}-{phase}.cells"
        earlier = _read_plan(path).intersection(one.id for one in within) if path.is_file() else set()
        content = "\n".join(sorted(earlier.union(one.id for one in cells))).encode()
        if not _holds(path, content):
            with self._replacing(path) as file:
                file.write(content)

    def list_unfinished(self, finished: Collection[str]) -> list[str]:
        """Return a sentence for each phase with planned cells that are not among the finished ones."""
        found = []
        for path in sorted(filter(Path.is_file, self.folder.glob("_*.cells"))):
            (name, _, phase), planned = path.stem[1:].rpartition("-"), _read_plan(path)
            if (there := len(planned.intersection(finished))) < len(planned):
                counts = f"{there:,} of the {len(planned):,} cells of its {phase} are stored"
                found.append(f"`{name}` is unfinished: {counts}; the same `bilevel run` continues it.")
        return found

    def finished(self) -> set[str]:
        """Return the ids of the cells that have a final row."""
        tables = self._tables(["cell", "final"])
        return {cell for table in tables for cell in table.filter(table["final"])["cell"].to_pylist()}

    def unfinished(self, cells: Iterable[Cell]) -> list[Cell]:
        done = self.finished()
        return [cell for cell in cells if cell.id not in done]

    def read(self, phase: str | None = None) -> Frame:
        """Return all rows, or those of a phase, "sweep" or "timing"; those of a cell that two processes wrote once."""
        if phase not in (None, SWEEP, TIMING):
            raise ValueError(f"`phase={phase!r}`: must be {SWEEP!r}, {TIMING!r} or None.")
        require("pandas", "bench")
        frame = _unite([SCHEMA().empty_table(), *_drop_copies(list(self._tables()))]).to_pandas()
        return frame if phase is None else frame[frame["phase"] == phase].reset_index(drop=True)

    def _tables(self, columns: list[str] | None = None) -> Iterator[Arrow]:
        for path in self._paths():
            table, problem = _read(path, columns)
            if problem is not None:
                way = f"its cells count as not run; `bilevel check {self.folder} --set-aside` moves it out of the way"
                warnings.warn(printable(f"`{path}` is damaged ({problem}); {way}."), stacklevel=3)
            if table is not None:
                yield table

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob("[!._]*.parquet"))


def _read_plan(path: Path) -> set[str]:
    return set(read_bounded(path, MOST_BYTES).decode(errors="replace").split())


def _holds(path: Path, content: bytes) -> bool:
    return path.is_file() and path.read_bytes() == content


def _check_rows(rows: Sequence[dict[str, Any]]) -> None:
    if not rows:
        raise ValueError("`rows` is empty; a task has at least one row.")
    for row in rows:
        for name in _KEYS:
            if row.get(name) is None:
                raise ValueError(f"a row has no `{name}`; each needs {', '.join(_KEYS)}.")
        for name, choices in _CHOICES.items():
            if row[name] not in choices:
                raise ValueError(f"`{name}={row[name]!r}`: must be one of {', '.join(choices)}.")
    finals = [row["cell"] for row in rows if row["final"]]
    if len(set(finals)) < len(finals):
        raise ValueError(f"cell {max(finals, key=finals.count)} has two final rows; write each cell once.")


def _table(rows: Sequence[dict[str, Any]]) -> Arrow:
    pa = require("pyarrow", "bench")
    types = {field.name: field.type for field in SCHEMA()}
    names = dict.fromkeys((*types, *(name for row in rows for name in row)))
    kinds = {name: types.get(name) or _kind(name, rows) for name in names}  # of a metric, or a parameter of a plug-in
    return pa.table({name: _column(name, kind, [row.get(name) for row in rows]) for name, kind in kinds.items()})


def _kind(name: str, rows: Sequence[dict[str, Any]]) -> Arrow:
    kinds = {type(row.get(name)) for row in rows} - {type(None)}
    return column_type(kinds.pop() if name.startswith(PARAMETER) and len(kinds) == 1 else float)


def _seal(table: Arrow, **options: Any) -> bytes:
    """Return a table as a file with its format and, in its footer, a digest of all its bytes but the digest's own."""
    parquet, file = require("pyarrow.parquet", "bench"), io.BytesIO()
    table = table.replace_schema_metadata({_FORMAT_KEY: str(FORMAT).encode()})
    with parquet.ParquetWriter(file, table.schema, write_page_checksum=True, **options) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({_DIGEST_KEY: _NO_DIGEST})
    content = file.getvalue()
    begin, end = _find_digest(content)
    return content[:begin] + hashlib.sha256(content).hexdigest().encode() + content[end:]


def _find_digest(content: bytes) -> tuple[int, int]:
    """Return where the digest of a file begins and ends, (0, 0) in a file that has none."""
    places = [found.span(1) for found in _DIGEST.finditer(content)]
    return places[-1] if places else (0, 0)


def _verify(content: bytes) -> bool:
    """Return whether a file has a digest; raise ValueError where it does not fit."""
    begin, end = _find_digest(content)
    plain = content[:begin] + _NO_DIGEST + content[end:]
    if end and hashlib.sha256(plain).hexdigest().encode() != content[begin:end]:
        raise ValueError("its contents do not fit its digest")
    return end > 0


def _column(name: str, kind: Arrow, values: list[Any]) -> Any:
    """Return the values as Arrow holds them, refusing those that it would quietly round."""
    pa = require("pyarrow", "bench")
    for given in set(map(type, values)) - {type(None)}:
        if not issubclass(given, _KINDS[str(kind)]) or (given is bool and kind != pa.bool_()):
            raise ValueError(f"column `{name}` holds a value of type {given.__name__}; it must be {kind}.")
    try:
        return pa.array(values, kind)
    except (pa.ArrowException, OverflowError) as error:
        raise ValueError(f"column `{name}` must be {kind}: {error}") from error


def _read(path: Path, columns: list[str] | None) -> tuple[Arrow | None, str | None]:
    """Return a file's table, or what is wrong with it; neither where the file is gone."""
    pa, problem = require("pyarrow", "bench"), ""
    for pause in (*_PAUSES, None):
        try:
            return _parse(path, columns), None
        except FileNotFoundError:  # another process set it aside
            return None, None
        except _NewerFormat:
            raise
        except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
            passing, again = _is_passing(error), " ".join(str(error).split()) or type(error).__name__
            way = "more memory is needed" if isinstance(error, MemoryError) else "nothing is lost: try again"
        if pause is None and passing:
            raise OSError(f"`{path}` cannot be read now ({again}); {way}.")
        if not passing and problem == again:  # the same on a second reading
            return None, again
        problem = again
        time.sleep(pause or 0.0)
    return None, problem


class _NewerFormat(ValueError):
    """A file of a later version of the library."""


def _parse(path: Path, columns: list[str] | None) -> Arrow:
    content = read_bounded(path, MOST_BYTES)
    is_verified = _verify(content)
    parquet, options = require("pyarrow.parquet", "bench"), {"page_checksum_verification": True}
    schema = parquet.ParquetFile(io.BytesIO(content), **options).schema_arrow
    version = int((schema.metadata or {}).get(_FORMAT_KEY, 1))
    if version > FORMAT:
        problem = f"has the format {version} of stores, and this version of bilevel reads up to {FORMAT}"
        raise _NewerFormat(f"`{path}` {problem}; upgrade it.")
    if lacking := [name for name in _KEYS if name not in schema.names]:
        raise ValueError(f"it lacks {', '.join(lacking)}")
    if double := [name for name, count in Counter(schema.names).items() if count > 1]:
        raise ValueError(f"it has several columns `{double[0]}`")
    # Texts are read as they are stored, each once, until their size is known.
    texts = [field.name for field in schema if str(field.type) in ("string", "large_string")]
    source = parquet.ParquetFile(io.BytesIO(content), read_dictionary=texts, **options)
    _check_size(source.metadata)
    # The pages of an older file are verified as they are read: all of them, or a cell might be done but not there.
    table = source.read(list(dict.fromkeys([*columns, *_KEYS])) if columns and is_verified else None)
    _check_bytes("text", sum(map(_count_text_bytes, table.columns)))
    table = _conform(table)
    _check_values(table)
    return table if columns is None else table.select(columns)


def _check_size(metadata: Any) -> None:
    """Refuse a file without rows, and one that would take too much memory."""
    rows, columns, groups = metadata.num_rows, metadata.num_columns, range(metadata.num_row_groups)
    if not rows:
        raise ValueError("it has no rows")
    _check_bytes(f"{rows:,} rows of {columns} columns", rows * columns * _BYTES_PER_VALUE)
    stored = (metadata.row_group(group).column(column) for group in groups for column in range(columns))
    _check_bytes("unpacked data", sum(column.total_uncompressed_size for column in stored))


def _check_bytes(what: str, size: int) -> None:
    if size > MOST_BYTES:
        raise ValueError(f"its {what} would take {size:,} bytes, and at most {MOST_BYTES:,} are read")


def _count_text_bytes(column: Arrow) -> int:
    """Return the bytes of the texts of a column that has each text once, when they are written out."""
    compute, size = require("pyarrow.compute", "bench"), 0
    for chunk in column.chunks if str(column.type).startswith("dictionary") else ():
        lengths = compute.binary_length(chunk.dictionary)
        size += compute.sum(compute.take(lengths.cast("int64"), chunk.indices)).as_py() or 0
    return size


def _check_values(table: Arrow) -> None:
    """Refuse keys without a value, and arguments of a problem that are not an object in JSON."""
    for name in _KEYS:
        if table[name].null_count:
            raise ValueError(f"it has rows without `{name}`")
    for text in table["problem_arguments"].unique().to_pylist():
        try:
            arguments = json.loads(text)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise ValueError("its `problem_arguments` are not an object in JSON")


def _is_passing(error: Exception) -> bool:
    """Tell whether an error is of the operating system's moment and not of the file."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _PASSING):
        return True
    return any(words in str(error).lower() for words in _PASSING_WORDS)


def _conform(table: Arrow) -> Arrow:
    """Return a file's table with our types in our columns; in others, numbers are floats, and the rest is text."""
    pa = require("pyarrow", "bench")
    ours = {field.name: field.type for field in SCHEMA()}
    fields = []
    for name, kind in zip(table.schema.names, table.schema.types, strict=True):
        numeric = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_null(kind)
        truth = pa.types.is_boolean(kind) and name.startswith(PARAMETER)
        fields.append((name, ours.get(name) or (pa.float64() if numeric else kind if truth else pa.string())))
    return table.cast(pa.schema(fields))


def _unite(tables: Sequence[Arrow]) -> Arrow:
    """Put tables of different columns below one another; numbers and text in one column become text."""
    pa = require("pyarrow", "bench")
    text = {field.name for table in tables for field in table.schema if field.type == pa.string()}
    kinds = ([(one.name, pa.string() if one.name in text else one.type) for one in table.schema] for table in tables)
    cast = (table.cast(pa.schema(fields)) for table, fields in zip(tables, kinds, strict=True))
    return pa.concat_tables(cast, promote_options="default")


def _drop_copies(tables: list[Arrow]) -> Iterable[Arrow]:
    """Keep each cell in one table: the first where it is finished, or else the first."""
    home: dict[str, int] = {}
    for candidates in ([table.filter(table["final"]) for table in tables], tables):
        for place, table in enumerate(candidates):
            for cell in table["cell"].to_pylist():
                home.setdefault(cell, place)
    for place, table in enumerate(tables):
        yield table.filter([home[cell] == place for cell in table["cell"].to_pylist()])

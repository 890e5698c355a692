"""Results as Parquet files in a folder, one file per task.

Any number of processes may write to a folder. A file appears complete, under a name derived from its cells, and is
never changed. Temporary files and files that were set aside have names that begin with a dot or an underscore. pandas
and DuckDB ignore such names, so both can read the folder directly.

Files may have different columns: a metric defined by a user is an additional column, and missing columns are null. Each
file contains a digest of its bytes. Reading changes nothing. A file is damaged if it cannot be parsed, does not match
its digest, has no rows, lacks a key, needs more than `MOST_BYTES` of memory, or is not a regular file. Damaged files
are skipped with a warning that names them, and `Store.set_aside` renames them on request. Errors that may be temporary
(too many open files, no memory) are tried again and do not count as damage.
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
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from bilevel._core.extras import printable, require
from bilevel._core.files import read_bounded, replacing
from bilevel._core.types import Calls
from bilevel.bench.config import SWEEP, TIMING, Cell, Statement, find_config, parameter_types, read_statement
from bilevel.engine.metrics import METRICS
from bilevel.engine.result import Status
from bilevel.solvers import SOLVERS, SolverBase

pa: Any = require("pyarrow", "bench")
parquet: Any = require("pyarrow.parquet", "bench")

Frame: TypeAlias = Any  # a pandas.DataFrame
Arrow: TypeAlias = Any  # a pyarrow.Table, Schema or DataType
PARAMETER = "param_"  # prefix of the columns of hyperparameters
SIZES = ("n_inner", "n_outer", "dim_inner", "dim_outer")  # rows of each level, and size of each variable
_KEYS = ("cell", "experiment", "phase", "problem", "problem_arguments", "solver", "seed", "status", "final")
_CHOICES = {"phase": (SWEEP, TIMING), "status": tuple(Status)}
_NAMES = {str: "string", bool: "bool", int: "int64", float: "float64"}
_KINDS: dict[str, Any] = {"string": str, "bool": (bool, np.bool_), "int64": Integral, "double": Real}
FORMAT, _FORMAT_KEY = 2, b"bilevel_store"  # in the metadata of a file; files of format 1 have no such entry
# Parquet has checksums of pages, but not of the footer with the names and places of columns.
_DIGEST_KEY, _NO_DIGEST = b"bilevel_digest", b"0" * 64
_DIGEST = re.compile(_DIGEST_KEY + rb".{1,4}?([0-9a-f]{64})", re.DOTALL)
_TEMPORARY = {getattr(errno, name) for name in ("EAGAIN", "EIO", "ENFILE", "EMFILE", "ENOMEM", "EINTR", "EBUSY")}
_TEMPORARY_WORDS = ("temporarily unavailable", "too many open files", "cannot allocate", "out of memory")
_PAUSES = (0.05, 0.2, 0.8)  # seconds between attempts
# A small file can contain many equal rows, so its size in memory is estimated from the metadata before it is read.
MOST_BYTES, _BYTES_PER_VALUE = 2**30, 8


def SCHEMA() -> Arrow:
    """Return the columns of every new file, which follow from the registries of solvers and metrics."""
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
    return pa.schema([(name, column_type(kind)) for name, kind in columns.items()])


def column_type(kind: type) -> Arrow:
    """Return the Arrow type of a column with values of a Python type."""
    if kind not in _NAMES:
        raise ValueError(f"a parameter is a text, a number, or true or false; not of type {kind!r}.")
    return pa.type_for_alias(_NAMES[kind])


def list_metrics(table: Frame) -> list[str]:
    """Return the metrics that have numbers in a table: those of the registry, in its order, then those of users."""
    fixed = {*SCHEMA().names} - METRICS.keys()
    own = (name for name in table.columns if name not in fixed and not name.startswith((PARAMETER, "calls_")))
    names = (name for name in dict.fromkeys((*METRICS, *own)) if name in table.columns)
    return [name for name in names if table[name].dtype.kind in "fiu" and table[name].notna().any()]


def list_finished(table: Frame) -> set[str]:
    """Return the ids of the cells that have a final row."""
    return set(table[table["final"].astype(bool)]["cell"])


def check_metric_names(names: Iterable[str]) -> None:
    """Raise ValueError if a user's metric has the name of another column."""
    taken = [name for name in names if name in SCHEMA().names and name not in METRICS]
    if taken:
        raise ValueError(f"metric `{taken[0]}` has the name of another column of the store; rename it.")


class Store:
    """A folder of results, which is created by the first `write`."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise NotADirectoryError(f"`{folder}` is a file; a store is a folder.")

    def write(self, rows: Sequence[dict[str, Any]]) -> Path | None:
        """Write all rows of some cells, except cells that are finished already, and return the new file if any."""
        _check_rows(rows)
        done = self.finished()
        rows = [row for row in rows if row["cell"] not in done]
        if not rows:
            return None
        cells = " ".join(sorted({row["cell"] for row in rows}))
        path = self._free_path(hashlib.sha256(cells.encode()).hexdigest()[:32])
        self._write_file(path, _seal(_make_table(rows)))
        return path

    def _write_file(self, path: Path, content: bytes) -> None:
        try:
            with replacing(path) as file:
                file.write(content)
        except OSError as error:
            raise type(error)(f"`{self.folder}` cannot be written to: {error.strerror or error}.") from error

    def _update_file(self, path: Path, content: bytes) -> None:
        if not (path.is_file() and path.read_bytes() == content):
            self._write_file(path, content)

    def _free_path(self, name: str) -> Path:
        """Return a path that does not exist: a file with this name is damaged or has an unfinished cell."""
        names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
        return next(path for path in (self.folder / f"{one}.parquet" for one in names) if not path.exists())

    def keep(self, path: Path) -> None:
        """Write the final rows of the sweep and all rows of the timing to one file of a store, in single precision."""
        rows = self.read()
        rows = rows[rows["final"] | (rows["phase"] == TIMING)].sort_values(["cell", "step"])
        if rows.empty:  # a file without rows counts as damaged
            return
        with np.errstate(over="ignore"):
            rows = rows.astype(dict.fromkeys(list_metrics(rows), np.float32))
        table = pa.Table.from_pandas(rows, preserve_index=False)
        with replacing(path) as file:
            file.write(_seal(table, compression="zstd", compression_level=19))

    def keep_config(self, path: str | Path, content: bytes | None = None) -> None:
        """Copy the config of an experiment, or this content under its name, into the folder."""
        source = find_config(path) if content is None else Path(path)
        content = source.read_bytes() if content is None else content
        if source.resolve() not in (one.resolve() for one in self.configs()):
            self._update_file(self.folder / f"_{source.stem}.toml", content)

    def configs(self) -> list[Path]:
        return sorted(self.folder.glob("_*.toml"))

    def experiments(self) -> list[Statement]:
        """Return name, metric and budgets of each config in the folder; nothing that these name is imported."""
        return [read_statement(path) for path in self.configs()]

    def keep_plan(self, experiment: str, phase: str, cells: Iterable[Cell], within: Iterable[Cell] = ()) -> None:
        """Record the planned cells of a phase, and those of earlier plans that are still in its grid, `within`."""
        path = self.folder / f"_{experiment}-{phase}.cells"
        earlier = _read_plan(path).intersection(one.id for one in within) if path.is_file() else set()
        self._update_file(path, "\n".join(sorted(earlier.union(one.id for one in cells))).encode())

    def list_unfinished(self, finished: Collection[str]) -> list[str]:
        """Return a sentence for each phase with planned cells that are not in `finished`."""
        found = []
        for path in sorted(filter(Path.is_file, self.folder.glob("_*.cells"))):
            (name, _, phase), planned = path.stem[1:].rpartition("-"), _read_plan(path)
            if (n_stored := len(planned.intersection(finished))) < len(planned):
                counts = f"{n_stored:,} of the {len(planned):,} cells of its {phase} are stored"
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
        """Return all rows, or those of the phase "sweep" or "timing". A cell that is in several files is read once."""
        if phase not in (None, SWEEP, TIMING):
            raise ValueError(f"`phase={phase!r}`: must be {SWEEP!r}, {TIMING!r} or None.")
        require("pandas", "bench")
        frame = _concatenate([SCHEMA().empty_table(), *_drop_copies(list(self._tables()))]).to_pandas()
        return frame if phase is None else frame[frame["phase"] == phase].reset_index(drop=True)

    def damaged(self) -> dict[Path, str]:
        """Return the damaged files, each with what is wrong."""
        return {path: problem for path in self._paths() if (problem := _read(path, None)[1]) is not None}

    def set_aside(self, paths: Iterable[Path]) -> list[Path]:
        """Rename files to ``_NAME.damaged``, which no reader considers, and return the new paths."""
        return [path.replace(path.with_name(f"_{path.name}.damaged")) for path in paths]

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


# Writing.


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


def _make_table(rows: Sequence[dict[str, Any]]) -> Arrow:
    types = {field.name: field.type for field in SCHEMA()}
    columns = {}
    for name in dict.fromkeys((*types, *(name for row in rows for name in row))):
        values = [row.get(name) for row in rows]
        columns[name] = _make_column(name, types.get(name) or _guess_type(name, values), values)
    return pa.table(columns)


def _guess_type(name: str, values: list[Any]) -> Arrow:
    """Return the type of a column that is not in the schema: a metric or a parameter that a user defined."""
    kinds = set(map(type, values)) - {type(None)}
    return column_type(kinds.pop() if name.startswith(PARAMETER) and len(kinds) == 1 else float)


def _make_column(name: str, kind: Arrow, values: list[Any]) -> Arrow:
    """Return the values as an Arrow array; ValueError for values that Arrow would convert or round."""
    for given in set(map(type, values)) - {type(None)}:
        if not issubclass(given, _KINDS[str(kind)]) or (given is bool and kind != pa.bool_()):
            raise ValueError(f"column `{name}` holds a value of type {given.__name__}; it must be {kind}.")
    try:
        return pa.array(values, kind)
    except (pa.ArrowException, OverflowError) as error:
        raise ValueError(f"column `{name}` must be {kind}: {error}") from error


def _seal(table: Arrow, **options: Any) -> bytes:
    """Return a table as a Parquet file, whose footer has the format and a digest of all bytes except the digest."""
    file = io.BytesIO()
    table = table.replace_schema_metadata({_FORMAT_KEY: str(FORMAT).encode()})
    with parquet.ParquetWriter(file, table.schema, write_page_checksum=True, **options) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({_DIGEST_KEY: _NO_DIGEST})
    content = file.getvalue()
    begin, end = _find_digest(content)
    return content[:begin] + hashlib.sha256(content).hexdigest().encode() + content[end:]


def _find_digest(content: bytes) -> tuple[int, int]:
    """Return the begin and end of the digest in a file, (0, 0) if it has none."""
    places = [found.span(1) for found in _DIGEST.finditer(content)]
    return places[-1] if places else (0, 0)


# Reading.


class _NewerFormat(ValueError):
    """A file of a later version of the library."""


def _read(path: Path, columns: list[str] | None) -> tuple[Arrow | None, str | None]:
    """Return the table of a file and None, or None and what is wrong; (None, None) if the file has disappeared."""
    problem = ""
    for pause in (*_PAUSES, None):
        try:
            return _parse(path, columns), None
        except FileNotFoundError:  # another process set it aside
            return None, None
        except _NewerFormat:
            raise
        except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
            is_temporary, text = _is_temporary(error), " ".join(str(error).split()) or type(error).__name__
            way = "more memory is needed" if isinstance(error, MemoryError) else "nothing is lost: try again"
        if pause is None and is_temporary:
            raise OSError(f"`{path}` cannot be read now ({text}); {way}.")
        if not is_temporary and problem == text:  # the second attempt failed in the same way
            return None, text
        problem = text
        time.sleep(pause or 0.0)
    return None, problem


def _is_temporary(error: Exception) -> bool:
    """Return True if an error is due to the state of the operating system and not to the file."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _TEMPORARY):
        return True
    return any(words in str(error).lower() for words in _TEMPORARY_WORDS)


def _parse(path: Path, columns: list[str] | None) -> Arrow:
    content = read_bounded(path, MOST_BYTES)
    has_digest = _verify(content)
    options = {"page_checksum_verification": True}
    schema = parquet.ParquetFile(io.BytesIO(content), **options).schema_arrow
    version = int((schema.metadata or {}).get(_FORMAT_KEY, 1))
    if version > FORMAT:
        problem = f"has the format {version} of stores, and this version of bilevel reads up to {FORMAT}"
        raise _NewerFormat(f"`{path}` {problem}; upgrade it.")
    if lacking := [name for name in _KEYS if name not in schema.names]:
        raise ValueError(f"it lacks {', '.join(lacking)}")
    if double := [name for name, count in Counter(schema.names).items() if count > 1]:
        raise ValueError(f"it has several columns `{double[0]}`")
    # Texts stay dictionary-encoded, with each text once, until their total size is known.
    texts = [field.name for field in schema if str(field.type) in ("string", "large_string")]
    source = parquet.ParquetFile(io.BytesIO(content), read_dictionary=texts, **options)
    _check_size(source.metadata)
    # Files without a digest are read completely, because the checksum of a page is only verified when it is read.
    table = source.read(list(dict.fromkeys([*columns, *_KEYS])) if columns and has_digest else None)
    _check_bytes("text", sum(map(_count_text_bytes, table.columns)))
    table = _cast(table)
    _check_values(table)
    return table if columns is None else table.select(columns)


def _verify(content: bytes) -> bool:
    """Return True if a file has a digest; ValueError if the file does not match it."""
    begin, end = _find_digest(content)
    plain = content[:begin] + _NO_DIGEST + content[end:]
    if end and hashlib.sha256(plain).hexdigest().encode() != content[begin:end]:
        raise ValueError("its contents do not fit its digest")
    return end > 0


def _check_size(metadata: Any) -> None:
    """Raise ValueError for a file without rows, and for one that would need too much memory."""
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
    """Return the size that the texts of a dictionary-encoded column have when they are decoded."""
    compute, size = require("pyarrow.compute", "bench"), 0
    for chunk in column.chunks if str(column.type).startswith("dictionary") else ():
        lengths = compute.binary_length(chunk.dictionary)
        size += compute.sum(compute.take(lengths.cast("int64"), chunk.indices)).as_py() or 0
    return size


def _check_values(table: Arrow) -> None:
    """Raise ValueError for keys without a value, and for arguments of a problem that are not a JSON object."""
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


def _cast(table: Arrow) -> Arrow:
    """Return a table with the types of the schema; other columns become floats, booleans or texts."""
    types = {field.name: field.type for field in SCHEMA()}
    fields = []
    for name, kind in zip(table.schema.names, table.schema.types, strict=True):
        is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_null(kind)
        is_option = pa.types.is_boolean(kind) and name.startswith(PARAMETER)
        fields.append((name, types.get(name) or (pa.float64() if is_number else kind if is_option else pa.string())))
    return table.cast(pa.schema(fields))


def _concatenate(tables: Sequence[Arrow]) -> Arrow:
    """Concatenate tables with different columns; a column with numbers in one table and texts in another is a text."""
    texts = {field.name for table in tables for field in table.schema if field.type == pa.string()}
    kinds = ([(one.name, pa.string() if one.name in texts else one.type) for one in table.schema] for table in tables)
    cast = (table.cast(pa.schema(fields)) for table, fields in zip(tables, kinds, strict=True))
    return pa.concat_tables(cast, promote_options="default")


def _drop_copies(tables: list[Arrow]) -> Iterable[Arrow]:
    """Keep each cell in one table only: the first in which it is finished, or else the first."""
    home: dict[str, int] = {}
    for candidates in ([table.filter(table["final"]) for table in tables], tables):
        for place, table in enumerate(candidates):
            for cell in table["cell"].to_pylist():
                home.setdefault(cell, place)
    for place, table in enumerate(tables):
        yield table.filter([home[cell] == place for cell in table["cell"].to_pylist()])

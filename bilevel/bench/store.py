"""Results as Parquet files in a folder, one file per task, which `Store.read` reads as one table.

Any number of processes may write to a folder. A file appears complete, under a name that is the digest of its bytes,
and is never changed. Temporary files and files that were set aside have names that begin with a dot or an underscore.

Files may have different columns: a metric defined by a user is an additional column, and missing columns are null.
Programs that take the columns of one file for those of all would lose the others without a message, so the folder also
contains a text, on which they stop: `pandas.read_parquet(folder)` raises an error that names the text.

Reading changes nothing. A file is damaged if it cannot be parsed, does not match its digest, has no rows, lacks a key,
needs more than `MOST_BYTES` of memory, or is not a regular file. Damaged files are skipped with a warning that names
them, and `Store.set_aside` renames them on request. Errors of the operating system, such as too many open files, are
raised and do not count as damage.
"""

import hashlib
import io
import json
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from bilevel._core.extras import printable, require
from bilevel._core.files import read_bounded, replacing
from bilevel._core.types import Calls
from bilevel.bench.config import SWEEP, TIMING, Cell, Experiment, FileTable, parameter_types, read_config
from bilevel.engine.metrics import METRICS
from bilevel.solvers import SOLVERS

pa: Any = require("pyarrow", "bench")
parquet: Any = require("pyarrow.parquet", "bench")

Frame: TypeAlias = Any  # a pandas.DataFrame
Arrow: TypeAlias = Any  # a pyarrow.Table, Schema or DataType
PARAMETER = "param_"  # prefix of the columns of hyperparameters
SIZES = ("n_inner", "n_outer", "dim_inner", "dim_outer")  # rows of each level, and size of each variable
_KEYS = ("cell", "experiment", "phase", "problem", "problem_arguments", "solver", "seed", "status", "final")
_TYPES = {str: "string", bool: "bool", int: "int64", float: "double"}
FORMAT, _FORMAT_KEY = 2, b"bilevel_store"  # in the metadata of a file; files of format 1 have no such entry
_DIGEST = re.compile("[0-9a-f]{64}")  # the name of a file of this version
_GUIDE = "HOW-TO-READ.txt"
_GUIDANCE = b"""This is a store of bilevel. Its files have different columns. To read all of them:

    from bilevel.bench.store import Store
    table = Store("FOLDER").read()

DuckDB reads them too, with `read_parquet('FOLDER/*.parquet', union_by_name = true)`.
"""
# A small file can contain many equal rows, so its size in memory is estimated from the metadata before it is read.
MOST_BYTES, _BYTES_PER_VALUE = 2**30, 8


def SCHEMA() -> Arrow:
    """Return the columns of every new file, which follow from the registries of solvers and metrics."""
    types = [parameter_types(solver) for solver in SOLVERS.values()]
    columns = {
        **dict.fromkeys(("cell", "experiment", "phase", "problem", "problem_arguments", "solver"), str),
        **dict(sorted((PARAMETER + name, kind) for own in types for name, kind in own.items())),
        **dict.fromkeys(SIZES, int),
        **{"columns": str, "seed": int, "status": str, "final": bool, "step": int, "seconds": float},
        **dict.fromkeys(("calls", *(f"calls_{kind}" for kind in Calls._fields)), int),
        **dict.fromkeys(("epochs", *METRICS, "memory_bytes"), float),
        **dict.fromkeys(("machine", "python", "jax", "bilevel", "revision", "written_at"), str),
    }
    return pa.schema([(name, column_type(kind)) for name, kind in columns.items()])


def column_type(kind: type) -> Arrow:
    """Return the Arrow type of a column with values of a Python type."""
    if kind not in _TYPES:
        raise ValueError(f"a parameter is a text, a number, or true or false; not of type {kind!r}.")
    return pa.type_for_alias(_TYPES[kind])


def list_metrics(table: Frame) -> list[str]:
    """Return the metrics that have numbers in a table: those of the registry, in its order, then those of users."""
    fixed = {*SCHEMA().names} - METRICS.keys()
    own = (name for name in table.columns if name not in fixed and not name.startswith((PARAMETER, "calls_")))
    names = (name for name in dict.fromkeys((*METRICS, *own)) if name in table.columns)
    return [name for name in names if table[name].dtype.kind in "fiu" and table[name].notna().any()]


def list_finished(table: Frame) -> set[str]:
    """Return the ids of the cells that have a final row."""
    return set(table[table["final"].astype(bool)]["cell"])


def check_columns(metrics: Iterable[str], parameters: Mapping[str, Mapping[str, type]]) -> None:
    """Raise ValueError if a user's metric, or parameter of a solver, needs a column of the store with another type."""
    known = {field.name: field.type for field in SCHEMA()}
    for name in metrics:
        if name in known and name not in METRICS:
            raise ValueError(f"metric `{name}` has the name of another column of the store; rename it.")
    for solver, types in parameters.items():
        for name, kind in types.items():
            if known.get(PARAMETER + name) not in (None, column_type(kind)):
                must = f"must be {known[PARAMETER + name]}, as in other solvers"
                raise ValueError(f"`{solver}`: its parameter `{name}` {must}; rename it.")


class Store:
    """A folder of results, which is created by the first `write`."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise NotADirectoryError(f"`{folder}` is a file; a store is a folder.")

    def write(self, rows: Sequence[dict[str, Any]]) -> Path | None:
        """Write all rows of some cells, except cells that are finished already, and return the new file if any."""
        done = self.finished()
        rows = [row for row in rows if row["cell"] not in done]
        if not rows:
            return None
        content = _to_parquet(_make_table(rows))
        self._write_file(self.folder / _GUIDE, _GUIDANCE)
        path = self.folder / f"{hashlib.sha256(content).hexdigest()}.parquet"
        self._write_file(path, content)
        return path

    def _write_file(self, path: Path, content: bytes) -> None:
        """Write a file, unless it exists and has this content."""
        if path.is_file() and path.read_bytes() == content:
            return
        try:
            with replacing(path) as file:
                file.write(content)
        except OSError as error:
            raise type(error)(f"`{self.folder}` cannot be written to: {error.strerror or error}.") from error

    def keep_config(self, experiment: Experiment) -> None:
        """Write the config of an experiment into the folder."""
        self._write_file(self.folder / f"_{experiment.name}.toml", experiment.text)

    def configs(self) -> list[Path]:
        return sorted(self.folder.glob("_*.toml"))

    def experiments(self) -> list[FileTable]:
        """Return the configs in the folder; nothing that they name is imported."""
        return [read_config(path) for path in self.configs()]

    def keep_plan(self, experiment: str, phase: str, cells: Iterable[Cell], within: Iterable[Cell] = ()) -> None:
        """Record the planned cells of a phase, and those of earlier plans that are still in its grid, `within`."""
        path = self.folder / f"_{experiment}-{phase}.cells"
        earlier = _read_plan(path).intersection(one.id for one in within) if path.is_file() else set()
        self._write_file(path, "\n".join(sorted(earlier.union(one.id for one in cells))).encode())

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
        tables = self._tables(keys_only=True)
        return {cell for table in tables for cell in table.filter(table["final"])["cell"].to_pylist()}

    def unfinished(self, cells: Iterable[Cell]) -> list[Cell]:
        done = self.finished()
        return [cell for cell in cells if cell.id not in done]

    def read(self, phase: str | None = None) -> Frame:
        """Return all rows, or those of the phase "sweep" or "timing". A cell that is in several files is read once."""
        if phase not in (None, SWEEP, TIMING):
            raise ValueError(f"`phase={phase!r}`: must be {SWEEP!r}, {TIMING!r} or None.")
        require("pandas", "bench")
        tables = list(self._tables())
        frame = _concatenate([SCHEMA().empty_table(), *tables]).to_pandas()
        # A cell in several files is read from the first in which it is finished, or else from the first.
        file = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
        is_finished = frame.groupby([frame["cell"], file])["final"].transform("any").to_numpy(bool)
        rank = np.where(is_finished, file, file + len(tables))
        frame = frame[rank == frame.assign(rank=rank).groupby("cell")["rank"].transform("min")]
        return (frame if phase is None else frame[frame["phase"] == phase]).reset_index(drop=True)

    def damaged(self) -> dict[Path, str]:
        """Return the damaged files, each with what is wrong."""
        return {path: problem for path in self._paths() if (problem := _read(path)[1]) is not None}

    def set_aside(self, paths: Iterable[Path]) -> list[Path]:
        """Rename files to ``_NAME.damaged``, which no reader considers, and return the new paths."""
        return [path.replace(path.with_name(f"_{path.name}.damaged")) for path in paths]

    def _tables(self, *, keys_only: bool = False) -> Iterator[Arrow]:
        for path in self._paths():
            table, problem = _read(path, keys_only=keys_only)
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
    try:
        return pa.array(values, kind)
    except (pa.ArrowException, OverflowError) as error:
        raise ValueError(f"column `{name}` must be {kind}: {error}") from error


def _to_parquet(table: Arrow) -> bytes:
    file = io.BytesIO()
    table = table.replace_schema_metadata({_FORMAT_KEY: str(FORMAT).encode()})
    parquet.write_table(table, file, write_page_checksum=True)
    return file.getvalue()


# Reading.


class _NewerFormat(ValueError):
    """A file of a later version of the library."""


def _read(path: Path, *, keys_only: bool = False) -> tuple[Arrow | None, str | None]:
    """Return the table of a file and None, or None and what is wrong; (None, None) if the file has disappeared."""
    try:
        return _parse(path, keys_only=keys_only), None
    except FileNotFoundError:  # another process set it aside
        return None, None
    except _NewerFormat:
        raise
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        text = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, MemoryError):
            raise OSError(f"`{path}` cannot be read now ({text}); more memory is needed.") from error
        if isinstance(error, OSError) and error.errno is not None:  # errors in the file have no such number
            raise OSError(f"`{path}` cannot be read now ({text}); nothing is lost: try again.") from error
        return None, text


def _parse(path: Path, *, keys_only: bool) -> Arrow:
    content = read_bounded(path, MOST_BYTES)
    has_digest = _DIGEST.fullmatch(path.stem)
    if has_digest and hashlib.sha256(content).hexdigest() != path.stem:
        raise ValueError("its contents do not fit its digest")
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
    table = source.read(_KEYS if keys_only and has_digest else None, use_threads=False)
    _check_bytes("text", sum(map(_count_text_bytes, table.columns)))
    table = _cast(table)
    _check_values(table)
    return table


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

"""Logs receive each row of a run as soon as it is evaluated: a CSV file, or a log of your own."""

import contextlib
import csv
import io
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from bilevel._core.files import as_path, replacing

_PACKAGE = str(Path(__file__).parents[1])
_RESUME = "; the log of a saved run is continued by `bilevel.resume(..., log=...)`."
Row: TypeAlias = Mapping[str, float]  # one evaluation of `result.history`, by column


class About(NamedTuple):
    """The run that a log belongs to."""

    problem: str
    solver: str
    parameters: Mapping[str, Any]
    seed: int


class Log(ABC):
    """Base class of logs. Derive from it and implement `write` for an own log.

    A run calls `open` before its first step, `write` as soon as a row is evaluated, and `close` when it ends for any
    reason. These calls are not timed, and only the first of several processes makes them. If one of them raises, the
    run warns and continues without the log; `result.history` has every row. Two errors of `open` end the run before it
    begins: FileExistsError, if the log of another run exists, and ImportError, if a package is missing. After Ctrl-C
    during `write`, the same row is written again.
    """

    def open(self, about: About, past: Sequence[Row]) -> None:
        """Prepare for the rows of a run; ``past`` are the rows of a run that is resumed."""
        return None

    @abstractmethod
    def write(self, row: Row) -> None:
        """Write a row. Its columns may differ from those of the row before."""

    def close(self) -> None:
        """Release the resources of `open`."""
        return None


class Recorder:
    """Writes each row of a history to a log once, and drops a log that fails."""

    def __init__(self, log: Log | None = None, about: About | None = None, past: Sequence[Row] = ()) -> None:
        self._log, self._done = log, len(past)
        if log is not None:
            self._call(log.open, about, past, fatal=(FileExistsError, ImportError))

    def catch_up(self, rows: Sequence[Row]) -> None:
        while self._log is not None and self._done < len(rows):
            self._call(self._log.write, dict(rows[self._done]))
            self._done += 1

    def close(self) -> None:
        if self._log is not None:
            self._call(self._log.close)

    def _call(self, method: Callable[..., None], *arguments: Any, fatal: tuple[type[Exception], ...] = ()) -> None:
        try:
            method(*arguments)
        except fatal:
            raise
        except Exception as error:
            log, self._log = self._log, None
            with contextlib.suppress(Exception):
                log.close()  # type: ignore[union-attr]
            how = f"{type(log).__name__} failed ({error!r})"
            warn_user(f"`log`: {how}. The run continues without it; `result.history` has every row.")


def warn_user(sentence: str) -> None:
    """Warn at the line of the user's code that called the package."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_PACKAGE, contextlib.__file__)):
        level, frame = level + 1, frame.f_back
    warnings.warn(sentence, RuntimeWarning, stacklevel=level)


class CSVLog(Log):
    """A CSV file with the columns of ``result.history``, complete at any time.

    A metric missing from a row is ``nan``. A new run refuses an existing file. A resumed run continues the file of the
    saved run, and refuses the file of another run: rows later than the save are removed and missing rows are added, so
    the file always contains the whole history.

    Parameters
    ----------
    path : path of the file; its folder is created if it does not exist
    """

    def __init__(self, path: str | Path) -> None:
        self.path = as_path("path", path)

    def open(self, about: About, past: Sequence[Row]) -> None:
        if self.path.exists():
            self._check_owner(past)
        self._rows: list[Row] = list(past)
        self._columns: list[str] = []
        if past:
            self._write_all()

    def write(self, row: Row) -> None:
        again = bool(self._rows) and self._rows[-1]["step"] == row["step"]
        self._rows[len(self._rows) - again :] = [row]
        if again or not set(row) <= set(self._columns):
            return self._write_all()
        with self.path.open("ab") as file:
            file.write(_lines([row], self._columns))

    def _write_all(self) -> None:
        self._columns = list(dict.fromkeys(name for row in self._rows for name in row))
        with replacing(self.path) as file:
            file.write(_lines([dict(zip(self._columns, self._columns, strict=True)), *self._rows], self._columns))

    def _check_owner(self, past: Sequence[Row]) -> None:
        me = f"`CSVLog({str(self.path)!r})`"
        if not past:
            raise FileExistsError(f"{me}: the file exists. Delete it or give another path{_RESUME}")
        try:
            with self.path.open(encoding="utf-8", newline="") as file:
                complete = [line for line in file if line.endswith("\n")]  # a full disk may cut the last line
            table = csv.DictReader(complete)
            if not {"step", "seconds"} <= set(table.fieldnames or ()):
                raise ValueError("no columns `step` and `seconds`")
            found = [(int(row["step"]), float(row["seconds"])) for row in table]
        except (ValueError, TypeError) as error:
            raise FileExistsError(f"{me}: the file is not the log of a run; give another path.") from error
        known, last = {(row["step"], row["seconds"]) for row in past}, past[-1]["step"]
        if any(step <= last and (step, seconds) not in known for step, seconds in found):
            raise FileExistsError(f"{me}: the file is the log of another run; give another path.")


def _lines(rows: Sequence[Mapping[str, Any]], columns: list[str]) -> bytes:
    text = io.StringIO()
    csv.DictWriter(text, columns, restval="nan", lineterminator="\n").writerows(rows)
    return text.getvalue().encode()

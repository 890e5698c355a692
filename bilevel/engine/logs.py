"""Logs get each row of a run as soon as it is evaluated: a table in a text file, event files, or one's own."""

import contextlib
import csv
import io
import sys
import time
import uuid
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from bilevel._io import as_path, replacing
from bilevel._optional import require

_PACKAGE = str(Path(__file__).parents[1])
_GO_ON = "; a run that was saved goes on in its own by `bilevel.resume(..., log=...)`."
Row: TypeAlias = Mapping[str, float]  # what `result.history` holds of one evaluation, by name of the column


class About(NamedTuple):
    """What a log is of."""

    problem: str
    solver: str
    parameters: Mapping[str, Any]
    seed: int


class OtherFileError(FileExistsError, ValueError):
    """A file is there that is not the log of this run."""


class Log(ABC):
    """Base of all logs; derive from it and write `write` to have your own.

    A run calls `open` before its first step, `write` as soon as a row is evaluated, and `close` however it ends, all
    off its clock; of several processes only the first does. Where one of them raises, the run warns and continues
    without the log, and `result.history` has every row. Two errors of `open` end the run before it begins:
    FileExistsError, because the log of another run is there, and ImportError, because a package is missing.
    After Ctrl-C in the midst of `write`, the same row is handed over once more.
    """

    def open(self, about: About, past: Sequence[Row]) -> None:
        """Make ready for the rows of what `about` tells; a resumed run begins with the rows ``past``."""
        return None

    @abstractmethod
    def write(self, row: Row) -> None:
        """Take a row; its columns may be others than those of the last one."""

    def close(self) -> None:
        """Let go of what `open` took."""
        return None


class Recorder:
    """Hands the rows of a history to a log, each once, and lets go of a log that fails."""

    def __init__(self, log: Log | None = None, about: About | None = None, past: Sequence[Row] = ()) -> None:
        self._log, self._done = log, len(past)
        if log is not None and about is not None:
            try:
                log.open(about, past)
            except (FileExistsError, ImportError):
                raise
            except Exception as error:
                self._let_go(log, error)

    def catch_up(self, rows: Sequence[Row], *, closing: bool = False) -> None:
        log = self._log
        if log is None:
            return
        try:
            while self._done < len(rows):
                log.write(dict(rows[self._done]))
                self._done += 1
            if closing:
                log.close()
        except Exception as error:
            self._let_go(log, error)

    def _let_go(self, log: Log, error: Exception) -> None:
        self._log = None
        with contextlib.suppress(Exception):
            log.close()
        how = f"{type(log).__name__} failed ({error!r})"
        warn_user(f"`log`: {how}. The run goes on without it; `result.history` has every row.")

    def close(self) -> None:
        self.catch_up((), closing=True)


def warn_user(sentence: str) -> None:
    """Warn at the line of the user, outside of this package."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_PACKAGE, contextlib.__file__)):
        level, frame = level + 1, frame.f_back
    warnings.warn(sentence, RuntimeWarning, stacklevel=level)


class CSVLog(Log):
    """A table in a text file, the columns of ``result.history``, complete and readable whenever you look.

    A metric missing from a row is ``nan``. A new run refuses a file that exists. A resumed one goes on in the file of
    the run that was saved, and refuses that of another run: rows later than the save are dropped, and those missing are
    written, so that the file always holds the whole history.

    Parameters
    ----------
    path : of the file; its folder is made
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
            raise FileExistsError(f"{me}: the file exists. Delete it or give another path{_GO_ON}")
        try:
            with self.path.open(encoding="utf-8", newline="") as file:
                table = csv.DictReader([line for line in file if line.endswith("\n")])  # not one cut by a full disk
            if not {"step", "seconds"} <= set(table.fieldnames or ()):
                raise ValueError("no columns `step` and `seconds`")
            found = [(int(row["step"]), float(row["seconds"])) for row in table]
        except (ValueError, TypeError) as error:
            raise OtherFileError(f"{me}: the file is no log of a run; give another path.") from error
        known, last = {(row["step"], row["seconds"]) for row in past}, past[-1]["step"]
        if any(step <= last and (step, seconds) not in known for step, seconds in found):
            raise OtherFileError(f"{me}: the file is the log of another run; give another path.")


def _lines(rows: Sequence[Mapping[str, Any]], columns: list[str]) -> bytes:
    text = io.StringIO()
    csv.DictWriter(text, columns, restval="nan", lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


class TensorBoardLog(Log):
    """Event files for TensorBoard: each column a scalar at its step, and what ran as a text.

    TensorBoard's relative time is the seconds of ``result.history``. A new run refuses a folder with event files. A
    resumed one goes on in it, and hides steps later than the save; a folder without event files gets the past rows too.

    Parameters
    ----------
    folder : one per run; it is made
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = as_path("folder", folder)

    def open(self, about: About, past: Sequence[Row]) -> None:
        begun = any(self.folder.glob("events.out.tfevents.*"))
        if begun and not past:
            me = f"`TensorBoardLog({str(self.folder)!r})`"
            raise FileExistsError(f"{me}: the folder has event files. Delete them or give another folder{_GO_ON}")
        self._events = require("tensorboardX.proto.event_pb2", "log")
        self._summaries = require("tensorboardX.summary", "log")
        self._began = time.time() - (past[-1]["seconds"] if past else 0.0)
        self.folder.mkdir(parents=True, exist_ok=True)
        # tensorboardX's SummaryWriter hands events to a thread: a full disk would go unseen, and block the run.
        # It names files by the second; a run resumed at once must not write over the first part.
        files = require("tensorboardX.event_file_writer", "log")
        self._writer = files.EventsWriter(str(self.folder / "events"), f".{uuid.uuid4().hex[:8]}")
        if begun:  # hide what came after the save
            restart = self._events.SessionLog(status=self._events.SessionLog.START)
            return self._add(int(past[-1]["step"]) + 1, past[-1]["seconds"], session_log=restart)
        about_rows = {"problem": about.problem, "solver": about.solver, "seed": about.seed, **about.parameters}
        table = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in about_rows.items())]
        self._add(0, 0.0, summary=self._summaries.text("run", "\n".join(table)))
        for row in past:
            self.write(row)

    def write(self, row: Row) -> None:
        values = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in row.items()]
        self._add(int(row["step"]), row["seconds"], summary=self._summaries.Summary(value=values))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, seconds: float, **content: Any) -> None:
        self._writer.write_event(self._events.Event(step=step, wall_time=self._began + seconds, **content))

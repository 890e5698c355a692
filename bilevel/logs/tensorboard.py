"""A log as event files for TensorBoard."""

import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bilevel.extras import require
from bilevel.logs.base import About, Log, Row

_EVENT_FILES = "events.out.tfevents.*"


class TensorBoardLog(Log):
    """Event files for TensorBoard: each column a scalar at its step, and what ran as a text.

    TensorBoard's relative time is the seconds of stepping, those of ``result.history``. A new run refuses a folder
    with event files. A resumed one goes on in it, and hides steps later than the save; a folder without event files
    gets the past rows too.

    Parameters
    ----------
    folder : one per run; it is made
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def open(self, about: About, past: Sequence[Row]) -> None:
        """Begin an event file."""
        begun = any(self.folder.glob(_EVENT_FILES))
        if begun and not past:
            raise FileExistsError(
                f"`TensorBoardLog({str(self.folder)!r})`: the folder has event files. Delete them or give another "
                "folder; a run that was saved goes on in its folder by `bilevel.resume(..., log=...)`."
            )
        self._events = require("tensorboardX.proto.event_pb2", "log")
        self._summaries = require("tensorboardX.summary", "log")
        self._began = time.time() - (past[-1]["seconds"] if past else 0.0)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._writer = self._new_writer()
        if begun:
            self._hide_from(int(past[-1]["step"]) + 1)
        else:
            self._add(0, 0.0, self._summaries.text("run", _table(about)))
            for row in past:
                self.write(row)

    def write(self, row: Row) -> None:
        """Add one event with all scalars of the row."""
        values = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in row.items()]
        self._add(int(row["step"]), row["seconds"], self._summaries.Summary(value=values))
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()

    def _new_writer(self) -> Any:
        # tensorboardX's SummaryWriter hands events to a thread: a full disk would go unseen, and block the run.
        # It names files by the second; a run resumed at once must not write over the first part.
        files = require("tensorboardX.event_file_writer", "log")
        return files.EventsWriter(str(self.folder / "events"), f".{uuid.uuid4().hex[:8]}")

    def _add(self, step: int, seconds: float, summary: Any) -> None:
        self._writer.write_event(self._events.Event(step=step, wall_time=self._began + seconds, summary=summary))

    def _hide_from(self, step: int) -> None:
        restart = self._events.SessionLog(status=self._events.SessionLog.START)
        self._writer.write_event(self._events.Event(step=step, wall_time=time.time(), session_log=restart))


def _table(about: About) -> str:
    rows = {"problem": about.problem, "solver": about.solver, "seed": about.seed, **about.parameters}
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])

"""A log as a table in a text file."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bilevel.atomic import replacing
from bilevel.logs.base import About, Log, Row


class CSVLog(Log):
    """A table in a text file, the columns of ``result.history``, complete and readable whenever you look.

    A metric missing from a row is ``nan``. A new run refuses a file that exists. A resumed one goes on in the file
    of the run that was saved: rows later than the save, which it will evaluate anew, are dropped, and those missing
    are written, so that the file always holds the whole history. It refuses the file of another run.

    Parameters
    ----------
    path : of the file; its folder is made
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._rows: list[Row] = []
        self._columns: list[str] = []

    def open(self, about: About, past: Sequence[Row]) -> None:
        """Refuse a file that is not of this run; write down what is past."""
        if self.path.exists():
            self._check_owner(past)
        self._rows, self._columns = list(past), []
        if past:
            self._write_all()

    def write(self, row: Row) -> None:
        """Add a line, or write the file anew where it gets another column."""
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
            raise FileExistsError(
                f"{me}: the file exists. Delete it or give another path; a run that was saved goes on in its file by "
                "`bilevel.resume(..., log=...)`."
            )
        try:
            found = _stamps(self.path)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{me}: the file is no log of a run; give another path.") from error
        known, last = {(row["step"], row["seconds"]) for row in past}, past[-1]["step"]
        if any(step <= last and (step, seconds) not in known for step, seconds in found):
            raise ValueError(f"{me}: the file is the log of another run; give another path.")


def _lines(rows: Sequence[Mapping[str, Any]], columns: list[str]) -> bytes:
    text = io.StringIO()
    csv.DictWriter(text, columns, restval="nan", lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _stamps(path: Path) -> list[tuple[int, float]]:
    """Return step and seconds of each row, which tell runs apart; a line cut short by a full disk is none."""
    with path.open(encoding="utf-8", newline="") as file:
        table = csv.DictReader([line for line in file if line.endswith("\n")])
    if not {"step", "seconds"} <= set(table.fieldnames or ()):
        raise ValueError("no columns `step` and `seconds`")
    return [(int(row["step"]), float(row["seconds"])) for row in table]

"""What every log is."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Row: TypeAlias = Mapping[str, float]  # what `result.history` holds of one evaluation, by name of the column


@dataclass(frozen=True)
class About:
    """What a log is of."""

    problem: str
    solver: str
    parameters: Mapping[str, Any]
    seed: int


class Log(ABC):
    """Base of all logs; derive from it and write `write` to have your own.

    A run calls `open` before its first step, `write` as soon as a row is evaluated, and `close` however it ends. None
    of this is on its clock. Of a run over several processes, only the first has its log called.

    What `open` raises ends the run before it begins. What `write` or `close` raises does not: the run warns, goes on
    without the log, and `result.history` still has every row. After Ctrl-C in the midst of `write`, the same row is
    handed over once more.
    """

    def open(self, about: About, past: Sequence[Row]) -> None:
        """Make ready for the rows to come.

        Parameters
        ----------
        about : what runs
        past : the rows that a resumed run begins with; empty for a new one
        """
        return None

    @abstractmethod
    def write(self, row: Row) -> None:
        """Take a row; its columns may be others than those of the last one."""

    def close(self) -> None:
        """Let go of what `open` took."""
        return None

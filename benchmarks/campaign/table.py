"""What a section found, and how it is written down."""

import contextlib
import sys
import traceback
from dataclasses import dataclass

from benchmarks.markdown import table


@dataclass(frozen=True)
class Row:
    """One kind of fault. What is neither lost nor survived was not tried."""

    fault: str
    tried: int
    survived: int  # ended as it must: nothing lost, and a message that says what happened
    lost: int
    note: str  # what was done, and what counts as surviving

    def __post_init__(self):
        if self.tried != self.survived + self.lost:
            raise ValueError(f"{self.fault}: {self.tried} tried, but {self.survived} survived and {self.lost} lost.")


class Counter:
    """Counts cases of one kind of fault; a case that raises is lost, and is told at once."""

    def __init__(self, fault, note):
        self.fault, self.note, self.survived, self.lost = fault, note, 0, 0

    @contextlib.contextmanager
    def case(self, name, weight=1):
        """A case that stands for ``weight`` faults."""
        try:
            yield
        except Exception as error:
            self.lost += weight
            where = traceback.extract_tb(error.__traceback__)[-1]
            print(f"LOST {self.fault}, {name}: {error!r} ({where.name}:{where.lineno})", file=sys.stderr, flush=True)
        else:
            self.survived += weight

    def row(self):
        return Row(self.fault, self.survived + self.lost, self.survived, self.lost, self.note)


def write(rows):
    """A Markdown table, with a line for all together."""
    sums = [f"{sum(getattr(row, name) for row in rows):,}" for name in ("tried", "survived", "lost")]
    cells = [[row.fault, f"{row.tried:,}", f"{row.survived:,}", f"{row.lost:,}", row.note] for row in rows]
    return table(["fault", "tried", "survived", "lost", "what was done"], [*cells, ["**all**", *sums, None]])

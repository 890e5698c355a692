"""The progress of an experiment: a line at the beginning and at the end of each task."""

import sys
import time

from bilevel._core.extras import describe_time, printable


def print_line(text: str, *, err: bool = False) -> None:
    """Print a text with its control characters escaped, since names in it may come from files of others."""
    print(printable(text), file=sys.stderr if err else sys.stdout, flush=True)


class Watcher:
    """Prints the progress of an experiment to standard error, if shown, and remembers failures."""

    def __init__(self, *, shown: bool = True) -> None:
        self.failures: list[str] = []
        self._shown = shown

    def begin(self, phase: str, done: int, total: int) -> None:
        """Begin a phase; some of its cells may be in the store already."""
        self._phase, self._first, self._done, self._total, self._began = phase, done, done, total, time.monotonic()
        self._print(f"{phase}: {total} cells; {done} cells were there")

    def start(self, title: str) -> None:
        """Begin a task in this process."""
        self._print(f"{self._phase}: {title}: compiling, running")

    def advance(self, n_cells: int, title: str, values: str) -> None:
        """Count the cells of a task that was stored, and print their values."""
        self._done += n_cells
        left = (time.monotonic() - self._began) / (self._done - self._first) * (self._total - self._done)
        place = f"{self._done} of {self._total} cells, about {describe_time(left)} left"
        self._print(f"{self._phase}: {title}: done, {values}; {place}")

    def failed(self, title: str, error: str) -> None:
        """Remember and print a task that failed."""
        self.failures.append(f"{title}: {error}")
        self._print(f"{title} failed: {error}")

    def _print(self, text: str) -> None:
        if self._shown:
            print_line(text, err=True)

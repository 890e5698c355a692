"""The progress of an experiment: a bar in a terminal, otherwise one line per task."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bilevel._core.extras import describe_time, printable, require

_console: Any = require("rich.console", "bench")
_markup = require("rich.markup", "bench")
_progress = require("rich.progress", "bench")


class Console(_console.Console):
    """A console that prints control characters in names as escapes, and does not replace names of emoji."""

    def __init__(self, **options: Any) -> None:
        super().__init__(emoji=False, **options)

    def render(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Yield the segments of a text; rich calls this for everything it prints, including cells of tables."""
        for segment in super().render(*args, **kwargs):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


class Watcher:
    """Receive the progress of an experiment; this class only remembers failures."""

    def __init__(self) -> None:
        self.failures: list[str] = []

    def begin(self, phase: str, done: int, total: int) -> None:
        """Begin a phase; some of its cells may be in the store already."""

    def start(self, title: str) -> None:
        """Begin a task in this process."""

    def advance(self, n_cells: int, title: str, best: float | None) -> None:
        """Count the cells of a task that was stored; `best` is the best final value of the metric so far."""

    def failed(self, title: str, error: str) -> None:
        """Remember a task that failed."""
        self.failures.append(f"{title}: {error}")


@contextmanager
def watch(metric: str, console: Any) -> Iterator[Watcher]:
    """Yield a watcher that writes to this console."""
    if not console.is_terminal:
        yield LiveLines(metric, console)
        return
    watcher = LiveBar(metric, console)
    with watcher.bar:
        yield watcher


class LiveBar(Watcher):
    """A progress bar per phase, with the time left and the best value so far."""

    def __init__(self, metric: str, console: Any) -> None:
        super().__init__()
        self.metric, self.task, self.best = metric, _progress.TaskID(0), ""
        columns = _progress.BarColumn(bar_width=20), _progress.MofNCompleteColumn(), _progress.TimeRemainingColumn()
        self.bar = _progress.Progress("{task.description}", *columns, "{task.fields[text]}", console=console)

    def begin(self, phase: str, done: int, total: int) -> None:
        self.task = self.bar.add_task(phase, total=total, completed=done, text=f"{done} cells were there")

    def start(self, title: str) -> None:
        self.bar.update(self.task, text=f"{title}: compiling, running{self.best}")

    def advance(self, n_cells: int, title: str, best: float | None) -> None:
        self.best = _describe_best(self.metric, best)
        self.bar.update(self.task, advance=n_cells, text=title + self.best)

    def failed(self, title: str, error: str) -> None:
        super().failed(title, error)
        self.bar.console.print(f"[red]{_markup.escape(title)} failed:[/] {_markup.escape(error)}")


class LiveLines(Watcher):
    """A line at the beginning and at the end of each task, for logs and pipes."""

    def __init__(self, metric: str, console: Any) -> None:
        super().__init__()
        self.metric, self.console = metric, console

    def begin(self, phase: str, done: int, total: int) -> None:
        self.phase, self.first, self.done, self.total, self.began = phase, done, done, total, time.monotonic()
        self._print(f"{phase}: {total} cells; {done} cells were there")

    def start(self, title: str) -> None:
        self._print(f"{self.phase}: {title}: compiling, running")

    def advance(self, n_cells: int, title: str, best: float | None) -> None:
        self.done += n_cells
        left = (time.monotonic() - self.began) / (self.done - self.first) * (self.total - self.done)
        place = f"{self.done} of {self.total} cells, about {describe_time(left)} left"
        self._print(f"{self.phase}: {title}: done{_describe_best(self.metric, best)}; {place}")

    def failed(self, title: str, error: str) -> None:
        super().failed(title, error)
        self._print(f"{title} failed: {error}")

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _describe_best(metric: str, best: float | None) -> str:
    return "" if best is None else f"; best {metric} {best:.5g}"

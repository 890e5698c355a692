"""A progress bar of an experiment, for a terminal."""

from typing import Any

from bilevel._optional import require

_markup = require("rich.markup", "bench")
_progress = require("rich.progress", "bench")


class LiveBar:
    """A progress bar per phase, with the time left and the best value so far."""

    def __init__(self, metric: str, console: Any) -> None:
        self.metric, self.task = metric, _progress.TaskID(0)
        rest = _progress.BarColumn(bar_width=20), _progress.MofNCompleteColumn(), _progress.TimeRemainingColumn()
        self.bar = _progress.Progress("{task.description}", *rest, "{task.fields[text]}", console=console)

    def begin(self, phase: str, done: int, total: int) -> None:
        self.task = self.bar.add_task(phase, total=total, completed=done, text=f"{done} cells were there")

    def advance(self, n_cells: int, title: str, best: float | None) -> None:
        words = title if best is None else f"{title}; best {self.metric} {best:.5g}"
        self.bar.update(self.task, advance=n_cells, text=words)

    def failed(self, title: str, error: str) -> None:
        self.bar.console.print(f"[red]{_markup.escape(title)} failed:[/] {_markup.escape(error)}")

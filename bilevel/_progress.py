"""How far work has come: a bar in a terminal or a notebook, and plain lines elsewhere, as in a log."""

import importlib.util
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from bilevel._optional import require

Reporter: TypeAlias = Callable[[float, str], None]  # takes the share of the work done so far, and a few words
# Control characters but tab and line feed, and those that reverse the direction of text.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_SHARE, _PAUSE = 0.1, 30.0  # a plain line is due after so much of the work, or so many seconds


@contextmanager
def progress_bar(title: str, shown: bool) -> Iterator[Reporter]:
    """Yield a reporter, which shows the time left, or does nothing where ``shown`` is false."""
    if not shown:
        yield lambda fraction, text: None
    elif not can_redraw():
        lines = Lines(title)
        yield lines
        lines.finish()
    else:
        rich = require("rich.progress", "progress")
        columns = rich.BarColumn(bar_width=16), rich.TaskProgressColumn(), rich.TimeRemainingColumn()
        with rich.Progress("{task.description}", *columns, "{task.fields[text]}") as bar:
            task = bar.add_task(title, total=1.0, text="starting")
            yield lambda fraction, text: bar.update(task, completed=min(fraction, 1.0), text=text)
            bar.update(task, completed=1.0)


def printable(text: str) -> str:
    """Return text with its control characters written as escapes, so that no name gives orders to a terminal."""
    return _CONTROLS.sub(lambda found: repr(found.group())[1:-1], text)


def can_redraw() -> bool:
    """Tell whether a line can be drawn again: in a terminal, and in a notebook with ipywidgets."""
    if "ipykernel" in sys.modules:
        return importlib.util.find_spec("ipywidgets") is not None
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


class Lines:
    """A line for each tenth of the work and each half minute, and for each new word at its start."""

    def __init__(self, title: str) -> None:
        self.title, self._began, self._last = printable(title), time.monotonic(), (-1.0, "", 0.0)

    def __call__(self, fraction: float, text: str) -> None:
        now, (before, words, when) = time.monotonic(), self._last
        waiting = fraction == 0 and text != words
        if waiting or fraction >= before + _SHARE or now >= when + _PAUSE:
            self._last = fraction, text, now
            left = f", {describe_time((now - self._began) * (1 / fraction - 1))} left" if 0 < fraction < 1 else ""
            print(f"{self.title}: {100 * min(fraction, 1.0):.0f} %, {printable(text)}{left}", flush=True)

    def finish(self) -> None:
        print(f"{self.title}: done in {describe_time(time.monotonic() - self._began)}", flush=True)


def describe_time(seconds: float) -> str:
    """Return hours, minutes and seconds, as 1:02:03, or 0:07."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextmanager
def compiling_bar(title: str, shown: bool) -> Iterator[Reporter]:
    """Yield what `progress_bar` yields, once it has said the first thing that a run does."""
    with progress_bar(title, shown) as report:
        report(0.0, "compiling")
        yield report

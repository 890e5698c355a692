"""Optional libraries, and what is shown with them: progress in terminals and logs, small tables in notebooks."""

import importlib
import importlib.util
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from types import ModuleType
from typing import TypeAlias


def require(module: str, extra: str) -> ModuleType:
    """Import a module of an extra, or raise ImportError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        # The error contains the name of the module that was not found: this one, a parent, or one that these import.
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise ImportError(f"This needs `{module}`: pip install 'bilevel[{extra}]'") from error
        raise ImportError(f"`{module}` is installed, but importing it failed: {error}") from error


# Progress

Reporter: TypeAlias = Callable[[float, str], None]  # called with the fraction of the work that is done, and a text
# Control characters except tab and line feed, and characters that reverse the direction of text.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_FRACTION, _SECONDS = 0.1, 30.0  # a plain line is printed after this fraction of the work, or this time


@contextmanager
def progress_bar(title: str, shown: bool) -> Iterator[Reporter]:
    """Yield a function that shows the progress and the remaining time, or does nothing if ``shown`` is false."""
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


@contextmanager
def compiling_bar(title: str, shown: bool) -> Iterator[Reporter]:
    """Yield the same as `progress_bar`, after reporting that a program is compiled."""
    with progress_bar(title, shown) as report:
        report(0.0, "compiling")
        yield report


def can_redraw() -> bool:
    """Return True if a line can be redrawn: in a terminal, and in a notebook with ipywidgets."""
    if "ipykernel" in sys.modules:
        return importlib.util.find_spec("ipywidgets") is not None
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def printable(text: str) -> str:
    """Return text with its control characters escaped, so that names cannot control the terminal."""
    return _CONTROLS.sub(lambda found: repr(found.group())[1:-1], text)


class Lines:
    """Prints a line for each tenth of the work, each half minute, and each new text before the work begins."""

    def __init__(self, title: str) -> None:
        self.title, self._began, self._last = printable(title), time.monotonic(), (-1.0, "", 0.0)

    def __call__(self, fraction: float, text: str) -> None:
        now, (before, words, when) = time.monotonic(), self._last
        waiting = fraction == 0 and text != words
        if waiting or fraction >= before + _FRACTION or now >= when + _SECONDS:
            self._last = fraction, text, now
            left = f", {describe_time((now - self._began) * (1 / fraction - 1))} left" if 0 < fraction < 1 else ""
            print(f"{self.title}: {100 * min(fraction, 1.0):.0f} %, {printable(text)}{left}", flush=True)

    def finish(self) -> None:
        print(f"{self.title}: done in {describe_time(time.monotonic() - self._began)}", flush=True)


def describe_time(seconds: float) -> str:
    """Return hours, minutes and seconds, as 1:02:03 or 0:07."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# HTML

_WIDTH, _HEIGHT, _MARGIN = 160, 28, 2
_CELL = "text-align:left;padding:1px 10px 1px 0;vertical-align:top"


def html_table(title: str, rows: Mapping[str, str], line: tuple[str, Sequence[float]] | None = None) -> str:
    """Return a table with a title and rows by name; ``line`` is the name and the numbers of a sparkline."""
    cells = [
        f"<th style='{_CELL}'>{escape(name)}</th><td style='{_CELL}'>{escape(text)}</td>" for name, text in rows.items()
    ]
    if line is not None and len(line[1]) > 1:
        cells.append(f"<th style='{_CELL}'>{escape(line[0])}</th><td style='{_CELL}'>{sparkline(line[1])}</td>")
    body = "".join(f"<tr>{cell}</tr>" for cell in cells)
    return f"<div><b>{escape(title)}</b><table style='border:none;font-size:90%'>{body}</table></div>"


def sparkline(values: Sequence[float]) -> str:
    """Return a small SVG line through the finite numbers, on a log scale if all of them are positive."""
    known = [(place, float(value)) for place, value in enumerate(values) if math.isfinite(value)]
    if not known:
        return "no finite number"
    if all(value > 0 for _, value in known):
        known = [(place, math.log(value)) for place, value in known]
    low, high = min(value for _, value in known), max(value for _, value in known)
    across, down = (_WIDTH - 2 * _MARGIN) / max(1, len(values) - 1), (_HEIGHT - 2 * _MARGIN) / ((high - low) or 1.0)
    points = " ".join(f"{_MARGIN + place * across:.1f},{_MARGIN + (high - value) * down:.1f}" for place, value in known)
    line = f"<polyline points='{points}' fill='none' stroke='currentColor' stroke-width='1.3'/>"
    return f"<svg width='{_WIDTH}' height='{_HEIGHT}' role='img' aria-label='from first to last'>{line}</svg>"

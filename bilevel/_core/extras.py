"""Optional libraries, and the progress of long computations."""

import importlib
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


Reporter: TypeAlias = Callable[[float, str], None]  # called with the fraction of the work that is done, and a text
# Control characters except tab and line feed, and characters that reverse the direction of text.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_LINE_FRACTION, _LINE_SECONDS = 0.1, 30.0


@contextmanager
def progress_lines(title: str, shown: bool) -> Iterator[Reporter]:
    """Yield a function that prints the progress and the remaining time, or does nothing if ``shown`` is false.

    It prints a line for each tenth of the work, each half minute, and each new text before the work begins.
    """
    title, began, last = printable(title), time.monotonic(), (-1.0, "", 0.0)

    def report(fraction: float, text: str) -> None:
        nonlocal last
        now, (before, words, when) = time.monotonic(), last
        is_new = fraction == 0 and text != words
        if is_new or fraction >= before + _LINE_FRACTION or now >= when + _LINE_SECONDS:
            last = fraction, text, now
            left = f", {describe_time((now - began) * (1 / fraction - 1))} left" if 0 < fraction < 1 else ""
            print(f"{title}: {100 * min(fraction, 1.0):.0f} %, {printable(text)}{left}", flush=True)

    yield report if shown else lambda fraction, text: None
    if shown:
        print(f"{title}: done in {describe_time(time.monotonic() - began)}", flush=True)


def printable(text: str) -> str:
    """Return text with its control characters escaped, so that names cannot control the terminal."""
    return _CONTROLS.sub(lambda found: repr(found.group())[1:-1], text)


def describe_time(seconds: float) -> str:
    """Return hours, minutes and seconds, as 1:02:03 or 0:07."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

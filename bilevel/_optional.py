"""Libraries that are imported when used, and a progress bar that needs one of them."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TypeAlias

Reporter: TypeAlias = Callable[[float, str], None]  # takes the share of the work done so far, and a few words


def require(module: str, extra: str) -> ModuleType:
    """Import a module of an extra, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"This needs `{module}`: pip install 'bilevel[{extra}]'") from error


@contextmanager
def progress_bar(title: str, shown: bool) -> Iterator[Reporter]:
    """Yield a reporter, which draws a bar with the time left, or does nothing where ``shown`` is false."""
    if not shown:
        yield lambda fraction, text: None
        return
    rich = require("rich.progress", "progress")
    columns = rich.BarColumn(bar_width=16), rich.TaskProgressColumn(), rich.TimeRemainingColumn()
    with rich.Progress("{task.description}", *columns, "{task.fields[text]}") as bar:
        task = bar.add_task(title, total=1.0, text="starting")
        yield lambda fraction, text: bar.update(task, completed=min(fraction, 1.0), text=text)
        bar.update(task, completed=1.0)

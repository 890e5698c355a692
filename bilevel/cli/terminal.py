"""What all commands share: output, tables, command lines as text, errors in one line, and stopping by signals."""

import contextlib
import shlex
import signal
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

from bilevel._core.extras import printable, require
from bilevel.bench.live import Console

typer = require("typer", "bench")
_markup = require("rich.markup", "bench")
_table = require("rich.table", "bench")

FAILED, REFUSED = 1, 2  # exit codes: some of the work failed; the input, or this machine, is not suitable
out = Console()
err = Console(stderr=True)
_PIPED_WIDTH = 120  # least width of a table that is not shown in a terminal
OutFolder = Annotated[Path, typer.Option("--out", help="folder to write to")]
_last_signal = int(signal.SIGINT)  # the signal that stopped the command


@contextlib.contextmanager
def errors_in_a_line() -> Iterator[None]:
    """Print errors of the input in one line with exit code 2, and warnings and stops in one line each."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: print_line(err, str(message), style="yellow")
        try:
            yield
        except (ValueError, OSError, ImportError, MemoryError) as error:
            err.print(f"[red]error:[/] {_markup.escape(str(error))}", soft_wrap=True)
            raise typer.Exit(REFUSED) from error
        except KeyboardInterrupt:
            exit_stopped("no file is half written. Run the same command again to continue or to start over.")


def handle_signals() -> None:
    """Make SIGTERM, which systems and schedulers send, stop a command in the same way as Ctrl-C."""
    signal.signal(signal.SIGTERM, _terminate)
    sys.unraisablehook = _stop_again


def _terminate(number: int, _: Any) -> NoReturn:
    global _last_signal
    _last_signal = number
    raise KeyboardInterrupt


def _stop_again(unraisable: Any) -> None:
    """Send the signal again if its KeyboardInterrupt was lost in a callback, such as one of the garbage collector."""
    if unraisable.exc_type is not KeyboardInterrupt:
        return sys.__unraisablehook__(unraisable)
    # Sent to the main thread, which may be blocked in a system call.
    timer = threading.Timer(0.05, signal.pthread_kill, [threading.main_thread().ident, _last_signal])
    timer.daemon = True
    timer.start()


def exit_stopped(text: str) -> NoReturn:
    """Print a line about a command that was stopped, and exit with the code that shells expect after a signal."""
    print_line(err, f"stopped; {text}")
    raise typer.Exit(128 + _last_signal) from None


def print_line(console: Any, text: str, style: str | None = None) -> None:
    """Print a line without interpreting markup, which the name of a folder may contain by accident."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def spell(name: str, *arguments: Any, **options: Any) -> str:
    """Return a command line as text; options without a value are left out."""
    words = ["bilevel", name, *arguments]
    for option, value in options.items():
        for one in value if isinstance(value, list) else [value]:
            words += [] if one is None else [f"--{option}", one]
    return shlex.join(map(str, words))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> None:
    """Print a table without breaking words, or a paragraph for each row if the table would be too wide."""
    cells = [list(map(printable, row)) for row in rows]
    widths = [max(map(_longest_word, column)) for column in zip(columns, *cells, strict=True)]
    least = 1 + sum(3 + width for width in widths)  # each column has a border and two spaces
    width = out.width if out.is_terminal else max(out.width, _PIPED_WIDTH, least)
    if least > width:
        print_line(out, f"{title}\n" if title else "")
        for row in cells:
            print_line(out, "\n".join(f"{name}: {cell}" for name, cell in zip(columns, row, strict=True)) + "\n")
        return
    table = _table.Table(title=title, show_lines=any("\n" in cell for row in cells for cell in row))
    for name, min_width in zip(columns, widths, strict=True):
        table.add_column(name, min_width=min_width)
    for row in cells:
        table.add_row(*map(_markup.escape, row))
    Console(file=out.file, width=width).print(table)


def _longest_word(text: str) -> int:
    return max(map(len, text.split()), default=1)

"""What all commands share: output, tables, command lines as text, errors in one line, and stopping by signals."""

import _thread
import contextlib
import shlex
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

from bilevel._core.extras import printable, require
from bilevel.bench.live import print_line

typer = require("typer", "bench")

FAILED, REFUSED = 1, 2  # exit codes: some of the work failed; the input, or this machine, is not suitable
OutFolder = Annotated[Path, typer.Option("--out", help="folder to write to")]
_last_signal = signal.SIGINT  # the signal that stopped the command


@contextlib.contextmanager
def errors_in_a_line() -> Iterator[None]:
    """Print errors of the input in one line with exit code 2, and warnings and stops in one line each."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: print_line(str(message), err=True)
        try:
            yield
        except (ValueError, OSError, ImportError, MemoryError) as error:
            print_line(f"error: {error}", err=True)
            raise typer.Exit(REFUSED) from error
        except KeyboardInterrupt:
            exit_stopped("no file is half written. Run the same command again to continue or to start over.")


def handle_signals() -> None:
    """Make SIGTERM, which systems and schedulers send, stop a command in the same way as Ctrl-C."""
    signal.signal(signal.SIGTERM, _terminate)
    sys.unraisablehook = _stop_again


def _terminate(number: int, _: Any) -> NoReturn:
    global _last_signal
    _last_signal = signal.Signals(number)
    raise KeyboardInterrupt


def _stop_again(unraisable: Any) -> None:
    """Send the signal again if its KeyboardInterrupt was lost in a callback, such as one of the garbage collector."""
    if unraisable.exc_type is not KeyboardInterrupt:
        return sys.__unraisablehook__(unraisable)
    timer = threading.Timer(0.05, _stop_main_thread)
    timer.daemon = True
    timer.start()


def _stop_main_thread() -> None:
    if hasattr(signal, "pthread_kill"):  # also ends a system call in which the main thread is blocked
        signal.pthread_kill(threading.main_thread().ident or 0, _last_signal)
    else:
        _thread.interrupt_main(_last_signal)


def exit_stopped(text: str) -> NoReturn:
    """Print a line about a command that was stopped, and exit with the code that shells expect after a signal."""
    print_line(f"stopped; {text}", err=True)
    raise typer.Exit(128 + _last_signal) from None


def spell(name: str, *arguments: Any, **options: Any) -> str:
    """Return a command line as text; options without a value are left out."""
    words = ["bilevel", name, *arguments]
    for option, value in options.items():
        for one in value if isinstance(value, list) else [value]:
            words += [] if one is None else [f"--{option}", one]
    return shlex.join(map(str, words))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> None:
    """Print aligned columns, or a paragraph for each row if these do not fit into the terminal."""
    cells = [[*map(printable, row)] for row in (columns, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
    fits = not sys.stdout.isatty() or max(map(len, lines)) <= shutil.get_terminal_size().columns
    if not fits or any("\n" in line for line in lines):
        lines = ["\n".join(map("{}: {}".format, columns, row)) + "\n" for row in cells[1:]]
    print_line("\n".join(([f"{title}:"] if title else []) + lines))

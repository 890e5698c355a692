"""What all commands share: two streams, tables, commands as they are typed, and errors in a line."""

import contextlib
import shlex
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

from bilevel._optional import require
from bilevel._progress import printable
from bilevel.bench.live import Console
from bilevel.cli import stops

typer = require("typer", "bench")
_markup = require("rich.markup", "bench")
_table = require("rich.table", "bench")

FAILED, REFUSED = 1, 2  # exit codes: some of the work failed; the input, or this machine, does not do
out = Console()
err = Console(stderr=True)
_PIPED_WIDTH = 120  # of a table that no terminal shows, at least
OutFolder = Annotated[Path, typer.Option("--out", help="folder to write to")]


@contextlib.contextmanager
def errors_in_a_line() -> Iterator[None]:
    """Turn errors of input into one line and exit code 2, a stop into one line, and warnings into one line each."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: say(err, str(message), style="yellow")
        try:
            yield
        except (ValueError, OSError, ImportError, MemoryError) as error:
            err.print(f"[red]error:[/] {_markup.escape(str(error))}", soft_wrap=True)
            raise typer.Exit(REFUSED) from error
        except KeyboardInterrupt:
            exit_stopped("no file is half written. The same command goes on, or begins anew.")


def exit_stopped(text: str) -> NoReturn:
    """Say what becomes of a command that was stopped, and end with the exit code that shells expect."""
    say(err, f"stopped; {text}")
    raise typer.Exit(stops.exit_code()) from None


def say(console: Any, text: str, style: str | None = None) -> None:
    """Print a line as it is: a folder's name may look like markup."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def spell(name: str, *arguments: Any, **options: Any) -> str:
    """Return a command as it would be typed, without options that have no value."""
    words = ["bilevel", name, *arguments]
    for option, value in options.items():
        for one in value if isinstance(value, list) else [value]:
            words += [] if one is None else [f"--{option}", one]
    return shlex.join(map(str, words))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> None:
    """Print a table with whole words; where they do not fit beside each other, a paragraph for each row."""
    cells = [list(map(printable, row)) for row in rows]
    # A border and two spaces beside each column.
    least = 1 + sum(3 + max(map(_longest_word, column)) for column in zip(columns, *cells, strict=True))
    width = out.width if out.is_terminal else max(out.width, _PIPED_WIDTH, least)
    if least > width:
        return _print_paragraphs(columns, cells, title)
    several = any("\n" in cell for row in cells for cell in row)
    table = _table.Table(title=title, show_lines=several)
    for name, column in zip(columns, zip(columns, *cells, strict=True), strict=True):
        table.add_column(name, min_width=max(map(_longest_word, column)))
    for row in cells:
        table.add_row(*map(_markup.escape, row))
    Console(file=out.file, width=width).print(table)


def _print_paragraphs(columns: Sequence[str], cells: Sequence[Sequence[str]], title: str | None) -> None:
    say(out, f"{title}\n" if title else "")
    for row in cells:
        say(out, "\n".join(f"{name}: {cell}" for name, cell in zip(columns, row, strict=True)) + "\n")


def _longest_word(text: str) -> int:
    return max(map(len, text.split()), default=1)

"""Markdown tables."""

from collections.abc import Iterable, Sequence


def table(columns: Sequence[str], rows: Iterable[Sequence[str | None]]) -> str:
    """Return a table of cells that are strings or None, which is shown as a dash."""
    return "\n".join([head(columns), *map(line, rows)])


def head(columns: Sequence[str]) -> str:
    """Return the first two lines of a table."""
    return f"{line(columns)}\n{line(['---'] * len(columns))}"


def line(cells: Sequence[str | None]) -> str:
    """Return one line of a table."""
    return "| " + " | ".join("–" if cell is None else cell for cell in cells) + " |"


def number(value: float | None, digits: int = 3) -> str | None:
    """Return a number with this many significant digits, without an exponent between 0.001 and a million."""
    if value is None:
        return None
    if 1e-3 <= abs(value) < 1e6:
        decimals = max(0, digits - 1 - int(f"{value:e}".partition("e")[2]))
        return f"{value:.{decimals}f}"
    return f"{value:.{digits - 1}e}"

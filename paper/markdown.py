"""Markdown tables and the number formats used in them."""

import re
from collections.abc import Sequence
from math import isfinite
from typing import Any

from bilevel.bench.tables import format_number

NOT_REACHED = "not reached"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table with escaped cells; None is shown as "–"."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join('–' if cell is None else escape(str(cell)) for cell in line)} |" for line in lines)


def escape(text: str) -> str:
    """Escape bars, which would end a table cell, and brackets that could begin a tag or a link."""
    return re.sub(r"<(?=[a-zA-Z/!?])", "&lt;", re.sub(r"([|\[])", r"\\\1", " ".join(text.split())))


def format_value(value: float) -> str:
    """Return four significant digits; "–" for NaN and "diverged" for an infinite value."""
    return format_number(value, digits=4)


def format_cost(value: float) -> str:
    """Return two significant digits below 10, three above, with spaces between thousands."""
    if not isfinite(value):
        return NOT_REACHED
    return f"{value:.2g}" if value < 10 else f"{float(f'{value:.3g}'):,.0f}".replace(",", " ")


def format_bytes(count: float) -> str:
    """Return a size in kB or MB; "–" for NaN."""
    return "–" if not isfinite(count) else f"{count / 1e3:.0f} kB" if count < 1e6 else f"{count / 1e6:.1f} MB"

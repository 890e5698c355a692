"""What notebooks show of a run and of a fitted estimator: a few rows, and a line as small as a word."""

import math
from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT, _MARGIN = 160, 28, 2
_CELL = "text-align:left;padding:1px 10px 1px 0;vertical-align:top"


def table(title: str, rows: Mapping[str, str], line: tuple[str, Sequence[float]] | None = None) -> str:
    """Return a table with a title, rows by name, and last a sparkline of numbers under its own name."""
    cells = [
        f"<th style='{_CELL}'>{escape(name)}</th><td style='{_CELL}'>{escape(text)}</td>" for name, text in rows.items()
    ]
    if line is not None and len(line[1]) > 1:
        cells.append(f"<th style='{_CELL}'>{escape(line[0])}</th><td style='{_CELL}'>{sparkline(line[1])}</td>")
    body = "".join(f"<tr>{cell}</tr>" for cell in cells)
    return f"<div><b>{escape(title)}</b><table style='border:none;font-size:90%'>{body}</table></div>"


def sparkline(values: Sequence[float]) -> str:
    """Return numbers as a small line in SVG, on a log scale where all are positive; what is not finite is left out."""
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

"""Figures as SVG files, made from kept results; the same results give the same bytes."""

import re
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

from bilevel._core.extras import require
from bilevel._core.files import replacing
from bilevel.bench.config import TIMING
from bilevel.bench.page import FONT_SIZE, assign_looks, draw_figure
from bilevel.bench.select import AXES, Section
from paper.parts import PARTS, PUBLISHED

_STYLE: dict[str, Any] = {"font.size": FONT_SIZE, "axes.titlesize": FONT_SIZE, "axes.linewidth": 0.6}
# Without a fixed salt the identifiers in the file would be random.
_STYLE |= {"svg.hashsalt": "bilevel", "svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans", "Arial"]}
_COORDINATES = re.compile(r'\b(?:d|x|y)="[^"]*"')


def write_svg(path: Path, draw: Callable[[], Any]) -> Path:
    """Call ``draw`` with the style of our figures, write the figure that it returns, and return the path."""
    drawn = StringIO()
    with require("matplotlib", "bench").rc_context(_STYLE):
        draw().savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    with replacing(path) as file:
        file.write(_COORDINATES.sub(_shorten, drawn.getvalue()).encode())
    return path


def _shorten(coordinates: re.Match[str]) -> str:
    """Keep one decimal, a tenth of a point."""
    return re.sub(r"(\.\d)\d+", r"\1", coordinates[0])


def draw_part(name: str, section: Section, folder: Path) -> Path | None:
    """Draw the timed runs of the solvers on the published grids, and return the path, or None without such runs."""
    timed = [one for one in section.contenders if one.parameters and (one.rows["phase"] == TIMING).any()]
    published = [one for one in timed if one.label.endswith(f"({PUBLISHED})")]
    if not published:
        return None
    looks, metric = assign_looks(one.label for one in section.contenders), PARTS[name].draws
    columns = ["cell", "status", "step", *AXES, metric]
    slim = tuple(one._replace(rows=one.rows[columns]) for one in published)
    shown = replace(section, metric=metric, rows=section.rows[[metric]], contenders=slim)
    return write_svg(folder / f"{name}-paper.svg", lambda: draw_figure(shown, looks))

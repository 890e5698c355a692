"""The benchmark as figures for print, each as wide as a column; and the look of each solver, the same everywhere."""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from bilevel._io import replacing
from bilevel._optional import require
from bilevel.bench.sections import AXES, Section, make_sections
from bilevel.bench.store import Frame

Axes: TypeAlias = Any  # a matplotlib.axes.Axes
Figure: TypeAlias = Any  # a matplotlib.figure.Figure

# At least 3:1 against white and against the dark page, and apart for red-green blind eyes: `test_figures.py` measures.
COLORS = ("#782dff", "#ff5a00", "#4ba578", "#c31e2d", "#6996d2", "#4b6978", "#8778ff")
# Lengths of marks and gaps, in widths of the line; their number has no divisor in common with that of colors.
DASHES: tuple[tuple[float, ...], ...] = ((), (4, 1.5), (1, 1.2), (5, 1.5, 1, 1.5), (8, 2))
WIDTH = 3.3  # inches, a column of most journals
FONT_SIZE = 8
_PANEL_HEIGHT, _LEGEND_ROW_HEIGHT = 1.9, 0.17
_LEGEND_COLUMNS = 3
_LINE_WIDTH = 1.2
# Type 42 keeps letters as letters, which journals ask for.
_STYLE = {"font.size": FONT_SIZE, "axes.titlesize": FONT_SIZE, "pdf.fonttype": 42, "axes.linewidth": 0.6}
# A date would make each file different from the one before.
_METADATA = {"pdf": {"CreationDate": None}, "png": {"Software": None}}


@dataclass(frozen=True)
class Look:
    """Color and dashes of a line."""

    color: str
    dashes: tuple[float, ...]


def assign_looks(solvers: Iterable[str]) -> dict[str, Look]:
    """Give each name a look; up to 35 names get different ones."""
    return {
        solver: Look(COLORS[place % len(COLORS)], DASHES[place % len(DASHES)])
        for place, solver in enumerate(sorted(set(solvers)))
    }


def write_figures(table: Frame, out: Path, *, metric: str | None = None) -> list[Path]:
    """Write a PDF and a PNG for each problem with a finite curve, and return their paths.

    Parameters
    ----------
    table : all rows of a store
    out : the folder to write to
    metric : drawn, and by whose final value settings are selected; see :func:`bilevel.bench.sections.make_sections`
    """
    looks = assign_looks(table["solver"])
    shown = [section for section in make_sections(table, metric) if section.curves]
    paths = []
    for section, name in zip(shown, file_names(shown), strict=True):
        with require("matplotlib", "bench").rc_context(_STYLE):
            figure = draw(section, looks)
            for kind, metadata in _METADATA.items():
                paths.append(Path(out) / f"{name}.{kind}")
                with replacing(paths[-1]) as file:
                    figure.savefig(file, format=kind, dpi=300, metadata=metadata)
    return paths


def file_names(shown: Sequence[Section]) -> list[str]:
    """Return experiment and problem of each section as a file name, with a digest where two would have the same."""
    names = (f"{section.experiment}-{section.problem}".lower() for section in shown)
    slugs = [re.sub(r"[^a-z0-9_]+", "-", name).strip("-")[:80] for name in names]
    keys = (json.dumps([one.experiment, one.problem, one.arguments], sort_keys=True).encode() for one in shown)
    digests = (hashlib.sha256(key).hexdigest()[:8] for key in keys)
    pairs = zip(slugs, digests, strict=True)
    return [slug if slugs.count(slug) == 1 else f"{slug}-{digest}" for slug, digest in pairs]


def draw(section: Section, looks: dict[str, Look]) -> Figure:
    """Draw one metric against seconds and against oracle calls, where each is known, one panel below the other."""
    metric = section.metric if section.metric in section.drawn(0) else section.drawn(0)[0]
    known = {axis for name, axis, _ in section.curves if name == metric}
    panels = [axis for axis in ("seconds", "calls") if axis in known]
    solvers = [solver for solver in looks if any(key[0] == metric and key[2] == solver for key in section.curves)]
    legend_height = _LEGEND_ROW_HEIGHT * -(-len(solvers) // _LEGEND_COLUMNS) + 0.25
    size = (WIDTH, _PANEL_HEIGHT * len(panels) + legend_height)
    figure = require("matplotlib.figure", "bench").Figure(figsize=size, layout="constrained")
    for axes, axis in zip(np.ravel(figure.subplots(len(panels), 1)), panels, strict=True):
        _panel(axes, section, metric, axis, looks)
    figure.axes[0].set_title(section.problem, parse_math=False)
    line = require("matplotlib.lines", "bench").Line2D
    handles = [line([], [], **_style(looks[solver])) for solver in solvers]
    place = {"loc": "outside lower center", "ncols": _LEGEND_COLUMNS, "frameon": False, "handlelength": 2.8}
    for text in figure.legend(handles, solvers, **place).get_texts():
        text.set_parse_math(False)
    return figure


def _panel(axes: Axes, section: Section, metric: str, axis: str, looks: dict[str, Look]) -> None:
    own = {solver: curve for (name, along, solver), curve in section.curves.items() if (name, along) == (metric, axis)}
    finite = [edge[np.isfinite(edge)] for curve in own.values() for edge in (curve.low, curve.median, curve.high)]
    top, bottom = np.max(np.concatenate(finite)), np.min(np.concatenate(finite))
    for solver, curve in own.items():
        style = _style(looks[solver]) | ({"marker": "."} if len(curve.x) == 1 else {})
        median = np.where(np.isfinite(curve.median), curve.median, np.nan)
        axes.plot(curve.x, median, **style)
        # Where a fifth of the seeds diverged, the band has no edge of its own and goes to that of the panel.
        edges = (np.clip(edge, bottom, top) for edge in (curve.low, curve.high))
        axes.fill_between(curve.x, *edges, where=~np.isnan(median), color=style["color"], alpha=0.15, linewidth=0)
    if bottom > 0 and section.metrics[metric].log_scale:
        axes.set_yscale("log")
    axes.set(xlabel=AXES[axis], ylabel=section.metrics[metric].label)
    axes.grid(alpha=0.3, linewidth=0.5)


def _style(look: Look) -> dict[str, Any]:
    return {"color": look.color, "linestyle": (0, look.dashes) if look.dashes else "-", "linewidth": _LINE_WIDTH}

"""Figures as SVG files, made from kept results; the same results give the same bytes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bilevel._io import replacing
from bilevel._optional import require
from bilevel.bench.cells import TIMING
from bilevel.bench.heat_maps import HeatMap, make_heat_maps
from bilevel.bench.report import FONT_SIZE, assign_looks, draw_figure
from bilevel.bench.sections import AXES, Contender, Section
from bilevel.bench.store import PARAMETER
from bilevel.engine.metrics import metric as describe
from paper.parts import PARTS, PUBLISHED

_STYLE: dict[str, Any] = {"font.size": FONT_SIZE, "axes.titlesize": FONT_SIZE, "axes.linewidth": 0.6}
# Without a fixed salt the identifiers in the file would be random.
_STYLE |= {"svg.hashsalt": "bilevel", "svg.fonttype": "none"}
_MAPS_PER_ROW = 4


def write_svg(path: Path, draw: Callable[[], Any]) -> Path:
    """Call ``draw``, which returns a figure, with our style, write the figure without a date, and return the path."""
    with require("matplotlib", "bench").rc_context(_STYLE), replacing(path) as file:
        draw().savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return path


def draw_part(name: str, section: Section, folder: Path) -> list[Path]:
    """Write the figures of an experiment and return their paths.

    There are up to three: the published solvers on the published grids, all contenders, and heat maps of the sweep.
    """
    metric = PARTS[name].draws
    timed = [one for one in section.contenders if one.parameters and (one.rows["phase"] == TIMING).any()]
    published = [one for one in timed if one.label.endswith(f"({PUBLISHED})")]
    looks = assign_looks(one.label for one in section.contenders)
    drawn: dict[str, Callable[[], Any]] = {}
    if published:
        drawn[f"{name}-paper"] = lambda: draw_figure(_restrict(section, published, metric), looks)
        drawn[f"{name}-all"] = lambda: draw_figure(_restrict(section, timed, metric), looks)
    if is_grid(section):
        drawn[f"{name}-sensitivity"] = lambda: draw_heat_maps(section)
    return [write_svg(folder / f"{stem}.svg", draw) for stem, draw in drawn.items()]


def _step_sizes(one: Contender) -> int:
    return int(one.swept[f"{PARAMETER}step_size"].nunique())


def is_grid(section: Section) -> bool:
    """Return True if some solver was run with several step sizes."""
    return any(_step_sizes(one) > 1 for one in section.contenders)


def _restrict(section: Section, contenders: list[Contender], metric: str) -> Section:
    """Return the section with some of its contenders and one metric."""
    columns = ["cell", "status", "step", *AXES, metric]
    slim = tuple(one._replace(rows=one.rows[columns]) for one in contenders)
    return replace(section, metric=metric, rows=section.rows[[metric]], contenders=slim)


def draw_heat_maps(section: Section) -> Any:
    """Return a figure of the final value over step size and ratio, with the widest grid of each solver.

    The value is the median over seeds at the best setting of the other parameters. Cells in which all of these settings
    diverged are white.
    """
    widest: dict[str, Contender] = {}
    for one in section.contenders:
        solver = one.label.partition(" (")[0]
        before = widest[solver].swept["cell"].nunique() if solver in widest else 0
        if _step_sizes(one) > 1 and one.swept["cell"].nunique() > before:
            widest[solver] = one
    maps = make_heat_maps(replace(section, contenders=tuple(widest.values())))
    maps = [one for one in maps if one.y in ("outer_ratio", "")]
    n_rows = -(-len(maps) // _MAPS_PER_ROW)
    figure = require("matplotlib.figure", "bench").Figure(figsize=(7.0, 1.9 * n_rows), layout="constrained")
    panels = np.ravel(figure.subplots(n_rows, _MAPS_PER_ROW, squeeze=False))
    images = [_medians(one) for one in maps]
    norm = _scale(np.concatenate([image[np.isfinite(image)] for image in images]), describe(section.metric).log_scale)
    for axes, map_, image in zip(panels, maps, images, strict=False):
        shown = axes.imshow(np.ma.masked_invalid(image), norm=norm, aspect="auto", origin="lower", cmap="viridis")
        axes.set_title(map_.label)
        axes.set_xticks(
            range(len(map_.ys)), ["" if ratio is None else f"{ratio:.2g}" for ratio in map_.ys], rotation=60
        )
        axes.set_yticks(range(len(map_.xs)), [f"{step:.2g}" for step in map_.xs])
    for axes in panels[len(maps) :]:
        axes.set_axis_off()
    figure.supxlabel("ratio r")
    figure.supylabel("step size")
    figure.colorbar(shown, ax=panels.tolist(), label=describe(section.metric).title, shrink=0.8)
    return figure


def _medians(one: HeatMap) -> np.ndarray:
    spots = ((one.spots[x, y].median if (x, y) in one.spots else np.nan for y in one.ys) for x in one.xs)
    return np.array([list(row) for row in spots])


def _scale(values: np.ndarray, log: bool) -> Any:
    colors = require("matplotlib.colors", "bench")
    if log and values.min() > 0:
        return colors.LogNorm(values.min(), values.max())
    return colors.Normalize(values.min(), np.quantile(values, 0.9))

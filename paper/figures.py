"""The figures of the paper and their companions, as SVG, from kept results."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bilevel._io import replacing
from bilevel._optional import require
from bilevel.bench.cells import TIMING
from bilevel.bench.report import FONT_SIZE, assign_looks, draw_figure
from bilevel.bench.sections import AXES, Contender, Section
from bilevel.engine.metrics import metric as describe
from paper.contenders import median_by_setting
from paper.parts import PARTS, PUBLISHED

# A fixed salt and no date: drawing twice gives the same file.
_STYLE = {"font.size": FONT_SIZE, "axes.titlesize": FONT_SIZE, "svg.hashsalt": "bilevel", "axes.linewidth": 0.6}
_PER_ROW = 4  # heat maps
_STEP, _RATIO = "param_step_size", "param_outer_ratio"


def draw_part(name: str, section: Section, folder: Path) -> list[Path]:
    """Draw the solvers of the paper on its grids, then all contenders, then the heat maps; return the paths."""
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
    return [_write(folder / f"{stem}.svg", draw) for stem, draw in drawn.items()]


def is_grid(section: Section) -> bool:
    """Tell whether several step sizes were tried."""
    return any(one.swept[_STEP].nunique() > 1 for one in section.contenders)


def _restrict(section: Section, contenders: list[Contender], metric: str) -> Section:
    """Return the section with these contenders and one metric."""
    columns = ["cell", "status", "step", *AXES, metric]
    slim = tuple(one._replace(rows=one.rows[columns]) for one in contenders)
    return replace(section, metric=metric, rows=section.rows[[metric]], contenders=slim)


def _write(path: Path, draw: Callable[[], Any]) -> Path:
    with require("matplotlib", "bench").rc_context(_STYLE), replacing(path) as file:
        draw().savefig(file, format="svg", metadata={"Date": None})
    return path


def draw_heat_maps(section: Section) -> Any:
    """Draw the final value over step size and ratio, for the widest grid of each solver; white where all diverged.

    Of the other parameters the best is taken, of the seeds the median.
    """
    widest: dict[str, Contender] = {}
    for one in section.contenders:
        solver = one.label.partition(" (")[0]
        if one.swept[_STEP].nunique() > 1 and one.swept["cell"].nunique() > _n_cells(widest.get(solver)):
            widest[solver] = one
    height = -(-len(widest) // _PER_ROW)
    options = {"figsize": (7.0, 1.9 * height), "layout": "constrained"}
    figure = require("matplotlib.figure", "bench").Figure(**options)
    panels = np.ravel(figure.subplots(height, _PER_ROW, squeeze=False))
    maps = [_heat_map(one, section.metric) for one in widest.values()]
    finite = np.concatenate([values[np.isfinite(values)] for values, _, _ in maps])
    norm = _scale(finite, describe(section.metric).log_scale)
    for axes, one, (values, steps, ratios) in zip(panels, widest.values(), maps, strict=False):
        image = axes.imshow(np.ma.masked_invalid(values), norm=norm, aspect="auto", origin="lower", cmap="viridis")
        axes.set_title(one.label)
        axes.set_xticks(range(len(ratios)), [f"{ratio:.2g}" for ratio in ratios], rotation=60)
        axes.set_yticks(range(len(steps)), [f"{step:.2g}" for step in steps])
    for axes in panels[len(maps) :]:
        axes.set_axis_off()
    figure.supxlabel("ratio r")
    figure.supylabel("step size")
    figure.colorbar(image, ax=panels.tolist(), label=describe(section.metric).title, shrink=0.8)
    return figure


def _n_cells(one: Contender | None) -> int:
    return 0 if one is None else one.swept["cell"].nunique()


def _heat_map(one: Contender, metric: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    medians = median_by_setting(one.swept, metric)
    best = medians.groupby([_STEP, _RATIO])["median"].min().unstack()  # every metric here is better when lower
    return best.to_numpy(np.float64), best.index.to_numpy(np.float64), best.columns.to_numpy(np.float64)


def _scale(values: np.ndarray, log: bool) -> Any:
    colors = require("matplotlib.colors", "bench")
    if log and values.min() > 0:
        return colors.LogNorm(values.min(), values.max())
    return colors.Normalize(values.min(), np.quantile(values, 0.9))

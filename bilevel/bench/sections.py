"""What is shown of a store: for each problem of each experiment, every solver at its selected setting.

The seeds of a setting are one curve: a median, and a band from 20 to 80 %. A seed that diverged counts as worse than
any other from its end on, and one that converged as what it had reached: left out, they would skew the curve. So would
one that is out of budget; there the curve ends.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from bilevel.bench.cells import SWEEP, TIMING
from bilevel.bench.select import SELECTED, drop_seed, quantiles, read_setting, select, split_columns, worst_value
from bilevel.bench.store import PARAMETER, Frame, list_metrics
from bilevel.engine.metrics import Metric
from bilevel.engine.metrics import metric as describe

AXES = {"seconds": "seconds", "calls": "oracle calls", "epochs": "epochs"}  # columns, and what they are called
MAX_POINTS = 120


class Curve(NamedTuple):
    """The quantiles of many seeds; infinite where too many of them diverged."""

    x: np.ndarray
    low: np.ndarray
    median: np.ndarray
    high: np.ndarray

    @property
    def is_drawable(self) -> bool:
        return bool(np.any(np.isfinite(self.median)))


class SeedCurve(NamedTuple):
    """A metric along one seed: finite values at increasing x, and the status at the end."""

    x: np.ndarray
    y: np.ndarray
    status: str

    @classmethod
    def from_evaluations(cls, x: np.ndarray, y: np.ndarray, status: str) -> "SeedCurve":
        """Leave out what was not evaluated; a value that is not finite ends the run as a divergence does."""
        known = ~(np.isnan(x) | np.isnan(y))
        x, y = x[known], y[known]
        infinite = np.flatnonzero(np.isinf(y))
        if len(infinite):
            x, y, status = x[: infinite[0]], y[: infinite[0]], "diverged"
        last_of_each = np.append(np.diff(x) > 0, True)[: len(x)]
        return cls(x[last_of_each], y[last_of_each], status)

    def at(self, grid: np.ndarray, worst: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the values on a grid, NaN where there are none, and where the run was going on or had diverged."""
        diverged = self.status == "diverged"
        if not len(self.x):
            return np.full(len(grid), worst if diverged else np.nan), np.full(len(grid), diverged)
        ended, reached = grid > self.x[-1], self.y[-1] if self.status == "converged" else np.nan
        values = np.where(ended, worst if diverged else reached, interpolate(self.x, self.y, grid))
        return values, (grid >= self.x[0]) & (diverged | ~ended)


def interpolate(x: np.ndarray, y: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Return y on the grid: geometric between two positive values, linear between others, NaN outside."""
    left = np.clip(np.searchsorted(x, grid, side="right") - 1, 0, len(x) - 1)
    right = np.minimum(left + 1, len(x) - 1)
    positive = (y[left] > 0) & (y[right] > 0) & (left < right)
    logs = np.log(np.where(y > 0, y, 1.0))
    straight = np.interp(grid, x, y, left=np.nan, right=np.nan)
    return np.where(positive, np.exp(np.interp(grid, x, logs, left=np.nan, right=np.nan)), straight)


def median_curve(seeds: Sequence[SeedCurve], worst: float = np.inf, max_points: int = MAX_POINTS) -> Curve:
    """Return the quantiles up to the end of the first seed that is out of budget, where at least half have data."""
    # Where seeds were evaluated: dense where they are, whatever the scale of the axis.
    grid = np.unique(np.concatenate([seed.x for seed in seeds]))
    if len(grid) > max_points:
        grid = grid[np.linspace(0, len(grid) - 1, max_points).round().astype(int)]
    values, has_data = map(np.array, zip(*(seed.at(grid, worst) for seed in seeds), strict=True))
    evaluated = ~np.isnan(values).all(axis=1)
    # A seed that leaves when its budget is used up would change the median of the others.
    complete = ~np.isnan(values[evaluated]).any(axis=0)
    shown = complete & (2 * np.sum(has_data, axis=0) >= len(seeds))
    return Curve(grid[shown], *quantiles(values[:, shown]))


def split_cells(rows: Frame) -> list[tuple[np.ndarray, str]]:
    """Return, for each cell in the order of their ids, the places of its rows by step, and its last status."""
    cells = rows["cell"].astype("category").cat.codes.to_numpy()
    order = np.lexsort((rows["step"].to_numpy(np.float64, na_value=np.nan), cells))
    statuses = rows["status"].to_numpy(object)
    parts = np.split(order, np.flatnonzero(np.diff(cells[order])) + 1) if len(order) else []
    return [(places, str(statuses[places[-1]])) for places in parts]


def make_curve(rows: Frame, axis: str, metric: str, cells: list[tuple[np.ndarray, str]] | None = None) -> Curve:
    """Return the curve of the rows of one setting; each cell, of those that `split_cells` finds, is a seed."""
    x, y = (rows[name].to_numpy(np.float64, na_value=np.nan) for name in (axis, metric))
    found = split_cells(rows) if cells is None else cells
    seeds = [SeedCurve.from_evaluations(x[places], y[places], status) for places, status in found]
    return median_curve(seeds, worst_value(metric))


def final_values(rows: Frame, metric: str) -> np.ndarray:
    """Return the last value of each seed."""
    y, cells = rows[metric].to_numpy(np.float64, na_value=np.nan), split_cells(rows)
    known = (y[places][~np.isnan(y[places])] for places, _ in cells)
    last = [values[-1] if len(values) else np.nan for values in known]
    return np.where([status == "diverged" for _, status in cells], worst_value(metric), last)


def reach(rows: Frame, metric: str, target: float, axis: str = "calls") -> np.ndarray:
    """Return the calls or seconds of each seed at the first value that is as good as the target, or inf."""
    x, y = (rows[name].to_numpy(np.float64, na_value=np.nan) for name in (axis, metric))
    there = y >= target if worst_value(metric) < 0 else y <= target
    found = (x[places][there[places]] for places, _ in split_cells(rows))
    return np.array([np.fmin.reduce(values) if len(values) else np.inf for values in found])


def first_reach(rows: Frame, metric: str, epsilons: Sequence[float], axis: str = "calls") -> np.ndarray:
    """Return the median over seeds of the calls, or seconds, at the first value at or below each epsilon, or inf."""
    return np.array([np.median(reach(rows, metric, epsilon, axis)) for epsilon in epsilons])


class Contender(NamedTuple):
    """A solver at its selected setting, or at all of them where none could be selected, because all diverged."""

    label: str  # the solver, and the column of its grid
    parameters: dict[str, Any] | None
    rows: Frame  # of the timing phase, where there are any
    swept: Frame  # of the sweep, all settings
    edges: str  # which parameters are at an end of their grid

    @property
    def setting(self) -> str:
        if self.parameters is None:
            return "none: each has an infinite median"
        words = {name: f"{one:.4g}" if isinstance(one, float) else one for name, one in self.parameters.items()}
        return ", ".join(f"{name} {word}" for name, word in words.items())


@dataclass(frozen=True)
class Section:
    """A problem of an experiment, all its rows, and its contenders in the order of their labels."""

    experiment: str
    problem: str
    arguments: dict[str, Any]  # those that all rows share: a problem may be drawn anew with each seed
    metric: str
    rows: Frame
    contenders: tuple[Contender, ...]
    own: Mapping[str, Metric] = field(default_factory=dict)  # metrics that were made from others for this section

    @cached_property
    def metrics(self) -> dict[str, Metric]:
        """The metrics that have a number, in the order of the registry."""
        return {name: self.own.get(name) or describe(name) for name in list_metrics(self.rows)}

    @cached_property
    def curves(self) -> dict[tuple[str, str, str], Curve]:
        """Curves by metric, axis and contender, without those of which there is nothing to see."""
        selected = [(one, split_cells(one.rows)) for one in self.contenders if one.parameters is not None]
        keys = itertools.product(self.metrics, AXES, selected)
        curves = {
            (metric, axis, one.label): make_curve(one.rows, axis, metric, cells) for metric, axis, (one, cells) in keys
        }
        return {key: curve for key, curve in curves.items() if curve.is_drawable}

    def with_curves(self, position: int) -> list[str]:
        """Return the metrics (0) or axes (1) or labels (2) that have a curve, in their order."""
        return list(dict.fromkeys(key[position] for key in self.curves))


def make_sections(table: Frame, metric: str | None = None) -> list[Section]:
    """Split all rows of a store by experiment and problem, and select each solver's setting by its final metric."""
    if table.empty:
        raise ValueError("`table` has no rows; run the experiment first, or name the folder of its store.")
    keys = [table["experiment"], table["problem"], table["problem_arguments"].map(drop_seed)]
    return [_make_section(experiment, problem, rows, metric) for (experiment, problem, _), rows in table.groupby(keys)]


def _make_section(experiment: str, problem: str, rows: Frame, metric: str | None) -> Section:
    arguments = rows["problem_arguments"].unique()
    shared = json.loads(arguments[0] if len(arguments) == 1 else drop_seed(arguments[0]))
    # By default h selects, or F where h is not known.
    known = (name for name in list_metrics(rows) if describe(name).selects and np.isfinite(rows[name]).any())
    selected = select(rows, metric or next(known, "outer_value"))
    contenders = (_make_contender(rows[rows["solver"] == row["solver"]], row) for row in selected.to_dict("records"))
    return Section(experiment, problem, shared, selected["metric"].iloc[0], rows, tuple(contenders))


def _make_contender(rows: Frame, selected: dict[str, Any]) -> Contender:
    swept = split_columns(rows[rows["phase"] == SWEEP])
    swept = swept[swept["column"] == selected["column"]]
    if selected["status"] != SELECTED:
        return Contender(selected["label"], None, swept, swept, "")
    parameters = dict(read_setting(selected))
    same = np.ones(len(rows), bool)
    for name in rows.filter(regex=f"^{PARAMETER}"):
        value = parameters.get(name.removeprefix(PARAMETER))
        equal = rows[name].isna() if value is None else rows[name] == value
        same &= equal.to_numpy(bool, na_value=False)
    timed = rows[same & (rows["phase"] == TIMING)]
    return Contender(selected["label"], parameters, timed if len(timed) else rows[same], swept, selected["edges"])


def add_gap(section: Section) -> Section:
    """Return a section whose loss has one metric more: how far it is above the lowest value seen on its problem.

    A section selected by a metric with a natural scale of its own, such as a distance, is returned as it is.
    """
    about = section.metrics[section.metric]
    if about.log_scale or about.better != "lower":
        return section
    name, rows = f"{section.metric}_above_lowest", section.rows
    # Seeds may be problems of their own, each with a lowest value of its own.
    finite = rows[np.isfinite(rows[section.metric])]
    lowest = finite.groupby("problem_arguments")[section.metric].min()

    def measure(own: Frame) -> Frame:
        return own.assign(**{name: own[section.metric] - own["problem_arguments"].map(lowest).astype(float)})

    contenders = tuple(one._replace(rows=measure(one.rows), swept=measure(one.swept)) for one in section.contenders)
    label = f"{about.label} − lowest seen"
    return replace(section, rows=measure(rows), contenders=contenders, own={name: Metric(name, label)})

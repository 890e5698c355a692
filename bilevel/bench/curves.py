"""The seeds of a setting as one: a median, and a band from 20 to 80 %.

A seed that diverged counts as worse than any other from its end on, and one that converged as what it had reached:
left out, they would make the rest look better, or worse, than the solver is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bilevel.bench.select import LARGER_IS_BETTER, Frame

AXES = ("seconds", "calls", "epochs")
LEVELS = (0.2, 0.5, 0.8)
MAX_POINTS = 120


@dataclass(frozen=True)
class Curve:
    """The quantiles of many seeds; infinite where too many of them diverged."""

    x: np.ndarray
    low: np.ndarray
    median: np.ndarray
    high: np.ndarray

    @property
    def is_drawable(self) -> bool:
        """Whether there is anything to see."""
        return bool(np.any(np.isfinite(self.median)))


@dataclass(frozen=True)
class Run:
    """A metric along one seed: finite values at increasing x, and the status at the end."""

    x: np.ndarray
    y: np.ndarray
    status: str

    @classmethod
    def of(cls, x: np.ndarray, y: np.ndarray, status: str) -> "Run":
        """Leave out what was not evaluated; a value that is not finite ends the run as a divergence does."""
        known = ~(np.isnan(x) | np.isnan(y))
        x, y = x[known], y[known]
        infinite = np.flatnonzero(np.isinf(y))
        if len(infinite):
            x, y, status = x[: infinite[0]], y[: infinite[0]], "diverged"
        last_of_each = np.append(np.diff(x) > 0, True)[: len(x)]
        return cls(x[last_of_each], y[last_of_each], status)

    def at(self, grid: np.ndarray, worst: float) -> np.ndarray:
        """Return the values on a grid, NaN where there are none."""
        inside = interpolated(self.x, self.y, grid)
        if self.status == "diverged":
            return np.where(self._ended(grid), worst, inside)
        if self.status == "converged" and len(self.x):
            return np.where(self._ended(grid), self.y[-1], inside)
        return inside

    def has_data(self, grid: np.ndarray) -> np.ndarray:
        """Say where the run was going on, or had diverged."""
        started = grid >= self.x[0] if len(self.x) else np.full(len(grid), self.status == "diverged")
        return started & (~self._ended(grid) | (self.status == "diverged"))

    def _ended(self, grid: np.ndarray) -> np.ndarray:
        return grid > self.x[-1] if len(self.x) else np.ones(len(grid), bool)


def interpolated(x: np.ndarray, y: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Return y on the grid: geometric between two positive values, linear between others, NaN outside."""
    if not len(x):
        return np.full(len(grid), np.nan)
    left = np.clip(np.searchsorted(x, grid, side="right") - 1, 0, len(x) - 1)
    right = np.minimum(left + 1, len(x) - 1)
    positive = (y[left] > 0) & (y[right] > 0) & (left < right)
    logs = np.log(np.where(y > 0, y, 1.0))
    straight = np.interp(grid, x, y, left=np.nan, right=np.nan)
    return np.where(positive, np.exp(np.interp(grid, x, logs, left=np.nan, right=np.nan)), straight)


def quantiles(values: np.ndarray, levels: Sequence[float] = LEVELS) -> np.ndarray:
    """Return quantiles along the first axis, leaving out NaN; they may be infinite, unlike NumPy's."""
    ordered = np.sort(values, axis=0)
    count = np.sum(~np.isnan(values), axis=0)
    place = np.multiply.outer(np.asarray(levels), np.maximum(count - 1, 0))
    below = np.floor(place).astype(int)
    part = place - below
    lower = np.take_along_axis(ordered, below, axis=0)
    upper = np.take_along_axis(ordered, np.ceil(place).astype(int), axis=0)
    with np.errstate(invalid="ignore"):
        return np.where(part == 0, lower, (1 - part) * lower + part * upper)


def worst_of(metric: str) -> float:
    """Return what a diverged seed counts as."""
    return -np.inf if metric in LARGER_IS_BETTER else np.inf


def median_curve(runs: Sequence[Run], worst: float = np.inf, max_points: int = MAX_POINTS) -> Curve:
    """Return the quantiles where at least half of the runs have data."""
    grid = _common_grid(runs, max_points)
    enough = 2 * np.sum([run.has_data(grid) for run in runs], axis=0) >= len(runs)
    grid = grid[enough]
    low, median, high = quantiles(np.array([run.at(grid, worst) for run in runs]))
    return Curve(grid, low, median, high)


def _common_grid(runs: Sequence[Run], max_points: int) -> np.ndarray:
    """Where runs were evaluated: dense where they are, whatever the scale of the axis."""
    places = np.unique(np.concatenate([run.x for run in runs]))
    if len(places) <= max_points:
        return places
    return places[np.linspace(0, len(places) - 1, max_points).round().astype(int)]


def curve_of(rows: Frame, axis: str, metric: str) -> Curve:
    """Return the curve of the rows of one setting; each cell is a seed."""
    runs = [
        Run.of(_floats(cell, axis), _floats(cell, metric), str(cell["status"].iloc[-1]))
        for _, cell in rows.sort_values("step").groupby("cell")
    ]
    return median_curve(runs, worst_of(metric))


def final_values(rows: Frame, metric: str) -> np.ndarray:
    """Return the last value of each seed."""
    cells = rows.sort_values("step").groupby("cell")
    last, diverged = cells[metric].last(), cells["status"].last() == "diverged"
    return last.mask(diverged, worst_of(metric)).to_numpy(np.float64, na_value=np.nan)


def calls_to_reach(rows: Frame, metric: str, epsilons: Sequence[float]) -> np.ndarray:
    """Return, for each epsilon, the median over seeds of the calls at the first evaluation at or below it.

    It is infinite where half of the seeds or more do not get there.
    """
    first = np.full((rows["cell"].nunique(), len(epsilons)), np.inf)
    for row, (_, cell) in zip(first, rows.sort_values("step").groupby("cell"), strict=True):
        values, calls = _floats(cell, metric), _floats(cell, "calls")
        for place, epsilon in enumerate(epsilons):
            row[place] = min(calls[values <= epsilon], default=np.inf)
    return np.median(first, axis=0)


def _floats(rows: Frame, column: str) -> np.ndarray:
    return rows[column].to_numpy(np.float64, na_value=np.nan)

"""A metric along the runs of several seeds, as a median curve with a band from the 20 % to the 80 % quantile.

After its end, a diverged seed counts as worse than any other, and a converged seed keeps its last value; leaving them
out would bias the curve. The curve ends with the first seed that is out of budget.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LEVELS = (0.2, 0.5, 0.8)
MAX_POINTS = 120


class Curve(NamedTuple):
    """Quantiles over seeds, infinite if too many of them diverged; and whether other seeds continue after its end."""

    x: np.ndarray
    low: np.ndarray
    median: np.ndarray
    high: np.ndarray
    is_cut: bool = False

    @property
    def is_drawable(self) -> bool:
        return bool(np.any(np.isfinite(self.median)))


class SeedCurve(NamedTuple):
    """A metric along the run of one seed: finite values at increasing x, and the status at the end."""

    x: np.ndarray
    y: np.ndarray
    status: str

    @classmethod
    def from_evaluations(cls, x: np.ndarray, y: np.ndarray, status: str) -> "SeedCurve":
        """Drop missing values; an infinite value ends the run like a divergence."""
        known = ~(np.isnan(x) | np.isnan(y))
        x, y = x[known], y[known]
        infinite = np.flatnonzero(np.isinf(y))
        if len(infinite):
            x, y, status = x[: infinite[0]], y[: infinite[0]], "diverged"
        last_of_each = np.append(np.diff(x) > 0, True)[: len(x)]
        return cls(x[last_of_each], y[last_of_each], status)

    def at(self, grid: np.ndarray, worst: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the values on a grid, with NaN for missing ones, and a mask of where the run has data or diverged."""
        diverged = self.status == "diverged"
        if not len(self.x):
            return np.full(len(grid), worst if diverged else np.nan), np.full(len(grid), diverged)
        ended, reached = grid > self.x[-1], self.y[-1] if self.status == "converged" else np.nan
        values = np.where(ended, worst if diverged else reached, interpolate(self.x, self.y, grid))
        return values, (grid >= self.x[0]) & (diverged | ~ended)


def interpolate(x: np.ndarray, y: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Interpolate geometrically between positive values, and linearly between others; NaN outside."""
    left = np.clip(np.searchsorted(x, grid, side="right") - 1, 0, len(x) - 1)
    right = np.minimum(left + 1, len(x) - 1)
    positive = (y[left] > 0) & (y[right] > 0) & (left < right)
    logs = np.log(np.where(y > 0, y, 1.0))
    straight = np.interp(grid, x, y, left=np.nan, right=np.nan)
    return np.where(positive, np.exp(np.interp(grid, x, logs, left=np.nan, right=np.nan)), straight)


def median_curve(seeds: Sequence[SeedCurve], worst: float = np.inf) -> Curve:
    """Return the quantiles at points where half of the seeds have data, up to the first seed that is out of budget."""
    grid = np.unique(np.concatenate([seed.x for seed in seeds]))  # dense where the seeds were evaluated
    if len(grid) > MAX_POINTS:
        grid = grid[np.linspace(0, len(grid) - 1, MAX_POINTS).round().astype(int)]
    values, has_data = map(np.array, zip(*(seed.at(grid, worst) for seed in seeds), strict=True))
    evaluated = ~np.isnan(values).all(axis=1)
    # If seeds that are out of budget were dropped, the median would jump.
    complete = ~np.isnan(values[evaluated]).any(axis=0)
    shown = complete & (2 * np.sum(has_data, axis=0) >= len(seeds))
    low, median, high = quantiles(values[:, shown])
    return Curve(grid[shown], low, median, high, is_cut=len(grid) > 0 and not complete[-1])


def quantiles(values: np.ndarray) -> np.ndarray:
    """Return the quantiles `LEVELS` of the rows without NaN; infinite between a number and infinity, NaN of no row."""
    known = values[~np.isnan(values.reshape(len(values), -1)).any(axis=1)]
    if not len(known):
        return np.full((len(LEVELS), *values.shape[1:]), np.nan)
    lower, upper = (np.quantile(known, LEVELS, axis=0, method=method) for method in ("lower", "higher"))
    with np.errstate(invalid="ignore"):
        between = np.where(np.isfinite(lower + upper), np.quantile(known, LEVELS, axis=0), lower + upper)
    return np.where(lower == upper, lower, between)

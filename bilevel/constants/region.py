"""Where constants hold."""

from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from bilevel import trees
from bilevel.problems import BilevelProblem


@dataclass(frozen=True, eq=False)
class Region:
    """Where constants hold: ||z|| <= radius and lower <= x <= upper, coordinate by coordinate; None is no limit."""

    radius: float | None = None
    lower: np.ndarray | None = None
    upper: np.ndarray | None = None

    @property
    def outer_radius(self) -> float:
        """The largest ||x||."""
        if self.lower is None or self.upper is None:
            return inf
        return float(np.linalg.norm(np.maximum(abs(self.lower), abs(self.upper))))

    def __str__(self) -> str:
        z = "all z" if self.radius is None else f"||z|| <= {self.radius:.4g}"
        if self.lower is None or self.upper is None:
            return f"{z}, all x"
        return f"{z}, x from {self.lower.min():.4g} to {self.upper.max():.4g}"


def holding_start(problem: BilevelProblem, radius: float) -> float:
    """Return the radius, or a larger one whose ball holds the start."""
    return max(radius, float(np.linalg.norm(trees.flat(problem.start.inner_var))))


def box_of(problem: BilevelProblem, box: tuple[Any, Any] | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the limits of x: those given, those of the problem where they are finite, or 1 around the start."""
    x = trees.flat(problem.start.outer_var)
    bounds = problem.oracles.outer_bounds if box is None else box
    low, high = (None, None) if bounds is None else bounds
    lower, upper = _limits(low, x, x - 1), _limits(high, x, x + 1)
    if not np.all(lower <= upper):
        raise ValueError(f"`box={box!r}`: a lower limit exceeds its upper one, or one is NaN.")
    return lower, upper


def _limits(given: Any, x: np.ndarray, otherwise: np.ndarray) -> np.ndarray:
    if given is None:
        return otherwise
    limits = trees.flat(given)
    if limits.size not in (1, x.size):
        raise ValueError(f"`box`: a limit has {limits.size} numbers; give one, or {x.size} like the outer variable.")
    return np.where(np.isinf(limits), otherwise, limits)

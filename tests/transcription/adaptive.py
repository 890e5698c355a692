"""AutoSRBA with a diagonal metric or a norm, Adam and bounds: dense NumPy, without rollback."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .directions import box, directions
from .problems import Array, LogisticSelection, Problem, Quadratic


def row_diagonals(problem: Problem, z: Array, x: Array) -> tuple[Array, Array]:
    """Return the curvature of each row in each coordinate, (n, p), and the curvature of the penalty."""
    if isinstance(problem, Quadratic):
        return np.diagonal(problem.inner.az, axis1=1, axis2=2), np.zeros(problem.p)
    assert isinstance(problem, LogisticSelection)
    rows = problem.y_train[:, None] * problem.X_train
    residuals = 1 / (1 + np.exp(rows @ z))
    return rows**2 * np.maximum(residuals * (1 - residuals), residuals**2)[:, None], np.exp(x)


def metric(problem: Problem, z: Array, x: Array, batch: int) -> Array:
    """Return H + mean(h²) / (batch H)."""
    rows, penalty = row_diagonals(problem, z, x)
    diagonal = rows.mean(axis=0) + penalty
    return diagonal + np.mean(rows**2, axis=0) / (batch * diagonal)


def norm(problem: Problem, z: Array, x: Array, signs: Array) -> float:
    """Return the root of the mean of ||H s||² over the rows s of ``signs``."""
    return float(np.sqrt(np.mean([np.sum(problem.hv(z, x, s) ** 2) for s in signs])))


class Adam:
    """Adam with steps rate / sqrt(1 + t / delay) and ε = least."""

    def __init__(self, rate: float, delay: float, least: float = 1e-8) -> None:
        self.rate, self.delay, self.least, self.t = rate, delay, least, 0
        self.mean: Array | float = 0.0
        self.square: Array | float = 0.0

    def update(self, gradient: Array) -> Array:
        """Return the change of the variable."""
        rate = self.rate / np.sqrt(1 + self.t / self.delay)
        self.t += 1
        self.mean = 0.9 * self.mean + 0.1 * gradient
        self.square = 0.999 * self.square + 0.001 * gradient**2
        mean, square = self.mean / (1 - 0.9**self.t), self.square / (1 - 0.999**self.t)
        return -rate * mean / np.maximum(np.sqrt(square) + self.least, 1e-300)


def adaptive_srba(
    problem: Problem,
    z: Array,
    x: Array,
    draws: Sequence[Any],
    *,
    step_size: float,
    period: int,
    scale_at: Callable[[int, Array, Array], Array | float],
    adam: Adam,
    bounds: Sequence[float],
    inner_adam: Adam | None = None,
) -> list[dict[str, Any]]:
    """Draws: inner, outer (not used in full-batch steps). The metric depends on the step, z and x."""
    u = u_prev = (z, np.zeros_like(z), x)
    history = []
    for s, draw in enumerate(draws):
        if s % period == 0:
            estimate = directions(problem, u, None, None)
            scale = scale_at(s, u[0], u[2])
        else:
            here = directions(problem, u, draw.inner, draw.outer)
            there = directions(problem, u_prev, draw.inner, draw.outer)
            estimate = tuple(e + h - t for e, h, t in zip(estimate, here, there, strict=True))
        d_z, d_v, d_x = estimate
        u_prev = u
        z, v, x = u
        z = z - step_size * d_z / scale if inner_adam is None else z + inner_adam.update(d_z)
        u = (z, v - step_size * d_v / scale, box(x + adam.update(d_x), bounds))
        history.append({"inner_var": u[0], "v": u[1], "outer_var": u[2]})
    return history

"""AutoSRBA with the low-rank metric, and with x frozen until z and v have converged: dense NumPy, without rollback."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .adaptive import Adam, row_diagonals
from .directions import box, directions
from .problems import Array, LogisticSelection

LENGTHS = [0, *(4.0**power for power in range(-1, 7))]
MULTIPLES = [1, *(4.0**-power for power in range(1, 8)), 0]


def majorizer(problem: LogisticSelection, z: Array, x: Array) -> Array:
    """Return a matrix that bounds the Hessian from above: the Hessian with the majorized curvature of each row."""
    rows = problem.y_train[:, None] * problem.X_train
    residuals = 1 / (1 + np.exp(rows @ z))
    curvatures = np.maximum(residuals * (1 - residuals), residuals**2)
    return rows.T @ (curvatures[:, None] * rows) / len(rows) + np.diag(np.exp(x))


def metric(problem: LogisticSelection, z: Array, x: Array, subspace: Array, batch: int) -> tuple[Array, Array]:
    """Return the metric M, and the products that span the next subspace."""
    rows, penalty = row_diagonals(problem, z, x)
    h = rows.mean(axis=0) + penalty
    ratio = 1 + np.mean(rows**2, axis=0) / (batch * h**2)
    C = majorizer(problem, z, x) / np.sqrt(np.outer(h, h))
    V = np.linalg.qr(subspace.T)[0].T
    values, vectors = np.linalg.eigh(V @ C @ V.T)
    A = (vectors.T @ V @ C) / np.sqrt(values)[:, None]
    in_direction = np.array([np.average(ratio, weights=a**2) for a in A])
    left = np.maximum(np.maximum(1 - np.sum(A**2, axis=0), np.clip(ratio - 1 - 6.4 / batch, 0, 1)), 1e-9)
    inside = A.T @ np.diag(in_direction) @ A + np.diag(left * ratio)
    return np.sqrt(np.outer(h, h)) * inside, V @ C


def first_fit(problem: LogisticSelection, z: Array, x: Array, subspace: Array, batch: int) -> tuple[Array, Array]:
    """Return z after searches along z, the gradient over the diagonal, and twice that over M; and the subspace."""
    for search in range(4):
        gradient = problem.gz(z, x, None)
        rows, penalty = row_diagonals(problem, z, x)
        h = rows.mean(axis=0) + penalty
        M, subspace = metric(problem, z, x, subspace, batch)
        diagonal = h + np.mean(rows**2, axis=0) / (batch * h)
        direction = gradient / diagonal if search == 1 else np.linalg.solve(M, gradient)
        tried = [t * z for t in MULTIPLES] if search == 0 else [z - t * direction for t in LENGTHS]
        z = min(tried, key=lambda moved: problem.inner_value(moved, x, None))
    return z, subspace


class Freeze:
    """The rule by which x is frozen until z and v are close to their solutions; at the start for at most 50 passes."""

    def __init__(self, step_size: float) -> None:
        self.step_size, self.passes, self.sizes = step_size, 1, None
        self.first: list[float] = []

    def moves(self, M: Array, u: Sequence[Array], D: Sequence[Array], outer_value: float) -> bool:
        """Return True if x moves after a full-batch pass with these directions."""
        lengths = [np.sqrt(part @ M @ part) for part in u[:2]]
        sizes = [np.sqrt(part @ np.linalg.solve(M, part)) for part in D[:2]]
        if self.sizes is None:
            self.sizes = [max(a, 10 * self.step_size * b) for a, b in zip(lengths, sizes, strict=True)]
            self.first = list(sizes)
        self.sizes = [max(old, min(new, 2 * old)) for old, new in zip(self.sizes, lengths, strict=True)]
        near = all(d <= max(a / 2, s / 100) for d, a, s in zip(sizes, lengths, self.sizes, strict=True))
        if self.first:
            near &= all(d <= max(f / 10, a / 1000) for d, a, f in zip(sizes, lengths, self.first, strict=True))
        lag = u[1] @ D[0]
        near &= abs(lag) <= 0.1 * abs(outer_value + lag)
        self.passes += 1
        moves = near or (bool(self.first) and self.passes > 50)
        if moves:
            self.first, self.passes = [], 0
        return moves


def low_rank_srba(
    problem: LogisticSelection,
    z: Array,
    x: Array,
    draws: Sequence[Any],
    *,
    step_size: float,
    period: int,
    batch: int,
    adam: Adam,
    bounds: Sequence[float],
    subspace: Array,
) -> list[dict[str, Any]]:
    """Draws: inner, outer (not used in full-batch steps)."""
    z, subspace = first_fit(problem, z, x, subspace, batch)
    u = u_prev = (z, np.zeros_like(z), x)
    freeze, history = Freeze(step_size), []
    for s, draw in enumerate(draws):
        if s % period == 0:
            estimate = directions(problem, u, None, None)
            M, subspace = metric(problem, u[0], u[2], subspace, batch)
            moves = freeze.moves(M, u, estimate, problem.outer_value(u[0], u[2], None))
        else:
            here = directions(problem, u, draw.inner, draw.outer)
            there = directions(problem, u_prev, draw.inner, draw.outer)
            estimate = tuple(e + h - t for e, h, t in zip(estimate, here, there, strict=True))
        d_z, d_v, d_x = estimate
        u_prev, (z, v, x) = u, u
        x = box(x + adam.update(d_x), bounds) if moves else x
        u = (z - step_size * np.linalg.solve(M, d_z), v - step_size * np.linalg.solve(M, d_v), x)
        history.append({"inner_var": u[0], "v": u[1], "outer_var": u[2]})
    return history

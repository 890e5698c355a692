"""F2SA-p: first-order penalty method; y_j tracks argmin j nu F + G, and a difference over j gives the gradient of h."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from .handover import DrawnRows
from .problems import Array, Problem


def indices_of(order: int) -> list[int]:
    """Return the nodes: -order/2..order/2 without 0 for even order, -(order-1)/2..(order+1)/2 for odd order."""
    if order % 2 == 0:
        return [j for j in range(-order // 2, order // 2 + 1) if j != 0]
    return list(range(-(order - 1) // 2, (order + 1) // 2 + 1))


def rule(indices: Sequence[int], moment: int) -> Array:
    """Return w with sum_j w_j j^k = k! for k = moment, and 0 for all other k below the number of indices."""
    powers = np.array([[float(j) ** k for j in indices] for k in range(len(indices))])
    return np.linalg.solve(powers, np.eye(len(indices))[moment])


def f2sa_p(
    problem: Problem,
    z: Array,
    x: Array,
    draws: Sequence[Any],
    *,
    step_size: float,
    outer_ratio: float,
    order: int = 2,
    nu: float = 0.1,
    normalized: bool = True,
) -> list[dict[str, Any]]:
    """Draws: inner_loops, outer_loops (T batches for each index; none of F at index 0), inner, outer."""
    indices = indices_of(order)
    alphas, interpolation = rule(indices, 1), rule(indices, 0)
    y = dict.fromkeys(indices, z)
    history = []
    for draw in draws:
        for j in indices:
            for k, rows in enumerate(draw.inner_loops[j]):
                slope = problem.gz(y[j], x, rows)
                if j != 0:
                    slope = slope + j * nu * problem.fz(y[j], x, draw.outer_loops[j][k])
                y[j] = y[j] - step_size * slope
        phi = np.zeros_like(x)
        for j, alpha in zip(indices, alphas, strict=True):
            phi = phi + alpha * problem.gx(y[j], x, draw.inner) / nu
            if j != 0:
                phi = phi + alpha * j * problem.fx(y[j], x, draw.outer)
        x = x - step_size / outer_ratio * (phi / np.linalg.norm(phi) if normalized else phi)
        z = sum(weight * y[j] for j, weight in zip(indices, interpolation, strict=True))
        history.append({"inner_var": z, "outer_var": x, "y": dict(y)})
    return history


def transcribe(problem: Problem, run: Any, z: Array, x: Array, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Repeat a run of the library on the same draws."""
    rows, solver, times = DrawnRows(run), run.solver, run.solver.n_inner_steps
    others = [j for j in indices_of(solver.order) if j != 0]

    def by_index(batches: list[Any]) -> dict[int, list[Any]]:
        return {j: batches[i * times : (i + 1) * times] for i, j in enumerate(others)}

    draws = [
        SimpleNamespace(
            inner_loops=by_index(rows.inner_list(d.inner_loops, times * len(others)))
            | {0: rows.inner_list(d.inner_loop_at_zero, times if solver.order % 2 else 0)},
            outer_loops=by_index(rows.outer_list(d.outer_loops, times * len(others))),
            inner=rows.inner(d.inner),
            outer=rows.outer(d.outer),
        )
        for d in run.draws
    ]
    options = {"order": solver.order, "nu": float(solver.perturbation), "normalized": solver.normalized}
    return f2sa_p(problem, z, x, draws, **options, **settings)

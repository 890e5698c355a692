"""ITD: differentiation of F(z_T(x), x) through the T inner steps, in reverse mode."""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from .handover import DrawnRows
from .problems import Array, Problem, Rows


def itd_gradient(
    problem: Problem, z: Array, x: Array, draw: Any, step_size: float, momentum: float = 0.0, checkpoints: bool = False
) -> tuple[Array, Array]:
    """Return z_T and the gradient of F(z_T(x), x) in x, where the start z is constant."""

    def advance(state: tuple[Array, Array], rows: Rows) -> tuple[Array, Array]:
        z, u = state
        u = momentum * u + (1 - momentum) * problem.gz(z, x, rows)
        return z - step_size * u, u

    n_steps, length = len(draw.inner_loop), math.isqrt(len(draw.inner_loop)) + 1
    path = {0: (z, np.zeros_like(z))}
    for k, rows in enumerate(draw.inner_loop):
        path[k + 1] = advance(path[k], rows)
    end = path[n_steps][0]
    w, q = problem.fz(end, x, draw.outer), np.zeros_like(z)
    g = problem.fx(end, x, draw.outer)
    firsts = range(1, n_steps - length, length) if checkpoints else []
    last = firsts[-1] + length if firsts else 0
    path = {k: state for k, state in path.items() if k == 0 or k in firsts or k >= last}
    for k in range(n_steps, 0, -1):
        if k - 1 not in path:
            first = max(kept for kept in path if kept < k)
            for j in range(first, first + length):
                path[j + 1] = advance(path[j], draw.inner_loop[j])
        rows, z_before = draw.inner_loop[k - 1], path[k - 1][0]
        q = momentum * q + w
        g = g - step_size * (1 - momentum) * problem.cr(z_before, x, q, rows)
        if k > 1:
            w = w - step_size * (1 - momentum) * problem.hv(z_before, x, q, rows)
    return end, g


def itd(
    problem: Problem,
    z: Array,
    x: Array,
    draws: Sequence[Any],
    *,
    step_size: float,
    outer_ratio: float,
    warm_start: bool = True,
    **options: Any,
) -> list[dict[str, Any]]:
    """Draws: inner_loop (T), outer. Without a warm start, each loop begins at the initial z."""
    z_start = z
    history = []
    for draw in draws:
        z, gradient = itd_gradient(problem, z if warm_start else z_start, x, draw, step_size, **options)
        x = x - step_size / outer_ratio * gradient
        history.append({"inner_var": z, "outer_var": x})
    return history


def transcribe(problem: Problem, run: Any, z: Array, x: Array, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Repeat a run of the library on the same draws."""
    rows, times = DrawnRows(run), run.solver.n_inner_steps
    draws = [SimpleNamespace(inner_loop=rows.inner_list(d.inner, times), outer=rows.outer(d.outer)) for d in run.draws]
    solver = run.solver
    options = {"momentum": float(solver.momentum or 0.0), "checkpoints": solver.checkpoints}
    return itd(problem, z, x, draws, warm_start=solver.warm_start, **options, **settings)

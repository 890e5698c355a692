"""ITD: differentiation of F(z_T(x), x) through the T inner steps, in reverse mode."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from .handover import DrawnRows
from .problems import Array, Problem


def itd_gradient(problem: Problem, z: Array, x: Array, draw: Any, step_size: float) -> tuple[Array, Array]:
    """Return z_T and the gradient of F(z_T(x), x) in x, where the start z is constant."""
    path = [z]
    for rows in draw.inner_loop:
        path.append(path[-1] - step_size * problem.gz(path[-1], x, rows))
    w = problem.fz(path[-1], x, draw.outer)
    g = problem.fx(path[-1], x, draw.outer)
    for k in range(len(draw.inner_loop), 0, -1):
        rows, z_before = draw.inner_loop[k - 1], path[k - 1]
        g = g - step_size * problem.cr(z_before, x, w, rows)
        if k > 1:
            w = w - step_size * problem.hv(z_before, x, w, rows)
    return path[-1], g


def itd(
    problem: Problem,
    z: Array,
    x: Array,
    draws: Sequence[Any],
    *,
    step_size: float,
    outer_ratio: float,
    warm_start: bool = True,
) -> list[dict[str, Any]]:
    """Draws: inner_loop (T), outer. Without a warm start, each loop begins at the initial z."""
    z_start = z
    history = []
    for draw in draws:
        z, gradient = itd_gradient(problem, z if warm_start else z_start, x, draw, step_size)
        x = x - step_size / outer_ratio * gradient
        history.append({"inner_var": z, "outer_var": x})
    return history


def transcribe(problem: Problem, run: Any, z: Array, x: Array, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Repeat a run of the library on the same draws."""
    rows, times = DrawnRows(run), run.solver.n_inner_steps
    draws = [SimpleNamespace(inner_loop=rows.inner_list(d.inner, times), outer=rows.outer(d.outer)) for d in run.draws]
    return itd(problem, z, x, draws, warm_start=run.solver.warm_start, **settings)

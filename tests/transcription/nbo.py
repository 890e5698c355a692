"""NBO: T gradient steps on the two linear systems with one Hessian, then the Newton step, then one outer step."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from .handover import DrawnRows
from .problems import Array, Problem


def nbo(
    problem: Problem, z: Array, x: Array, draws: Sequence[Any], *, step_size: float, outer_ratio: float
) -> list[dict[str, Any]]:
    """Draws: inner, inner_loop (T), outer, cross, x_outer."""
    u = np.zeros_like(z)
    history = []
    for draw in draws:
        g_y, f_y = problem.gz(z, x, draw.inner), problem.fz(z, x, draw.outer)
        v, w = np.zeros_like(z), np.zeros_like(z)
        for t, rows in enumerate(draw.inner_loop):
            # u is -v of the library, w the Newton step of u.
            slope_v = (problem.hv(z, x, v, rows) if t else 0) - g_y
            slope_w = problem.hv(z, x, w - u, rows) + f_y
            v, w = v - step_size * slope_v, w - step_size * slope_w
        z, u = z - v, u - w
        x = x - step_size / outer_ratio * (problem.fx(z, x, draw.x_outer) - problem.cr(z, x, u, draw.cross))
        history.append({"inner_var": z, "v": -u, "outer_var": x})
    return history


def transcribe(problem: Problem, run: Any, z: Array, x: Array, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Repeat a run of the library on the same draws."""
    rows, times = DrawnRows(run), run.solver.n_inner_steps
    draws = [
        SimpleNamespace(
            inner=rows.inner(d.inner),
            inner_loop=[rows.inner(d.first), *rows.inner_list(d.products, times - 1)],
            outer=rows.outer(d.outer),
            cross=rows.inner(d.cross),
            x_outer=rows.outer(d.outer_cross),
        )
        for d in run.draws
    ]
    return nbo(problem, z, x, draws, **settings)

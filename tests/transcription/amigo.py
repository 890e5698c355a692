"""AmIGO: warm-started inner steps, warm-started steps on the linear system, then one outer step."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from .handover import DrawnRows
from .problems import Array, Problem


def amigo(
    problem: Problem, z: Array, x: Array, draws: Sequence[Any], *, step_size: float, outer_ratio: float
) -> list[dict[str, Any]]:
    """Draws: inner_loop (T), outer, linear_loop (T), cross."""
    v = np.zeros_like(z)
    history = []
    for draw in draws:
        for rows in draw.inner_loop:
            z = z - step_size * problem.gz(z, x, rows)
        f_z = problem.fz(z, x, draw.outer)
        f_x = problem.fx(z, x, draw.outer)
        for rows in draw.linear_loop:
            v = v - step_size * (problem.hv(z, x, v, rows) + f_z)
        x = x - step_size / outer_ratio * (problem.cr(z, x, v, draw.cross) + f_x)
        history.append({"inner_var": z, "v": v, "outer_var": x})
    return history


def transcribe(problem: Problem, run: Any, z: Array, x: Array, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Repeat a run of the library on the same draws."""
    rows, times = DrawnRows(run), run.solver.n_inner_steps
    draws = [
        SimpleNamespace(
            inner_loop=rows.inner_list(d.inner_loop, times),
            linear_loop=rows.inner_list(d.neumann.products, times),
            cross=rows.inner(d.neumann.cross),
            outer=rows.outer(d.neumann.outer),
        )
        for d in run.draws
    ]
    return amigo(problem, z, x, draws, **settings)

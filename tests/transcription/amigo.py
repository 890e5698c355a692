"""AmIGO: warm-started inner steps, warm-started steps on the linear system, then one outer step."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from .handover import DrawnRows
from .problems import Array, Problem


def amigo(
    problem: Problem,
    z: Array,
    x: Array,
    draws: Sequence[Any],
    *,
    step_size: float,
    outer_ratio: float,
    v_step: float | None = None,
    normal: bool = False,
) -> list[dict[str, Any]]:
    """Draws: inner_loop (T), outer, linear_loop (T, or 2T for normal equations), cross."""
    v_step = step_size if v_step is None else v_step
    v = np.zeros_like(z)
    history = []
    for draw in draws:
        for rows in draw.inner_loop:
            z = z - step_size * problem.gz(z, x, rows)
        f_z = problem.fz(z, x, draw.outer)
        f_x = problem.fx(z, x, draw.outer)
        for first, second in zip(draw.linear_loop[::2], draw.linear_loop[1::2], strict=True) if normal else ():
            v = v - v_step * problem.hv(z, x, problem.hv(z, x, v, first) + f_z, second)
        for rows in () if normal else draw.linear_loop:
            v = v - v_step * (problem.hv(z, x, v, rows) + f_z)
        x = x - step_size / outer_ratio * (problem.cr(z, x, v, draw.cross) + f_x)
        history.append({"inner_var": z, "v": v, "outer_var": x})
    return history


def transcribe(problem: Problem, run: Any, z: Array, x: Array, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Repeat a run of the library on the same draws."""
    rows, times, normal = DrawnRows(run), run.solver.n_inner_steps, run.solver.normal_equations
    draws = [
        SimpleNamespace(
            inner_loop=rows.inner_list(d.inner_loop, times),
            linear_loop=rows.inner_list(d.neumann.products, 2 * times if normal else times),
            cross=rows.inner(d.neumann.cross),
            outer=rows.outer(d.neumann.outer),
        )
        for d in run.draws
    ]
    v_step = None if run.solver.v_step is None else float(run.solver.v_step)
    return amigo(problem, z, x, draws, v_step=v_step, normal=normal, **settings)

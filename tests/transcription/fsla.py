"""FSLA: one step on z, one on v at the new z, then one on x with STORM momentum at the new z and v."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from .handover import DrawnRows
from .problems import Array, Problem, Rows


def _d_x(problem: Problem, point: tuple[Array, Array, Array], inner: Rows, outer: Rows) -> Array:
    z, v, x = point
    return problem.cr(z, x, v, inner) + problem.fx(z, x, outer)


def fsla(
    problem: Problem,
    z: Array,
    x: Array,
    draws: Sequence[Any],
    *,
    step_size: float,
    outer_ratio: float,
    momentum: float | None = 0.5,
) -> list[dict[str, Any]]:
    """Draws: inner (for z), v_inner, v_outer, x_inner, x_outer."""
    v = np.zeros_like(z)
    previous, dh = None, None
    history = []
    for t, draw in enumerate(draws, start=1):
        rho = step_size * t**-0.5
        z = z - rho * problem.gz(z, x, draw.inner)
        v = v - rho * (problem.hv(z, x, v, draw.v_inner) + problem.fz(z, x, draw.v_outer))
        point = (z, v, x)
        new = _d_x(problem, point, draw.x_inner, draw.x_outer)
        if t == 1:
            dh = new
        else:
            a = min(1.0, momentum * t**-0.5 if momentum is not None else rho)
            dh = new + (1.0 - a) * (dh - _d_x(problem, previous, draw.x_inner, draw.x_outer))
        previous = point
        x = x - step_size / outer_ratio * t**-0.5 * dh
        history.append({"inner_var": z, "v": v, "outer_var": x, "dh": dh})
    return history


def transcribe(problem: Problem, run: Any, z: Array, x: Array, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Repeat a run of the library on the same draws."""
    rows = DrawnRows(run)
    draws = [
        SimpleNamespace(
            inner=rows.inner(d.inner),
            v_inner=rows.inner(d.v_rows.inner),
            v_outer=rows.outer(d.v_rows.outer),
            x_inner=rows.inner(d.x_rows.inner),
            x_outer=rows.outer(d.x_rows.outer),
        )
        for d in run.draws
    ]
    given = run.solver.momentum
    return fsla(problem, z, x, draws, momentum=None if given is None else float(given), **settings)

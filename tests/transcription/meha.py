"""MEHA: gradient steps on F / c + G - (Moreau envelope of G), with y near the proximal point."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from .handover import DrawnRows
from .problems import Array, Problem


def meha(
    problem: Problem,
    z: Array,
    x: Array,
    draws: Sequence[Any],
    *,
    step_size: float,
    outer_ratio: float,
    gam: float = 10.0,
    c_0: float = 1.0,
    q: float = 0.48,
    eta: float | None = None,
) -> list[dict[str, Any]]:
    """Draws: inner_at_z (the move of y), x_inner, inner (the move of z), x_outer, outer (the move of z)."""
    y = z
    history = []
    for k, draw in enumerate(draws):
        c = c_0 * (k + 1) ** q
        d_y = problem.gz(y, x, draw.inner_at_z) + (y - z) / gam
        y = y - (step_size if eta is None else eta) * d_y
        d_x = problem.fx(z, x, draw.x_outer) / c + problem.gx(z, x, draw.x_inner) - problem.gx(y, x, draw.x_inner)
        x = x - step_size / outer_ratio * d_x
        d_z = problem.fz(z, x, draw.outer) / c + problem.gz(z, x, draw.inner) - (z - y) / gam
        z = z - step_size * d_z
        history.append({"inner_var": z, "outer_var": x, "y": y})
    return history


def transcribe(problem: Problem, run: Any, z: Array, x: Array, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Repeat a run of the library on the same draws."""
    rows, solver = DrawnRows(run), run.solver
    draws = [
        SimpleNamespace(
            inner_at_z=rows.inner(d.y_inner),
            x_inner=rows.inner(d.x_inner),
            inner=rows.inner(d.z_inner),
            x_outer=rows.outer(d.x_outer),
            outer=rows.outer(d.z_outer),
        )
        for d in run.draws
    ]
    eta = None if solver.y_step_size is None else float(solver.y_step_size)
    fixed = {"gam": float(solver.gamma), "c_0": float(solver.c_0), "q": float(solver.c_power), "eta": eta}
    return meha(problem, z, x, draws, **fixed, **settings)

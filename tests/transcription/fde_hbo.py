"""FdeHBO: recursive momentum on three estimates, with central differences instead of second derivatives."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from .handover import DrawnRows
from .problems import Array, Problem


def fd_residual(problem: Problem, z: Array, x: Array, v: Array, draw: Any, delta: float) -> Array:
    """Return the gradient in v of ½ v'Hv + v'∇zF, with a difference of gradients instead of H."""
    plus, minus = (problem.gz(z + sign * delta * v, x, draw.v_inner) for sign in (1, -1))
    return (plus - minus) / (2 * delta) + problem.fz(z, x, draw.v_outer)


def fd_hypergradient(problem: Problem, z: Array, x: Array, v: Array, draw: Any, delta: float) -> Array:
    """Return ∇xF plus the cross derivative times v, with a difference of gradients instead of that derivative."""
    plus, minus = (problem.gx(z + sign * delta * v, x, draw.x_inner) for sign in (1, -1))
    return problem.fx(z, x, draw.x_outer) + (plus - minus) / (2 * delta)


def fde_hbo(
    problem: Problem,
    z: Array,
    x: Array,
    draws: Sequence[Any],
    *,
    step_size: float,
    outer_ratio: float,
    momentum: float = 0.5,
    delta: float = 1e-3,
    v_radius: float = np.inf,
) -> list[dict[str, Any]]:
    """Draws: inner, v_inner, v_outer, x_inner, x_outer."""
    v = np.zeros_like(z)
    before = (z, x, v)
    h_g = h_r = h_f = np.nan
    history = []
    for t, draw in enumerate(draws, start=1):
        new = (
            problem.gz(z, x, draw.inner),
            fd_residual(problem, z, x, v, draw, delta),
            fd_hypergradient(problem, z, x, v, draw, delta),
        )
        if t == 1:
            h_g, h_r, h_f = new
        else:
            eta = min(1.0, momentum * (t - 1) ** (-2 / 3))
            old_g = problem.gz(before[0], before[1], draw.inner)
            old_r = fd_residual(problem, *before, draw, delta)
            old_f = fd_hypergradient(problem, *before, draw, delta)
            h_g = eta * new[0] + (1 - eta) * (h_g + new[0] - old_g)
            h_r = eta * new[1] + (1 - eta) * (h_r + new[1] - old_r)
            h_f = eta * new[2] + (1 - eta) * (h_f + new[2] - old_f)
        before = (z, x, v)
        step = step_size / np.cbrt(t)
        z, x, w = z - step * h_g, x - step / outer_ratio * h_f, v - step * h_r
        v = w * min(1.0, v_radius / np.linalg.norm(w))
        history.append({"inner_var": z, "outer_var": x, "v": v})
    return history


def transcribe(problem: Problem, run: Any, z: Array, x: Array, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Repeat a run of the library on the same draws."""
    rows, solver = DrawnRows(run), run.solver
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
    radius = np.inf if solver.v_radius is None else float(solver.v_radius)
    parameters = {"momentum": float(solver.momentum), "delta": float(solver.perturbation), "v_radius": radius}
    return fde_hbo(problem, z, x, draws, **parameters, **settings)

"""PZOBO: the response of the inner loop to x is estimated by Gaussian perturbations of x."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from .handover import DrawnRows, gaussians
from .problems import Array, Problem, Rows


def _inner_loop(problem: Problem, z: Array, x: Array, batches: Sequence[Rows], step_size: float) -> Array:
    for rows in batches:
        z = z - step_size * problem.gz(z, x, rows)
    return z


def pzobo(
    problem: Problem,
    z: Array,
    x: Array,
    draws: Sequence[Any],
    *,
    step_size: float,
    outer_ratio: float,
    smoothing: float = 0.01,
) -> list[dict[str, Any]]:
    """Draws: inner_loop (T, common to all loops of the step), outer, gaussians (K, d)."""
    history = []
    for draw in draws:
        z_start = z
        z = _inner_loop(problem, z_start, x, draw.inner_loop, step_size)
        f_z, f_x = problem.fz(z, x, draw.outer), problem.fx(z, x, draw.outer)
        gaussians = np.atleast_2d(draw.gaussians)
        gradient = f_x
        for u in gaussians:
            z_u = _inner_loop(problem, z_start, x + smoothing * u, draw.inner_loop, step_size)
            delta = (z_u - z) / smoothing
            gradient = gradient + (delta @ f_z) * u / len(gaussians)
        x = x - step_size / outer_ratio * gradient
        history.append({"inner_var": z, "outer_var": x})
    return history


def transcribe(problem: Problem, run: Any, z: Array, x: Array, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Repeat a run of the library on the same draws."""
    rows, solver = DrawnRows(run), run.solver
    draws = [
        SimpleNamespace(
            inner_loop=rows.inner_list(d.inner_loop, solver.n_inner_steps),
            outer=rows.outer(d.outer),
            gaussians=gaussians(run, d, x),
        )
        for d in run.draws
    ]
    return pzobo(problem, z, x, draws, smoothing=float(solver.smoothing), **settings)

"""Forward mode: Z = dz/dx is carried through the inner steps, or its products with a few directions of x."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from .handover import DrawnRows, signs
from .problems import Array, Problem


def forward_mode(
    problem: Problem,
    z: Array,
    x: Array,
    draws: Sequence[Any],
    *,
    step_size: float,
    outer_ratio: float,
    warm_start: bool = True,
    reset: bool = True,
) -> list[dict[str, Any]]:
    """Draws: inner_loop (T), outer, signs (K, d), or None for the coordinates of x."""
    z_start = z
    history = []
    jacobian = np.zeros((problem.p, problem.d))
    for draw in draws:
        z = z if warm_start else z_start
        columns = np.eye(problem.d) if draw.signs is None else draw.signs.T
        if reset:
            jacobian = np.zeros((problem.p, columns.shape[1]))
        for rows in draw.inner_loop:
            images = [
                problem.hv(z, x, t, rows) + problem.jf(z, x, u, rows)
                for t, u in zip(jacobian.T, columns.T, strict=True)
            ]
            jacobian = jacobian - step_size * np.column_stack(images)
            z = z - step_size * problem.gz(z, x, rows)
        f_z, f_x = problem.fz(z, x, draw.outer), problem.fx(z, x, draw.outer)
        if draw.signs is None:
            gradient = f_x + jacobian.T @ f_z
        else:
            gradient = f_x + np.mean([(t @ f_z) * u for t, u in zip(jacobian.T, columns.T, strict=True)], axis=0)
        x = x - step_size / outer_ratio * gradient
        history.append({"inner_var": z, "outer_var": x, "gradient": gradient})
    return history


def transcribe(problem: Problem, run: Any, z: Array, x: Array, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Repeat a run of the library on the same draws."""
    rows, solver = DrawnRows(run), run.solver
    is_exact = solver.n_directions == problem.d
    draws = [
        SimpleNamespace(
            inner_loop=rows.inner_list(d.inner_loop, solver.n_inner_steps),
            outer=rows.outer(d.outer),
            signs=None if is_exact else signs(run, d, x),
        )
        for d in run.draws
    ]
    return forward_mode(problem, z, x, draws, warm_start=solver.warm_start, reset=solver.reset, **settings)

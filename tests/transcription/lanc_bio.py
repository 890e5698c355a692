"""LancBiO: an incremental Lanczos process on Hessians that change from step to step, restarted from its residual."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from .handover import DrawnRows
from .problems import Array, Problem


def lanc_bio(
    problem: Problem,
    z: Array,
    x: Array,
    draws: Sequence[Any],
    *,
    step_size: float,
    outer_ratio: float,
    m: int,
    residual: bool = True,
) -> list[dict[str, Any]]:
    """Draws: inner_loop (T), inner (for products of the Hessian), cross, outer."""
    v = np.zeros_like(z)
    history = []
    for k, draw in enumerate(draws):
        for rows in draw.inner_loop:
            z = z - step_size * problem.gz(z, x, rows)
        b = -problem.fz(z, x, draw.outer)
        if k % m == 0:
            v_bar = v if residual else np.zeros_like(v)
            w = problem.hv(z, x, v_bar, draw.inner) if residual else v_bar
            columns: list[Array] = []
            alphas: list[float] = []
            betas: list[float] = []
            omega, image_size = b - w, 0.0
        exhausted = len(columns) == problem.p or np.sum(omega**2) <= np.finfo(float).eps * image_size**2
        if exhausted:
            problem.hv(z, x, np.zeros_like(z), draw.inner)  # the library evaluates this product as well
        else:
            beta = np.linalg.norm(omega)
            q = omega / beta
            u = problem.hv(z, x, q, draw.inner)
            if columns:
                u = u - beta * columns[-1]
                betas.append(beta)
            alpha = q @ u
            columns.append(q)
            alphas.append(alpha)
            omega, image_size = u - alpha * q, np.linalg.norm(u)
        basis = np.column_stack(columns)
        tridiagonal = np.diag(alphas) + np.diag(betas, 1) + np.diag(betas, -1)
        v = v_bar + basis @ np.linalg.solve(tridiagonal, basis.T @ (b - w))
        x = x - step_size / outer_ratio * (problem.cr(z, x, v, draw.cross) + problem.fx(z, x, draw.outer))
        history.append({"inner_var": z, "outer_var": x, "v": v, "dimension": len(columns)})
    return history


def transcribe(problem: Problem, run: Any, z: Array, x: Array, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Repeat a run of the library on the same draws."""
    rows, solver = DrawnRows(run), run.solver
    draws = [
        SimpleNamespace(
            inner_loop=rows.inner_list(d.inner_loop, solver.n_inner_steps),
            inner=rows.inner(d.neumann.products),
            cross=rows.inner(d.neumann.cross),
            outer=rows.outer(d.neumann.outer),
        )
        for d in run.draws
    ]
    return lanc_bio(problem, z, x, draws, m=solver.period, residual=solver.warm_start, **settings)

"""LancBiO: an incremental Lanczos process on Hessians that change from step to step, restarted from its residual."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from .handover import DrawnRows
from .problems import Array, Problem
from .sub_bio import loops_with_products


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
    growth: tuple[int, int] | None = None,
) -> list[dict[str, Any]]:
    """Draws: inner_loop (T), inner (for products of the Hessian), cross, outer.

    With growth = (l, c) the dimension is 1 at first and grows by c percent every l steps, up to m, with a restart.
    """
    dimension = m if growth is None else 1
    since_restart = 0
    v = np.zeros_like(z)
    history = []
    for k, draw in enumerate(draws):
        for rows in draw.inner_loop:
            z = z - step_size * problem.gz(z, x, rows)
        b = -problem.fz(z, x, draw.outer)
        if growth is not None and k > 0 and k % growth[0] == 0 and dimension < m:
            dimension = min(m, math.ceil(Fraction(dimension * (100 + growth[1]), 100)))
            since_restart = 0
        if since_restart % dimension == 0:
            v_bar = v if residual else np.zeros_like(v)
            w = problem.hv(z, x, v_bar, draw.inner) if residual else v_bar
            columns: list[Array] = []
            alphas: list[float] = []
            betas: list[float] = []
            omega, image_size = b - w, 0.0
        since_restart += 1
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
    solver = run.solver
    growth = None if solver.growth_period is None else (solver.growth_period, solver.growth_percent)
    draws = loops_with_products(DrawnRows(run), run)
    return lanc_bio(problem, z, x, draws, m=solver.period, growth=growth, residual=solver.warm_start, **settings)

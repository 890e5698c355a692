"""Neumann-AID: inner steps, then the inverse Hessian of one training batch by a truncated geometric series."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from .handover import DrawnRows
from .problems import Array, Problem


def neumann_aid(
    problem: Problem,
    z: Array,
    x: Array,
    draws: Sequence[Any],
    *,
    step_size: float,
    outer_ratio: float,
    terms: int,
    differ: bool = False,
) -> list[dict[str, Any]]:
    """Draws: inner_loop (T), inner (for all products), outer. The series has ``terms`` + 1 terms."""
    history = []
    for draw in draws:
        for rows in draw.inner_loop:
            z = z - step_size * problem.gz(z, x, rows)
        p = v1 = first = problem.fz(z, x, draw.outer)
        for _ in range(terms):
            v1 = v1 - step_size * problem.hv(z, x, v1, draw.inner)
            p = p + v1
        v2 = step_size * p
        if differ:
            eps = 0.01 / np.linalg.norm(first)
            plus, minus = problem.gx(z + eps * p, x, draw.inner), problem.gx(z - eps * p, x, draw.inner)
            v3 = step_size * (plus - minus) / (2 * eps)
        else:
            v3 = problem.cr(z, x, v2, draw.inner)
        x = x - step_size / outer_ratio * (problem.fx(z, x, draw.outer) - v3)
        history.append({"inner_var": z, "outer_var": x, "v": -v2})
    return history


def transcribe(problem: Problem, run: Any, z: Array, x: Array, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Repeat a run of the library on the same draws."""
    rows, solver = DrawnRows(run), run.solver
    draws = [
        SimpleNamespace(
            inner_loop=rows.inner_list(d.inner_loop, solver.n_inner_steps),
            inner=rows.inner(d.neumann.cross),
            outer=rows.outer(d.neumann.outer),
        )
        for d in run.draws
    ]
    return neumann_aid(problem, z, x, draws, terms=solver.n_neumann, differ=solver.finite_difference, **settings)

"""DARTS: an outer step along the derivative of one inner step, with a difference for the second derivatives."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from .handover import DrawnRows
from .problems import Array, Problem


def darts(
    problem: Problem,
    z: Array,
    x: Array,
    draws: Sequence[Any],
    *,
    step_size: float,
    outer_ratio: float,
    radius: float = 0.01,
    second_order: bool = True,
) -> list[dict[str, Any]]:
    """Draws: inner, outer."""
    history = []
    for draw in draws:
        if second_order:
            unrolled = z - step_size * problem.gz(z, x, draw.inner)
            vector = problem.fz(unrolled, x, draw.outer)
            g = problem.fx(unrolled, x, draw.outer)
            eps = radius / np.linalg.norm(vector)
            plus, minus = (problem.gx(z + sign * eps * vector, x, draw.inner) for sign in (1, -1))
            g = g - step_size * (plus - minus) / (2 * eps)
        else:
            g = problem.fx(z, x, draw.outer)
        x = x - step_size / outer_ratio * g
        z = z - step_size * problem.gz(z, x, draw.inner)
        history.append({"inner_var": z, "outer_var": x})
    return history


def transcribe(problem: Problem, run: Any, z: Array, x: Array, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Repeat a run of the library on the same draws."""
    rows, solver = DrawnRows(run), run.solver
    draws = [SimpleNamespace(inner=rows.inner_list(d.inner, 1)[0], outer=rows.outer(d.outer)) for d in run.draws]
    options = {"radius": float(solver.perturbation), "second_order": not solver.first_order}
    return darts(problem, z, x, draws, **options, **settings)

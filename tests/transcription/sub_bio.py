"""SubBiO: v solves its system in the plane of two normalized vectors, b and (I - theta H) v."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from .handover import DrawnRows
from .problems import Array, Problem


def sub_bio(
    problem: Problem,
    z: Array,
    x: Array,
    draws: Sequence[Any],
    *,
    step_size: float,
    outer_ratio: float,
    theta: float | None = None,
) -> list[dict[str, Any]]:
    """Draws: inner_loop (T), inner (for products of the Hessian), cross, outer."""
    theta = step_size if theta is None else theta
    v = np.zeros_like(z)
    history = []
    for draw in draws:
        for rows in draw.inner_loop:
            z = z - step_size * problem.gz(z, x, rows)
        b = -problem.fz(z, x, draw.outer)
        w = v - theta * problem.hv(z, x, v, draw.inner)
        plane = [b / np.linalg.norm(b)]
        if np.any(w):
            plane.append(w / np.linalg.norm(w))
        images = [problem.hv(z, x, vector, draw.inner) for vector in plane]
        if len(plane) == 1:
            problem.hv(z, x, w, draw.inner)  # the library evaluates this product as well
        basis = np.column_stack(plane)
        v = basis @ np.linalg.solve(basis.T @ np.column_stack(images), basis.T @ b)
        x = x - step_size / outer_ratio * (problem.cr(z, x, v, draw.cross) + problem.fx(z, x, draw.outer))
        history.append({"inner_var": z, "outer_var": x, "v": v})
    return history


def transcribe(problem: Problem, run: Any, z: Array, x: Array, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Repeat a run of the library on the same draws."""
    rows, solver = DrawnRows(run), run.solver
    theta = None if solver.plane_step is None else float(solver.plane_step)
    return sub_bio(problem, z, x, loops_with_products(rows, run), theta=theta, **settings)


def loops_with_products(rows: DrawnRows, run: Any) -> list[Any]:
    """Return the draws of SubBiO and LancBiO."""
    return [
        SimpleNamespace(
            inner_loop=rows.inner_list(d.inner_loop, run.solver.n_inner_steps),
            inner=rows.inner(d.neumann.products),
            cross=rows.inner(d.neumann.cross),
            outer=rows.outer(d.neumann.outer),
        )
        for d in run.draws
    ]

"""AID-CG: inner steps, conjugate gradients on the system of one batch, and one outer step."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from .handover import DrawnRows
from .problems import Array, Problem


def solve_by_cg(
    product: Callable[[Array], Array], right: Array, start: Array | None, steps: int, tolerance: float
) -> Array:
    """Return an approximate solution u of A u = right; products after the end are evaluated and not used."""
    u = np.zeros_like(right) if start is None else start
    r = right if start is None else right - product(u)
    s = r
    ended = False
    for _ in range(steps):
        y = product(s)
        ended = ended or r @ r <= tolerance or s @ y <= 0
        if ended:
            continue
        a = (r @ r) / (s @ y)
        u, r_next = u + a * s, r - a * y
        s = r_next + (r_next @ r_next) / (r @ r) * s
        r = r_next
    return u


def aid_cg(
    problem: Problem,
    z: Array,
    x: Array,
    draws: Sequence[Any],
    *,
    step_size: float,
    outer_ratio: float,
    n_products: int,
    warm_z: bool = True,
    warm_u: bool = False,
    damping: float = 0.0,
    tolerance: float = 0.0,
) -> list[dict[str, Any]]:
    """Draws: inner_loop (T), inner (for all products), cross, outer. Here u solves (H + damping) u = +fz."""
    z_first, u = z, np.zeros_like(z)
    history = []
    for draw in draws:
        z = z if warm_z else z_first
        for rows in draw.inner_loop:
            z = z - step_size * problem.gz(z, x, rows)

        def damped_product(s: Array, z: Array = z, x: Array = x, draw: Any = draw) -> Array:
            return problem.hv(z, x, s, draw.inner) + damping * s

        right = problem.fz(z, x, draw.outer)
        u = solve_by_cg(damped_product, right, u if warm_u else None, n_products, tolerance)
        x = x - step_size / outer_ratio * (problem.fx(z, x, draw.outer) - problem.cr(z, x, u, draw.cross))
        history.append({"inner_var": z, "v": -u, "outer_var": x})
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
    options = {"damping": float(solver.damping), "tolerance": float(solver.tolerance)}
    options |= {"n_products": solver.n_products, "warm_z": solver.warm_start, "warm_u": solver.warm_start_v}
    return aid_cg(problem, z, x, draws, **options, **settings)

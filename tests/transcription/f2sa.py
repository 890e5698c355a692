"""F2SA: first-order penalty method; z tracks argmin G, and y tracks argmin F / lam + G."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from .handover import DrawnRows
from .problems import Array, Problem


def f2sa(
    problem: Problem,
    z: Array,
    x: Array,
    draws: Sequence[Any],
    *,
    step_size: float,
    outer_ratio: float,
    delta_0: float,
    shared_batch: bool,
    lambda_0: float = 1.0,
    published: bool = False,
    published_y_step: bool = False,
    constant: bool = False,
) -> list[dict[str, Any]]:
    """Draws: inner_loop, y_inner_loop, y_outer_loop (T each), inner (at y), inner_at_z, outer.

    `published` uses the printed exponent of delta, -1/7 in place of -6/7. `published_y_step` makes y follow
    the planned alpha_t = step_size t^(-5/7) / (2 lambda_0) instead of the actual multiplier; the two agree
    when lam grows as lambda_0 t^(1/7). `constant` is ALT-PBGD: constant lam and steps, equal ones for y and z.
    """
    y, lam = z, lambda_0
    history = []
    for t, draw in enumerate(draws, start=1):
        gamma = step_size if constant else step_size * t ** (-4 / 7)
        alpha = step_size * t ** (-5 / 7) / (2.0 * lambda_0) if published_y_step else gamma / (2.0 * lam)
        alpha = step_size / lam if constant else alpha
        loops = zip(draw.inner_loop, draw.y_inner_loop, draw.y_outer_loop, strict=True)
        for z_rows, y_inner, y_outer in loops:
            z = z - gamma * problem.gz(z, x, z_rows)
            y = y - alpha * (problem.fz(y, x, y_outer) + lam * problem.gz(y, x, y_inner))
        z_inner = draw.inner if shared_batch else draw.inner_at_z
        penalty = problem.gx(y, x, draw.inner) - problem.gx(z, x, z_inner)
        gradient = problem.fx(y, x, draw.outer) + lam * penalty
        x = x - step_size / outer_ratio * (1.0 if constant else t ** (-5 / 7)) * gradient
        if not constant:
            lam = lam + delta_0 * t ** (-1 / 7 if published else -6 / 7)
        history.append({"inner_var": z, "outer_var": x, "y": y, "lam": lam})
    return history


def transcribe(problem: Problem, run: Any, z: Array, x: Array, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Repeat a run of the library on the same draws."""
    rows, solver, times = DrawnRows(run), run.solver, run.solver.n_inner_steps
    draws = [
        SimpleNamespace(
            inner_loop=rows.inner_list(d.inner_loop, times),
            y_inner_loop=rows.inner_list(d.y_inner_loop, times),
            y_outer_loop=rows.outer_list(d.y_outer_loop, times),
            inner=rows.inner(d.inner),
            inner_at_z=rows.inner(d.inner_at_z),
            outer=rows.outer(d.outer),
        )
        for d in run.draws
    ]
    printed, constant = solver.schedule == "printed", solver.schedule == "constant"
    penalty = {
        "lambda_0": float(solver.lambda_0),
        "delta_0": float(solver.delta_0),
        "shared_batch": solver.shared_batch,
    }
    return f2sa(
        problem, z, x, draws, published=printed, published_y_step=printed, constant=constant, **penalty, **settings
    )

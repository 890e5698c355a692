"""SAMA: inner steps by SGD or Adam, then an outer step with the derivative of the last inner step."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from .handover import DrawnRows
from .problems import Array, Problem

B1, B2, EPS = 0.9, 0.999, 1e-8


def adam(q: Array, m: Array, v: Array, t: int, rate: float) -> tuple[Array, Array, Array, Array]:
    """Return a step of Adam, its derivative by the gradient in each coordinate, and the new averages."""
    m_new, v_new = B1 * m + (1 - B1) * q, B2 * v + (1 - B2) * q**2
    m_hat, v_hat = m_new / (1 - B1**t), v_new / (1 - B2**t)
    root = np.sqrt(v_hat)
    slope_m, slope_v = (1 - B1) / (1 - B1**t), 2 * (1 - B2) * q / (1 - B2**t)
    slope = slope_m / (root + EPS) - m_hat / (root + EPS) ** 2 * slope_v / (2 * root)
    return rate * m_hat / (root + EPS), rate * slope, m_new, v_new


def sama(
    problem: Problem,
    z: Array,
    x: Array,
    draws: Sequence[Any],
    *,
    step_size: float,
    outer_ratio: float,
    radius: float = 1.0,
    scale: float = 1.0,
    multitask: bool = False,
    adam_rate: float | None = None,
) -> list[dict[str, Any]]:
    """Draws: inner_loop (T), inner (for the difference), outer."""
    m = v = np.zeros_like(z)
    t, history = 0, []
    for draw in draws:
        for rows in draw.inner_loop:
            q, t = problem.gz(z, x, rows), t + 1
            if adam_rate is None:
                z, slope = z - step_size * q, np.full_like(z, step_size)
            else:
                move, slope, m, v = adam(q, m, v, t, adam_rate)
                z = z - move
        y = scale * slope * problem.fz(z, x, draw.outer)
        eps = radius / np.linalg.norm(y)
        g = problem.fx(z, x, draw.outer)
        g = g - problem.gx(z + eps * y, x, draw.inner) / (2 * eps)
        g = g + problem.gx(z - eps * y, x, draw.inner) / (2 * eps)
        x = x - step_size / outer_ratio * g
        z = z - eps * y if multitask else z
        history.append({"inner_var": z, "outer_var": x})
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
    options = {"radius": float(solver.perturbation), "scale": float(solver.response_scale), "multitask": solver.nudge}
    # The library's name "adam" stands for the rate 1e-3.
    return sama(problem, z, x, draws, adam_rate=1e-3 if solver.inner_optimizer else None, **options, **settings)

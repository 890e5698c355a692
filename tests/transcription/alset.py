"""ALSET: warm inner steps, then an outer step at the new z and the old x, both with sizes proportional to t^(-1/2)."""

from collections.abc import Sequence
from typing import Any

from .handover import alternating
from .neumann import n2
from .problems import Array, Problem


def alset(
    problem: Problem,
    z: Array,
    x: Array,
    draws: Sequence[Any],
    *,
    step_size: float,
    outer_ratio: float,
    n_neumann: int,
    neumann_step: float = 0.5,
) -> list[dict[str, Any]]:
    """Draws: inner_loop (T), outer, neumann, length (in 0..Q-1), cross."""
    history = []
    for t, draw in enumerate(draws, start=1):
        shrink = t**-0.5
        for rows in draw.inner_loop:
            z = z - step_size * shrink * problem.gz(z, x, rows)
        v = n2(problem, z, x, draw.outer, draw.neumann, draw.length, n_neumann, neumann_step)
        gradient = problem.fx(z, x, draw.outer) + problem.cr(z, x, v, draw.cross)
        x = x - step_size * shrink / outer_ratio * gradient
        history.append({"inner_var": z, "outer_var": x})
    return history


def transcribe(problem: Problem, run: Any, z: Array, x: Array, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Repeat a run of the library on the same draws."""
    draws, fixed = alternating(run, run.solver.n_inner_steps)
    return alset(problem, z, x, draws, **fixed, **settings)

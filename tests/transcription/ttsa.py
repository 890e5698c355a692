"""TTSA: one inner step and one outer step, with sizes proportional to t^(-2/5) and t^(-3/5)."""

from collections.abc import Sequence
from typing import Any

from .handover import alternating
from .neumann import hyp2
from .problems import Array, Problem


def ttsa(
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
    """Draws: inner, outer, neumann, length, cross. The outer step is taken at the new z."""
    history = []
    for t, draw in enumerate(draws, start=1):
        z = z - step_size * t ** (-2 / 5) * problem.gz(z, x, draw.inner)
        gradient = hyp2(problem, z, x, draw.outer, draw.neumann, draw.length, n_neumann, draw.cross, neumann_step)
        x = x - step_size / outer_ratio * t ** (-3 / 5) * gradient
        history.append({"inner_var": z, "outer_var": x})
    return history


def transcribe(problem: Problem, run: Any, z: Array, x: Array, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Repeat a run of the library on the same draws."""
    draws, fixed = alternating(run, 1)
    for draw in draws:
        draw.inner = draw.inner_loop[0]
    return ttsa(problem, z, x, draws, **fixed, **settings)

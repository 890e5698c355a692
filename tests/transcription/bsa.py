"""BSA: a loop of inner steps, then one outer step with the random-length Neumann estimate."""

from collections.abc import Sequence
from typing import Any

from .handover import alternating
from .neumann import hyp2
from .problems import Array, Problem


def bsa(
    problem: Problem,
    z: Array,
    x: Array,
    draws: Sequence[Any],
    *,
    step_size: float,
    outer_ratio: float,
    n_neumann: int,
    neumann_step: float = 0.5,
    warm_start: bool = True,
) -> list[dict[str, Any]]:
    """Draws: inner_loop, outer, neumann, length, cross.

    Without the warm start each loop begins at the initial z and its s-th move (s = 1, 2, ...) has size
    step_size / s; the length of the loop is that of the draw, so that it may grow with t.
    """
    z_start = z
    history = []
    for t, draw in enumerate(draws, start=1):
        if not warm_start:
            z = z_start
        for s, rows in enumerate(draw.inner_loop, start=1):
            size = step_size * t**-0.5 if warm_start else step_size / s
            z = z - size * problem.gz(z, x, rows)
        gradient = hyp2(problem, z, x, draw.outer, draw.neumann, draw.length, n_neumann, draw.cross, neumann_step)
        x = x - step_size / outer_ratio * t**-0.5 * gradient
        history.append({"inner_var": z, "outer_var": x})
    return history


def transcribe(problem: Problem, run: Any, z: Array, x: Array, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Repeat a run of the library on the same draws."""
    draws, fixed = alternating(run, run.solver.n_inner_steps)
    return bsa(problem, z, x, draws, warm_start=run.solver.warm_start, **fixed, **settings)

"""StocBiO: warm-started inner steps, then one outer step with the truncated Neumann estimate."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from .handover import DrawnRows
from .neumann import hyp1
from .problems import Array, Problem


def stocbio(
    problem: Problem,
    z: Array,
    x: Array,
    draws: Sequence[Any],
    *,
    step_size: float,
    outer_ratio: float,
    neumann_step: float = 0.5,
) -> list[dict[str, Any]]:
    """Draws: inner_loop (T), outer, neumann (Q), cross."""
    history = []
    for draw in draws:
        for rows in draw.inner_loop:
            z = z - step_size * problem.gz(z, x, rows)
        gradient = hyp1(problem, z, x, draw.outer, draw.neumann, draw.cross, neumann_step)
        x = x - step_size / outer_ratio * gradient
        history.append({"inner_var": z, "outer_var": x})
    return history


def transcribe(problem: Problem, run: Any, z: Array, x: Array, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Repeat a run of the library on the same draws."""
    rows, times, n_neumann = DrawnRows(run), run.solver.n_inner_steps, run.solver.n_neumann
    draws = [
        SimpleNamespace(inner_loop=rows.inner_list(d.inner_loop, times), **rows.series(d.neumann, n_neumann))
        for d in run.draws
    ]
    return stocbio(problem, z, x, draws, neumann_step=float(run.solver.neumann_step), **settings)

"""StocBiO: warm-started inner steps, then one outer step with the truncated Neumann estimate."""

from collections.abc import Sequence
from typing import Any

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

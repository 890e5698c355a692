"""VRBO: SARAH estimates carried through an inner loop, restarted from all rows every `period` outer steps."""

from collections.abc import Sequence
from typing import Any

from .neumann import hyp1
from .problems import Array, Problem


def vrbo(
    problem: Problem,
    z: Array,
    x: Array,
    draws: Sequence[Any],
    *,
    step_size: float,
    outer_ratio: float,
    period: int,
    n_inner_steps: int,
    n_neumann: int,
    neumann_step: float = 0.5,
) -> list[dict[str, Any]]:
    """Draws, as lists over k = 0..T: inner, outer, neumann (lists of Q), cross."""
    dz, dh = None, None
    history = []
    for s, draw in enumerate(draws):
        if s % period == 0:
            dz = problem.gz(z, x)
            dh = hyp1(problem, z, x, None, [None] * n_neumann, None, neumann_step)
        z_prev, x_prev = z, x
        x = x - step_size / outer_ratio * dh
        for k in range(n_inner_steps + 1):
            rest = (draw.outer[k], draw.neumann[k], draw.cross[k], neumann_step)
            dz = dz + problem.gz(z, x, draw.inner[k]) - problem.gz(z_prev, x_prev, draw.inner[k])
            dh = dh + hyp1(problem, z, x, *rest) - hyp1(problem, z_prev, x_prev, *rest)
            z_prev, x_prev = z, x
            if k < n_inner_steps:
                z = z - step_size * dz
        history.append({"inner_var": z, "outer_var": x, "dz": dz, "dh": dh})
    return history

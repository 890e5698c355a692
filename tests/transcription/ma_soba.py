"""MA-SOBA: SOBA, where x moves along the moving average of its directions up to the step before."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .directions import directions
from .handover import single
from .problems import Array, Problem


def ma_soba(
    problem: Problem,
    z: Array,
    x: Array,
    draws: Sequence[Any],
    *,
    step_size: float,
    outer_ratio: float,
    theta: float = 1.0,
) -> list[dict[str, Any]]:
    """Draws: inner, outer. The average starts at 0, so x does not move in the first step."""
    v, average = np.zeros_like(z), np.zeros_like(x)
    history = []
    for t, draw in enumerate(draws, start=1):
        rho = step_size * t**-0.5
        gamma = step_size / outer_ratio * t**-0.5
        weight = min(1.0, theta * t**-0.5)
        d_z, d_v, d_x = directions(problem, (z, v, x), draw.inner, draw.outer)
        x = x - gamma * average
        z, v = z - rho * d_z, v - rho * d_v
        average = (1.0 - weight) * average + weight * d_x
        history.append({"inner_var": z, "v": v, "outer_var": x, "average": average})
    return history


def transcribe(problem: Problem, run: Any, z: Array, x: Array, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Repeat a run of the library on the same draws."""
    return ma_soba(problem, z, x, single(run), theta=float(run.solver.momentum), **settings)

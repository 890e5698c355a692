"""SOBA: simultaneous stochastic steps on z, v and x, all with sizes proportional to t^(-1/2)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .directions import ball, box, directions
from .handover import single
from .problems import Array, Problem


def soba(
    problem: Problem,
    z: Array,
    x: Array,
    draws: Sequence[Any],
    *,
    step_size: float,
    outer_ratio: float,
    bounds: Sequence[float] | None = None,
    v_radius: float | None = None,
) -> list[dict[str, Any]]:
    """Draws: inner, outer."""
    v = np.zeros_like(z)
    history = []
    for t, draw in enumerate(draws, start=1):
        rho = step_size * t**-0.5
        gamma = step_size / outer_ratio * t**-0.5
        d_z, d_v, d_x = directions(problem, (z, v, x), draw.inner, draw.outer)
        z, v, x = z - rho * d_z, ball(v - rho * d_v, v_radius), box(x - gamma * d_x, bounds)
        history.append({"inner_var": z, "v": v, "outer_var": x})
    return history


def transcribe(problem: Problem, run: Any, z: Array, x: Array, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Repeat a run of the library on the same draws."""
    return soba(problem, z, x, single(run), **settings)

"""SPABA: the recursive estimates of SRBA, restarted at random instead of periodically."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .directions import ball, directions
from .handover import single
from .problems import Array, Problem


def spaba(
    problem: Problem,
    z: Array,
    x: Array,
    draws: Sequence[Any],
    *,
    step_size: float,
    outer_ratio: float,
    v_radius: float | None = None,
) -> list[dict[str, Any]]:
    """Draws: inner, outer, refresh (True for a full-batch step; the first step always is)."""
    v = np.zeros_like(z)
    z_prev, v_prev, x_prev = z, v, x
    d_z, d_v, d_x = np.zeros_like(z), np.zeros_like(z), np.zeros_like(x)
    history = []
    for t, draw in enumerate(draws, start=1):
        if t == 1 or draw.refresh:
            d_z, d_v, d_x = directions(problem, (z, v, x), None, None)
        else:
            new_z, new_v, new_x = directions(problem, (z, v, x), draw.inner, draw.outer)
            old_z, old_v, old_x = directions(problem, (z_prev, v_prev, x_prev), draw.inner, draw.outer)
            d_z, d_v, d_x = d_z + new_z - old_z, d_v + new_v - old_v, d_x + new_x - old_x
        z_prev, v_prev, x_prev = z, v, x
        z = z - step_size * d_z
        v = ball(v - step_size * d_v, v_radius)
        x = x - step_size / outer_ratio * d_x
        history.append({"inner_var": z, "v": v, "outer_var": x})
    return history


def transcribe(problem: Problem, run: Any, z: Array, x: Array, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Repeat a run of the library on the same draws."""
    draws = single(run)
    for one, drawn in zip(draws, run.draws, strict=True):
        one.refresh = bool(drawn.coin)
    return spaba(problem, z, x, draws, **settings)

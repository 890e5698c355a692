"""SBO-LSVRG: sampled directions corrected by a reference point, which a coin replaces by the current point."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .directions import ball, directions
from .handover import single
from .problems import Array, Problem


def sbo_lsvrg(
    problem: Problem,
    z: Array,
    x: Array,
    draws: Sequence[Any],
    *,
    step_size: float,
    outer_ratio: float,
    v_radius: float | None = None,
) -> list[dict[str, Any]]:
    """Draws: inner, outer, refresh (True replaces the reference; the first step always does)."""
    u = z, np.zeros_like(z), x
    history = []
    for t, draw in enumerate(draws):
        if t == 0 or draw.refresh:
            reference, mean = u, directions(problem, u, None, None)
            estimate = mean
        else:
            here = directions(problem, u, draw.inner, draw.outer)
            there = directions(problem, reference, draw.inner, draw.outer)
            estimate = tuple(a - b + c for a, b, c in zip(here, there, mean, strict=True))
        d_z, d_v, d_x = (step_size * part for part in estimate)
        u = u[0] - d_z, ball(u[1] - d_v, v_radius), u[2] - d_x / outer_ratio
        history.append(dict(zip(("inner_var", "v", "outer_var"), u, strict=True)))
    return history


def transcribe(problem: Problem, run: Any, z: Array, x: Array, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Repeat a run of the library on the same draws."""
    draws = single(run)
    for one, drawn in zip(draws, run.draws, strict=True):
        one.refresh = bool(drawn.coin)
    return sbo_lsvrg(problem, z, x, draws, **settings)

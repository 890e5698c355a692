"""SRBA: recursive estimates of the three directions, restarted by a full-batch pass every `period` steps."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .directions import ball, box, directions
from .handover import single
from .problems import Array, Problem


def srba(
    problem: Problem,
    z: Array,
    x: Array,
    draws: Sequence[Any],
    *,
    step_size: float,
    outer_ratio: float,
    period: int,
    v_radius: float | None = None,
    bounds: Sequence[float] | None = None,
    v: Array | None = None,
) -> list[dict[str, Any]]:
    """Draws: inner, outer (not used in full-batch steps)."""
    rho, gamma = step_size, step_size / outer_ratio
    u = (z, np.zeros_like(z) if v is None else v, x)
    u_prev = u
    estimate = (np.zeros_like(z), np.zeros_like(z), np.zeros_like(x))
    history = []
    for s, draw in enumerate(draws):
        if s % period == 0:
            estimate = directions(problem, u, None, None)
        else:
            here = directions(problem, u, draw.inner, draw.outer)
            there = directions(problem, u_prev, draw.inner, draw.outer)
            estimate = tuple(e + h - t for e, h, t in zip(estimate, here, there, strict=True))
        d_z, d_v, d_x = estimate
        u_prev = u
        z, v, x = u
        u = (z - rho * d_z, ball(v - rho * d_v, v_radius), box(x - gamma * d_x, bounds))
        history.append({"inner_var": u[0], "v": u[1], "outer_var": u[2]})
    return history


def transcribe(problem: Problem, run: Any, z: Array, x: Array, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Repeat a run of the library on the same draws."""
    return srba(problem, z, x, single(run), period=run.solver.period, **settings)

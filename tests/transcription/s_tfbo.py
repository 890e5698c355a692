"""S-TFBO: simultaneous steps on z, v and x, each divided by the root of a sum of squared norms."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .directions import directions
from .handover import single
from .problems import Array, Problem


def s_tfbo(
    problem: Problem,
    z: Array,
    x: Array,
    draws: Sequence[Any],
    *,
    step_size: float,
    outer_ratio: float,
) -> list[dict[str, Any]]:
    """Draws: inner, outer."""
    alpha, beta, gamma = outer_ratio, 1 / step_size, 1 / step_size
    v = np.zeros_like(z)
    history = []
    for draw in draws:
        d_z, d_v, d_x = directions(problem, (z, v, x), draw.inner, draw.outer)
        beta = np.hypot(beta, np.linalg.norm(d_z))
        gamma = np.hypot(gamma, np.linalg.norm(d_v))
        alpha = np.hypot(alpha, np.linalg.norm(d_x))
        phi = max(beta, gamma)
        z, v, x = z - d_z / beta, v - d_v / phi, x - d_x / (alpha * phi)
        history.append({"inner_var": z, "v": v, "outer_var": x})
    return history


def transcribe(problem: Problem, run: Any, z: Array, x: Array, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Repeat a run of the library on the same draws."""
    return s_tfbo(problem, z, x, single(run), **settings)

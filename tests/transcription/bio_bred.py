"""BiO-BreD, SBiO-BreD and ASBiO-BreD, for any step of x: a function of x and of the estimated hypergradient."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .itd import itd_gradient
from .neumann import hyp2
from .problems import Array, Problem

OuterStep = Callable[[Array, Array], Array]


def plain_step(size: float) -> OuterStep:
    """psi = |y|^2/2, R = 0."""
    return lambda x, w: x - size * w


def soft_step(size: float, strength: float) -> OuterStep:
    """psi = |y|^2/2, R = strength |y|_1: each coordinate of x - size w goes towards 0 by size * strength."""

    def step(x: Array, w: Array) -> Array:
        y, least = x - size * w, size * strength
        return np.where(y > least, y - least, np.where(y < -least, y + least, 0.0))

    return step


def entropic_step(size: float) -> OuterStep:
    """psi = sum y log y on the simplex."""

    def step(x: Array, w: Array) -> Array:
        weights = x * np.exp(-size * w)
        return weights / weights.sum()

    return step


def diagonal_step(size: float, constant: float, lower: float, upper: float) -> OuterStep:
    """psi = y'Hy/2 with H = sqrt(average of w^2) + constant, R = 0, and x in a box."""
    average: Any = 0.0

    def step(x: Array, w: Array) -> Array:
        nonlocal average
        average = 0.99 * average + 0.01 * w**2
        return np.clip(x - size * w / (np.sqrt(average) + constant), lower, upper)

    return step


def bio_bred(
    problem: Problem, z: Array, x: Array, draws: Sequence[Any], *, inner_step: float, outer_step: OuterStep
) -> list[dict[str, Any]]:
    """Draws: inner_loop, a list of K times None, and outer, None: all batches are full."""
    history = []
    for draw in draws:
        z, w = itd_gradient(problem, z, x, draw, inner_step)
        x = outer_step(x, w)
        history.append({"inner_var": z, "outer_var": x})
    return history


def sbio_bred(
    problem: Problem,
    z: Array,
    x: Array,
    draws: Sequence[Any],
    *,
    inner_step: float,
    outer_step: OuterStep,
    n_neumann: int,
    neumann_step: float,
) -> list[dict[str, Any]]:
    """Draws: inner, outer, neumann, length, cross. Both moves are from the old point."""
    history = []
    for draw in draws:
        d_z = problem.gz(z, x, draw.inner)
        w = hyp2(problem, z, x, draw.outer, draw.neumann, draw.length, n_neumann, draw.cross, neumann_step)
        z, x = z - inner_step * d_z, outer_step(x, w)
        history.append({"inner_var": z, "outer_var": x})
    return history


def asbio_bred(
    problem: Problem,
    z: Array,
    x: Array,
    draws: Sequence[Any],
    *,
    inner_step: float,
    outer_step: OuterStep,
    n_neumann: int,
    neumann_step: float,
    period: int,
) -> list[dict[str, Any]]:
    """Draws as for `sbio_bred`; every ``period`` steps, all rows are read with the drawn length."""
    history, last, d_z, w = [], (z, x), np.zeros_like(z), np.zeros_like(x)

    def hypergradient(z: Array, x: Array, draw: Any) -> Array:
        return hyp2(problem, z, x, draw.outer, draw.neumann, draw.length, n_neumann, draw.cross, neumann_step)

    for t, draw in enumerate(draws):
        if t % period == 0:
            d_z = problem.gz(z, x, None)
            w = hyp2(problem, z, x, None, [None] * draw.length, draw.length, n_neumann, None, neumann_step)
        else:
            d_z = d_z + problem.gz(z, x, draw.inner) - problem.gz(*last, draw.inner)
            w = w + hypergradient(z, x, draw) - hypergradient(*last, draw)
        last = (z, x)
        z, x = z - inner_step * d_z, outer_step(x, w)
        history.append({"inner_var": z, "outer_var": x})
    return history

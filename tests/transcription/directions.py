"""The three directions of a single-loop method, and two projections."""

from collections.abc import Sequence

import numpy as np

from .problems import Array, Problem, Rows

State = tuple[Array, Array, Array]  # (z, v, x)


def directions(problem: Problem, u: State, inner: Rows, outer: Rows) -> State:
    """D_z = grad_z G, D_v = H v + grad_z F, D_x = (cross) v + grad_x F, on the given rows."""
    z, v, x = u
    d_z = problem.gz(z, x, inner)
    d_v = problem.hv(z, x, v, inner) + problem.fz(z, x, outer)
    d_x = problem.cr(z, x, v, inner) + problem.fx(z, x, outer)
    return d_z, d_v, d_x


def ball(v: Array, radius: float | None) -> Array:
    """Project onto the ball of this radius around 0, if a radius is given."""
    norm = np.linalg.norm(v)
    return v if radius is None or norm <= radius else v * (radius / norm)


def box(x: Array, bounds: Sequence[float] | None) -> Array:
    """Clip each coordinate to the bounds, if bounds are given."""
    return x if bounds is None else np.clip(x, bounds[0], bounds[1])

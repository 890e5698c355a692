"""Estimates of the constants of a problem, which never exceed them: for mu_G, they are never below it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from bilevel import BilevelProblem
from bilevel._core import trees
from bilevel._core.compilation import arithmetic, compiled
from bilevel._core.types import Array, Point
from bilevel.oracles import Oracles
from bilevel.problems.certificate import Region, box_around, radius_with_start

_DRAWS, _ASCENTS = 512, 12  # random points of a search, and steps of ascent from each


def sample_constants(
    problem: BilevelProblem, radius: float | None = None, box: Any = None, seed: int = 0
) -> dict[str, float]:
    """Estimate each constant by the largest derivative at random points, rows and directions, improved by ascent."""
    region = Region(radius or radius_with_start(problem, 0.0) + 1, *box_around(problem, box))
    rng = np.random.default_rng(seed)
    with arithmetic(np.float64):
        oracles = problem.oracles.in_float64()
        start = trees.cast(problem.start, np.float64)
        flat, unravel = ravel_pytree((start.inner_var, start.outer_var))
        unravel = jax.tree_util.Partial(unravel)
        values = {"mu_G": _least_curvature(oracles, start, unravel, random_points(start, region, rng, 16))}
        oracles = oracles.with_batches(1, "iid")
        for level, n, orders in (("F", oracles.n_outer, (1, 2, 3)), ("G", oracles.n_inner, (2, 3, 4))):
            for order in orders:
                draws = random_points(start, region, rng, _DRAWS), rng.standard_normal((_DRAWS, flat.size))
                rows = rng.integers(0, n, (_DRAWS, 1)).astype(np.int32)
                largest = _largest_derivatives(oracles, *draws, rows, unravel, level, order)
                values[f"L{order - 1}_{level}"] = float(np.max(largest))
    return values


def random_points(start: Point, region: Region, rng: np.random.Generator, count: int) -> np.ndarray:
    """Return random (z, x) in the region, with half of the z on its boundary."""
    assert region.radius is not None and region.lower is not None and region.upper is not None
    z = rng.standard_normal((count, trees.flat(start.inner_var).size))
    lengths = region.radius * np.minimum(1, 2 * rng.uniform(size=(count, 1)))
    z *= lengths / np.linalg.norm(z, axis=1, keepdims=True)
    return np.hstack([z, rng.uniform(region.lower, region.upper, (count, len(region.lower)))])


@compiled("level", "order")
def _largest_derivatives(
    oracles: Oracles, points: Array, directions: Array, rows: Array, unravel: Any, level: str, order: int
) -> Array:
    value = oracles.outer_value if level == "F" else oracles.inner_value

    def one(point: Array, direction: Array, row: Array) -> Array:
        def along(direction: Array) -> Array:
            def derivative(t: Array, order: int) -> Array:
                if order == 0:
                    z, x = unravel(point + t * direction)
                    return value(Point(z, x, z), row)
                return jax.jvp(lambda t: derivative(t, order - 1), (t,), (jnp.ones_like(t),))[1]

            return derivative(jnp.zeros_like(point[0]), order)

        def ascend(_: Any, state: tuple[Array, Array]) -> tuple[Array, Array]:
            direction, largest = state
            size, slope = jax.value_and_grad(along)(direction)
            return _unit(slope, direction), jnp.maximum(largest, jnp.abs(size))

        start = _unit(direction, direction), jnp.zeros_like(point[0])
        return jax.lax.fori_loop(0, _ASCENTS, ascend, start)[1]

    return jax.vmap(one)(points, directions, rows)


def _unit(vector: Array, otherwise: Array) -> Array:
    """Return the vector divided by its norm, or ``otherwise`` if it is 0."""
    norm = jnp.linalg.norm(vector)
    return jnp.where(norm > 0, vector / jnp.where(norm > 0, norm, 1), otherwise)


def _least_curvature(oracles: Oracles, start: Point, unravel: Any, points: np.ndarray) -> float:
    """Return the smallest eigenvalue of ∇²zz G at some points."""
    z, unravel_z = ravel_pytree(start.inner_var)

    @jax.jit
    def hessian(oracles: Oracles, point: Array, basis: Array) -> Array:
        z, x = unravel(point)
        return jax.lax.map(lambda v: ravel_pytree(oracles.hvp(Point(z, x, unravel_z(v))))[0], basis)

    matrices = (hessian(oracles, point, np.eye(z.size)) for point in points)
    return float(min(np.linalg.eigvalsh(np.asarray(matrix))[0] for matrix in matrices))

"""Constants of any problem, estimated: the largest derivatives that a search finds.

Certificate bounds of any strongly convex problem follow from them: an indication, no proof.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from bilevel import _tree as trees
from bilevel._precision import arithmetic
from bilevel._types import Array, Point
from bilevel.oracles import Oracles
from bilevel.problems.certificate import NOTHING, Bounds

if TYPE_CHECKING:
    from bilevel.problems.base import BilevelProblem
from bilevel.problems.constants import Found, Region, Values, box_around, radius_with_start

_DRAWS, _ASCENTS = 512, 12


def sample_constants(problem: "BilevelProblem", radius: float | None, box: Any, seed: int) -> Found:
    """Take the largest derivative of each order among many points, rows and directions, improved by ascent."""
    region = Region(radius or radius_with_start(problem, 0.0) + 1, *box_around(problem, box))
    rng = np.random.default_rng(seed)
    with arithmetic(np.float64):
        oracles = problem.oracles.in_float64().with_batches(1, "iid")
        size, unravel = _joint(problem)
        values: Values = {"mu_G": _least_curvature(problem, region, rng)}
        for level, n, orders in (("F", oracles.n_outer, (1, 2, 3)), ("G", oracles.n_inner, (2, 3, 4))):
            for order in orders:
                draws = _points(problem, region, rng, _DRAWS), rng.standard_normal((_DRAWS, size))
                rows = rng.integers(0, n, (_DRAWS, 1)).astype(np.int32)
                largest = _largest_derivatives(oracles, *draws, rows, unravel, level, order)
                values[f"L{order - 1}_{level}"] = float(np.max(largest))
    return values, dict.fromkeys(values, "estimate"), region


def _joint(problem: "BilevelProblem") -> tuple[int, Any]:
    """Return the size of (z, x) and how it goes back into trees."""
    start = trees.cast((problem.start.inner_var, problem.start.outer_var), np.float64)
    flat, unravel = ravel_pytree(start)
    return flat.size, jax.tree_util.Partial(unravel)


def _points(problem: "BilevelProblem", region: Region, rng: np.random.Generator, count: int) -> np.ndarray:
    """Return random (z, x) of the region, half of the z on its edge."""
    assert region.radius is not None and region.lower is not None and region.upper is not None
    z = rng.standard_normal((count, trees.flat(problem.start.inner_var).size))
    lengths = region.radius * np.minimum(1, 2 * rng.uniform(size=(count, 1)))
    z *= lengths / np.linalg.norm(z, axis=1, keepdims=True)
    return np.hstack([z, rng.uniform(region.lower, region.upper, (count, len(region.lower)))])


@partial(jax.jit, static_argnames=("level", "order"))
def _largest_derivatives(
    oracles: Oracles, points: Array, directions: Array, rows: Array, unravel: Any, level: str, order: int
) -> Array:
    value = oracles.outer_value if level == "F" else oracles.inner_value

    def one(point: Array, direction: Array, row: Array) -> Array:
        def along(direction: Array) -> Array:
            def moved(t: Array) -> Array:
                z, x = unravel(point + t * direction)
                return value(Point(z, x, z), row)

            return _repeated_derivative(moved, order)(jnp.zeros_like(point[0]))

        def ascend(_: Any, state: tuple[Array, Array]) -> tuple[Array, Array]:
            direction, largest = state
            size, slope = jax.value_and_grad(along)(direction)
            return _unit(slope, direction), jnp.maximum(largest, jnp.abs(size))

        start = _unit(direction, direction), jnp.zeros_like(point[0])
        return jax.lax.fori_loop(0, _ASCENTS, ascend, start)[1]

    return jax.vmap(one)(points, directions, rows)


def _repeated_derivative(function: Callable[[Array], Array], order: int) -> Callable[[Array], Array]:
    if order == 0:
        return function
    slope = _repeated_derivative(function, order - 1)
    return lambda t: jax.jvp(slope, (t,), (jnp.ones_like(t),))[1]


def _unit(vector: Array, otherwise: Array) -> Array:
    """Return the vector divided by its norm; ``otherwise`` where it is 0."""
    norm = jnp.linalg.norm(vector)
    return jnp.where(norm > 0, vector / jnp.where(norm > 0, norm, 1), otherwise)


def _least_curvature(problem: "BilevelProblem", region: Region, rng: np.random.Generator, count: int = 16) -> float:
    """Return the smallest eigenvalue of ∇²zz G among some points."""
    oracles = problem.oracles.in_float64()
    _, unravel = _joint(problem)
    unravel_z = ravel_pytree(trees.cast(problem.start.inner_var, np.float64))[1]

    @jax.jit
    def hessian(oracles: Oracles, point: Array, basis: Array) -> Array:
        z, x = unravel(point)
        return jax.lax.map(lambda v: ravel_pytree(oracles.hvp(Point(z, x, unravel_z(v))))[0], basis)

    basis = np.eye(trees.flat(problem.start.inner_var).size)
    matrices = (hessian(oracles, point, basis) for point in _points(problem, region, rng, count))
    return float(min(np.linalg.eigvalsh(np.asarray(matrix))[0] for matrix in matrices))


class SampledBounds:
    """Bounds from constants sampled at this x, in a ball of z that holds the point."""

    why = "The losses are the user's own: their constants come from a search, and the true ones may be larger."

    def __init__(self, problem: "BilevelProblem") -> None:
        self._problem = problem

    def __call__(self, point: Point, direction: Point) -> Bounds:
        """Return the bounds of the whole space, with what the search finds in their place."""
        radius = 1 + float(np.linalg.norm(trees.flat(point.inner_var)))
        try:
            found = self._problem.constants(radius=radius, box=(point.outer_var, point.outer_var))
        except ValueError:
            return NOTHING  # the search met curvature that is not positive
        residual, v_residual = (float(np.linalg.norm(trees.flat(part))) for part in (direction.inner_var, direction.v))
        bend = found.L2_G * float(np.linalg.norm(trees.flat(point.v)))
        delta = residual / found.mu_G
        return Bounds(delta, found.mu_G, v_residual, bend, found.L1_F, bend + found.L1_F, found.L1_G)

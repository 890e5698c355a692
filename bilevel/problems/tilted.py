"""The inner level around a point, tilted so that the point is stationary: its products, its solves, its branch.

    Ĝ(z, x) = G(z, x) - gᵀz + λ/2 ||z - z0||²,   g = ∇z G(z0, x0)

The branch ẑ(x) of its stationary points goes through z0, however far z0 is from a minimizer of G; the damping λ makes
∇²zz Ĝ positive where ∇²zz G is not. Everything is in float64 and on all rows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bilevel import _tree as trees
from bilevel._programs import Compiled
from bilevel._types import Array, Point, PyTree, Scalar
from bilevel.oracles import Oracles

_POWER_STEPS = 30  # that estimate the largest curvature
_NEWTON_STEPS, _MOST_PRODUCTS = 20, 1000
_NEWTON_RESIDUAL = 1e-13  # of ||∇z G|| + ||(∇²zz G) z||: rounding


class TiltedLevel(NamedTuple):
    """Ĝ."""

    oracles: Oracles
    point: Point
    tilt: PyTree  # g
    damping: Scalar

    @classmethod
    def at(cls, oracles: Oracles, point: Point, damping: float) -> "TiltedLevel":
        return cls(oracles, point, _inner_grad(oracles, point), np.float64(damping))

    def grad(self, z: PyTree, x: PyTree, tilt: PyTree) -> PyTree:
        """Return ∇z Ĝ for another tilt."""
        pull = trees.scale(self.damping, trees.subtract(z, self.point.inner_var))
        return trees.add(
            trees.subtract(self.oracles.inner_grad(self.point._replace(inner_var=z, outer_var=x)), tilt), pull
        )

    def product(self, point: Point, w: PyTree) -> PyTree:
        """Return (∇²zz G + λ) w."""
        return trees.add(self.oracles.hvp(point._replace(v=w)), trees.scale(self.damping, w))


class _Solve(NamedTuple):
    """Conjugate gradients on their way: what is solved, what is left, and the smallest curvature met."""

    solution: PyTree
    left: PyTree
    move: PyTree
    left_sq: Array
    products: Array
    curvature: Array


@Compiled
def conjugate_gradients(level: TiltedLevel, point: Point, right: PyTree, accuracy: Scalar, limit: Scalar) -> _Solve:
    """Solve (∇²zz G + λ) w = right, until the residual is small or negative curvature is met."""
    goal = accuracy**2 * trees.norm_sq(right)

    def goes_on(at: _Solve) -> Array:
        return (at.left_sq > goal) & (at.products < limit) & (at.curvature > 0)

    def step(at: _Solve) -> _Solve:
        product = level.product(point, at.move)
        bend = trees.dot(at.move, product)
        length = jnp.where(bend > 0, at.left_sq / jnp.where(bend > 0, bend, 1), 0)
        left = trees.subtract(at.left, trees.scale(length, product))
        solution, left_sq = trees.add(at.solution, trees.scale(length, at.move)), trees.norm_sq(left)
        move = trees.add(left, trees.scale(left_sq / at.left_sq, at.move))
        curvature = jnp.minimum(at.curvature, bend / trees.norm_sq(at.move))
        return _Solve(solution, left, move, left_sq, at.products + 1, curvature)

    start = _Solve(trees.zeros_like(right), right, right, trees.norm_sq(right), jnp.int32(0), jnp.float64(jnp.inf))
    return jax.lax.while_loop(goes_on, step, start)


def follow(level: TiltedLevel, point: Point) -> tuple[Point, float, int]:
    """Go from z0 to the stationary point of Ĝ at another x, by Newton's method, to rounding."""
    left, size = _tilted_grad(level, point)
    products, scale = 0, max(float(norm(level.tilt) + norm(_product(level, point))), 1e-300)
    for _ in range(_NEWTON_STEPS):
        if size <= _NEWTON_RESIDUAL * scale:
            break
        found = conjugate_gradients(level, point, left, np.float64(1e-8), np.int32(_MOST_PRODUCTS))
        trial = point._replace(inner_var=trees.subtract(point.inner_var, found.solution))
        products, (trial_left, trial_size) = products + int(found.products), _tilted_grad(level, trial)
        if not trial_size < size:
            break
        point, left, size = trial, trial_left, trial_size
    return point, float(size / scale), products


@Compiled
def _tilted_grad(level: TiltedLevel, point: Point) -> tuple[PyTree, Array]:
    left = level.grad(point.inner_var, point.outer_var, level.tilt)
    return left, norm(left)


@Compiled
def _product(level: TiltedLevel, point: Point) -> PyTree:
    return level.product(point, point.inner_var)


@Compiled
def largest_curvature(level: TiltedLevel) -> Array:
    """Return the largest |eigenvalue| of ∇²zz G + λ, by power iterations from ∇z F and a fixed vector."""
    fixed = jax.tree.map(lambda leaf: jnp.cos(jnp.arange(leaf.size, dtype=leaf.dtype)).reshape(leaf.shape), level.tilt)

    def multiply(_: Array, carry: tuple[PyTree, Array]) -> tuple[PyTree, Array]:
        product = level.product(level.point, carry[0])
        size = norm(product)
        return trees.scale(1 / jnp.maximum(size, jnp.finfo(size.dtype).tiny), product), size

    first = trees.scale(1 / norm(fixed), fixed)
    return jax.lax.fori_loop(0, _POWER_STEPS, multiply, (first, jnp.zeros_like(norm(fixed))))[1]


_inner_grad = Compiled(lambda oracles, point: oracles.inner_grad(point))


def norm(tree: PyTree) -> Array:
    """Return the Euclidean norm over all leaves."""
    return jnp.sqrt(trees.norm_sq(tree))

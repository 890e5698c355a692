"""Rollback of a run that grows.

In the norms |z|² = z'Mz and |D|² = D'M^-1 D of a metric M, a move of z is ρ|D_z| long. Where an iteration with
step ρ is unstable, ρ times some curvature is above 2, and once that direction dominates, a move is longer than z is.
So a refresh is good where, for z and for v,

    ρ |D| <= ½ size,    size ← max(size, min(|z|, 2 size)) at a good refresh, and ten moves long at the first

Otherwise, or where anything became non-finite, the run rolls back to the last good refresh and halves its steps. After
ten good ones in a row they are doubled again, up to what they were; after the k-th rollback it takes 10 (k + 1).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from bilevel import _tree as trees
from bilevel._types import Array, Point, PyTree, Scalar
from bilevel.solvers.preconditioning import Preconditioning

_LONGEST_MOVE = 0.5  # of the size
_FIRST_MOVES = 10
_PATIENCE = 10  # good refreshes
_REACH = 1e6  # a point this much farther out than the last good one is not worth evaluating


class Rollback(NamedTuple):
    """The last good refresh, with D there, and the sizes of z and v; how much smaller steps are.

    ``streak`` counts good refreshes since steps last changed, ``rollbacks`` all the bad ones.
    """

    point: Point
    estimate: Point
    preconditioning: Preconditioning
    sizes: tuple[Array, Array]
    scale: Array
    streak: Array
    rollbacks: Array


def init_rollback(start: Point, preconditioning: Preconditioning, one: Array) -> Rollback:
    """Return the memory before the first refresh, which is taken as good."""
    zero = jnp.zeros_like(one)
    return Rollback(start, trees.zeros_like(start), preconditioning, (zero, zero), jnp.ones_like(one), zero, zero)


def check_refresh(
    last: Rollback, point: Point, exact: Point, preconditioning: Preconditioning, step: Scalar, first: Array
) -> Rollback:
    """Return the memory of this refresh if it is good, or else the last one with halved steps."""
    lengths, directions = measure(point, exact, preconditioning)
    moves = [step * direction for direction in directions]
    least = [jnp.where(first, _FIRST_MOVES * move, size) for move, size in zip(moves, last.sizes, strict=True)]
    # What grows by more than a factor of two may be growing without end.
    grown = [jnp.where(first, new, jnp.minimum(new, 2 * old)) for new, old in zip(lengths, least, strict=True)]
    sizes = jnp.maximum(grown[0], least[0]), jnp.maximum(grown[1], least[1])
    calm = [last.scale * move <= _LONGEST_MOVE * size for move, size in zip(moves, least, strict=True)]
    good = first | (calm[0] & calm[1] & jnp.isfinite(trees.largest((point, exact))))
    again = last.streak >= _PATIENCE * (1 + last.rollbacks)
    scale = jnp.where(again, jnp.minimum(2 * last.scale, 1), last.scale)
    streak = jnp.where(again, 0, last.streak + 1)
    here = Rollback(point, exact, preconditioning, sizes, scale, streak, last.rollbacks)
    back = last._replace(scale=last.scale / 2, streak=jnp.zeros_like(last.streak), rollbacks=last.rollbacks + 1)
    return jax.tree.map(lambda new, old: jnp.where(good, new, old), here, back)


def measure(point: Point, exact: Point, metric: Preconditioning) -> tuple[list[Array], list[Array]]:
    """Return the lengths of z and v, and those of their directions."""
    lengths = [_norm(part, metric) for part in (point.inner_var, point.v)]
    return lengths, [_dual_norm(part, metric) for part in (exact.inner_var, exact.v)]


def _norm(part: PyTree, metric: Preconditioning) -> Array:
    return trees.norm(part, metric.length_sq if jax.tree.leaves(metric.diagonal) else trees.norm_sq)


def _dual_norm(part: PyTree, metric: Preconditioning) -> Array:
    if not jax.tree.leaves(metric.diagonal):
        return trees.norm(part)
    return trees.norm(part, lambda part: trees.dot(part, metric.solve(part)))


def point_within_reach(last: Rollback, point: Point) -> Point:
    """Return the point, or the last good one where it is far out or not finite."""
    near = trees.norm(trees.subtract(point, last.point)) <= _REACH * jnp.hypot(1, trees.norm(last.point))
    return jax.tree.map(lambda new, old: jnp.where(near, new, old), point, last.point)

"""Rollback of a run whose iterates grow.

In the norms |z|² = z'Mz and |D|² = D'M^-1 D of the preconditioner M, a move of z has length ρ|D_z|. If the iteration
with step ρ is unstable, ρ times some curvature is above 2, and once that direction dominates, a move is longer than z
itself. A full-batch pass is therefore accepted if, for z and for v,

    ρ |D| <= ½ size,    size ← max(size, min(|z|, 2 size)) at an accepted pass, and ten moves at the first pass

Otherwise, or if anything is not finite, the run rolls back to the last accepted pass and halves its steps. After ten
accepted passes in a row the steps are doubled again, up to their initial size; after the k-th rollback, 10 (k + 1)
passes are required.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from bilevel._core import trees
from bilevel._core.types import Array, Point, PyTree, Scalar
from bilevel.solvers.auto.preconditioner import Preconditioner
from bilevel.solvers.moves import MovesState

_LONGEST_MOVE = 0.5  # relative to the size
_FIRST_MOVES = 10
_PATIENCE = 10  # accepted passes
_LARGEST_DISTANCE = 1e6  # from the last accepted point, relative to its norm; a point farther away is not evaluated


class Rollback(NamedTuple):
    """The last accepted pass: its point, D, M and the states of transformations; and the sizes of z and v.

    All steps are multiplied by ``scale``. ``streak`` counts the passes accepted since the scale last changed, and
    ``rollbacks`` those that were not accepted.
    """

    point: Point
    estimate: Point
    preconditioner: Preconditioner
    moves: MovesState
    sizes: tuple[Array, Array]
    scale: Array
    streak: Array
    rollbacks: Array


def init_rollback(start: Point, preconditioner: Preconditioner, moves: MovesState, like: Scalar) -> Rollback:
    """Return the state before the first pass, which is always accepted."""
    zero, one = jnp.zeros_like(like), jnp.ones_like(like)
    return Rollback(start, trees.zeros_like(start), preconditioner, moves, (zero, zero), one, zero, zero)


def check_pass(
    last: Rollback,
    point: Point,
    exact: Point,
    preconditioner: Preconditioner,
    moves_state: MovesState,
    step: Scalar,
    first: Array,
) -> Rollback:
    """Return the state of this pass if it is accepted, and otherwise that of the last one, with halved steps."""
    lengths, directions = measure(point, exact, preconditioner)
    moves = [step * direction for direction in directions]
    least = [jnp.where(first, _FIRST_MOVES * move, size) for move, size in zip(moves, last.sizes, strict=True)]
    # A variable that grows by more than a factor of two may be diverging.
    grown = [jnp.where(first, new, jnp.minimum(new, 2 * old)) for new, old in zip(lengths, least, strict=True)]
    sizes = jnp.maximum(grown[0], least[0]), jnp.maximum(grown[1], least[1])
    calm = [last.scale * move <= _LONGEST_MOVE * size for move, size in zip(moves, least, strict=True)]
    good = first | (calm[0] & calm[1] & jnp.isfinite(trees.largest((point, exact))))
    again = last.streak >= _PATIENCE * (1 + last.rollbacks)
    scale = jnp.where(again, jnp.minimum(2 * last.scale, 1), last.scale)
    streak = jnp.where(again, 0, last.streak + 1)
    here = Rollback(point, exact, preconditioner, moves_state, sizes, scale, streak, last.rollbacks)
    back = last._replace(scale=last.scale / 2, streak=jnp.zeros_like(last.streak), rollbacks=last.rollbacks + 1)
    return jax.tree.map(lambda new, old: jnp.where(good, new, old), here, back)


def measure(point: Point, exact: Point, preconditioner: Preconditioner) -> tuple[list[Array], list[Array]]:
    """Return the lengths of z and v, and those of their directions."""

    def dual_sq(part: PyTree) -> Array:
        return trees.dot(part, preconditioner.solve(part))

    lengths = [trees.norm(part, preconditioner.length_sq) for part in (point.inner_var, point.v)]
    return lengths, [trees.norm(part, dual_sq) for part in (exact.inner_var, exact.v)]


def point_to_evaluate(last: Rollback, point: Point) -> Point:
    """Return the point, or the last accepted one if the point is far away or not finite."""
    near = trees.norm(trees.subtract(point, last.point)) <= _LARGEST_DISTANCE * jnp.hypot(1, trees.norm(last.point))
    return jax.tree.map(lambda new, old: jnp.where(near, new, old), point, last.point)

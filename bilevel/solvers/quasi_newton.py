"""Limited-memory quasi-Newton matrices: what moves and changes of a gradient say of an inverse Hessian.

From H = α I, a pair (s, g) of a move and of the change of the gradient makes of H, by BFGS and by SR1,

    H ← (I - ρ s gᵀ) H (I - ρ g sᵀ) + ρ s sᵀ,  ρ = 1/(s·g);      H ← H + w wᵀ/(w·g),  w = s - H g

Matrices are never formed: BFGS multiplies by its two loops over the pairs, SR1 keeps w in the place of s. Pairs that
would spoil H are refused: those without positive curvature (BFGS) or with a vanishing w·g (SR1), and moves so short
that the rounding of gradients is most of their change.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from bilevel._types import AnyArray, Array, Scalar

FORMS = ("bfgs", "sr1")
_SMALLEST_COSINE = 1e-8  # of the angle between w and g, of SR1


class Pairs(NamedTuple):
    """Moves s (of SR1: w) and changes g, a row each, oldest first, and 1/(s·g); 0 where a row is empty or refused."""

    moves: AnyArray
    changes: AnyArray
    weights: AnyArray


def no_pairs(memory: int, like: AnyArray) -> Pairs:
    """Return room for so many pairs of vectors."""
    rows = jnp.zeros((memory, like.size), like.dtype)
    return Pairs(rows, rows, jnp.zeros(memory, like.dtype))


def put(pairs: Pairs, place: Array, pair: Pairs) -> Pairs:
    """Return the pairs with one of them replaced."""
    return jax.tree.map(lambda rows, row: rows.at[place].set(row), pairs, pair)


def push(pairs: Pairs, pair: Pairs) -> Pairs:
    """Return the pairs without the oldest and with a new one; as they were where that is refused."""
    taken = pair.weights != 0
    return jax.tree.map(lambda rows, row: jnp.where(taken, jnp.concatenate([rows[1:], row[None]]), rows), pairs, pair)


@dataclass(frozen=True)
class InverseHessian:
    """H as a function of the pairs, from a multiple of the identity."""

    form: str
    scale: Scalar

    def product(self, pairs: Pairs, vector: Array) -> Array:
        """Return H vector."""
        if self.form == "sr1":
            return self.scale * vector + (pairs.weights * (pairs.moves @ vector)) @ pairs.moves
        ahead, shares = jax.lax.scan(_back, vector, pairs, reverse=True)
        return jax.lax.scan(_forth, self.scale * ahead, (pairs, shares))[0]

    def pair(self, pairs: Pairs, begin: Array, move: Array, change: Array) -> Pairs:
        """Return the row of a new pair, whose move began at a point, with a weight of 0 where it is refused."""
        eps = jnp.finfo(move.dtype).eps
        if self.form == "sr1":
            kept = move - self.product(pairs, change)
            curvature = kept @ change
            sound = jnp.abs(curvature) > _SMALLEST_COSINE * jnp.linalg.norm(kept) * jnp.linalg.norm(change)
            sound &= kept @ kept > eps * (move @ move)  # else H has it already
        else:
            kept, curvature = move, move @ change
            sound = curvature > eps * (change @ change)
        sound &= move @ move > eps * (begin @ begin)
        return Pairs(kept, change, jnp.where(sound, 1 / jnp.where(sound, curvature, 1), 0))


def _back(ahead: Array, pair: Pairs) -> tuple[Array, Array]:
    share = pair.weights * (pair.moves @ ahead)
    return ahead - share * pair.changes, share


def _forth(ahead: Array, pair_and_share: tuple[Pairs, Array]) -> tuple[Array, None]:
    pair, share = pair_and_share
    return ahead + (share - pair.weights * (pair.changes @ ahead)) * pair.moves, None

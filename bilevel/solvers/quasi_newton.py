"""Limited-memory quasi-Newton approximations H of an inverse Hessian.

H starts at α I. A pair (s, g) of a move and the change of the gradient along it updates H by BFGS or by SR1:

    H ← (I - ρ s gᵀ) H (I - ρ g sᵀ) + ρ s sᵀ,  ρ = 1/(s·g);      H ← H + w wᵀ/(w·g),  w = s - H g

Matrices are never formed: BFGS multiplies by two loops over the pairs, and SR1 stores w instead of s. A pair is
rejected if it has no positive curvature (BFGS), if w·g vanishes (SR1), or if the move is so short that g consists
mostly of rounding errors.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from bilevel._core.types import AnyArray, Array, Scalar

FORMS = ("bfgs", "sr1")
_SMALLEST_COSINE = 1e-8  # of the angle between w and g, for SR1


class Pairs(NamedTuple):
    """Moves s (for SR1: w) and changes g, one per row, oldest first; and 1/(s·g), 0 for empty and rejected rows."""

    moves: AnyArray
    changes: AnyArray
    weights: AnyArray


def no_pairs(memory: int, like: AnyArray) -> Pairs:
    """Return ``memory`` empty rows."""
    rows = jnp.zeros((memory, like.size), like.dtype)
    return Pairs(rows, rows, jnp.zeros(memory, like.dtype))


def put(pairs: Pairs, row: Array, pair: Pairs) -> Pairs:
    """Return the pairs with one row replaced."""
    return jax.tree.map(lambda rows, new: rows.at[row].set(new), pairs, pair)


def push(pairs: Pairs, pair: Pairs) -> Pairs:
    """Return the pairs without the oldest and with a new one; a rejected pair changes nothing."""
    accepted = pair.weights != 0
    return jax.tree.map(
        lambda rows, new: jnp.where(accepted, jnp.concatenate([rows[1:], new[None]]), rows), pairs, pair
    )


@dataclass(frozen=True)
class InverseHessian:
    """H as a function of the pairs, starting from a multiple of the identity."""

    form: str
    scale: Scalar

    def product(self, pairs: Pairs, vector: Array) -> Array:
        """Return H vector."""
        if self.form == "sr1":
            return self.scale * vector + (pairs.weights * (pairs.moves @ vector)) @ pairs.moves
        product, weights = jax.lax.scan(_backward, vector, pairs, reverse=True)
        return jax.lax.scan(_forward, self.scale * product, (pairs, weights))[0]

    def pair(self, pairs: Pairs, start: Array, move: Array, change: Array) -> Pairs:
        """Return the row of a new pair, for a move from ``start``; its weight is 0 if the pair is rejected."""
        eps = jnp.finfo(move.dtype).eps
        if self.form == "sr1":
            stored = move - self.product(pairs, change)
            curvature = stored @ change
            accepted = jnp.abs(curvature) > _SMALLEST_COSINE * jnp.linalg.norm(stored) * jnp.linalg.norm(change)
            accepted &= stored @ stored > eps * (move @ move)  # otherwise H g = s holds already
        else:
            stored, curvature = move, move @ change
            accepted = curvature > eps * (change @ change)
        accepted &= move @ move > eps * (start @ start)
        return Pairs(stored, change, jnp.where(accepted, 1 / jnp.where(accepted, curvature, 1), 0))


def _backward(product: Array, pair: Pairs) -> tuple[Array, Array]:
    weight = pair.weights * (pair.moves @ product)
    return product - weight * pair.changes, weight


def _forward(product: Array, pair_and_weight: tuple[Pairs, Array]) -> tuple[Array, None]:
    pair, weight = pair_and_weight
    return product + (weight - pair.weights * (pair.changes @ product)) * pair.moves, None

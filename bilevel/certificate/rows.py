"""Passes over all rows, in pieces, so that few are in float64 at a time. Rows are columns here: (features, samples)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bilevel import trees
from bilevel.certificate.metric import DENSE
from bilevel.oracles import Samples
from bilevel.types import Array, PyTree

_PIECE = 2048


def summed(function: Callable[[Any, Array], PyTree], samples: Samples) -> PyTree:
    """Return the mean over rows: the function gives the sum over the data of a piece with weights."""
    pieces = samples.sliced(min(_PIECE, samples.n))

    def with_piece(index: Array, total: PyTree) -> PyTree:
        return trees.add(total, trees.scale(pieces.share(index), function(*pieces.take(index))))

    first = jnp.zeros((), jnp.int32)
    shapes = jax.eval_shape(lambda: function(*pieces.take(first)))
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return jax.lax.fori_loop(0, pieces.n_blocks, with_piece, nothing)


def whitened(rows: Array, inverse_root: Array) -> Array:
    """Return L⁻¹ d of each row: d'w = (L⁻¹d)'(L'w) <= ||L⁻¹d|| ||w||."""
    return inverse_root[:, None] * rows if inverse_root.ndim == 1 else inverse_root @ rows


def norms(rows: Array) -> Array:
    """Return the norm of each row."""
    return jnp.sqrt(jnp.sum(rows**2, axis=0))


def spread(rows: Array, weights: Array) -> Array:
    """Return the sum of weights dd', or for long rows its trace as a matrix of one number: the larger bound."""
    if rows.shape[0] > DENSE:
        return jnp.sum(weights * jnp.sum(rows**2, axis=0))[None, None]
    return (rows * weights) @ rows.T

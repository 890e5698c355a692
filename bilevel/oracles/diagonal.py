"""The diagonal of a matrix from a few of its products.

With signs s_k = ±1 and e_i the mean over probes k of s_ki (H s_k)_i,

    e_i = H_ii + sum over j ≠ i of H_ij (mean over k of s_ki s_kj)

The signs of a coordinate over the probes are a column of a Hadamard matrix, flipped at random. Coordinates are dealt
out to the columns at random, as evenly as can be: those of different columns do not disturb each other, so up to as
many coordinates as probes the diagonal is exact; beyond, it is unbiased.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from bilevel._types import Array, Count, PyTree

N_PROBES = 8  # a power of two


def probe_diagonal(product: Callable[[PyTree], PyTree], like: PyTree, index: Count) -> PyTree:
    """Return the diagonal of the symmetric matrix with these products; ``index`` chooses the signs."""
    flat, unravel = ravel_pytree(like)

    def one(probe: Array) -> Array:
        return probe * ravel_pytree(product(unravel(probe)))[0]

    # One after the other: together they would take the memory of as many full-batch passes.
    return unravel(jnp.mean(jax.lax.map(one, probe_signs(flat.size, index).astype(flat.dtype)), axis=0))


def probe_signs(size: int, index: Count) -> Array:
    """Return the signs of the probes, a row each; the same in every run."""
    from scipy.linalg import hadamard

    flip_key, deal_key = jax.random.split(jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), index))
    columns = jax.random.permutation(deal_key, np.arange(size, dtype=np.int32) % N_PROBES)
    flips = 2 * jax.random.bernoulli(flip_key, shape=(size,)).astype(jnp.int32) - 1
    return jnp.asarray(hadamard(N_PROBES, np.int32))[:, columns] * flips

"""Diagonals of the inner Hessian, which preconditioners divide by: in closed form, or estimated from a few products.

Oracles with `has_row_diagonals` give the diagonal of the Hessian of each row. For other oracles the diagonal of
H = ∇²zz G is estimated by probes. With signs s_k = ±1 and e the mean over probes k of s_k (H s_k),

    e_i = H_ii + sum over j ≠ i of H_ij (mean over k of s_ki s_kj)

The signs of a coordinate over the probes are a column of a Hadamard matrix, flipped at random. Coordinates are assigned
to columns at random and as evenly as possible, and coordinates of different columns do not disturb each other. The
estimate is therefore exact for up to `N_PROBES` coordinates, and unbiased for more.
"""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from bilevel._core import trees
from bilevel._core.types import Array, Count, Point, PyTree
from bilevel.oracles.base import Oracles, estimate

N_PROBES = 8  # a power of two


def _averaged(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Return a function of oracles that is averaged over the devices on which their rows lie."""

    @functools.wraps(function)
    def average(oracles: Oracles, *arguments: Any) -> PyTree:
        return oracles.average(function, *arguments)

    return average


def diagonal_passes(oracles: Oracles) -> int:
    """Return the number of Hessian-vector products per inner row that a diagonal takes; 1 in closed form."""
    return 1 if oracles.has_row_diagonals else N_PROBES


@_averaged
def inner_diagonal(oracles: Oracles, point: Point, index: Count = 0) -> PyTree:
    """Return the diagonal of ∇²zz G on all rows; if it is estimated, ``index`` chooses the signs."""
    return _diagonal(oracles, point, index, majorize=False)


@_averaged
def diagonal_majorizer(oracles: Oracles, point: Point, index: Count = 0) -> PyTree:
    """Return the diagonal of ∇²zz G, increased by the curvature that badly fitted rows have on the way to their fit."""
    return _diagonal(oracles, point, index, majorize=True)


@_averaged
def squared_diagonals(oracles: Oracles, point: Point) -> PyTree:
    """Return the mean over rows of the squares of their diagonal majorizers; 0 if there is no closed form."""
    if not oracles.has_row_diagonals:
        return trees.zeros_like(point.inner_var)
    return estimate(partial(oracles._row_diagonals, power=2, majorize=True), point, oracles.inner_samples, None)


@_averaged
def majorized_hvp(oracles: Oracles, point: Point) -> PyTree:
    """Return the product with v of a matrix whose diagonal is the majorizer; that of ∇²zz G without a closed form."""
    if not oracles.has_row_diagonals:
        return oracles.hvp(point)
    return estimate(oracles._majorized_product, point, oracles.inner_samples, None)


def _diagonal(oracles: Oracles, point: Point, index: Count, majorize: bool) -> PyTree:
    if not oracles.has_row_diagonals:
        return probe_diagonal(lambda v: oracles.hvp(point._replace(v=v)), point.inner_var, index)
    rows = estimate(partial(oracles._row_diagonals, power=1, majorize=majorize), point, oracles.inner_samples, None)
    return trees.add(rows, oracles._diagonal_regularization(point))


def probe_diagonal(product: Callable[[PyTree], PyTree], like: PyTree, index: Count) -> PyTree:
    """Return the diagonal of the symmetric matrix with these products; ``index`` chooses the signs."""
    flat, unravel = ravel_pytree(like)

    def one(probe: Array) -> Array:
        return probe * ravel_pytree(product(unravel(probe)))[0]

    # One after the other, since all probes together would need the memory of several full-batch passes.
    return unravel(jnp.mean(jax.lax.map(one, probe_signs(flat.size, index).astype(flat.dtype)), axis=0))


def probe_signs(size: int, index: Count) -> Array:
    """Return the signs of the probes, one row each; they are the same in every run."""
    from scipy.linalg import hadamard

    flip_key, deal_key = jax.random.split(jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), index))
    columns = jax.random.permutation(deal_key, np.arange(size, dtype=np.int32) % N_PROBES)
    flips = 2 * jax.random.bernoulli(flip_key, shape=(size,)).astype(jnp.int32) - 1
    return jnp.asarray(hadamard(N_PROBES, np.int32))[:, columns] * flips

"""Vector algebra on pytrees of arrays."""

import functools
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from bilevel._core.compilation import compiled
from bilevel._core.types import AnyArray, Array, PyTree, Scalar

add = partial(jax.tree.map, operator.add)
subtract = partial(jax.tree.map, operator.sub)
zeros_like = partial(jax.tree.map, jnp.zeros_like)
ones_like = partial(jax.tree.map, jnp.ones_like)


def scale(factor: Scalar, tree: PyTree) -> Any:
    """Return factor * tree."""
    return jax.tree.map(lambda leaf: factor * leaf, tree)


def dot(a: PyTree, b: PyTree) -> Array:
    """Return the inner product of two trees."""
    return sum(jax.tree.leaves(jax.tree.map(lambda s, t: (s * t).sum(), a, b)))  # type: ignore[return-value]


def norm_sq(tree: PyTree) -> Array:
    """Return the squared Euclidean norm over all leaves."""
    return dot(tree, tree)


def largest(tree: PyTree) -> Array:
    """Return the largest absolute value over all leaves."""
    return functools.reduce(jnp.maximum, [jnp.max(jnp.abs(leaf), initial=0) for leaf in jax.tree.leaves(tree)])


def norm(tree: PyTree, squared: Callable[[PyTree], Array] = norm_sq) -> Array:
    """Return the root of a quadratic form, by default the Euclidean norm, without overflow or underflow of squares."""
    exponent = jnp.frexp(largest(tree))[1]
    # Not by a division, which XLA may combine with others of the quadratic form.
    return jnp.ldexp(jnp.sqrt(squared(jax.tree.map(lambda leaf: jnp.ldexp(leaf, -exponent), tree))), exponent)


def is_finite(tree: PyTree) -> bool:
    """Return True if all leaves are finite."""
    return all(bool(np.all(np.isfinite(leaf))) for leaf in jax.tree.leaves(tree))


def to_numpy(tree: PyTree, dtype: DTypeLike | None = None) -> Any:
    """Return a copy of the tree in NumPy, in ``dtype`` if it is given."""
    return jax.tree.map(lambda leaf: np.array(leaf, dtype=dtype), tree)


def flat(tree: PyTree) -> np.ndarray:
    """Return the concatenated leaves of a tree, in float64."""
    return np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(tree)])


def put(array: AnyArray, dtype: DTypeLike | None = None) -> Array:
    """Return a NumPy array on the device. Unlike `jnp.asarray`, this compiles no program for its shape."""
    return jax.device_put(np.asarray(array, dtype))


def cast(tree: PyTree, dtype: DTypeLike) -> Any:
    """Return the tree with its floating leaves in ``dtype`` and the others as they are."""
    arrays = jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else put(leaf), tree)
    return jax.tree.map(lambda a: _convert(a, np.dtype(dtype)) if jnp.issubdtype(a.dtype, jnp.floating) else a, arrays)


@compiled("dtype")
def _convert(array: Array, dtype: np.dtype) -> Array:
    return array.astype(dtype)

"""The rows of one level: their layout, how a batch is drawn, taken, weighted and counted."""

from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from bilevel import trees
from bilevel.oracles.sampling import permuted, uniform_rows
from bilevel.types import Array, Count, PyTree

# Up to this many numbers per row the sample axis goes last, so that XLA's loops run along samples.
NARROW = 64


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["leaves", "row_weights"],
    meta_fields=["n", "axes", "dtype", "batch_size", "sampling"],
)
@dataclass(frozen=True)
class Samples:
    """Data of one level, one flat array per leaf.

    Attributes
    ----------
    leaves : pytree of arrays, the sample axis of each where `axes` says
    n : number of real rows; padding may follow
    axes : the sample axis of each leaf, in the order of ``jax.tree.leaves``
    dtype : the floating type that rows are taken in; the leaves may be held in a narrower one
    batch_size, sampling : how `draw` draws; see :mod:`bilevel.oracles.sampling`
    row_weights : weights of the rows of each block in its estimate, block after block; None where all are 1/b
    """

    leaves: PyTree
    n: int
    axes: tuple[int, ...]
    dtype: np.dtype
    batch_size: int = 1
    sampling: str = "full"
    row_weights: Array | None = None

    @classmethod
    def from_rows(
        cls, data: PyTree, dtype: DTypeLike, order: np.ndarray | None = None, narrow: int = NARROW
    ) -> "Samples":
        """Lay out a pytree of arrays whose first axis is the samples, in the given order of rows.

        The sample axis of a leaf goes last where a row holds at most ``narrow`` numbers.
        """
        leaves, structure = jax.tree.flatten(data)
        axes = tuple(leaf.ndim - 1 if prod(leaf.shape[1:]) <= narrow else 0 for leaf in leaves)

        def laid_out(leaf: np.ndarray, axis: int) -> Array:
            rows = leaf if order is None else leaf[order]
            if np.issubdtype(rows.dtype, np.floating):
                rows = rows.astype(dtype, copy=False)
            return jnp.asarray(np.ascontiguousarray(np.moveaxis(rows, 0, axis)))

        arrays = [laid_out(leaf, axis) for leaf, axis in zip(leaves, axes, strict=True)]
        return cls(jax.tree.unflatten(structure, arrays), leaves[0].shape[0], axes, np.dtype(dtype))

    @classmethod
    def shuffled(cls, data: PyTree, dtype: DTypeLike, rng: np.random.Generator, narrow: int = NARROW) -> "Samples":
        """Lay out rows in a random order: consecutive rows of a file are seldom independent."""
        n = jax.tree.leaves(data)[0].shape[0]
        return cls.from_rows(data, dtype, rng.permutation(n), narrow)

    def one(self) -> PyTree:
        """Return the first row."""
        return self._map(lambda leaf, axis: jnp.take(leaf, 0, axis=axis))

    @property
    def vmap_axes(self) -> PyTree:
        """The sample axes in the form that ``jax.vmap`` takes."""
        return jax.tree.unflatten(jax.tree.structure(self.leaves), self.axes)

    @property
    def n_blocks(self) -> int:
        """Number of blocks, the last of which may be short."""
        return -(-self.n // self.batch_size)

    @property
    def has_short_block(self) -> bool:
        """Whether the last block has fewer than `batch_size` rows."""
        return self.n % self.batch_size != 0

    def batched(self, batch_size: int, sampling: str) -> "Samples":
        """Return the same rows, drawn in batches of this size.

        Where the last block is short, samples-last data are padded, so that every block begins at an aligned address;
        rows-first data, which may be large, are left as they are.
        """
        plain = replace(self, batch_size=batch_size, sampling=sampling, row_weights=None)
        if sampling not in ("blocks", "reshuffle") or not plain.has_short_block:
            return plain
        if all(axis == 0 for axis in self.axes):
            return replace(plain, row_weights=plain._row_weights(real_rows_last=True))
        missing = -self.n % batch_size
        padded = self._map(partial(_padded, n=self.n, missing=missing))
        return replace(plain, leaves=padded, row_weights=plain._row_weights(real_rows_last=False))

    def _row_weights(self, real_rows_last: bool) -> Array:
        """Return the weights of all blocks where the last is short.

        Of unpadded data, XLA moves a slice that would reach past the end back: the last one then begins with rows of
        the block before it, which weigh nothing.
        """
        missing = -self.n % self.batch_size
        weights = np.full(self.n + missing, 1 / self.batch_size, self.dtype)
        weights[-self.batch_size :] = 1 / (self.batch_size - missing)
        if self.sampling == "reshuffle":
            # A pass visits each block once, whatever its size, so the short one must weigh less.
            weights[:] = self.n_blocks / self.n
        weights[-self.batch_size :][slice(missing) if real_rows_last else slice(-missing, None)] = 0
        return jnp.asarray(weights)

    def astype(self, dtype: DTypeLike) -> "Samples":
        """Return the same rows with floating leaves in ``dtype``."""
        return replace(
            self,
            leaves=trees.cast(self.leaves, dtype),
            dtype=np.dtype(dtype),
            row_weights=trees.cast(self.row_weights, dtype),
        )

    def widened(self) -> "Samples":
        """Return the same rows, cast to float64 as they are taken, not before."""
        wide = np.dtype(np.float64)
        return replace(self, dtype=wide, row_weights=trees.cast(self.row_weights, wide))

    @property
    def is_widened(self) -> bool:
        """Whether rows are held in a narrower type than they are taken in."""
        floats = (leaf for leaf in jax.tree.leaves(self.leaves) if jnp.issubdtype(leaf.dtype, jnp.floating))
        return any(leaf.dtype != self.dtype for leaf in floats)

    def draw(self, key: Array, index: Array, count: int | None = None) -> Any:
        """Draw the rows of step ``index``: one batch, or ``count`` of them along a leading axis."""
        shape = () if count is None else (count,)
        if self.sampling == "full":
            return None
        if self.sampling == "reshuffle":
            return self._next_of_pass(key, index, count)
        step_key = jax.random.fold_in(key, index)
        if self.sampling == "iid":
            return uniform_rows(step_key, (*shape, self.batch_size), self.n)
        return uniform_rows(step_key, shape, self.n) // self.batch_size

    def _next_of_pass(self, key: Array, index: Array, count: int | None) -> Array:
        def block(position: Array) -> Array:
            pass_key = jax.random.fold_in(key, position // self.n_blocks)
            return permuted(pass_key, position % self.n_blocks, self.n_blocks)

        if count is None:
            return block(index)
        return jax.vmap(block)(index * count + jnp.arange(count, dtype=jnp.int32))

    def take(self, rows: Any) -> tuple[PyTree, Array]:
        """Return the data of the rows, and weights such that sum(weights * values) is their estimate."""
        if rows is None:
            return trees.cast(self.leaves, self.dtype), self._all_weights()
        if self.sampling == "iid":
            taken = self._map(lambda leaf, axis: jnp.take(leaf, rows, axis=axis))
            return trees.cast(taken, self.dtype), self._equal_weights()
        block = partial(jax.lax.dynamic_slice_in_dim, start_index=rows * self.batch_size, slice_size=self.batch_size)
        weights = self._equal_weights() if self.row_weights is None else block(self.row_weights)
        return trees.cast(self._map(lambda leaf, axis: block(leaf, axis=axis)), self.dtype), weights

    def _equal_weights(self) -> Array:
        return jnp.full(self.batch_size, 1 / self.batch_size, self.dtype)

    def _all_weights(self) -> Array:
        held = jax.tree.leaves(self.leaves)[0].shape[self.axes[0]]
        if held == self.n:
            return jnp.full(self.n, 1 / self.n, self.dtype)
        return jnp.where(jnp.arange(held, dtype=jnp.int32) < self.n, jnp.asarray(1 / self.n, self.dtype), 0)

    def count(self, rows: Any) -> Count:
        """Return how many rows one batch holds."""
        if rows is None:
            return self.n
        if self.sampling == "iid" or not self.has_short_block:
            return self.batch_size
        return jnp.minimum(self.batch_size, self.n - rows * self.batch_size)

    def counts(self, rows: Any, batches: int) -> Array:
        """Return how many rows each of several batches holds."""
        one = self.n if rows is None else self.count(rows)
        return jnp.broadcast_to(jnp.asarray(one, jnp.int32), (batches,))

    def share(self, rows: Array) -> Array:
        """Return (rows of the block)/n, the weight of a block in a table's mean."""
        return jnp.broadcast_to(jnp.asarray(self.count(rows), self.dtype) / self.n, rows.shape)

    def _map(self, function: Any) -> PyTree:
        leaves, structure = jax.tree.flatten(self.leaves)
        return jax.tree.unflatten(structure, [function(*pair) for pair in zip(leaves, self.axes, strict=True)])


def _padded(leaf: Array, axis: int, *, n: int, missing: int) -> Array:
    """Append copies of row 0: weights leave them out, and a user's loss is finite on a real row."""
    real = jax.lax.slice_in_dim(leaf, 0, n, axis=axis)
    filler = jnp.repeat(jax.lax.slice_in_dim(leaf, 0, 1, axis=axis), missing, axis=axis)
    return jnp.concatenate([real, filler], axis=axis)

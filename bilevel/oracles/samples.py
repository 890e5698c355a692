"""The rows of one level: their layout, and how batches of them are drawn, taken, weighted and counted.

A *block* is one of the ceil(n/b) contiguous runs of b rows. Rows are shuffled once, when a problem is built. If the
last block is short, it is drawn less often and is never filled with other rows. Each sampling is a pure function of
(key, step), so that any step can be drawn at any time:

==============  ====================================================================================
``blocks``      one block, drawn with probability (its rows)/n, with replacement
``iid``         b rows, uniform, with replacement, as the theory assumes; 2 to 3 times slower
``reshuffle``   each block once per pass, in a new order in each pass
``full``        all rows in each step: the deterministic version of a method
==============  ====================================================================================
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from bilevel._core import threefry, trees
from bilevel._core.compilation import compiled
from bilevel._core.types import Array, Count, PyTree

SAMPLINGS = ("blocks", "iid", "reshuffle", "full")
STATIC = {"static": True}  # metadata of a field that is not a pytree of arrays; programs are compiled for its value
NARROW = 64  # up to this many numbers per row the sample axis is last, so that XLA's loops run along samples
PIECE = 2048  # rows that a full-batch pass reads at a time, if it reads the rows in pieces
_ROUNDS = 16  # of the Feistel network; with 4 rounds the orders of few blocks are visibly uneven


def permute(key: Array, position: Array, n: int) -> Array:
    """Return the image of ``position`` under a random permutation of {0, …, n-1} given by ``key``.

    A Feistel network on the next power of four, repeated until the image is below n, is a bijection. It can be
    evaluated at a single position, so no table of the permutation is carried from step to step.
    """
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = jnp.uint32(2**half_bits - 1)
    round_keys = jax.random.bits(key, (_ROUNDS,), dtype=jnp.uint32)

    def network(value: Array) -> Array:
        left, right = value >> half_bits, value & mask
        for i in range(_ROUNDS):
            # The finalizer of MurmurHash3 scrambles 32 bits.
            bits = right ^ round_keys[i]
            bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
            bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
            left, right = right, left ^ ((bits ^ (bits >> 16)) & mask)
        return (left << half_bits) | right

    outside = network(position.astype(jnp.uint32))
    return jax.lax.while_loop(lambda value: value >= n, network, outside).astype(jnp.int32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Samples:
    """Data of one level, one flat array per leaf.

    Attributes
    ----------
    leaves : pytree of arrays of n rows, with the sample axes in `axes`
    n : number of rows
    axes : the sample axis of each leaf, in the order of ``jax.tree.leaves``
    dtype : the floating type in which rows are taken; the leaves may have a narrower one
    batch_size, sampling : size of a batch, and one of `SAMPLINGS`
    blocks : a copy of the rows, block after block, the last one padded; None if a block is a slice of the leaves
    row_weights : weights of the rows of each block in its estimate, block after block; None if all are 1/b
    key_words : the two words of the random key of a step, or None if the loss takes no key
    piece : number of rows that a full-batch pass reads at a time; None leaves the choice to the layout
    """

    leaves: PyTree
    n: int = field(metadata=STATIC)
    axes: tuple[int, ...] = field(metadata=STATIC)
    dtype: np.dtype = field(metadata=STATIC)
    batch_size: int = field(default=1, metadata=STATIC)
    sampling: str = field(default="full", metadata=STATIC)
    blocks: PyTree | None = None
    row_weights: Array | None = None
    key_words: Array | None = None
    piece: int | None = field(default=None, metadata=STATIC)

    @classmethod
    def from_rows(
        cls, data: PyTree, dtype: DTypeLike, rng: np.random.Generator | None = None, narrow: int = NARROW
    ) -> "Samples":
        """Lay out a pytree of arrays whose first axis is the samples, in a random order if ``rng`` is given.

        The sample axis of a leaf is last if a row has at most ``narrow`` numbers.
        """
        leaves = jax.tree.leaves(data)
        axes = tuple(leaf.ndim - 1 if prod(leaf.shape[1:]) <= narrow else 0 for leaf in leaves)
        unordered = cls(data, leaves[0].shape[0], axes, np.dtype(dtype))
        order = None if rng is None else rng.permutation(unordered.n)

        def lay_out(leaf: np.ndarray, axis: int) -> Array:
            rows = leaf if order is None else leaf[order]
            if np.issubdtype(rows.dtype, np.floating):
                rows = rows.astype(dtype, copy=False)
            return trees.put(np.ascontiguousarray(np.moveaxis(rows, 0, axis)))

        return replace(unordered, leaves=unordered._map(lay_out))

    @property
    def row_axes(self) -> PyTree:
        """The sample axes of the data that `take` returns, as a tree of the same structure."""
        axes = jax.tree.unflatten(jax.tree.structure(self.leaves), self.axes)
        return axes if self.key_words is None else (axes, 0)

    @property
    def n_blocks(self) -> int:
        """Number of blocks, the last of which may be short."""
        return -(-self.n // self.batch_size)

    def with_batches(self, batch_size: int, sampling: str) -> "Samples":
        """Return the same rows, drawn in batches of this size.

        Samples-last data are copied block after block, so that a step reads two stretches of memory instead of 2p, as
        slices of p features would need. Rows-first data, which may be large, are not copied.
        """
        plain = self.with_slices(batch_size, sampling)
        if sampling not in ("blocks", "reshuffle") or not any(self.axes):
            return plain

        weights = plain._row_weights(real_rows_last=False) if self.n % batch_size else None
        blocks = self._map(partial(_in_blocks, batch_size=batch_size))
        return replace(plain, blocks=blocks, row_weights=weights)

    def with_slices(self, batch_size: int, sampling: str) -> "Samples":
        """Return the same rows, drawn in batches of this size that are slices of the leaves."""
        plain = replace(self, batch_size=batch_size, sampling=sampling, blocks=None, row_weights=None)
        if sampling not in ("blocks", "reshuffle") or self.n % batch_size == 0:
            return plain
        return replace(plain, row_weights=plain._row_weights(real_rows_last=True))

    def _row_weights(self, real_rows_last: bool) -> Array:
        weights = self.weights(np.arange(self.n_blocks))
        if not real_rows_last:
            weights[-1] = weights[-1, ::-1]
        return trees.put(weights.ravel())

    def weights(self, blocks: np.ndarray) -> np.ndarray:
        """Return the weights of the rows of each block.

        XLA shifts a slice that would exceed the array. A short last block then begins with rows of the block before it,
        which get the weight 0.
        """
        missing = -self.n % self.batch_size
        usual, last = 1 / self.batch_size, 1 / (self.batch_size - missing)
        if self.sampling == "reshuffle":  # a pass visits each block once, whatever its size is
            usual = last = self.n_blocks / self.n
        weights = np.full((len(blocks), self.batch_size), usual, self.dtype)
        weights[blocks == self.n_blocks - 1] = np.where(np.arange(self.batch_size) < missing, 0, last)
        return weights

    def astype(self, dtype: DTypeLike) -> "Samples":
        """Return the same rows with floating leaves in ``dtype``."""
        return replace(trees.cast(self, dtype), dtype=np.dtype(dtype))

    def in_float64(self) -> "Samples":
        """Return the same rows, which are cast to float64 when they are taken."""
        return replace(self, dtype=np.dtype(np.float64), row_weights=trees.cast(self.row_weights, np.float64))

    @property
    def is_cast_when_taken(self) -> bool:
        """Whether the type of the leaves differs from the type in which rows are taken."""
        floats = (leaf for leaf in jax.tree.leaves(self.leaves) if jnp.issubdtype(leaf.dtype, jnp.floating))
        return any(leaf.dtype != self.dtype for leaf in floats)

    def with_key(self, words: Array, level: int) -> "Samples":
        """Return the same rows, whose losses derive their keys from the two words of the key of a step."""
        if self.key_words is None:
            return self
        # Rows of the two levels with the same number must not have the same key.
        return replace(self, key_words=words ^ jnp.array([0, level], jnp.uint32))

    def draw(self, key: Array, index: Array, count: int | None = None) -> Any:
        """Draw the rows of step ``index``: one batch, or ``count`` batches along a leading axis."""
        if self.sampling == "full":
            return None
        if self.sampling == "reshuffle":
            return self._next_of_pass(key, index, count)
        shape = (() if count is None else (count,)) + ((self.batch_size,) if self.sampling == "iid" else ())
        rows = threefry.integers(threefry.fold_in(key, index), shape, self.n)
        return rows if self.sampling == "iid" else rows // self.batch_size

    def _next_of_pass(self, key: Array, index: Array, count: int | None) -> Array:
        def block(position: Array) -> Array:
            pass_key = threefry.fold_in(key, position // self.n_blocks)
            return permute(pass_key, position % self.n_blocks, self.n_blocks)

        if count is None:
            return block(index)
        return jax.vmap(block)(index * count + jnp.arange(count, dtype=jnp.int32))

    def take(self, rows: Any) -> tuple[PyTree, Array]:
        """Return the data of the rows, and weights with which sum(weights * values) is the estimate of the mean."""
        data, weights = self._take(rows)
        return (data if self.key_words is None else (data, self._row_keys(rows, weights.size))), weights

    def _row_keys(self, rows: Any, count: int) -> Array:
        """Return the key of each taken row, which depends only on the rows and on the step."""
        assert self.key_words is not None, "only losses that take keys need them"
        key = jax.random.wrap_key_data(self.key_words, impl="threefry2x32")
        # Different batches of a step have different keys.
        drawn = jnp.ravel(jnp.asarray(0 if rows is None else rows + 1, jnp.uint32))
        places = 2 * jnp.arange(drawn.size, dtype=jnp.uint32) + 1
        number = jnp.sum(drawn * places * jnp.uint32(0x9E3779B1), dtype=jnp.uint32)
        return jax.random.key_data(jax.random.split(threefry.fold_in(key, number), count))

    def _take(self, rows: Any) -> tuple[PyTree, Array]:
        if rows is None:
            return trees.cast(self.leaves, self.dtype), jnp.full(self.n, 1 / self.n, self.dtype)
        equal = jnp.full(self.batch_size, 1 / self.batch_size, self.dtype)
        if self.sampling == "iid":
            taken = self._map(lambda leaf, axis: jnp.take(leaf, rows, axis=axis))
            return trees.cast(taken, self.dtype), equal
        block = partial(jax.lax.dynamic_slice_in_dim, start_index=rows * self.batch_size, slice_size=self.batch_size)
        weights = equal if self.row_weights is None else block(self.row_weights)
        if self.blocks is None:
            return trees.cast(self._map(lambda leaf, axis: block(leaf, axis=axis)), self.dtype), weights
        taken = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, rows, keepdims=False), self.blocks)
        return trees.cast(taken, self.dtype), weights

    def count(self, rows: Any, batches: int | None = None, first: Count | None = None) -> Count:
        """Return the number of rows in one batch, in several batches together, or in the ``first`` of them."""
        if batches is not None:
            counts = self.counts(rows, batches)
            if first is not None:
                counts = jnp.where(jnp.arange(batches, dtype=jnp.int32) < first, counts, 0)
            return jnp.sum(counts, dtype=jnp.int32)
        if rows is None:
            return self.n
        if self.sampling == "iid" or self.n % self.batch_size == 0:
            return self.batch_size
        return jnp.minimum(self.batch_size, self.n - rows * self.batch_size)

    def counts(self, rows: Any, batches: int) -> Array:
        """Return the number of rows in each of several batches."""
        return jnp.broadcast_to(jnp.asarray(self.count(rows), jnp.int32), (batches,))

    def mean(self, function: Callable[[PyTree, Array], PyTree]) -> PyTree:
        """Return a weighted sum over rows, ``function(data, weights)``, on all rows, which are read in pieces."""
        in_blocks = self.blocks is not None and self.sampling == "blocks" and self.piece == self.batch_size
        pieces = self if in_blocks else self.with_slices(min(self.piece or PIECE, self.n), "blocks")

        def with_piece(index: Array, total: PyTree) -> PyTree:
            return trees.add(total, trees.scale(pieces.share(index), function(*pieces.take(index))))

        nothing = trees.zeros_like(jax.eval_shape(lambda: function(*pieces.take(jnp.zeros((), jnp.int32)))))
        return jax.lax.fori_loop(0, pieces.n_blocks, with_piece, nothing)

    @property
    def is_read_in_pieces(self) -> bool:
        """Whether a full-batch pass reads the rows in pieces: for the cache, or to save the memory of a cast copy."""
        by_layout = self.is_cast_when_taken or (not any(self.axes) and self.n > PIECE)
        return by_layout or (self.piece is not None and self.piece < self.n)

    def share(self, rows: Array) -> Array:
        """Return (rows of the block)/n, the weight of a block in the mean of a table."""
        return jnp.broadcast_to(jnp.asarray(self.count(rows), self.dtype) / self.n, rows.shape)

    def _map(self, function: Any) -> PyTree:
        leaves, structure = jax.tree.flatten(self.leaves)
        return jax.tree.unflatten(structure, [function(*pair) for pair in zip(leaves, self.axes, strict=True)])


@compiled("axis", "batch_size")
def _in_blocks(leaf: Array, axis: int, batch_size: int) -> Array:
    """Return the rows block after block, along a new first axis."""
    rows = jnp.moveaxis(leaf, axis, 0)
    # The last block is padded with the first row, on which a loss is finite.
    filler = jnp.broadcast_to(rows[:1], (-len(rows) % batch_size, *rows.shape[1:]))
    blocks = jnp.concatenate([rows, filler]).reshape(-1, batch_size, *rows.shape[1:])
    return jnp.moveaxis(blocks, 1, axis + 1)

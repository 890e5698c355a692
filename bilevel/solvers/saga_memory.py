"""Tables of SAGA for one level: the last estimate of every block, or the last terms of every row.

The updates are in :mod:`bilevel.solvers.saba`. If rows are long, terms of rows take less memory than estimates (see
:mod:`bilevel.oracles.rowwise`): for a softmax model a few numbers per class instead of a few per class and feature. The
part of the derivatives that is not a sum over rows, such as regularization, is then exact instead of stored.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from bilevel._core import trees
from bilevel._core.types import Array, Point, PyTree
from bilevel.oracles import Samples


class Level(NamedTuple):
    """Samples and derivatives of one level; only rowwise oracles have `terms`, `sum` and `regularization`."""

    samples: Samples
    estimate: Callable[[Point, Array], PyTree]  # the derivatives on a block
    terms: Callable[[Point, Array], PyTree]  # the terms of the rows of a block
    sum: Callable[[PyTree, Array, Point], PyTree]  # the derivatives that consist of such terms
    regularization: Callable[[Point], PyTree]  # the derivatives that are not sums over rows

    @classmethod
    def of(cls, oracles: Any, name: str) -> "Level":
        """Return the level "inner" or "outer" of some oracles."""
        suffixes = "_samples", "", "_terms", "_sum", "_regularization"
        return cls(*(getattr(oracles, name + suffix, None) for suffix in suffixes))  # type: ignore[arg-type]

    @property
    def blocks(self) -> Array:
        """Return the indices of all blocks."""
        return jnp.arange(self.samples.n_blocks, dtype=jnp.int32)


def _read(table: PyTree, block: Array) -> tuple[PyTree, PyTree]:
    """Return the entry of a block, and the table to write into; without this barrier a GPU copies the table first."""
    return jax.lax.optimization_barrier((jax.tree.map(lambda leaf: leaf[block], table), table))


class BlockTable(NamedTuple):
    """The last estimate of each block, all kinds in one row, and their weighted mean."""

    table: Array
    mean: Array

    @classmethod
    def fill(cls, level: Level, start: Point, empty: bool) -> "BlockTable":
        """Return a table of the estimates at the start, or of zeros."""
        table = jax.lax.map(lambda block: ravel_pytree(level.estimate(start, block))[0], level.blocks)
        return cls(jnp.zeros_like(table) if empty else table, jnp.zeros_like(table[0])).rebuild(level, start)

    def update(self, level: Level, point: Point, block: Array) -> tuple[PyTree, "BlockTable"]:
        """Return the SAGA estimate S, and the table with the new estimate of the block."""
        return self.store(level.samples, level.estimate(point, block), block)

    def store(self, samples: Samples, estimate: PyTree, block: Array) -> tuple[PyTree, "BlockTable"]:
        """Return S and the new table for an estimate that has been computed."""
        new, unravel = ravel_pytree(estimate)
        old, table = _read(self.table, block)
        change = new - old
        mean = self.mean + samples.share(block) * change
        return unravel(change + self.mean), BlockTable(table.at[block].set(new), mean)

    def rebuild(self, level: Level, like: Point) -> "BlockTable":
        """Return the table with its mean summed again."""
        return self._replace(mean=level.samples.share(level.blocks) @ self.table)


class RowTable(NamedTuple):
    """The last terms of each row, block after block, and the mean of the estimates that consist of them."""

    table: PyTree
    mean: PyTree

    @classmethod
    def fill(cls, level: Level, start: Point, empty: bool) -> "RowTable":
        """Return a table of the terms at the start, or of zeros."""
        table = jax.lax.map(lambda block: level.terms(start, block), level.blocks)
        zero = trees.zeros_like(level.sum(jax.tree.map(lambda leaf: leaf[0], table), jnp.int32(0), start))
        return cls(trees.zeros_like(table), zero) if empty else cls(table, zero).rebuild(level, start)

    def update(self, level: Level, point: Point, block: Array) -> tuple[PyTree, "RowTable"]:
        """Return the SAGA estimate S, and the table with the new terms of the block."""
        new = level.terms(point, block)
        old, table = _read(self.table, block)
        change = level.sum(trees.subtract(new, old), block, point)
        reduced = trees.add(trees.add(change, self.mean), level.regularization(point))
        table = jax.tree.map(lambda leaf, terms: leaf.at[block].set(terms), table, new)
        mean = trees.add(self.mean, trees.scale(level.samples.share(block), change))
        return reduced, RowTable(table, mean)

    def rebuild(self, level: Level, like: Point) -> "RowTable":
        """Return the table with its mean summed again, from rows and terms, without derivatives."""

        def add_block(block: Array, total: PyTree) -> PyTree:
            terms = jax.tree.map(lambda leaf: leaf[block], self.table)
            return trees.add(total, trees.scale(level.samples.share(block), level.sum(terms, block, like)))

        zero = trees.zeros_like(self.mean)
        return self._replace(mean=jax.lax.fori_loop(0, level.samples.n_blocks, add_block, zero))


TABLES: dict[str, type[BlockTable] | type[RowTable]] = {"blocks": BlockTable, "rows": RowTable}

"""What SABA remembers of each level: the last estimate of every block, or the last terms of every row.

The updates are in :mod:`bilevel.solvers.saba`. Terms of rows take less memory than estimates where rows are long (see
:mod:`bilevel.oracles.rowwise`): of a softmax model a few numbers per class instead of a few per class and feature. The
part of the derivatives that is no sum over rows is then not remembered but exact.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from bilevel import _tree as trees
from bilevel._types import Array, Point, PyTree
from bilevel.oracles import Samples


class Level(NamedTuple):
    """What tables see of one level of a problem; `terms`, `sum` and `regularization` are of rowwise oracles."""

    samples: Samples
    estimate: Callable[[Point, Array], PyTree]  # the derivatives on a block
    terms: Callable[[Point, Array], PyTree]  # of the rows of a block
    sum: Callable[[PyTree, Array, Point], PyTree]  # the derivatives that such terms make
    regularization: Callable[[Point], PyTree]  # the derivatives that are no sum over rows

    @classmethod
    def of(cls, oracles: Any, name: str) -> "Level":
        suffixes = "_samples", "", "_terms", "_sum", "_regularization"
        return cls(*(getattr(oracles, name + suffix, None) for suffix in suffixes))  # type: ignore[arg-type]

    @property
    def blocks(self) -> Array:
        return jnp.arange(self.samples.n_blocks, dtype=jnp.int32)


def _read(table: PyTree, block: Array) -> tuple[PyTree, PyTree]:
    """Return what is remembered of a block, and the table to write into: without this order a GPU copies it first."""
    return jax.lax.optimization_barrier((jax.tree.map(lambda leaf: leaf[block], table), table))


class BlockTable(NamedTuple):
    """The last estimate of each block, all kinds in one row, and their weighted mean."""

    table: Array
    mean: Array

    @classmethod
    def fill(cls, level: Level, start: Point, empty: bool) -> "BlockTable":
        """Remember the estimates at the start, or zeros."""
        table = jax.lax.map(lambda block: ravel_pytree(level.estimate(start, block))[0], level.blocks)
        return cls(jnp.zeros_like(table) if empty else table, jnp.zeros_like(table[0])).rebuild(level, start)

    def update(self, level: Level, point: Point, block: Array) -> tuple[PyTree, "BlockTable"]:
        """Return the estimate with less variance, and the table with the new one in it."""
        new, unravel = ravel_pytree(level.estimate(point, block))
        old, table = _read(self.table, block)
        change = new - old
        mean = self.mean + level.samples.share(block) * change
        return unravel(change + self.mean), BlockTable(table.at[block].set(new), mean)

    def rebuild(self, level: Level, like: Point) -> "BlockTable":
        """Sum the mean anew from the table."""
        return self._replace(mean=level.samples.share(level.blocks) @ self.table)


class RowTable(NamedTuple):
    """The last terms of each row, block after block, and the mean of the estimates that they make.

    Where `rebuild` sums the mean anew, rows are multiplied but no derivative is asked for.
    """

    table: PyTree
    mean: PyTree

    @classmethod
    def fill(cls, level: Level, start: Point, empty: bool) -> "RowTable":
        table = jax.lax.map(lambda block: level.terms(start, block), level.blocks)
        nothing = trees.zeros_like(level.sum(jax.tree.map(lambda leaf: leaf[0], table), jnp.int32(0), start))
        return cls(trees.zeros_like(table), nothing) if empty else cls(table, nothing).rebuild(level, start)

    def update(self, level: Level, point: Point, block: Array) -> tuple[PyTree, "RowTable"]:
        new = level.terms(point, block)
        old, table = _read(self.table, block)
        change = level.sum(trees.subtract(new, old), block, point)
        reduced = trees.add(trees.add(change, self.mean), level.regularization(point))
        table = jax.tree.map(lambda leaf, terms: leaf.at[block].set(terms), table, new)
        mean = trees.add(self.mean, trees.scale(level.samples.share(block), change))
        return reduced, RowTable(table, mean)

    def rebuild(self, level: Level, like: Point) -> "RowTable":
        def with_block(block: Array, total: PyTree) -> PyTree:
            terms = jax.tree.map(lambda leaf: leaf[block], self.table)
            return trees.add(total, trees.scale(level.samples.share(block), level.sum(terms, block, like)))

        nothing = trees.zeros_like(self.mean)
        return self._replace(mean=jax.lax.fori_loop(0, level.samples.n_blocks, with_block, nothing))


TABLES: dict[str, type[BlockTable] | type[RowTable]] = {"blocks": BlockTable, "rows": RowTable}

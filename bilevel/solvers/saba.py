"""SABA: stochastic average bilevel algorithm, SAGA for bilevel problems.

Dagréou, Ablin, Vaiter, Moreau. A framework for bilevel optimization that enables stochastic and global variance
reduction algorithms. NeurIPS 2022, arXiv 2201.13409. Confidence: high; the paper's text was compared.

Tables Y contain the last estimate of each block, and M is their mean with weights w_i = (rows of block i)/n:

    draw i with probability w_i, j likewise;   g = estimates on block i (or j) at u
    S = g - Y[i] + M;   M ← M + w_i (g - Y[i]);   Y[i] ← g
    z ← z - α S_{∇z G};   v ← v - α (S_hvp + S_{∇z F});   x ← x - (α/r)(S_cross + S_{∇x F})

Cost 5b. Memory: n_b blocks of 2p + d and m_b blocks of p + d, or the terms of n + m rows. Adaptive: nothing.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from bilevel._core import trees
from bilevel._core.types import Array, Calls, Point, PyTree, Rows
from bilevel.oracles import Oracles, RowwiseOracles, Samples, join
from bilevel.problems import BilevelProblem
from bilevel.solvers.base import Complexity, Solver, solver
from bilevel.solvers.fields import bounds, given, one_of, positive, whole
from bilevel.solvers.moves import MovesState, direction_calls

_ROWS_REBUILD_FACTOR = 10  # rebuilding the mean of a row table reads all rows, so it is done less often


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
    """The last terms of each row, block after block, and the mean of the estimates that consist of them.

    If rows are long, terms take less memory than estimates (see :mod:`bilevel.oracles.rowwise`): for a softmax model a
    few numbers per class instead of a few per class and feature. The part of the derivatives that is not a sum over
    rows, such as regularization, is then exact instead of stored.
    """

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


class SABAState(NamedTuple):
    """The iterate, a table for each level, and the states of transformations."""

    point: Point
    inner: Any
    outer: Any
    moves: MovesState


@solver
class SABA(Solver[SABAState, Rows]):
    """Stochastic average bilevel algorithm.

    Parameters
    ----------
    batch_size : rows per block, on both levels
    tables : "zero" starts with empty tables at no cost, "full" fills them at the start for 3n + 2m calls
    memory : "blocks" stores the estimate of each block; "rows" stores the terms of each row, which takes much less
        memory if rows are long, and requires a linear model in closed form
    rebuild_every : steps between two recomputations of the means from the tables, which remove accumulated rounding
        errors; None means (n + m) / batch_size, and ten times that with ``memory="rows"``, which reads all rows
    sampling : "blocks" only: a table belongs to a fixed partition of the rows
    """

    v_radius: float | None = positive(default=None, optional=True, hint="; use None for no projection")
    outer_bounds: str | tuple[Any, Any] | None = bounds(default=None, kw_only=True)
    tables: str = one_of(("zero", "full"), default="zero")
    memory: str = one_of(tuple(TABLES), default="blocks")
    rebuild_every: int | None = whole(default=None, optional=True, hint="; use None for the default")
    sampling: str = one_of(("blocks",), default="blocks", kw_only=True)
    complexity = Complexity("O((n+m)^2/3 ε^-1)", "finite sum", "C^{2,2}", "C^{3,3}")
    needs_plain_step, needs_finite_sum, keeps_tables = None, True, True

    def configure(self, problem: BilevelProblem) -> Self:
        if self.memory == "rows" and not isinstance(problem.oracles, RowwiseOracles):
            name = type(problem.oracles).__name__
            raise ValueError(f"`SABA(memory='rows')`: {name} has no terms of rows; use memory='blocks'.")
        if self.memory == "rows" and problem.oracles.is_on_host:
            raise ValueError("`SABA(memory='rows')`: its means are sums over all rows; use memory='blocks'.")
        n_blocks = sum(
            -(-n // size) for n, size in zip((problem.n_inner, problem.n_outer), self.batches(), strict=True)
        )
        every = n_blocks * (_ROWS_REBUILD_FACTOR if self.memory == "rows" else 1)
        return replace(self, rebuild_every=self.rebuild_every or every)

    def init(self, oracles: Oracles, start: Point) -> SABAState:
        fill = partial(TABLES[self.memory].fill, start=start, empty=self.tables == "zero")
        levels = fill(Level.of(oracles, "inner")), fill(Level.of(oracles, "outer"))
        return SABAState(start, *levels, self.moves.init(start))

    def init_calls(self, oracles: Oracles) -> Calls:
        return direction_calls(oracles.n_inner, oracles.n_outer) if self.tables == "full" else Calls()

    def refreshes(self, index: Array, draw: Rows) -> Array:
        return (index % given(self.rebuild_every) == 0) & (index > 0)

    def refresh(self, oracles: Oracles, state: SABAState, index: Array, draw: Rows) -> SABAState:
        inner = state.inner.rebuild(Level.of(oracles, "inner"), state.point)
        outer = state.outer.rebuild(Level.of(oracles, "outer"), state.point)
        return self.step(oracles, state._replace(inner=inner, outer=outer), index, draw)

    def step(self, oracles: Oracles, state: SABAState, index: Array, draw: Rows) -> SABAState:
        inner, inner_table = state.inner.update(Level.of(oracles, "inner"), state.point, draw.inner)
        outer, outer_table = state.outer.update(Level.of(oracles, "outer"), state.point, draw.outer)
        steps = self.step_size, self.step_size / self.outer_ratio
        point, moves = self.moves.apply(oracles, state.point, state.moves, join(inner, outer), *steps)
        return SABAState(point, inner_table, outer_table, moves)

    def calls(self, oracles: Oracles, draw: Rows, refresh: bool) -> Calls:
        return direction_calls(oracles.count_inner(draw.inner), oracles.count_outer(draw.outer))

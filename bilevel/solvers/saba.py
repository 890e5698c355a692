"""SABA: stochastic average bilevel algorithm, the SAGA of bilevel problems.

Dagréou, Ablin, Vaiter, Moreau. A framework for bilevel optimization that enables stochastic and global variance
reduction algorithms. NeurIPS 2022, arXiv 2201.13409. Confidence: high; the paper's text was compared.

Tables Y (:mod:`bilevel.solvers.saga_memory`) hold the last estimate of each block, M their mean weighted by
w_i = (rows of block i)/n:

    draw i with probability w_i, j likewise;   g = estimates on block i (or j) at u
    S = g - Y[i] + M;   M ← M + w_i (g - Y[i]);   Y[i] ← g
    z ← z - α S_{∇z G};   v ← v - α (S_hvp + S_{∇z F});   x ← x - (α/r)(S_cross + S_{∇x F})

Cost 5b. Memory: n_b blocks of 2p + d and m_b blocks of p + d, or the terms of n + m rows. Adaptive: nothing.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Self

from bilevel import _tree as trees
from bilevel._types import Array, Calls, Point, Rows
from bilevel.oracles import Oracles, RowwiseOracles, join
from bilevel.solvers.base import Complexity, solver
from bilevel.solvers.directions import direction_calls
from bilevel.solvers.parameters import one_of, whole
from bilevel.solvers.preconditioning import PreconditionedSolver, Preconditioning, diagonal_calls, metric_diagonal
from bilevel.solvers.saga_memory import TABLES, Level

_ROWS_REBUILD_AFTER = 10  # times as many steps as blocks: the rows are read for it
_OLDEST_DIAGONAL = 300  # steps: a penalty may have grown since


class SABAState(NamedTuple):
    """The iterate, a table for each level, and what moves need beyond a direction."""

    point: Point
    inner: Any
    outer: Any
    preconditioning: Preconditioning = Preconditioning()


@solver
class SABA(PreconditionedSolver):
    """Stochastic average bilevel algorithm.

    Parameters
    ----------
    batch_size : rows per block, on both levels
    tables : "zero" starts with empty tables at no cost, "full" fills them at the start for 3n + 2m calls
    memory : "blocks" remembers the estimate of each block; "rows" the terms of each row, which takes far less where
        rows are long, and needs a linear model in closed form
    rebuild_every : steps after which the means are summed anew from the tables, against rounding; None means
        (n + m) / batch_size, ten times that for "rows", where rows are read for it; with a preconditioner at most 300
    preconditioner : "diagonal" divides the moves of z and v by the diagonal of ∇²zz G, taken at the start and when the
        means are summed anew, for n each time; None leaves them as they are
    sampling : "blocks" only: a table belongs to a fixed partition of the rows
    """

    tables: str = one_of(("zero", "full"), default="zero")
    memory: str = one_of(tuple(TABLES), default="blocks")
    rebuild_every: int | None = whole(default=None, optional=True, hint="; use None for the default")
    preconditioner: str | None = one_of(("diagonal",), default=None, optional=True, kw_only=True)
    sampling: str = one_of(("blocks",), default="blocks", kw_only=True)
    table_order = 2
    complexity = Complexity("O((n+m)^2/3 ε^-1)", "finite sum", "C^{2,2}", "C^{3,3}")
    restarts = needs_finite_sum = True
    keeps_tables = True

    def resolve(self, oracles: Oracles) -> Self:
        if self.memory == "rows" and not isinstance(oracles, RowwiseOracles):
            name = type(oracles).__name__
            raise ValueError(f"`SABA(memory='rows')`: {name} gives no terms of rows; use memory='blocks'.")
        if self.memory == "rows" and oracles.is_on_host:
            raise ValueError("`SABA(memory='rows')`: reads all rows to sum its means; use memory='blocks'.")
        if self.rebuild_every is not None:
            return self
        blocks = oracles.inner_samples.n_blocks + oracles.outer_samples.n_blocks
        every = blocks * (_ROWS_REBUILD_AFTER if self.memory == "rows" else 1)
        return replace(self, rebuild_every=every if self.preconditioner is None else min(every, _OLDEST_DIAGONAL))

    def init(self, oracles: Oracles, start: Point) -> SABAState:
        fill = partial(TABLES[self.memory].fill, start=start, empty=self.tables == "zero")
        diagonal = () if self.preconditioner is None else metric_diagonal(oracles, start, 0)
        levels = fill(Level.of(oracles, "inner")), fill(Level.of(oracles, "outer"))
        return SABAState(start, *levels, self.init_preconditioning(start, diagonal))

    def init_calls(self, oracles: Oracles) -> Calls:
        cost = direction_calls(oracles.n_inner, oracles.n_outer) if self.tables == "full" else Calls()
        return cost if self.preconditioner is None else trees.add(cost, diagonal_calls(oracles))

    def refreshes(self, index: Array, draw: Rows) -> Array:
        assert self.rebuild_every is not None, "resolve() fills it in"
        return (index % self.rebuild_every == 0) & (index > 0)

    def refresh(self, oracles: Oracles, state: SABAState, index: Array, draw: Rows) -> SABAState:
        inner = state.inner.rebuild(Level.of(oracles, "inner"), state.point)
        outer = state.outer.rebuild(Level.of(oracles, "outer"), state.point)
        rebuilt = state._replace(inner=inner, outer=outer)
        if self.preconditioner is not None:
            diagonal = metric_diagonal(oracles, state.point, index)
            rebuilt = rebuilt._replace(preconditioning=state.preconditioning._replace(diagonal=diagonal))
        return self.step(oracles, rebuilt, index, draw)

    def step(self, oracles: Oracles, state: SABAState, index: Array, draw: Rows) -> SABAState:
        inner, inner_table = state.inner.update(Level.of(oracles, "inner"), state.point, draw.inner)
        outer, outer_table = state.outer.update(Level.of(oracles, "outer"), state.point, draw.outer)
        state = state._replace(inner=inner_table, outer=outer_table)
        return self.descend(oracles, state, join(inner, outer), self.step_size)

    def calls(self, oracles: Oracles, draw: Rows, refresh: bool) -> Calls:
        cost = direction_calls(oracles.count_inner(draw.inner), oracles.count_outer(draw.outer))
        return trees.add(cost, diagonal_calls(oracles)) if refresh and self.preconditioner is not None else cost

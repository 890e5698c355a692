"""SABA: stochastic average bilevel algorithm, SAGA for bilevel problems.

Dagréou, Ablin, Vaiter, Moreau. A framework for bilevel optimization that enables stochastic and global variance
reduction algorithms. NeurIPS 2022, arXiv 2201.13409. Confidence: high; the paper's text was compared.

Tables Y (:mod:`bilevel.solvers.saga_memory`) contain the last estimate of each block, and M is their mean with weights
w_i = (rows of block i)/n:

    draw i with probability w_i, j likewise;   g = estimates on block i (or j) at u
    S = g - Y[i] + M;   M ← M + w_i (g - Y[i]);   Y[i] ← g
    z ← z - α S_{∇z G};   v ← v - α (S_hvp + S_{∇z F});   x ← x - (α/r)(S_cross + S_{∇x F})

Cost 5b. Memory: n_b blocks of 2p + d and m_b blocks of p + d, or the terms of n + m rows. Adaptive: nothing.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Self

from bilevel._core.types import Array, Calls, Point, Rows
from bilevel.oracles import Oracles, RowwiseOracles, join
from bilevel.problems import BilevelProblem
from bilevel.solvers.base import Complexity, Solver, solver
from bilevel.solvers.fields import bounds, given, one_of, positive, transformation, whole
from bilevel.solvers.moves import MovesState, direction_calls
from bilevel.solvers.saga_memory import TABLES, Level

_ROWS_REBUILD_FACTOR = 10  # rebuilding the mean of a row table reads all rows, so it is done less often


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
    outer_optimizer: str | Any | None = transformation(("adam",), default=None, kw_only=True)
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

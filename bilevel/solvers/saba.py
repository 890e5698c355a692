"""SABA: stochastic average bilevel algorithm, the SAGA of bilevel problems.

Dagréou, Ablin, Vaiter, Moreau. A framework for bilevel optimization that enables stochastic and global
variance reduction algorithms. NeurIPS 2022, arXiv 2201.13409.

Tables Y hold the last estimate of each block, M their mean weighted by w_i = (rows of block i)/n:

    draw i with probability w_i, j likewise;   g = estimates on block i (or j) at u
    S = g - Y[i] + M;   M ← M + w_i (g - Y[i]);   Y[i] ← g
    z ← z - α S_{∇z G};   v ← v - α (S_hvp + S_{∇z F});   x ← x - (α/r)(S_cross + S_{∇x F})

Cost 5b. Memory: n_b blocks of 2p + d and m_b blocks of p + d.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from bilevel.oracles import Oracles, Samples, joined
from bilevel.solvers.base import Solver, solver
from bilevel.solvers.complexity import Complexity
from bilevel.solvers.directions import descend, direction_calls
from bilevel.solvers.fields import one_of, positive, whole
from bilevel.types import Array, Calls, InnerPass, OuterPass, Point, Rows

Pass = TypeVar("Pass", InnerPass, OuterPass)


class Memory(NamedTuple):
    """Last estimate of each block, all kinds in one row, and their weighted mean."""

    table: Array
    mean: Array


class SABAState(NamedTuple):
    """The iterate and a memory for each level."""

    point: Point
    inner: Memory
    outer: Memory


@solver
class SABA(Solver):
    """Stochastic average bilevel algorithm.

    Parameters
    ----------
    step_size : step of the inner variable and of v
    outer_ratio : the outer variable moves with ``step_size / outer_ratio``
    batch_size : rows per block, on both levels
    v_radius : radius of the ball v is kept in; None means no projection
    tables : "zero" starts with empty tables at no cost, "full" fills them at the start for 3n + 2m calls
    rebuild_every : steps after which the means are summed anew from the tables, against rounding; None means
        once per (n + m) / batch_size steps
    sampling : "blocks" only: a table belongs to a fixed partition of the rows
    """

    v_radius: float | None = positive(default=None, optional=True, hint="; use None for no projection")
    tables: str = one_of(("zero", "full"), default="zero")
    rebuild_every: int | None = whole(default=None, optional=True, hint="; use None for the default")
    sampling: str = one_of(("blocks",), default="blocks", kw_only=True)

    complexity = Complexity("O((n+m)^2/3 ε^-1)", "finite sum", "C^{2,2}", "C^{3,3}")
    restarts = True

    def resolve(self, oracles: Oracles) -> Self:
        """Fill in the default of ``rebuild_every``."""
        if self.rebuild_every is not None:
            return self
        return replace(self, rebuild_every=oracles.inner_samples.n_blocks + oracles.outer_samples.n_blocks)

    def init(self, oracles: Oracles, start: Point) -> SABAState:
        """Set up the tables."""

        def memory(samples: Samples, estimate: Callable[[Array], Pass]) -> Memory:
            blocks = jnp.arange(samples.n_blocks, dtype=jnp.int32)
            table = jax.lax.map(lambda block: ravel_pytree(estimate(block))[0], blocks)
            if self.tables == "zero":
                table = jnp.zeros_like(table)
            return Memory(table, _weighted_mean(samples, table))

        return SABAState(
            point=start,
            inner=memory(oracles.inner_samples, lambda rows: oracles.inner(start, rows)),
            outer=memory(oracles.outer_samples, lambda rows: oracles.outer(start, rows)),
        )

    def init_calls(self, oracles: Oracles) -> Calls:
        """Count one estimate per block when the tables are filled."""
        return direction_calls(oracles.n_inner, oracles.n_outer) if self.tables == "full" else Calls()

    def refreshes(self, index: Array, draw: Rows) -> Array:
        """Rebuild the means each ``rebuild_every`` steps, not at the first."""
        assert self.rebuild_every is not None, "resolve() fills it in"
        return (index % self.rebuild_every == 0) & (index > 0)

    def refresh(self, oracles: Oracles, state: SABAState, index: Array, draw: Rows) -> SABAState:
        """Sum the means anew, then take an ordinary step; no row is read for it."""
        rebuilt = state._replace(
            inner=state.inner._replace(mean=_weighted_mean(oracles.inner_samples, state.inner.table)),
            outer=state.outer._replace(mean=_weighted_mean(oracles.outer_samples, state.outer.table)),
        )
        return self.step(oracles, rebuilt, index, draw)

    def step(self, oracles: Oracles, state: SABAState, index: Array, draw: Rows) -> SABAState:
        """Move along the variance-reduced direction."""
        inner, inner_memory = _reduced(
            oracles.inner(state.point, draw.inner), state.inner, draw.inner, oracles.inner_samples
        )
        outer, outer_memory = _reduced(
            oracles.outer(state.point, draw.outer), state.outer, draw.outer, oracles.outer_samples
        )
        direction = joined(inner, outer)
        outer_step = self.step_size / self.outer_ratio
        point = descend(oracles, state.point, direction, self.step_size, outer_step, self.v_radius)
        return SABAState(point, inner_memory, outer_memory)

    def calls(self, oracles: Oracles, draw: Rows, refresh: bool) -> Calls:
        """Count one direction."""
        return direction_calls(oracles.count_inner(draw.inner), oracles.count_outer(draw.outer))


def _reduced(fresh: Pass, memory: Memory, block: Array, samples: Samples) -> tuple[Pass, Memory]:
    """Return g - Y[i] + M, and the memory with g in the place of Y[i]."""
    new, unravel = ravel_pytree(fresh)
    change = new - memory.table[block]
    reduced = unravel(change + memory.mean)
    mean = memory.mean + samples.share(block) * change
    return reduced, Memory(memory.table.at[block].set(new), mean)


def _weighted_mean(samples: Samples, table: Array) -> Array:
    return samples.share(jnp.arange(samples.n_blocks, dtype=jnp.int32)) @ table

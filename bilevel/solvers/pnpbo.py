"""PnPBO: plug-and-play, one loop over z, v and x with an estimator of choice for each.

Chu, Xu, Yao, Yu, Zhang. A Provably Convergent Plug-and-Play Framework for Stochastic Bilevel Optimization. 2025, arXiv
2505.01258. Confidence: medium; only the abstract of the text was available. The estimators are taken from their own
papers, and the order of the moves from the authors' code.

With g = D_{B,C}(u), g' on the same rows at the last u, and S = g - Y + M from tables as in :mod:`bilevel.solvers.saba`,
each of z, v and x moves along its own estimate d:

    sgd          d = g                                    saga    d = S
    zerosarah    d ← (1 - λ)(d + g - g') + λ S            page    d ← d + g - g', or D(u) with probability 1/q
                 d = S in the first step                          d = D(u) in the first step
    z ← z - α d_z;   v ← P(v - α d_v);   h ← (1 - ρ) h + ρ d_x;   x ← x - (α/r) h

For zerosarah that is g - g' + (1 - λ) d + λ (g' - Y + M), with Y and M before their update, as in its paper.
The average h is for unbiased d_x (sgd and saga); otherwise h = d_x. Tables start at 0, so that only page makes
full-batch passes. Methods with names of their own are settings: SFFBA is zerosarah for all three (the default), MSEBA
is zerosarah for z and page for v and x, MA-SABA is saga for all, SPABA is page for all. The authors' code has (1 + λ) g
instead of (1 - λ) g, whose limit is three times D, and clips each coordinate of v to [-1, 1], which changes the
solution if v is larger. Here P is the projection onto a ball, or the identity.
Cost 5b (b for z, 2b for v, 2b for x), twice that for zerosarah and page; in a full-batch step of page n for z and n + m
for v and x instead. Memory: up to 6p + 4d, and tables like those of SABA for saga and zerosarah. Adaptive: nothing.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from bilevel._core import trees
from bilevel._core.types import Array, Calls, Count, Point, PyTree, Rows
from bilevel.oracles import SAMPLINGS, Oracles
from bilevel.problems import BilevelProblem
from bilevel.solvers.base import Complexity, Solver, solver
from bilevel.solvers.fields import bounds, fraction, given, one_of, positive, whole
from bilevel.solvers.moves import MovesState, draw_below
from bilevel.solvers.saba import BlockTable, Level

ESTIMATORS = ("sgd", "saga", "page", "zerosarah")
_UNBIASED = ("sgd", "saga")
_TABLED = ("saga", "zerosarah")  # with a table of the last estimate of each block
_RECURSIVE = ("page", "zerosarah")  # the last estimate plus a difference
_AVERAGE = 0.1  # the authors' code uses 0.1 and 0.2

# The derivative of each level that each part of a direction contains.
_INNER_KINDS = {"inner_var": "inner_grad", "outer_var": "cross", "v": "hvp"}
_OUTER_KINDS = {"outer_var": "outer_grad_outer", "v": "outer_grad"}


class Levels(NamedTuple):
    """The derivatives of each level, as parts of a direction, or their table; None for those that are not needed."""

    inner: Any
    outer: Any


class PnPBOState(NamedTuple):
    """The iterate, the one before it, the recursive parts of d, a table for each level, and the average h."""

    point: Point
    previous: Any  # () if no estimator is recursive
    estimate: Point
    memory: Levels
    average: PyTree
    moves: MovesState


class PnPBODraw(NamedTuple):
    """A batch on each level, and whether page computes D(u)."""

    inner: Any
    outer: Any
    coin: Array


@solver
class PnPBO(Solver[PnPBOState, PnPBODraw]):
    """Plug-and-play bilevel optimization: a single loop with an estimator for each variable.

    Parameters
    ----------
    inner_estimator : estimator of D_z: "sgd", "saga", "page" or "zerosarah"
    v_estimator : estimator of D_v
    outer_estimator : estimator of D_x
    mixing : λ of "zerosarah"; None means batch_size / (n + m), which is of the order that its theory requires
    momentum : ρ, the weight of the new estimate in the average of D_x; None means 0.1 for the unbiased estimators "sgd"
        and "saga", and no average for the others
    period : q; "page" makes a full-batch pass with probability 1/q. None means 1 + (n + m) // batch_size. If no
        variable uses "page", the means of the tables are summed again every q steps, to remove rounding errors
    sampling : must be "blocks" for "saga" and "zerosarah": a table belongs to a fixed partition of the rows
    """

    v_radius: float | None = positive(default=None, optional=True, hint="; use None for no projection")
    outer_bounds: str | tuple[Any, Any] | None = bounds(default=None, kw_only=True)
    inner_estimator: str = one_of(ESTIMATORS, default="zerosarah")
    v_estimator: str = one_of(ESTIMATORS, default="zerosarah")
    outer_estimator: str = one_of(ESTIMATORS, default="zerosarah")
    mixing: float | None = fraction(default=None, optional=True)
    momentum: float | None = fraction(default=None, optional=True)
    period: int | None = whole(default=None, optional=True, hint="; use None for the default")
    sampling: str = one_of(SAMPLINGS, default="blocks", kw_only=True)
    complexity = Complexity("O((n+m)^1/2 ε^-1)", "finite sum, ZeroSARAH or PAGE")
    needs_plain_step, needs_finite_sum, keeps_tables = None, True, True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self._parts(*_TABLED) and self.sampling != "blocks":
            raise ValueError(
                f"`PnPBO(sampling={self.sampling!r})`: the tables of 'saga' and 'zerosarah' require blocks; use "
                "sampling='blocks', or 'sgd' and 'page' for all variables."
            )

    @property
    def _estimators(self) -> dict[str, str]:
        return {"inner_var": self.inner_estimator, "outer_var": self.outer_estimator, "v": self.v_estimator}

    def _parts(self, *names: str) -> list[str]:
        """Return the variables whose estimator is one of these."""
        return [part for part, name in self._estimators.items() if name in names]

    def configure(self, problem: BilevelProblem) -> Self:
        rows = problem.n_inner + problem.n_outer
        momentum = _AVERAGE if self.outer_estimator in _UNBIASED else None
        return replace(
            self,
            mixing=min(1.0, self.batch_size / rows) if self.mixing is None else self.mixing,
            momentum=momentum if self.momentum is None else self.momentum,
            period=self.period or 1 + rows // self.batch_size,
        )

    def init(self, oracles: Oracles, start: Point) -> PnPBOState:
        recursive = self._parts(*_RECURSIVE)
        estimate = trees.zeros_like(select(start, recursive))
        memory = empty_tables(oracles, start, self._parts(*_TABLED))
        average = () if self.momentum is None else trees.zeros_like(start.outer_var)
        return PnPBOState(start, start if recursive else (), estimate, memory, average, self.moves.init(start))

    def draw(self, oracles: Oracles, key: Array, index: Array) -> PnPBODraw:
        return PnPBODraw(*oracles.draw(key, index), draw_below(key, index, given(self.period)) == 0)

    def refreshes(self, index: Array, draw: PnPBODraw) -> Array:
        if self._parts("page"):
            return (index == 0) | draw.coin
        return (index % given(self.period) == 0) & (index > 0)

    def refresh(self, oracles: Oracles, state: PnPBOState, index: Array, draw: PnPBODraw) -> PnPBOState:
        tables = zip(Levels._fields, state.memory, strict=True)
        rebuilt = (
            None if table is None else table.rebuild(Level.of(oracles, name), state.point) for name, table in tables
        )
        state = state._replace(memory=Levels(*rebuilt))
        return self.step(oracles, state, index, draw, full=self._parts("page"))

    def step(
        self, oracles: Oracles, state: PnPBOState, index: Array, draw: PnPBODraw, full: Collection[str] = ()
    ) -> PnPBOState:
        estimate, memory = self._estimate(oracles, state, index, draw, full)
        averaged, average, share = estimate, state.average, self.momentum
        if share is not None:
            average = jax.tree.map(lambda old, new: (1 - share) * old + share * new, average, estimate.outer_var)
            averaged = estimate._replace(outer_var=average)
        steps = self.step_size, self.step_size / self.outer_ratio
        point, moves = self.moves.apply(oracles, state.point, state.moves, averaged, *steps)
        recursive = self._parts(*_RECURSIVE)
        previous = state.point if recursive else ()
        return PnPBOState(point, previous, select(estimate, recursive), memory, average, moves)

    def _estimate(
        self, oracles: Oracles, state: PnPBOState, index: Array, draw: PnPBODraw, full: Collection[str]
    ) -> tuple[Point, Levels]:
        """Return d, with the parts in ``full`` computed on all rows, and the tables."""
        rows, point, recursive = Rows(draw.inner, draw.outer), state.point, self._sampled(full, *_RECURSIVE)
        terms = evaluate(oracles, point, rows, self._sampled(full, *ESTIMATORS))
        reduced, memory = saga(oracles, state.memory, terms, rows, self._parts(*_TABLED))
        new = direction(terms)
        exact = direction(evaluate(oracles, point, Rows(), full))
        old = direction(evaluate(oracles, state.previous, rows, recursive)) if recursive else new
        share = jnp.where(index == 0, 1, given(self.mixing))  # the first step has no last estimate

        def estimate(part: str, name: str) -> PyTree:
            if part in full:
                return getattr(exact, part)
            if name not in _RECURSIVE:
                return getattr(new if name == "sgd" else reduced, part)
            change = trees.subtract(getattr(new, part), getattr(old, part))
            updated = trees.add(getattr(state.estimate, part), change)
            if name == "page":
                return updated
            return jax.tree.map(lambda d, s: (1 - share) * d + share * s, updated, getattr(reduced, part))

        return Point(*(estimate(part, name) for part, name in self._estimators.items())), memory

    def _sampled(self, full: Collection[str], *names: str) -> list[str]:
        return [part for part in self._parts(*names) if part not in full]

    def calls(self, oracles: Oracles, draw: PnPBODraw, refresh: bool) -> Calls:
        full = self._parts("page") if refresh else []
        rows = oracles.count_inner(draw.inner), oracles.count_outer(draw.outer)
        evaluations = [self._sampled(full, *ESTIMATORS), self._sampled(full, *_RECURSIVE)]
        here, previous = (evaluation_calls(*rows, parts) for parts in evaluations)
        exact = evaluation_calls(oracles.n_inner, oracles.n_outer, full)
        return trees.add(trees.add(here, previous), exact)


def evaluate(oracles: Oracles, point: Point, rows: Rows, parts: Collection[str]) -> Levels:
    """Return the derivatives that these parts of a direction consist of."""
    if len(parts) == len(Point._fields):
        inner, outer = oracles.inner(point, rows.inner), oracles.outer(point, rows.outer)
        return Levels(Point(inner.grad, inner.cross, inner.hvp), Point(None, outer.grad_outer, outer.grad))

    def level(kinds: dict[str, str], rows: Any) -> Point:
        found = {part: getattr(oracles, kind)(point, rows) for part, kind in kinds.items() if part in parts}
        return Point(*map(found.get, Point._fields))

    return Levels(level(_INNER_KINDS, rows.inner), level(_OUTER_KINDS, rows.outer))


def evaluation_calls(inner_rows: Count, outer_rows: Count, parts: Collection[str]) -> Calls:
    """Return the cost of `evaluate` on these numbers of rows."""
    kinds = {kind: inner_rows for part, kind in _INNER_KINDS.items() if part in parts}
    return Calls(**kinds, **{kind: outer_rows for part, kind in _OUTER_KINDS.items() if part in parts})


def direction(terms: Levels) -> Point:
    """Return the direction: the sum of both levels."""
    pairs = zip(*terms, strict=True)
    return Point(*(one if other is None else trees.add(one, other) for one, other in pairs))


def select(point: Point, parts: Collection[str]) -> Point:
    """Return some parts, and None instead of the others."""
    return Point(*(value if name in parts else None for name, value in point._asdict().items()))


def empty_tables(oracles: Oracles, start: Point, parts: Collection[str]) -> Levels:
    """Return tables of zeros for the derivatives of these parts; None if a level has none of them."""

    def empty(terms: Point, n_blocks: int) -> BlockTable | None:
        if not jax.tree.leaves(terms):
            return None
        row = jnp.zeros_like(ravel_pytree(terms)[0])
        return BlockTable(jnp.zeros((n_blocks, *row.shape), row.dtype), row)

    terms = select(start, parts)
    outer = empty(terms._replace(inner_var=None), oracles.outer_samples.n_blocks)
    return Levels(empty(terms, oracles.inner_samples.n_blocks), outer)


def saga(oracles: Oracles, memory: Levels, terms: Levels, rows: Rows, parts: Collection[str]) -> tuple[Point, Levels]:
    """Return the parts of the SAGA direction S, and the tables with the new derivatives."""
    samples = oracles.inner_samples, oracles.outer_samples
    reduced, tables = [], []
    for level, table, new, block in zip(samples, memory, terms, rows, strict=True):
        estimate = select(new, parts)
        if table is not None:
            estimate, table = table.store(level, estimate, block)
        reduced.append(estimate)
        tables.append(table)
    return direction(Levels(*reduced)), Levels(*tables)

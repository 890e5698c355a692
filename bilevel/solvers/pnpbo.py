"""PnPBO: one loop over z, v and x with an estimator of choice for each.

Chu, Xu, Yao, Yu, Zhang. A Provably Convergent Plug-and-Play Framework for Stochastic Bilevel Optimization. 2025, arXiv
2505.01258. Confidence: medium. Of the text only the abstract could be had; the estimators are those of their own
papers, and the order of the moves is that of the authors' code.

With g = D_{B,C}(u), g' the same rows at the last u, S = g - Y + M from tables as in :mod:`bilevel.solvers.saba`, each
of z, v and x moves along its own estimate,

    sgd          d = g                                        saga    d = S
    zerosarah    d ← (1 - λ)(d + g - g') + λ S, at first S    page    d ← d + g - g', by a coin and at first D(u)
    z ← z - α d_z;   v ← P(v - (α/s) d_v);   h ← (1 - ρ) h + ρ d_x;   x ← x - (α/r) h

where the average h is meant for unbiased d_x, sgd and saga, and h = d_x else. Tables start at 0, so that only page ever
reads all rows. The names of the papers are settings: SFFBA is zerosarah for all three, the default; MSEBA zerosarah for
z and page for v and x; MA-SABA saga for all; SPABA page for all. The authors' code has (1 + λ) g in the place of
(1 - λ) g, whose limit is three times D; and it clips each coordinate of v to [-1, 1], which moves the solution where v
is larger. Here P is the projection onto a ball, or nothing.
Cost 5b (b for z, 2b for v, 2b for x), twice that where the estimator is zerosarah or page; at a coin of page n for z
and n + m for v and x instead. Memory: up to 6p + 4d, and tables as SABA's of what saga and zerosarah estimate.
Adaptive: nothing.
"""

from dataclasses import replace
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from bilevel import _tree as trees
from bilevel._types import Array, Calls, Point, PyTree, Rows
from bilevel.oracles import SAMPLINGS, Oracles
from bilevel.problems import BilevelProblem
from bilevel.solvers.base import Complexity, Solver, solver
from bilevel.solvers.estimates import (
    ESTIMATORS,
    RECUR,
    REMEMBER,
    Memory,
    keep,
    read,
    read_calls,
    rebuild,
    reduce,
    remember_nothing,
    total,
)
from bilevel.solvers.fields import bounds, fraction, given, one_of, positive, transformation, whole
from bilevel.solvers.moves import MovesState, draw_below

_UNBIASED = ("sgd", "saga")
_AVERAGE = 0.1  # the authors' code has 0.1 and 0.2


class PnPBOState(NamedTuple):
    """The iterate, the one before it, the estimates that recur, the tables, and the average of d_x."""

    point: Point
    previous: Any  # () where nothing recurs
    estimate: Point
    memory: Memory
    average: PyTree
    moves: MovesState


class PnPBODraw(NamedTuple):
    """A batch on each level, and the coin of page."""

    inner: Any
    outer: Any
    coin: Array


@solver
class PnPBO(Solver[PnPBOState, PnPBODraw]):
    """Plug-and-play bilevel optimization: a single loop with an estimator for each variable.

    Parameters
    ----------
    inner_estimator : of D_z: "sgd", "saga", "page" or "zerosarah"
    v_estimator : of D_v
    outer_estimator : of D_x
    v_ratio : s, v moves with ``step_size / v_ratio``
    mixing : λ of "zerosarah"; None means batch_size / (n + m), the order that its theory asks for
    momentum : ρ, the share of the new estimate in the average of D_x; None means 0.1 where that is unbiased ("sgd",
        "saga"), and no average where it is not
    period : q, the coin of "page" falls with probability 1/q; None means 1 + (n + m) // batch_size. Where no variable
        uses "page", the means of the tables are summed anew each q steps, against rounding
    sampling : "blocks" only, for "saga" and "zerosarah": a table belongs to a fixed partition of the rows
    """

    v_radius: float | None = positive(default=None, optional=True, hint="; use None for no projection")
    outer_optimizer: str | Any | None = transformation(("adam",), default=None, kw_only=True)
    outer_bounds: str | tuple[Any, Any] | None = bounds(default=None, kw_only=True)
    inner_estimator: str = one_of(ESTIMATORS, default="zerosarah")
    v_estimator: str = one_of(ESTIMATORS, default="zerosarah")
    outer_estimator: str = one_of(ESTIMATORS, default="zerosarah")
    v_ratio: float = positive(default=1.0)
    mixing: float | None = fraction(default=None, optional=True)
    momentum: float | None = fraction(default=None, optional=True)
    period: int | None = whole(default=None, optional=True, hint="; use None for the default")
    sampling: str = one_of(SAMPLINGS, default="blocks", kw_only=True)
    complexity = Complexity("O((n+m)^1/2 ε^-1)", "finite sum, ZeroSARAH or PAGE")
    needs_plain_step, needs_finite_sum, keeps_tables = None, True, True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self._parts(*REMEMBER) and self.sampling != "blocks":
            told = f"`PnPBO(sampling={self.sampling!r})`: the tables of 'saga' and 'zerosarah' need blocks"
            raise ValueError(f"{told}; take sampling='blocks', or 'sgd' and 'page' for all variables.")

    @property
    def _estimators(self) -> Point:
        return Point(self.inner_estimator, self.outer_estimator, self.v_estimator)

    def _parts(self, *names: str) -> list[str]:
        """Return the variables whose estimator is one of these."""
        return [part for part, name in self._estimators._asdict().items() if name in names]

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
        recurring = self._parts(*RECUR)
        estimate = trees.zeros_like(keep(start, recurring))
        memory = remember_nothing(oracles, start, self._parts(*REMEMBER))
        average = () if self.momentum is None else trees.zeros_like(start.outer_var)
        return PnPBOState(start, start if recurring else (), estimate, memory, average, self.moves.init(start))

    def draw(self, oracles: Oracles, key: Array, index: Array) -> PnPBODraw:
        return PnPBODraw(*oracles.draw(key, index), draw_below(key, index, given(self.period)) == 0)

    def refreshes(self, index: Array, draw: PnPBODraw) -> Array:
        if self._parts("page"):
            return (index == 0) | draw.coin
        return (index % given(self.period) == 0) & (index > 0)

    def refresh(self, oracles: Oracles, state: PnPBOState, index: Array, draw: PnPBODraw) -> PnPBOState:
        state = state._replace(memory=rebuild(oracles, state.memory, state.point))
        return self._advance(oracles, state, index, draw, self._parts("page"))

    def step(self, oracles: Oracles, state: PnPBOState, index: Array, draw: PnPBODraw) -> PnPBOState:
        return self._advance(oracles, state, index, draw, [])

    def _advance(
        self, oracles: Oracles, state: PnPBOState, index: Array, draw: PnPBODraw, full: list[str]
    ) -> PnPBOState:
        estimates, memory = self._estimate(oracles, state, index, draw, full)
        direction = estimates._replace(v=trees.scale(1 / self.v_ratio, estimates.v))
        average = state.average
        if self.momentum is not None:
            share = self.momentum
            average = jax.tree.map(lambda old, new: (1 - share) * old + share * new, average, estimates.outer_var)
            direction = direction._replace(outer_var=average)
        steps = self.step_size, self.step_size / self.outer_ratio
        point, moves = self.moves.apply(oracles, state.point, state.moves, direction, *steps)
        recurring = self._parts(*RECUR)
        previous = state.point if recurring else ()
        return PnPBOState(point, previous, keep(estimates, recurring), memory, average, moves)

    def _estimate(
        self, oracles: Oracles, state: PnPBOState, index: Array, draw: PnPBODraw, full: list[str]
    ) -> tuple[Point, Memory]:
        """Return d, whose ``full`` parts are read on all rows, and the tables."""
        rows, point, recurring = Rows(draw.inner, draw.outer), state.point, self._sampled(full, *RECUR)
        terms = read(oracles, point, rows, self._sampled(full, *ESTIMATORS))
        reduced, memory = reduce(oracles, state.memory, terms, rows, self._parts(*REMEMBER))
        new, exact = total(terms), total(read(oracles, point, Rows(), full))
        old = total(read(oracles, state.previous, rows, recurring)) if recurring else new
        share = jnp.where(index == 0, 1, given(self.mixing))  # at first there is nothing to recur from

        def estimate(part: str, name: str) -> PyTree:
            if part in full:
                return getattr(exact, part)
            if name not in RECUR:
                return getattr(new if name == "sgd" else reduced, part)
            change = trees.subtract(getattr(new, part), getattr(old, part))
            recurred = trees.add(getattr(state.estimate, part), change)
            if name == "page":
                return recurred
            return jax.tree.map(lambda d, s: (1 - share) * d + share * s, recurred, getattr(reduced, part))

        return Point(*(estimate(*chosen) for chosen in self._estimators._asdict().items())), memory

    def _sampled(self, full: list[str], *names: str) -> list[str]:
        return [part for part in self._parts(*names) if part not in full]

    def calls(self, oracles: Oracles, draw: PnPBODraw, refresh: bool) -> Calls:
        full = self._parts("page") if refresh else []
        rows = oracles.count_inner(draw.inner), oracles.count_outer(draw.outer)
        once, twice = (read_calls(*rows, self._sampled(full, *names)) for names in (ESTIMATORS, RECUR))
        return trees.add(trees.add(once, twice), read_calls(oracles.n_inner, oracles.n_outer, full))

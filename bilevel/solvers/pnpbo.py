"""PnPBO: plug-and-play, one loop over z, v and x with an estimator of choice for each.

Chu, Xu, Yao, Yu, Zhang. A Provably Convergent Plug-and-Play Framework for Stochastic Bilevel Optimization. 2025, arXiv
2505.01258. Confidence: medium; only the abstract of the text was available. The estimators are taken from their own
papers, and the order of the moves from the authors' code.

With g = D_{B,C}(u), g' on the same rows at the last u, and S = g - Y + M from tables as in :mod:`bilevel.solvers.saba`,
each of z, v and x moves along its own estimate d:

    sgd          d = g                                    saga    d = S
    zerosarah    d ← (1 - λ)(d + g - g') + λ S            page    d ← d + g - g', or D(u) with probability 1/q
                 d = S in the first step                          d = D(u) in the first step
    z ← z - α d_z;   v ← P(v - (α/s) d_v);   h ← (1 - ρ) h + ρ d_x;   x ← x - (α/r) h

The average h is for unbiased d_x (sgd and saga); otherwise h = d_x. Tables start at 0, so that only page makes
full-batch passes. Methods with names of their own are settings: SFFBA is zerosarah for all three (the default), MSEBA
is zerosarah for z and page for v and x, MA-SABA is saga for all, SPABA is page for all. The authors' code has (1 + λ) g
instead of (1 - λ) g, whose limit is three times D, and clips each coordinate of v to [-1, 1], which changes the
solution if v is larger. Here P is the projection onto a ball, or the identity.
Cost 5b (b for z, 2b for v, 2b for x), twice that for zerosarah and page; in a full-batch step of page n for z and n + m
for v and x instead. Memory: up to 6p + 4d, and tables like those of SABA for saga and zerosarah. Adaptive: nothing.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from bilevel._core import trees
from bilevel._core.types import Array, Calls, Point, PyTree, Rows
from bilevel.oracles import SAMPLINGS, Oracles
from bilevel.problems import BilevelProblem
from bilevel.solvers import estimates
from bilevel.solvers.base import Complexity, Solver, solver
from bilevel.solvers.estimates import ESTIMATORS, RECURSIVE, TABLED, Memory
from bilevel.solvers.fields import bounds, fraction, given, one_of, positive, transformation, whole
from bilevel.solvers.moves import MovesState, draw_below

_UNBIASED = ("sgd", "saga")
_AVERAGE = 0.1  # the authors' code uses 0.1 and 0.2


class PnPBOState(NamedTuple):
    """The iterate, the one before it, the recursive parts of d, the tables, and the average h."""

    point: Point
    previous: Any  # () if no estimator is recursive
    estimate: Point
    memory: Memory
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
    v_ratio : s; v moves with ``step_size / v_ratio``
    mixing : λ of "zerosarah"; None means batch_size / (n + m), which is of the order that its theory requires
    momentum : ρ, the weight of the new estimate in the average of D_x; None means 0.1 for the unbiased estimators "sgd"
        and "saga", and no average for the others
    period : q; "page" makes a full-batch pass with probability 1/q. None means 1 + (n + m) // batch_size. If no
        variable uses "page", the means of the tables are summed again every q steps, to remove rounding errors
    sampling : must be "blocks" for "saga" and "zerosarah": a table belongs to a fixed partition of the rows
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
        if self._parts(*TABLED) and self.sampling != "blocks":
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
        recursive = self._parts(*RECURSIVE)
        estimate = trees.zeros_like(estimates.select(start, recursive))
        memory = estimates.empty_memory(oracles, start, self._parts(*TABLED))
        average = () if self.momentum is None else trees.zeros_like(start.outer_var)
        return PnPBOState(start, start if recursive else (), estimate, memory, average, self.moves.init(start))

    def draw(self, oracles: Oracles, key: Array, index: Array) -> PnPBODraw:
        return PnPBODraw(*oracles.draw(key, index), draw_below(key, index, given(self.period)) == 0)

    def refreshes(self, index: Array, draw: PnPBODraw) -> Array:
        if self._parts("page"):
            return (index == 0) | draw.coin
        return (index % given(self.period) == 0) & (index > 0)

    def refresh(self, oracles: Oracles, state: PnPBOState, index: Array, draw: PnPBODraw) -> PnPBOState:
        state = state._replace(memory=estimates.rebuild(oracles, state.memory, state.point))
        return self.step(oracles, state, index, draw, full=self._parts("page"))

    def step(
        self, oracles: Oracles, state: PnPBOState, index: Array, draw: PnPBODraw, full: Sequence[str] = ()
    ) -> PnPBOState:
        estimate, memory = self._estimate(oracles, state, index, draw, full)
        direction = estimate._replace(v=trees.scale(1 / self.v_ratio, estimate.v))
        average, share = state.average, self.momentum
        if share is not None:
            average = jax.tree.map(lambda old, new: (1 - share) * old + share * new, average, estimate.outer_var)
            direction = direction._replace(outer_var=average)
        steps = self.step_size, self.step_size / self.outer_ratio
        point, moves = self.moves.apply(oracles, state.point, state.moves, direction, *steps)
        recursive = self._parts(*RECURSIVE)
        previous = state.point if recursive else ()
        return PnPBOState(point, previous, estimates.select(estimate, recursive), memory, average, moves)

    def _estimate(
        self, oracles: Oracles, state: PnPBOState, index: Array, draw: PnPBODraw, full: Sequence[str]
    ) -> tuple[Point, Memory]:
        """Return d, with the parts in ``full`` computed on all rows, and the tables."""
        rows, point, recursive = Rows(draw.inner, draw.outer), state.point, self._sampled(full, *RECURSIVE)
        terms = estimates.evaluate(oracles, point, rows, self._sampled(full, *ESTIMATORS))
        reduced, memory = estimates.saga(oracles, state.memory, terms, rows, self._parts(*TABLED))
        new = estimates.direction(terms)
        exact = estimates.direction(estimates.evaluate(oracles, point, Rows(), full))
        old = estimates.direction(estimates.evaluate(oracles, state.previous, rows, recursive)) if recursive else new
        share = jnp.where(index == 0, 1, given(self.mixing))  # the first step has no last estimate

        def estimate(part: str, name: str) -> PyTree:
            if part in full:
                return getattr(exact, part)
            if name not in RECURSIVE:
                return getattr(new if name == "sgd" else reduced, part)
            change = trees.subtract(getattr(new, part), getattr(old, part))
            updated = trees.add(getattr(state.estimate, part), change)
            if name == "page":
                return updated
            return jax.tree.map(lambda d, s: (1 - share) * d + share * s, updated, getattr(reduced, part))

        return Point(*(estimate(part, name) for part, name in self._estimators.items())), memory

    def _sampled(self, full: Sequence[str], *names: str) -> list[str]:
        return [part for part in self._parts(*names) if part not in full]

    def calls(self, oracles: Oracles, draw: PnPBODraw, refresh: bool) -> Calls:
        full = self._parts("page") if refresh else []
        rows = oracles.count_inner(draw.inner), oracles.count_outer(draw.outer)
        evaluations = [self._sampled(full, *ESTIMATORS), self._sampled(full, *RECURSIVE)]
        here, previous = (estimates.evaluation_calls(*rows, parts) for parts in evaluations)
        exact = estimates.evaluation_calls(oracles.n_inner, oracles.n_outer, full)
        return trees.add(trees.add(here, previous), exact)

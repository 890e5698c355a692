"""SPABA: single-loop probabilistic stochastic bilevel algorithm, SRBA with random refreshes.

Chu, Xu, Yao, Zhang. SPABA: A Single-Loop and Probabilistic Stochastic Bilevel Algorithm Achieving Optimal Sample
Complexity. ICML 2024, arXiv 2405.18777.

In the first step, and then with probability 1/q, a full-batch pass; the same coin for z, v and x:

    D ← D(u)   or   draw B, C;  D ← D + D_{B,C}(u) - D_{B,C}(u_previous);      u ← P(u - step · D)

Confidence: medium; only the abstract of the text was available. PAGE, which SPABA adapts, is taken from its own paper:
a full-batch pass in the first step, 1/q = b/(b + n + m), constant steps. Three codes of the authors differ from that
and from one another. None starts with a full-batch pass except by chance. One refreshes with probability 0.1; two toss
one coin when the step is compiled and take the same branch in all steps. Two clip each coordinate of v to [-1, 1],
which changes the solution if v is larger; here P is the projection onto a ball (``v_radius``) or the identity. All have
a separate step for v; here it moves with the step of z.
Cost 3n + 2m with probability 1/q, else 10 b. Memory 6p + 3d. Adaptive: nothing.
"""

from dataclasses import replace
from typing import Any, NamedTuple, Self

from bilevel._core import trees
from bilevel._core.types import Array, Calls, Point, Rows
from bilevel.oracles import Oracles
from bilevel.problems import BilevelProblem
from bilevel.solvers.base import Complexity, Solver, solver
from bilevel.solvers.drift import Drift, DriftMonitor
from bilevel.solvers.fields import bounds, given, positive, whole
from bilevel.solvers.moves import draw_below, recursive_calls
from bilevel.solvers.srba import RecursiveState, move_along


class SPABADraw(NamedTuple):
    """A batch on each level, and the coin."""

    inner: Any
    outer: Any
    coin: Array


@solver
class SPABA(Solver[RecursiveState, SPABADraw]):
    """Single-loop probabilistic stochastic bilevel algorithm.

    Parameters
    ----------
    period : q, mean number of steps from one full-batch pass to the next; None means 1 + (n + m) // batch_size
    """

    period: int | None = whole(default=None, optional=True, hint="; use None for the default")
    v_radius: float | None = positive(default=None, optional=True, hint="; use None for no projection", kw_only=True)
    outer_bounds: str | tuple[Any, Any] | None = bounds(default=None, kw_only=True)
    complexity = Complexity("O((n+m)^1/2 ε^-1)", "finite sum")
    needs_plain_step, needs_finite_sum = None, True

    def configure(self, problem: BilevelProblem) -> Self:
        return replace(self, period=self.period or 1 + 2 * (problem.n_inner + problem.n_outer) // sum(self.batches()))

    def init(self, oracles: Oracles, start: Point) -> RecursiveState:
        drift, moves = Drift.none(self.step_size), self.moves.init(start)
        return RecursiveState(start, start, trees.zeros_like(start), drift, moves)

    def draw(self, oracles: Oracles, key: Array, index: Array) -> SPABADraw:
        return SPABADraw(*oracles.draw(key, index), draw_below(key, index, given(self.period)) == 0)

    def refreshes(self, index: Array, draw: SPABADraw) -> Array:
        return (index == 0) | draw.coin

    def refresh(self, oracles: Oracles, state: RecursiveState, index: Array, draw: SPABADraw) -> RecursiveState:
        exact = oracles.direction(state.point)
        drift = state.drift.measure(exact, state.estimate, index)
        return move_along(self, oracles, state._replace(drift=drift), exact)

    def step(self, oracles: Oracles, state: RecursiveState, index: Array, draw: SPABADraw) -> RecursiveState:
        change = oracles.difference(state.point, state.previous, Rows(draw.inner, draw.outer))
        return move_along(self, oracles, state, trees.add(state.estimate, change))

    def calls(self, oracles: Oracles, draw: SPABADraw, refresh: bool) -> Calls:
        return recursive_calls(oracles, draw, refresh)

    @property
    def monitor(self) -> DriftMonitor:
        return DriftMonitor(self)

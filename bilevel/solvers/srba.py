"""SRBA: stochastic recursive bilevel algorithm.

Dagréou, Moreau, Vaiter, Ablin. A Lower Bound and a Near-Optimal Algorithm for Bilevel Empirical Risk Minimization.
AISTATS 2024. Confidence: high; the paper's text was compared.

With u = (z, v, x), steps ρ for z and v and γ for x, the projection P of v onto a ball, every q steps

    D ← D(u), a full-batch pass;                            u ← P(u - step · D)
    q - 1 times:  draw B, C;  D ← D + D_{B,C}(u) - D_{B,C}(u_previous);  u ← P(u - step · D)

Cost per period: 3n + 2m + 10 b (q - 1). Memory: 6p + 3d, no tables. Adaptive: nothing.
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
from bilevel.solvers.moves import MovesState, recursive_calls


class RecursiveState(NamedTuple):
    """The iterate u, the one before it, the estimate of D, its drift, and the states of transformations."""

    point: Point
    previous: Point
    estimate: Point
    drift: Drift
    moves: MovesState


@solver
class SRBA(Solver[RecursiveState, Rows]):
    """Stochastic recursive bilevel algorithm.

    Parameters
    ----------
    step_size : ρ, the step of the inner variable and of v
    period : q, steps from one full-batch pass to the next; None means max(1, (n + m) // (2 batch_size))
    """

    period: int | None = whole(default=None, optional=True, hint="; use None for the default")
    v_radius: float | None = positive(default=None, optional=True, hint="; use None for no projection", kw_only=True)
    outer_bounds: str | tuple[Any, Any] | None = bounds(default=None, kw_only=True)
    complexity = Complexity("O((n+m)^1/2 ε^-1)", "finite sum", "C^{2,2}", "C^{3,3}")
    needs_plain_step, needs_finite_sum = None, True

    def configure(self, problem: BilevelProblem) -> Self:
        return replace(self, period=self.period or max(1, (problem.n_inner + problem.n_outer) // sum(self.batches())))

    def init(self, oracles: Oracles, start: Point) -> RecursiveState:
        return RecursiveState(start, start, trees.zeros_like(start), Drift.none(self.step_size), self.moves.init(start))

    def refreshes(self, index: Array, draw: Rows) -> Array:
        return index % given(self.period) == 0

    def refresh(self, oracles: Oracles, state: RecursiveState, index: Array, draw: Rows) -> RecursiveState:
        exact = oracles.direction(state.point)
        return move_along(self, oracles, state._replace(drift=state.drift.measure(exact, state.estimate, index)), exact)

    def step(self, oracles: Oracles, state: RecursiveState, index: Array, draw: Rows) -> RecursiveState:
        change = oracles.difference(state.point, state.previous, draw)
        return move_along(self, oracles, state, trees.add(state.estimate, change))

    def calls(self, oracles: Oracles, draw: Rows, refresh: bool) -> Calls:
        return recursive_calls(oracles, draw, refresh)

    @property
    def monitor(self) -> DriftMonitor:
        return DriftMonitor(self)


def move_along(solver: Solver, oracles: Oracles, state: RecursiveState, estimate: Point) -> RecursiveState:
    """Return the state after u ← P(u - step · D) with this estimate of D."""
    steps = solver.step_size, solver.step_size / solver.outer_ratio
    point, moves = solver.moves.apply(oracles, state.point, state.moves, estimate, *steps)
    return state._replace(point=point, previous=state.point, estimate=estimate, moves=moves)

"""SBO-LSVRG: loopless stochastic variance-reduced gradients for all three variables, SABA without its tables.

A submission to ICLR 2024 on bilevel optimization with L-SVRG. L-SVRG: Kovalev, Horváth, Richtárik. Don't Jump Through
Hoops and Remove Those Loops: SVRG and Katyusha are Better Without the Outer Loop. ALT 2020, arXiv 1901.08689.
Confidence: low; only the abstract of the submission and its reviews were available. The estimate is that of L-SVRG, and
the moves are those of SOBA with constant steps.

In the first step, and then with probability 1/q, the reference ũ becomes u; the same coin for z, v and x:

    ũ ← u, D(ũ) by a full-batch pass;   u ← P(u - step · D(ũ))
    or   draw B, C;                     u ← P(u - step · (D_{B,C}(u) - D_{B,C}(ũ) + D(ũ)))

Choice made here: the reference is replaced before the move, where the sampled terms cancel and are not computed. In the
paper on L-SVRG it is replaced after the move, by the point before it.
Cost 3n + 2m with probability 1/q, else 10 b. Memory 6p + 3d, no tables. Adaptive: nothing.
"""

from dataclasses import replace
from typing import Any, NamedTuple, Self

from bilevel._core import trees
from bilevel._core.types import Array, Calls, Point, Rows
from bilevel.oracles import Oracles
from bilevel.problems import BilevelProblem
from bilevel.solvers.base import Complexity, Solver, solver
from bilevel.solvers.fields import bounds, given, positive, whole
from bilevel.solvers.moves import MovesState, draw_below, recursive_calls
from bilevel.solvers.spaba import SPABADraw


class ReferenceState(NamedTuple):
    """The iterate u, the reference ũ, D(ũ), and the states of transformations."""

    point: Point
    reference: Point
    exact: Point
    moves: MovesState


@solver
class SBOLSVRG(Solver[ReferenceState, SPABADraw]):
    """Stochastic bilevel optimization with loopless SVRG.

    Parameters
    ----------
    period : q, mean number of steps from one full-batch pass to the next; None means max(1, (n + m) // batch_size)
    """

    period: int | None = whole(default=None, optional=True, hint="; use None for the default")
    v_radius: float | None = positive(default=None, optional=True, hint="; use None for no projection", kw_only=True)
    outer_bounds: str | tuple[Any, Any] | None = bounds(default=None, kw_only=True)
    complexity = Complexity("O((n+m)^2/3 ε^-1)", "finite sum")
    needs_plain_step, needs_finite_sum = None, True

    def configure(self, problem: BilevelProblem) -> Self:
        rows = problem.n_inner + problem.n_outer
        return replace(self, period=self.period or max(1, 2 * rows // sum(self.batches())))

    def init(self, oracles: Oracles, start: Point) -> ReferenceState:
        return ReferenceState(start, start, trees.zeros_like(start), self.moves.init(start))

    def draw(self, oracles: Oracles, key: Array, index: Array) -> SPABADraw:
        return SPABADraw(*oracles.draw(key, index), draw_below(key, index, given(self.period)) == 0)

    def refreshes(self, index: Array, draw: SPABADraw) -> Array:
        return (index == 0) | draw.coin

    def refresh(self, oracles: Oracles, state: ReferenceState, index: Array, draw: SPABADraw) -> ReferenceState:
        exact = oracles.direction(state.point)
        return self._move(oracles, state._replace(reference=state.point, exact=exact), exact)

    def step(self, oracles: Oracles, state: ReferenceState, index: Array, draw: SPABADraw) -> ReferenceState:
        change = oracles.difference(state.point, state.reference, Rows(draw.inner, draw.outer))
        return self._move(oracles, state, trees.add(state.exact, change))

    def _move(self, oracles: Oracles, state: ReferenceState, direction: Point) -> ReferenceState:
        steps = self.step_size, self.step_size / self.outer_ratio
        point, moves = self.moves.apply(oracles, state.point, state.moves, direction, *steps)
        return state._replace(point=point, moves=moves)

    def calls(self, oracles: Oracles, draw: SPABADraw, refresh: bool) -> Calls:
        return recursive_calls(oracles, draw, refresh)

"""SOBA: stochastic bilevel algorithm.

Dagréou, Ablin, Vaiter, Moreau. A framework for bilevel optimization that enables stochastic and global variance
reduction algorithms. NeurIPS 2022, arXiv 2201.13409. Confidence: high; the paper's text was compared, except for its
schedule.

    draw B, C;   (z, v) ← (z, v) - α t^-½ D_{B,C}(u);   x ← x - (α/r) t^-½ D_{B,C}(u),   all at the old u

Cost 5b. Memory 2p + d. Adaptive: nothing.
"""

from typing import Any

from bilevel._core.types import Array, Calls, Point, Rows
from bilevel.oracles import Oracles
from bilevel.solvers.base import Complexity, PointState, Solver, solver
from bilevel.solvers.fields import bounds, positive
from bilevel.solvers.moves import decay, direction_calls


@solver
class SOBA(Solver[PointState, Rows]):
    """Stochastic bilevel algorithm: plain stochastic directions, with steps decreasing like t^-1/2.

    Parameters
    ----------
    step_size : first step of the inner variable and of v
    """

    v_radius: float | None = positive(default=None, optional=True, hint="; use None for no projection")
    outer_bounds: str | tuple[Any, Any] | None = bounds(default=None, kw_only=True)
    needs_plain_step = None
    complexity = Complexity("O(ε^-2)", "general expectation", "C^{2,2}", "C^{3,3}")

    def init(self, oracles: Oracles, start: Point) -> PointState:
        return PointState(start, self.moves.init(start))

    def step(self, oracles: Oracles, state: PointState, index: Array, draw: Rows) -> PointState:
        direction, step = oracles.direction(state.point, draw), decay(self.step_size, index, 0.5)
        return PointState(*self.moves.apply(oracles, *state, direction, step, step / self.outer_ratio))

    def calls(self, oracles: Oracles, draw: Rows, refresh: bool) -> Calls:
        return direction_calls(oracles.count_inner(draw.inner), oracles.count_outer(draw.outer))

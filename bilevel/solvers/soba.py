"""SOBA: stochastic bilevel algorithm.

Dagréou, Ablin, Vaiter, Moreau. A framework for bilevel optimization that enables stochastic and global variance
reduction algorithms. NeurIPS 2022, arXiv 2201.13409. Confidence: high; the paper's text was compared, but for its
schedule.

    draw B, C;   (z, v) ← (z, v) - α t^-½ D_{B,C}(u);   x ← x - (α/r) t^-½ D_{B,C}(u),   all at the old u

Cost 5b. Memory 2p + d. Adaptive: nothing.
"""

from typing import NamedTuple

from bilevel._types import Array, Calls, Point, Rows
from bilevel.oracles import Oracles
from bilevel.solvers.base import Complexity, solver
from bilevel.solvers.directions import decay, direction_calls
from bilevel.solvers.preconditioning import PreconditionedSolver, Preconditioning


class SOBAState(NamedTuple):
    """The iterate, and the state of the transformation of D_x if there is one."""

    point: Point
    preconditioning: Preconditioning = Preconditioning()


@solver
class SOBA(PreconditionedSolver):
    """Stochastic bilevel algorithm: plain stochastic directions, steps decreasing like t^-1/2.

    Parameters
    ----------
    step_size : first step of the inner variable and of v
    """

    table_order = 3
    complexity = Complexity("O(ε^-2)", "general expectation", "C^{2,2}", "C^{3,3}")

    def init(self, oracles: Oracles, start: Point) -> SOBAState:
        return SOBAState(start, self.init_preconditioning(start))

    def step(self, oracles: Oracles, state: SOBAState, index: Array, draw: Rows) -> SOBAState:
        step = decay(self.step_size, index, 0.5)
        direction = oracles.direction(state.point, draw)
        return self.descend(oracles, state, direction, step)

    def calls(self, oracles: Oracles, draw: Rows, refresh: bool) -> Calls:
        return direction_calls(oracles.count_inner(draw.inner), oracles.count_outer(draw.outer))

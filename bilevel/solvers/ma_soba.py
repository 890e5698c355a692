"""MA-SOBA: SOBA with a moving average of the outer direction.

Chen, Xiao, Balasubramanian. Optimal Algorithms for Stochastic Bilevel Optimization under Relaxed Smoothness Conditions.
JMLR 25(151), 2024, arXiv 2306.12067. Confidence: medium; the method is well known, the paper's text was not compared.

    draw B, C;   x ← x - (α/r) t^-½ h, the old average;   (z, v) ← (z, v) - α t^-½ D_{B,C}(u), at the old u
    h ← (1 - θ_t) h + θ_t D_x,   θ_t = min(1, θ t^-½),   h = 0 at first, so x does not move in the first step

Cost 5b. Memory 2p + 2d. Adaptive: nothing.
"""

from typing import NamedTuple

import jax

from bilevel._core import trees
from bilevel._core.types import Array, Calls, Point, PyTree, Rows
from bilevel.oracles import Oracles
from bilevel.solvers.base import Complexity, Solver, solver
from bilevel.solvers.fields import fraction
from bilevel.solvers.moves import MovesState, decay, decay_share, direction_calls


class MASOBAState(NamedTuple):
    """The iterate, the average of D_x, and the states of transformations."""

    point: Point
    average: PyTree
    moves: MovesState


@solver
class MASOBA(Solver[MASOBAState, Rows]):
    """SOBA with a moving average of the outer direction.

    Parameters
    ----------
    step_size : first step of the inner variable and of v; steps decrease like t^-1/2
    momentum : θ; the share of the new direction in the average is min(1, θ t^-1/2)
    """

    momentum: float = fraction(default=1.0)
    needs_plain_step = None
    complexity = Complexity("O(ε^-2)", "general expectation", "C^{1,1}", "C^{2,2}")

    def init(self, oracles: Oracles, start: Point) -> MASOBAState:
        return MASOBAState(start, trees.zeros_like(start.outer_var), self.moves.init(start))

    def step(self, oracles: Oracles, state: MASOBAState, index: Array, draw: Rows) -> MASOBAState:
        direction = oracles.direction(state.point, draw)
        step = decay(self.step_size, index, 0.5)
        averaged = direction._replace(outer_var=state.average)
        point, moves = self.moves.apply(oracles, state.point, state.moves, averaged, step, step / self.outer_ratio)
        share = decay_share(self.momentum, index, 0.5)
        average = jax.tree.map(lambda old, new: (1 - share) * old + share * new, state.average, direction.outer_var)
        return MASOBAState(point, average, moves)

    def calls(self, oracles: Oracles, draw: Rows, refresh: bool) -> Calls:
        return direction_calls(oracles.count_inner(draw.inner), oracles.count_outer(draw.outer))

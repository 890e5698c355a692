"""TTSA: two-timescale stochastic approximation.

Hong, Wai, Wang, Yang. A Two-Timescale Stochastic Algorithm Framework for Bilevel Optimization: Complexity Analysis and
Application to Actor-Critic. SIAM J. Optim. 33(1), 2023, arXiv 2007.05170.

    draw B;  z ← z - α t^-2/5 ∇z G_B
    x ← x - (α/r) t^-3/5 ((∇²xz G_B') v + ∇x F_C)   at the new z,   v by a Neumann series of random length

The paper lets Q grow like log t; here it is fixed. Cost (4 + P) b, P of mean (Q - 1)/2. Memory p + d.
"""

from typing import NamedTuple

from bilevel._types import Array, Calls, Point
from bilevel.oracles import Oracles
from bilevel.solvers.alternating import AlternatingDraw, AlternatingSolver
from bilevel.solvers.base import solver
from bilevel.solvers.directions import decayed, inner_descent


class TTSAState(NamedTuple):
    """The iterate, with the v of the last hypergradient."""

    point: Point


@solver
class TTSA(AlternatingSolver):
    """Two-timescale stochastic approximation.

    Parameters
    ----------
    step_size : first step of the inner variable; steps decrease like t^-2/5
    outer_ratio : the outer variable moves with ``step_size / outer_ratio``, decreasing like t^-3/5
    batch_size : rows per batch, on both levels
    n_neumann : Q; the Neumann series takes P products, uniform in 0, …, Q - 1
    neumann_step : η, its step; below 2/L of the batches' Hessians
    sampling : "blocks", "iid", "reshuffle" or "full"
    """

    def init(self, oracles: Oracles, start: Point) -> TTSAState:
        """Start where the problem starts."""
        return TTSAState(start)

    def draw(self, oracles: Oracles, key: Array, index: Array) -> AlternatingDraw:
        """Draw 1 + Q inner batches, one outer and the length."""
        return self.draw_alternating(oracles, key, index, 1)

    def step(self, oracles: Oracles, state: TTSAState, index: Array, draw: AlternatingDraw) -> TTSAState:
        """Take one inner step, then move along the hypergradient there."""
        step = decayed(self.step_size, index, 2 / 5)
        point = inner_descent(oracles, state.point, draw.inner_loop, 1, step)
        return TTSAState(self.outer_move(oracles, point, index, draw, power=3 / 5))

    def calls(self, oracles: Oracles, draw: AlternatingDraw, refresh: bool) -> Calls:
        """Count one gradient and a hypergradient of the drawn length."""
        return self.alternating_calls(oracles, draw, 1)

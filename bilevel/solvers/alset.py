"""ALSET: alternating stochastic gradient descent.

Chen, Sun, Yin. Closing the Gap: Tighter Analysis of Alternating Stochastic Gradient Methods for Bilevel Problems.
NeurIPS 2021.

    T times:  draw B;  z ← z - α t^-½ ∇z G_B
    x ← x - (α/r) t^-½ ((∇²xz G_B') v + ∇x F_C),   v by a Neumann series of random length P in {0, …, Q-1}

The paper prints P in {1, …, Q}, which biases v by a factor I - η H. With a warm start BSA is the same algorithm.

Cost (T + P + 3) b, P of mean (Q - 1)/2. Memory p + d.
"""

from typing import NamedTuple

from bilevel._types import Array, Calls, Point
from bilevel.oracles import Oracles
from bilevel.solvers.alternating import AlternatingDraw, AlternatingSolver
from bilevel.solvers.base import solver
from bilevel.solvers.directions import decayed, inner_descent
from bilevel.solvers.parameters import whole


class ALSETState(NamedTuple):
    """The iterate, with the v of the last hypergradient."""

    point: Point


@solver
class ALSET(AlternatingSolver):
    """Alternating stochastic gradient descent.

    Parameters
    ----------
    step_size : first step of the inner variable; steps decrease like t^-1/2
    outer_ratio : the outer variable moves with the inner step divided by this
    batch_size : rows per batch, on both levels
    n_neumann : Q; the Neumann series takes P products, uniform in 0, …, Q - 1
    neumann_step : η, its step; below 2/L of the batches' Hessians
    n_inner_steps : T, inner steps per outer step; one is enough for the theory
    sampling : "blocks", "iid", "reshuffle" or "full"
    """

    n_inner_steps: int = whole(default=10)

    def init(self, oracles: Oracles, start: Point) -> ALSETState:
        """Start where the problem starts."""
        return ALSETState(start)

    def draw(self, oracles: Oracles, key: Array, index: Array) -> AlternatingDraw:
        """Draw T + Q inner batches, one outer and the length."""
        return self.draw_alternating(oracles, key, index, self.n_inner_steps)

    def step(self, oracles: Oracles, state: ALSETState, index: Array, draw: AlternatingDraw) -> ALSETState:
        """Follow the inner problem, then move along the hypergradient there."""
        step = decayed(self.step_size, index, 0.5)
        point = inner_descent(oracles, state.point, draw.inner_loop, self.n_inner_steps, step)
        return ALSETState(self.outer_move(oracles, point, index, draw, power=0.5))

    def calls(self, oracles: Oracles, draw: AlternatingDraw, refresh: bool) -> Calls:
        """Count T gradients and a hypergradient of the drawn length."""
        return self.alternating_calls(oracles, draw, self.n_inner_steps)

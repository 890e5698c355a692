"""ALSET: alternating stochastic gradient descent.

Chen, Sun, Yin. Closing the Gap: Tighter Analysis of Alternating Stochastic Gradient Methods for Bilevel Problems.
NeurIPS 2021. Confidence: high; the paper's text was compared.

    T times:  draw B;  z ← z - α t^-½ ∇z G_B
    x ← x - (α/r) t^-½ ((∇²xz G_B') v + ∇x F_C),   v by a Neumann series of random length P in {0, …, Q-1}

The paper prints P in {1, …, Q}, which biases v by a factor I - η H, and which no other source of the estimator has. BSA
with a warm start is the same algorithm.
Cost (T + P + 3) b, P of mean (Q - 1)/2. Memory p + d. Adaptive: nothing.
"""

from dataclasses import dataclass

from bilevel._core.types import Array, Calls, Point
from bilevel.oracles import Oracles
from bilevel.solvers.base import Complexity, PointState, solver
from bilevel.solvers.fields import whole
from bilevel.solvers.moves import MovesState, decay, draw_below, split
from bilevel.solvers.neumann import LoopDraw, NeumannDraw, NeumannSolver, hypergradient, hypergradient_calls


@dataclass(frozen=True)
class AlternatingSolver(NeumannSolver[PointState, LoopDraw]):
    """The common part of BSA, ALSET and TTSA: inner steps, then a move of x by a series of random length.

    Parameters
    ----------
    n_neumann : Q; the Neumann series takes P products, uniform in 0, …, Q - 1
    """

    n_inner_steps = 1  # a parameter of BSA and ALSET
    inner_power = outer_power = 0.5  # steps decrease like t to minus these powers
    needs_plain_step = None

    def init(self, oracles: Oracles, start: Point) -> PointState:
        return PointState(start, self.moves.init(start))

    def draw(self, oracles: Oracles, key: Array, index: Array) -> LoopDraw:
        times, length = self.n_inner_steps, draw_below(key, index, self.n_neumann)
        rows = oracles.draw_inner(key, index, times + self.n_neumann)
        inner_loop, products, cross = split(rows, times, self.n_neumann - 1, None)
        return LoopDraw(inner_loop, NeumannDraw(products, cross, oracles.draw_outer(key, index), length))

    def step(self, oracles: Oracles, state: PointState, index: Array, draw: LoopDraw) -> PointState:
        step = decay(self.step_size, index, self.inner_power)
        moved = self.moves.inner_steps(oracles, *state, draw.inner_loop, self.n_inner_steps, step)
        return self.outer_move(oracles, *moved, index, draw)

    def outer_move(self, oracles: Oracles, point: Point, moves: MovesState, index: Array, draw: LoopDraw) -> PointState:
        """Return the state with x moved along the hypergradient, and the v of that hypergradient."""
        _, grad, v = hypergradient(oracles, point, draw.neumann, self.n_neumann, self.neumann_step)
        step = decay(self.step_size / self.outer_ratio, index, self.outer_power)
        return PointState(*self.moves.outer(oracles, point._replace(v=v), moves, grad, step))

    def calls(self, oracles: Oracles, draw: LoopDraw, refresh: bool) -> Calls:
        hyper = hypergradient_calls(oracles, draw.neumann, self.n_neumann)
        return hyper._replace(inner_grad=oracles.count_inner(draw.inner_loop, self.n_inner_steps))


@solver
class ALSET(AlternatingSolver):
    """Alternating stochastic gradient descent.

    Parameters
    ----------
    step_size : first step of the inner variable; steps decrease like t^-1/2
    n_inner_steps : T, inner steps per outer step; the theory holds for T = 1
    """

    n_inner_steps: int = whole(default=10)
    complexity = Complexity("Õ(ε^-2)", "general expectation", "C^{1,1}", "C^{2,2}")

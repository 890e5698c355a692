"""StocBiO: stochastic bilevel optimizer, with an inner loop and a truncated Neumann series.

Ji, Yang, Liang. Bilevel Optimization: Convergence Analysis and Enhanced Design. ICML 2021, arXiv 2010.07962.
Confidence: medium; the loops were compared with the authors' code, whose series is not that of the paper (see below).

    T times:  draw B;  z ← z - α ∇z G_B
    draw C, B_1, …, B_Q, B';   v = -η sum_{l<=Q} prod (I - η H_B) ∇z F_C;   x ← x - (α/r)((∇²xz G_B') v + ∇x F_C)

With t_l = (I - η H)^l ∇z F the authors' code has v = -(t_1 + … + t_Q + η t_Q), with one batch for all products. This
is about 1/η times as large, and so is its step of x where F does not depend on x.
Cost (T + Q + 3) b. Memory p + d. Adaptive: nothing. v is computed from scratch in every step.
"""

from typing import Self

from bilevel._core.types import Array, Calls, Point
from bilevel.oracles import Oracles
from bilevel.problems import BilevelProblem
from bilevel.solvers import neumann
from bilevel.solvers.base import Complexity, PointState, Solver, solver
from bilevel.solvers.fields import positive, whole
from bilevel.solvers.moves import split


@solver
class StocBiO(Solver[PointState, neumann.LoopDraw]):
    """Stochastic bilevel optimizer.

    Parameters
    ----------
    step_size : α, step of the inner loop
    """

    n_inner_steps: int = whole(default=10)
    n_neumann: int = whole(default=10)
    neumann_step: float = positive(default=0.5)
    needs_plain_step = None
    complexity = Complexity("Õ(ε^-2)", "general expectation", "C^{1,1}", "C^{2,2}")

    def configure(self, problem: BilevelProblem) -> Self:
        neumann.check_step(self, self.neumann_step, problem)
        return self

    def init(self, oracles: Oracles, start: Point) -> PointState:
        return PointState(start, self.moves.init(start))

    def draw(self, oracles: Oracles, key: Array, index: Array) -> neumann.LoopDraw:
        rows = oracles.draw_inner(key, index, self.n_inner_steps + self.n_neumann + 1)
        inner_loop, products, cross = split(rows, self.n_inner_steps, self.n_neumann, None)
        return neumann.LoopDraw(inner_loop, neumann.NeumannDraw(products, cross, oracles.draw_outer(key, index)))

    def step(self, oracles: Oracles, state: PointState, index: Array, draw: neumann.LoopDraw) -> PointState:
        rows, times = draw.inner_loop, self.n_inner_steps
        point, moves = self.moves.inner_steps(oracles, *state, rows, times, self.step_size)
        _, grad, v = neumann.hypergradient(oracles, point, draw.neumann, self.n_neumann, self.neumann_step)
        point, step = point._replace(v=v), self.step_size / self.outer_ratio
        return PointState(*self.moves.outer(oracles, point, moves, grad, step))

    def calls(self, oracles: Oracles, draw: neumann.LoopDraw, refresh: bool) -> Calls:
        calls = neumann.hypergradient_calls(oracles, draw.neumann, self.n_neumann)
        return calls._replace(inner_grad=oracles.count_inner(draw.inner_loop, self.n_inner_steps))

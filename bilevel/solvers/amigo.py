"""AmIGO: amortized implicit gradient optimization, with warm-started inner loops for z and for v.

Arbel, Mairal. Amortized Implicit Differentiation for Stochastic Bilevel Optimization. ICLR 2022, arXiv 2111.14580.
Confidence: medium; the method is well known, the paper's text was not compared.

    T times:  draw B;  z ← z - α ∇z G_B
    draw C;   T times:  draw B;  v ← v - α ((∇²zz G_B) v + ∇z F_C)      at the new z, ∇z F_C computed once
    draw B;   x ← x - (α/r)((∇²xz G_B) v + ∇x F_C)

Cost (2T + 3) b. Memory 2p + d. Adaptive: nothing. With constant steps the error levels off at the noise of the batches.
"""

from typing import Any

from bilevel._core import trees
from bilevel._core.types import Array, Calls, Point, PyTree
from bilevel.oracles import Oracles
from bilevel.solvers.base import Complexity, PointState, Solver, solver
from bilevel.solvers.fields import whole
from bilevel.solvers.moves import move, move_outer, repeat, split
from bilevel.solvers.neumann import LoopDraw, NeumannDraw, hypergradient_calls


@solver
class AmIGO(Solver[PointState, LoopDraw]):
    """Amortized implicit gradient optimization.

    Parameters
    ----------
    step_size : α, step of both inner loops
    n_inner_steps : T, steps of each loop per outer step
    """

    n_inner_steps: int = whole(default=10)
    needs_plain_step = None
    complexity = Complexity("O(ε^-2)", "general expectation", "C^{1,1}", "C^{2,2}")

    def init(self, oracles: Oracles, start: Point) -> PointState:
        return PointState(start, self.moves.init(start))

    def draw(self, oracles: Oracles, key: Array, index: Array) -> LoopDraw:
        times = self.n_inner_steps
        inner_loop, products, cross = split(oracles.draw_inner(key, index, 2 * times + 1), times, times, None)
        return LoopDraw(inner_loop, NeumannDraw(products, cross, oracles.draw_outer(key, index)))

    def step(self, oracles: Oracles, state: PointState, index: Array, draw: LoopDraw) -> PointState:
        times = self.n_inner_steps
        point, moves = self.moves.inner_steps(oracles, *state, draw.inner_loop, times, self.step_size)
        outer = oracles.outer(point, draw.neumann.outer)

        def step_v(v: PyTree, rows: Any) -> PyTree:
            return move(v, trees.add(oracles.hvp(point._replace(v=v), rows), outer.grad), self.step_size)

        point = point._replace(v=repeat(times, draw.neumann.products, step_v, point.v))
        grad = trees.add(oracles.cross(point, draw.neumann.cross), outer.grad_outer)
        return PointState(move_outer(oracles, point, grad, self.step_size / self.outer_ratio), moves)

    def calls(self, oracles: Oracles, draw: LoopDraw, refresh: bool) -> Calls:
        calls = hypergradient_calls(oracles, draw.neumann, self.n_inner_steps)
        return calls._replace(inner_grad=oracles.count_inner(draw.inner_loop, self.n_inner_steps))

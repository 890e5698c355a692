"""AmIGO: amortized implicit gradient optimization, two inner loops, both warm.

Arbel, Mairal. Amortized Implicit Differentiation for Stochastic Bilevel Optimization. ICLR 2022, arXiv 2111.14580.

    T times:  draw B;  z ← z - α ∇z G_B
    draw C;   T times:  draw B;  v ← v - α ((∇²zz G_B) v + ∇z F_C)      at the new z, ∇z F_C computed once
    draw B;   x ← x - (α/r)((∇²xz G_B) v + ∇x F_C)

Cost (2T + 3) b. Memory 2p + d. With constant steps it stops at a floor of noise.
"""

from typing import Any, NamedTuple

from bilevel import _tree as trees
from bilevel._types import Array, Calls, PyTree
from bilevel.oracles import Oracles
from bilevel.solvers.base import Complexity, PointState, Solver, solver
from bilevel.solvers.directions import inner_descent, move, move_outer, repeat, split
from bilevel.solvers.parameters import whole


class AmIGODraw(NamedTuple):
    """Batches of both loops, of the cross product and of the outer gradients."""

    inner_loop: Any
    linear_loop: Any
    cross: Any
    outer: Any


@solver
class AmIGO(Solver):
    """Amortized implicit gradient optimization.

    Parameters
    ----------
    step_size : step of both inner loops
    n_inner_steps : T, steps of each loop per outer step
    """

    n_inner_steps: int = whole(default=10)
    table_order = 5
    complexity = Complexity("O(ε^-2)", "general expectation", "C^{1,1}", "C^{2,2}")

    def draw(self, oracles: Oracles, key: Array, index: Array) -> AmIGODraw:
        times = self.n_inner_steps
        inner_loop, linear_loop, cross = split(oracles.draw_inner(key, index, 2 * times + 1), times, times, None)
        return AmIGODraw(inner_loop, linear_loop, cross, oracles.draw_outer(key, index))

    def step(self, oracles: Oracles, state: PointState, index: Array, draw: AmIGODraw) -> PointState:
        point = inner_descent(oracles, state.point, draw.inner_loop, self.n_inner_steps, self.step_size)
        outer = oracles.outer(point, draw.outer)

        def follow_system(v: PyTree, rows: Any) -> PyTree:
            return move(v, trees.add(oracles.hvp(point._replace(v=v), rows), outer.grad), self.step_size)

        point = point._replace(v=repeat(self.n_inner_steps, draw.linear_loop, follow_system, point.v))
        grad = trees.add(oracles.cross(point, draw.cross), outer.grad_outer)
        return PointState(move_outer(oracles, point, grad, self.step_size / self.outer_ratio))

    def calls(self, oracles: Oracles, draw: AmIGODraw, refresh: bool) -> Calls:
        outer, times = oracles.count_outer(draw.outer), self.n_inner_steps
        grads, products = (oracles.count_inner(loop, times) for loop in (draw.inner_loop, draw.linear_loop))
        cross = oracles.count_inner(draw.cross)
        return Calls(inner_grad=grads, hvp=products, cross=cross, outer_grad=outer, outer_grad_outer=outer)

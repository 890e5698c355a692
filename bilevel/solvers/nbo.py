"""NBO: inexact Newton steps of z and v with one common Hessian.

Dong, Yang, Yao, Zhang. Efficient Curvature-Aware Hypergradient Approximation for Bilevel Optimization. ICML 2025, arXiv
2505.02101. Confidence: medium; only the abstract and the opening of the text were available. The two systems, the warm
start of v and the point of the hypergradient are taken from notes on the paper that print them.

With H = ∇²zz G at the old (z, x), both systems are solved by T gradient steps, s from 0 and v from the last v:

    T times:   draw B;   s ← s - α (H_B s - ∇z G);   v ← v - α (H_B v + ∇z F)      gradients at the old (z, x), once
    z ← z - s;   x ← x - (α/r)((∇²xz G) v + ∇x F)      at the new z and v, the old x

T = 1 is one step of gradient descent on both. The notes leave the rest open. Choices made here: the systems are solved
by gradient descent on the same batches, and the step of z is not damped, since T gradient steps on the quadratic model
of G move z no further than T gradient steps on G.
Cost (2T + 3) b, of which 2T - 1 products. Memory 3p + d. Adaptive: nothing. On full batches it converges for any T.
"""

from typing import Any, NamedTuple

from bilevel._core import trees
from bilevel._core.types import Array, Calls, Point, PyTree
from bilevel.oracles import Oracles
from bilevel.solvers.base import Complexity, PointState, Solver, solver
from bilevel.solvers.fields import whole
from bilevel.solvers.moves import move, repeat, split


class NBODraw(NamedTuple):
    """Inner batches for ∇z G, the first product, the other products and x; outer batches for v and for x."""

    inner: Any
    first: Any
    products: Any
    cross: Any
    outer: Any
    outer_cross: Any


@solver
class NBO(Solver[PointState, NBODraw]):
    """Newton-based bilevel optimization.

    Parameters
    ----------
    step_size : α, step of the gradient descent that solves the systems of z and v; below 2/L of the batches' Hessians
    n_inner_steps : T, steps of that descent per outer step
    """

    n_inner_steps: int = whole(default=10)
    needs_plain_step = "z moves by inexact Newton steps"
    complexity = Complexity("a rate, not confirmed", "full batches")

    def init(self, oracles: Oracles, start: Point) -> PointState:
        return PointState(start, self.moves.init(start))

    def draw(self, oracles: Oracles, key: Array, index: Array) -> NBODraw:
        times = self.n_inner_steps
        inner = split(oracles.draw_inner(key, index, times + 2), None, None, times - 1, None)
        return NBODraw(*inner, *split(oracles.draw_outer(key, index, 2), None, None))

    def step(self, oracles: Oracles, state: PointState, index: Array, draw: NBODraw) -> PointState:
        point = state.point
        grad, outer_grad = oracles.inner_grad(point, draw.inner), oracles.outer_grad(point, draw.outer)

        def descend(solution: PyTree, right_side: PyTree, rows: Any) -> PyTree:
            product = oracles.hvp(point._replace(v=solution), rows)
            return move(solution, trees.subtract(product, right_side), self.step_size)

        def descend_both(both: tuple[PyTree, PyTree], rows: Any) -> tuple[PyTree, PyTree]:
            return descend(both[0], grad, rows), descend(both[1], right_side, rows)

        right_side = trees.scale(-1, outer_grad)
        # The first step of s requires no product, since s = 0.
        step, v = trees.scale(self.step_size, grad), descend(point.v, right_side, draw.first)
        if self.n_inner_steps > 1:
            step, v = repeat(self.n_inner_steps - 1, draw.products, descend_both, (step, v))
        point = Point(trees.subtract(point.inner_var, step), point.outer_var, v)
        hypergrad = trees.add(oracles.cross(point, draw.cross), oracles.outer_grad_outer(point, draw.outer_cross))
        step = self.step_size / self.outer_ratio
        return PointState(*self.moves.outer(oracles, point, state.moves, hypergrad, step))

    def calls(self, oracles: Oracles, draw: NBODraw, refresh: bool) -> Calls:
        products = 2 * oracles.count_inner(draw.products, self.n_inner_steps - 1) if self.n_inner_steps > 1 else 0
        return Calls(
            inner_grad=oracles.count_inner(draw.inner),
            hvp=oracles.count_inner(draw.first) + products,
            cross=oracles.count_inner(draw.cross),
            outer_grad=oracles.count_outer(draw.outer),
            outer_grad_outer=oracles.count_outer(draw.outer_cross),
        )

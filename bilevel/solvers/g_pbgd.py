"""G-PBGD: penalty-based gradient descent, whose penalty is half the squared norm of ∇z G.

Shen, Chen. On Penalty-based Bilevel Gradient Descent Method. ICML 2023, arXiv 2302.05185. Confidence: high; the paper
and the authors' code were compared.

It minimizes F + (γ/2) ||∇z G||² over z and x together. With s = min(1/γ, 1), both at the old (z, x),

    draw B, B', C;   q = ∇z G_B(z, x)
    x ← x - (α/r) s (∇x F_C + γ (∇²xz G_B') q);   z ← z - α s (∇z F_C + γ (∇²zz G_B') q)

By default all batches are full, as published; otherwise B and B' are independent, so that the products are unbiased.
The paper has s = 1; s and a growing γ (``ramp``) are from the authors' code. There is no inner loop. ∇²zz G must be
nonsingular away from the minimizers of G, since other stationary points of G attract z as well. z minimizes the
penalized problem and not G: its distance from the solution is of the order of 1/γ.
Cost 3n + 2m, or 5b with batches. Memory 2p + d. Adaptive: nothing. The bias is of the order of 1/γ.
"""

from typing import Any, NamedTuple

from bilevel._core import trees
from bilevel._core.types import Array, Calls, Point
from bilevel.oracles import Oracles
from bilevel.solvers.base import Complexity, PointState, solver
from bilevel.solvers.fields import positive
from bilevel.solvers.moves import move, split
from bilevel.solvers.v_pbgd import PenaltySolver


class GPBGDDraw(NamedTuple):
    """Batches of q, of the products with q, and of the gradients of F."""

    inner: Any
    products: Any
    outer: Any


@solver
class GPBGD(PenaltySolver[PointState, GPBGDDraw]):
    """Penalty-based bilevel gradient descent with the gradient of G.

    Parameters
    ----------
    step_size : α, step of z
    """

    penalty: float = positive(default=100.0)
    complexity = Complexity("a rate, not confirmed")

    def init(self, oracles: Oracles, start: Point) -> PointState:
        return PointState(start, self.moves.init(start))

    def draw(self, oracles: Oracles, key: Array, index: Array) -> GPBGDDraw:
        inner, products = split(oracles.draw_inner(key, index, 2), None, None)
        return GPBGDDraw(inner, products, oracles.draw_outer(key, index))

    def step(self, oracles: Oracles, state: PointState, index: Array, draw: GPBGDDraw) -> PointState:
        point, (weight, inner_weight) = state.point, self.weights(index)
        at_q = point._replace(v=trees.scale(inner_weight, oracles.inner_grad(point, draw.inner)))
        outer = trees.scale(weight, oracles.outer(point, draw.outer))
        grad_x = trees.add(outer.grad_outer, oracles.cross(at_q, draw.products))
        grad_z = trees.add(outer.grad, oracles.hvp(at_q, draw.products))
        point = point._replace(inner_var=move(point.inner_var, grad_z, self.step_size))
        step = self.step_size / self.outer_ratio
        return PointState(*self.moves.outer(oracles, point, state.moves, grad_x, step, weight))

    def calls(self, oracles: Oracles, draw: GPBGDDraw, refresh: bool) -> Calls:
        products, outer = oracles.count_inner(draw.products), oracles.count_outer(draw.outer)
        inner = oracles.count_inner(draw.inner)
        return Calls(inner_grad=inner, hvp=products, cross=products, outer_grad=outer, outer_grad_outer=outer)

"""Neumann-AID: inner steps, then implicit differentiation by a Neumann series on one batch.

Lorraine, Vicol, Duvenaud. Optimizing Millions of Hyperparameters by Implicit Differentiation. AISTATS 2020, arXiv
1911.02590. Confidence: medium; only the opening of the text was available, and formulas and batches are those of the
authors' code for augmentation networks.

    T times:  draw B;  z ← z - α ∇z G_B
    draw B, C;   v = -α sum_{l<=Q} (I - α H_B)^l ∇z F_C;   x ← x - (α/r)((∇²xz G_B) v + ∇x F_C)

This is StocBiO with η = α, and with one batch B for all products and for the cross product, so that the Hessian of that
batch is inverted instead of a product of Hessians of several batches. The authors' code differentiates one computation
graph repeatedly, which is the same. The series with η = α is the derivative through the last Q + 1 inner steps, if
these did not move z. Their code has the opposite sign of ∇x F; two other codes of theirs omit the factor α of v, and
use an outer product of gradients instead of H. Choice made here: plain steps instead of momentum for z and RMSprop for
x.
iDARTS (Zhang, Su, Pan, Chang, Abbasnejad, Haffari. ICML 2021, arXiv 2106.10784) is the same with T = 5, Q = 2 and, with
the sum s = -v/α and ε = 0.01/||∇z F_C||, a difference instead of the last product: `finite_difference=True` takes

    (∇²xz G) v ≈ -α (∇x G_B(z + ε s, x) - ∇x G_B(z - ε s, x)) / 2ε

The code of iDARTS is a second source of the series on a single batch.
Cost (T + Q + 3) b, with the difference one b more. Memory p + d. Adaptive: nothing. v is computed from scratch in every
step.
"""

import jax.numpy as jnp

from bilevel._core import trees
from bilevel._core.types import Array, Calls, Point
from bilevel.oracles import Oracles
from bilevel.solvers.base import Complexity, PointState, Solver, solver
from bilevel.solvers.darts import cross_difference
from bilevel.solvers.fields import flag, whole
from bilevel.solvers.moves import split
from bilevel.solvers.neumann import LoopDraw, NeumannDraw, hypergradient_calls, series

_DISTANCE = 0.01  # of iDARTS, from z along the sum divided by ||∇z F||


@solver
class NeumannAID(Solver[PointState, LoopDraw]):
    """Approximate implicit differentiation by a Neumann series.

    Parameters
    ----------
    step_size : α, step of the inner loop and of the Neumann series
    finite_difference : replace the product with ∇²xz G by a difference of gradients, as iDARTS
    """

    n_inner_steps: int = whole(default=10)
    n_neumann: int = whole(default=10)
    finite_difference: bool = flag(default=False)
    needs_plain_step = None
    complexity = Complexity("none")

    def init(self, oracles: Oracles, start: Point) -> PointState:
        return PointState(start, self.moves.init(start))

    def draw(self, oracles: Oracles, key: Array, index: Array) -> LoopDraw:
        inner_loop, rows = split(oracles.draw_inner(key, index, self.n_inner_steps + 1), self.n_inner_steps, None)
        products = None if rows is None else jnp.broadcast_to(rows, (self.n_neumann, *rows.shape))
        return LoopDraw(inner_loop, NeumannDraw(products, rows, oracles.draw_outer(key, index)))

    def step(self, oracles: Oracles, state: PointState, index: Array, draw: LoopDraw) -> PointState:
        rows, times = draw.inner_loop, self.n_inner_steps
        point, moves = self.moves.inner_steps(oracles, *state, rows, times, self.step_size)
        outer, rows = oracles.outer(point, draw.neumann.outer), draw.neumann.cross
        point = point._replace(v=series(oracles, point, draw.neumann, outer.grad, self.n_neumann, self.step_size))
        if self.finite_difference:
            distance = _DISTANCE / self.step_size  # of z along the sum, which is -v/α
            cross, _ = cross_difference(oracles, point, point.v, distance, rows, trees.norm(outer.grad))
        else:
            cross = oracles.cross(point, rows)
        grad, step = trees.add(cross, outer.grad_outer), self.step_size / self.outer_ratio
        return PointState(*self.moves.outer(oracles, point, moves, grad, step))

    def calls(self, oracles: Oracles, draw: LoopDraw, refresh: bool) -> Calls:
        calls = hypergradient_calls(oracles, draw.neumann, self.n_neumann)
        if self.finite_difference:
            calls = calls._replace(cross=0, inner_grad_outer=2 * calls.cross)
        return calls._replace(inner_grad=oracles.count_inner(draw.inner_loop, self.n_inner_steps))

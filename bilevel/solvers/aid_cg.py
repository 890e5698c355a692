"""AID-CG: inner steps, then implicit differentiation by conjugate gradients on one batch.

Grazzi, Franceschi, Pontil, Salzo. On the Iteration Complexity of Hypergradient Computation. ICML 2020, arXiv
2006.16218; before it Pedregosa (ICML 2016), and iMAML of Rajeswaran, Finn, Kakade, Levine (NeurIPS 2019). Confidence:
high; the equations were compared with the text of the first paper and with the authors' code of iMAML.

    T times:  draw B;  z ← z - α ∇z G_B
    draw B, C;   r = -∇z F_C - (H_B + λ) v;   s = r      v = 0, or the last v
    Q times:  y = (H_B + λ) s;   a = r'r / s'y;   v ← v + a s;   r⁺ = r - a y;   s ← r⁺ + (r⁺'r⁺ / r'r) s;   r = r⁺
    draw B;   x ← x - (α/r)((∇²xz G_B) v + ∇x F_C)

All products are with one batch, since conjugate gradients require a single symmetric matrix. v does not change any more
once r'r is at most the tolerance, or once s'y <= 0, where the matrix is not positive definite: the inner level of a
network is an example. Q products are counted in any case, so that the calls of a step are known beforehand. If
the spectrum of H_B + λ lies in [mu, L] and κ = L/mu, the error of v after Q products is at most

    2 √κ ((√κ - 1)/(√κ + 1))^Q times the error of the first v

and the error of z adds to it. On batches v approaches -H_B⁻¹ ∇z F_C, whose mean is not -H⁻¹ ∇z F: small batches cause a
bias that more products do not reduce. With small batches few products are better; see docs/solvers.md for figures.
AID-FP of the same paper replaces conjugate gradients by a fixed-point iteration with the step α, which is NeumannAID
with Q - 1 products.
Cost (T + Q + 3) b, one b more with a warm v. Memory 4p + d. Adaptive: the steps of conjugate gradients.
"""

from typing import Any, NamedTuple

from bilevel._core import trees
from bilevel._core.conjugate_gradients import conjugate_gradients
from bilevel._core.types import Array, Calls, Point, PyTree
from bilevel.oracles import Oracles
from bilevel.solvers.base import Complexity, Solver, solver
from bilevel.solvers.fields import flag, positive, whole
from bilevel.solvers.moves import split
from bilevel.solvers.neumann import LoopDraw, NeumannDraw, hypergradient_calls


class AIDCGState(NamedTuple):
    """The iterate, the states of transformations, and the first inner variable, for cold starts."""

    point: Point
    moves: Any
    first_inner_var: PyTree


@solver
class AIDCG(Solver[AIDCGState, LoopDraw]):
    """Approximate implicit differentiation by conjugate gradients.

    Parameters
    ----------
    step_size : α, step of the inner loop
    n_products : Q, Hessian-vector products of conjugate gradients per outer step; few if batches are small
    warm_start_v : continue from the last v, which takes one more product; False starts from 0
    damping : λ, added to the diagonal of ∇²zz G; raise it if the inner level is not strongly convex; 0 turns it off
    tolerance : v does not change any more once the squared residual r'r is at most this; 0 turns it off
    """

    n_inner_steps: int = whole(default=10)
    n_products: int = whole(default=10)
    warm_start: bool = flag(default=True)
    warm_start_v: bool = flag(default=False)
    damping: float = positive(default=0.0, off=True)
    tolerance: float = positive(default=0.0, off=True)
    needs_plain_step = None
    complexity = Complexity("O((n+m) ε^-1)", "full batches, warm starts of z and v", "C^{1,1}", "C^{2,2}")

    def init(self, oracles: Oracles, start: Point) -> AIDCGState:
        return AIDCGState(start, self.moves.init(start), start.inner_var)

    def draw(self, oracles: Oracles, key: Array, index: Array) -> LoopDraw:
        rows = oracles.draw_inner(key, index, self.n_inner_steps + 2)
        inner_loop, products, cross = split(rows, self.n_inner_steps, None, None)
        return LoopDraw(inner_loop, NeumannDraw(products, cross, oracles.draw_outer(key, index)))

    def step(self, oracles: Oracles, state: AIDCGState, index: Array, draw: LoopDraw) -> AIDCGState:
        point, moves = state.point, state.moves
        if not self.warm_start:
            point = point._replace(inner_var=state.first_inner_var)
            moves = moves._replace(inner=self.moves.init(point).inner)
        times = self.n_inner_steps
        point, moves = self.moves.inner_steps(oracles, point, moves, draw.inner_loop, times, self.step_size)
        outer = oracles.outer(point, draw.neumann.outer)
        v = self.solve(oracles, point, outer.grad, draw.neumann.products)
        point = point._replace(v=v)
        grad = trees.add(oracles.cross(point, draw.neumann.cross), outer.grad_outer)
        moved = self.moves.outer(oracles, point, moves, grad, self.step_size / self.outer_ratio)
        return AIDCGState(*moved, state.first_inner_var)

    def adapt(self, oracles: Oracles, point: Point, draw: LoopDraw) -> Point:
        """Return the point after the inner steps."""
        moves, times = self.moves.init(point), self.n_inner_steps
        return self.moves.inner_steps(oracles, point, moves, draw.inner_loop, times, self.step_size)[0]

    def solve(self, oracles: Oracles, point: Point, grad: PyTree, rows: Any) -> PyTree:
        """Return v after Q products of conjugate gradients for (∇²zz G + λ) v = -∇z F on these rows."""

        def multiply(direction: PyTree) -> PyTree:
            product = oracles.hvp(point._replace(v=direction), rows)
            return trees.add(product, trees.scale(self.damping, direction))

        v, residual = trees.zeros_like(point.v), trees.scale(-1, grad)
        if self.warm_start_v:
            v, residual = point.v, trees.subtract(residual, multiply(point.v))
        return trees.add(v, conjugate_gradients(multiply, residual, self.tolerance, self.n_products).solution)

    def calls(self, oracles: Oracles, draw: LoopDraw, refresh: bool) -> Calls:
        products = (self.n_products + self.warm_start_v) * oracles.count_inner(draw.neumann.products)
        loop = oracles.count_inner(draw.inner_loop, self.n_inner_steps)
        return hypergradient_calls(oracles, draw.neumann, 1)._replace(inner_grad=loop, hvp=products)

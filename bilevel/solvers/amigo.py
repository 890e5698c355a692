"""AmIGO: amortized implicit gradient optimization, with warm-started inner loops for z and for v.

Arbel, Mairal. Amortized Implicit Differentiation for Stochastic Bilevel Optimization. ICLR 2022, arXiv 2111.14580.
Confidence: high; loops, warm starts and batches were compared with the authors' code, which has T = 1.

    T times:  draw B;  z ← z - α ∇z G_B
    draw C;   T times:  draw B;  v ← v - α ((∇²zz G_B) v + ∇z F_C)      at the new z, ∇z F_C computed once
    draw B;   x ← x - (α/r)((∇²xz G_B) v + ∇x F_C)

The steps of v minimize v'Hv/2 + v'∇z F_C. The authors' code also has steps on ||H v + ∇z F_C||²/2, which are the
default of its configuration, with the step 0.9; a script of theirs selects the first. `normal_equations=True` is

    draw B, B';   v ← v - α_v (∇²zz G_B') ((∇²zz G_B) v + ∇z F_C)

They converge for an indefinite Hessian too. But the condition number is squared, and α_v must be below 2/L² for the
largest curvature L, so that many more steps are required where the inner level is ill-conditioned.
Cost (2T + 3) b, with normal equations (3T + 3) b. Memory 2p + d. Adaptive: nothing. With constant steps the error
levels off at the noise of the batches.
"""

import jax

from bilevel._core import trees
from bilevel._core.types import Array, Calls, Point, PyTree
from bilevel.oracles import Oracles
from bilevel.solvers.base import Complexity, PointState, Solver, solver
from bilevel.solvers.fields import flag, positive, whole
from bilevel.solvers.moves import batch, move, split
from bilevel.solvers.neumann import LoopDraw, NeumannDraw, hypergradient_calls


@solver
class AmIGO(Solver[PointState, LoopDraw]):
    """Amortized implicit gradient optimization.

    Parameters
    ----------
    step_size : α, step of both inner loops
    n_inner_steps : T, steps of each loop per outer step
    normal_equations : let v minimize ||H v + ∇z F||², by two products per step
    v_step : α_v, step of v; None means `step_size`
    """

    n_inner_steps: int = whole(default=10)
    normal_equations: bool = flag(default=False)
    v_step: float | None = positive(default=None, optional=True, hint="; use None for `step_size`")
    needs_plain_step = None
    complexity = Complexity("O(ε^-2)", "general expectation", "C^{1,1}", "C^{2,2}")

    @property
    def _n_products(self) -> int:
        return (2 if self.normal_equations else 1) * self.n_inner_steps

    def init(self, oracles: Oracles, start: Point) -> PointState:
        return PointState(start, self.moves.init(start))

    def draw(self, oracles: Oracles, key: Array, index: Array) -> LoopDraw:
        times, products = self.n_inner_steps, self._n_products
        inner_loop, products, cross = split(oracles.draw_inner(key, index, times + products + 1), times, products, None)
        return LoopDraw(inner_loop, NeumannDraw(products, cross, oracles.draw_outer(key, index)))

    def step(self, oracles: Oracles, state: PointState, index: Array, draw: LoopDraw) -> PointState:
        times = self.n_inner_steps
        point, moves = self.moves.inner_steps(oracles, *state, draw.inner_loop, times, self.step_size)
        outer = oracles.outer(point, draw.neumann.outer)

        def multiply(direction: PyTree, k: Array) -> PyTree:
            return oracles.hvp(point._replace(v=direction), batch(draw.neumann.products, k))

        def step_v(k: Array, v: PyTree) -> PyTree:
            if self.normal_equations:
                residual = trees.add(multiply(v, 2 * k), outer.grad)
                return move(v, multiply(residual, 2 * k + 1), v_step)
            return move(v, trees.add(multiply(v, k), outer.grad), v_step)

        v_step = self.step_size if self.v_step is None else self.v_step
        point = point._replace(v=jax.lax.fori_loop(0, times, step_v, point.v))
        grad = trees.add(oracles.cross(point, draw.neumann.cross), outer.grad_outer)
        return PointState(*self.moves.outer(oracles, point, moves, grad, self.step_size / self.outer_ratio))

    def calls(self, oracles: Oracles, draw: LoopDraw, refresh: bool) -> Calls:
        calls = hypergradient_calls(oracles, draw.neumann, self._n_products)
        return calls._replace(inner_grad=oracles.count_inner(draw.inner_loop, self.n_inner_steps))

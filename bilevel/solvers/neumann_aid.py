"""Neumann-AID: inner steps, then implicit differentiation by a Neumann series on one batch.

Lorraine, Vicol, Duvenaud. Optimizing Millions of Hyperparameters by Implicit Differentiation. AISTATS 2020, arXiv
1911.02590. Confidence: medium; formulas and batches are those of the authors' code for augmentation networks, of the
text only the opening could be had.

    T times:  draw B;  z ← z - α ∇z G_B
    draw B, C;   v = -α sum_{l<=Q} (I - α H_B)^l ∇z F_C;   x ← x - (α/r)((∇²xz G_B) v + ∇x F_C)

It is StocBiO with η = α, and with one batch B for all products and the cross product: what is inverted is the Hessian
of that batch, as the authors' code does with a graph that it keeps, and not a product of Hessians of many. The series
with η = α is what differentiating through the last Q + 1 inner steps gives if these had stayed where they are.
That code has ∇x F with the other sign; two others of theirs leave out the factor α of v, and have an outer product of
gradients in the place of H. Chosen here: plain steps, where they have momentum for z and RMSprop for x.
Cost (T + Q + 3) b. Memory p + d. Adaptive: nothing. v is rebuilt at every step.
"""

import jax.numpy as jnp

from bilevel._types import Array, Calls, Point
from bilevel.oracles import Oracles
from bilevel.solvers.base import Complexity, PointState, Solver, solver
from bilevel.solvers.fields import whole
from bilevel.solvers.moves import move_outer, split
from bilevel.solvers.neumann import LoopDraw, NeumannDraw, hypergradient, hypergradient_calls


@solver
class NeumannAID(Solver[PointState, LoopDraw]):
    """Approximate implicit differentiation by a Neumann series.

    Parameters
    ----------
    step_size : α, step of the inner loop and of the Neumann series
    """

    n_inner_steps: int = whole(default=10)
    n_neumann: int = whole(default=10)
    needs_plain_step = None
    complexity = Complexity("none")

    def init(self, oracles: Oracles, start: Point) -> PointState:
        return PointState(start, self.moves.init(start))

    def draw(self, oracles: Oracles, key: Array, index: Array) -> LoopDraw:
        inner_loop, one = split(oracles.draw_inner(key, index, self.n_inner_steps + 1), self.n_inner_steps, None)
        products = None if one is None else jnp.broadcast_to(one, (self.n_neumann, *one.shape))
        return LoopDraw(inner_loop, NeumannDraw(products, one, oracles.draw_outer(key, index)))

    def step(self, oracles: Oracles, state: PointState, index: Array, draw: LoopDraw) -> PointState:
        rows, times = draw.inner_loop, self.n_inner_steps
        point, moves = self.moves.inner_steps(oracles, *state, rows, times, self.step_size)
        _, grad, v = hypergradient(oracles, point, draw.neumann, self.n_neumann, self.step_size)
        point = move_outer(oracles, point._replace(v=v), grad, self.step_size / self.outer_ratio)
        return PointState(point, moves)

    def calls(self, oracles: Oracles, draw: LoopDraw, refresh: bool) -> Calls:
        calls = hypergradient_calls(oracles, draw.neumann, self.n_neumann)
        return calls._replace(inner_grad=oracles.count_inner(draw.inner_loop, self.n_inner_steps))

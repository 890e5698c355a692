"""SAMA: the last step of the inner loop is differentiated, and the inverse Hessian is replaced by the identity.

Choe, Mehta, Ahn, Neiswanger, Xie, Strubell, Xing. Making Scalable Meta Learning Practical. NeurIPS 2023, arXiv
2310.05674. Confidence: high; the formulas are those of the authors' library betty.

    T times:  draw B;  z ← z - A(∇z G_B)      A is the plain step α ∇z G, or that of an optimizer such as Adam
    draw B, C;   w = ∇z F_C;   y = c A'ᵀ w,   A' is the derivative of the last step by its gradient;   ε = R/||y||
    x ← x - (α/r)(∇x F_C - (∇x G_B(z + ε y, x) - ∇x G_B(z - ε y, x)) / 2ε)      at the new z;   if nudged:  z ← z - ε y

For Adam, A' is diagonal. Differentiating the update as it is implemented includes the correction of Adam's averages for
their start, which the formula in betty leaves out. Coordinates of z whose gradients were always 0 have A' = 0. For
plain steps betty leaves the step size out of y; that is c = 1/α.
No inverse Hessian is approximated, so the hypergradient is biased, and strongly so where the inner level is
ill-conditioned: on small strongly convex problems other solvers are better. It is meant for large networks, where no
second derivatives and no copies of z beyond these are affordable. betty has R = 1, a large distance on small problems.
Cost (T + 4) b; no second derivatives. Memory 2p + d and the state of the optimizer. Adaptive: nothing.
"""

from bilevel._core import trees
from bilevel._core.types import Array, Calls, Point
from bilevel.oracles import Oracles
from bilevel.solvers.base import Complexity, PointState, Solver, solver
from bilevel.solvers.darts import cross_difference, inner_step
from bilevel.solvers.fields import flag, positive, whole
from bilevel.solvers.moves import batch, split
from bilevel.solvers.neumann import LoopDraw, NeumannDraw


@solver
class SAMA(Solver[PointState, LoopDraw]):
    """Scalable meta learning with the derivative of an adaptive step.

    Parameters
    ----------
    step_size : α, step of the inner loop without an `inner_optimizer`
    perturbation : R, distance of the two points of the difference from z; larger for networks, where 1 is usual
    response_scale : c, multiplies the response of z to x, whose size relative to ∇x F is not known
    nudge : leave z at z - ε y, where F is lower
    """

    n_inner_steps: int = whole(default=10)
    perturbation: float = positive(default=0.01)
    response_scale: float = positive(default=1.0)
    nudge: bool = flag(default=False)
    needs_plain_step = None
    complexity = Complexity("none")

    def init(self, oracles: Oracles, start: Point) -> PointState:
        return PointState(start, self.moves.init(start))

    def draw(self, oracles: Oracles, key: Array, index: Array) -> LoopDraw:
        inner_loop, cross = split(oracles.draw_inner(key, index, self.n_inner_steps + 1), self.n_inner_steps, None)
        return LoopDraw(inner_loop, NeumannDraw(None, cross, oracles.draw_outer(key, index)))

    def step(self, oracles: Oracles, state: PointState, index: Array, draw: LoopDraw) -> PointState:
        before = self.n_inner_steps - 1
        point, moves = self.moves.inner_steps(oracles, *state, draw.inner_loop, before, self.step_size)
        gradient = oracles.inner_grad(point, batch(draw.inner_loop, before))
        change, transposed, moves = inner_step(self.moves, point, gradient, moves, self.step_size)
        point = point._replace(inner_var=trees.subtract(point.inner_var, change))
        outer = oracles.outer(point, draw.neumann.outer)
        direction = trees.scale(self.response_scale, transposed(outer.grad))
        response, behind = cross_difference(oracles, point, direction, self.perturbation, draw.neumann.cross)
        if self.nudge:
            point = point._replace(inner_var=behind)
        grad = trees.subtract(outer.grad_outer, response)
        return PointState(*self.moves.outer(oracles, point, moves, grad, self.step_size / self.outer_ratio))

    def calls(self, oracles: Oracles, draw: LoopDraw, refresh: bool) -> Calls:
        outer = oracles.count_outer(draw.neumann.outer)
        return Calls(
            inner_grad=oracles.count_inner(draw.inner_loop, self.n_inner_steps),
            inner_grad_outer=2 * oracles.count_inner(draw.neumann.cross),
            outer_grad=outer,
            outer_grad_outer=outer,
        )

"""BOME: bilevel optimization made easy, with a dynamic barrier on the value of the inner problem.

Liu, Ye, Wright, Stone, Liu. BOME! Bilevel Optimization Made Easy: A Simple First-Order Approach. NeurIPS 2022, arXiv
2209.08709. Confidence: high; the equations are those of the authors' codes: by default of the code for toy problems,
and with `barrier_of="value"` of those for hyperparameters and data cleaning, without their momentum of 0.9 on z and x.

Every step is a full-batch pass:

    w = z;   T times:  w ← w - α ∇z G(w, x)
    q = (∇z G(z, x), ∇x G(z, x) - ∇x G(w, x))
    λ = max(0, κ - <∇F, q> / ||q||²),  or 0 if q = 0                                    barrier_of="gradient"
    λ = max(0, (κ (G(z, x) - G(w, x)) - <∇F, q>) / (||q||² + 10⁻⁸))                      barrier_of="value"
    (z, x) ← (z, x) - (α/r)(∇F + λ q),   both at the old point; z with a step of its own if `z_step` is given

z is not replaced by w. Cost (T + 1) n + 2n + 2m, 2n more if "value". Memory 2p + d. Adaptive: the weight λ of the inner
problem. The bias is of the order of (1 - α mu_G)^T.
"""

import jax.numpy as jnp

from bilevel._core import trees
from bilevel._core.types import Array, Calls, Point
from bilevel.oracles import Oracles
from bilevel.solvers.base import Complexity, PointState, Solver, solver
from bilevel.solvers.fields import one_of, positive, whole
from bilevel.solvers.moves import inner_descent, move, move_outer

_DAMPING = 1e-8  # in the weight that is based on values, as in the authors' code


@solver
class BOME(Solver[PointState, object]):
    """Bilevel optimization made easy.

    Parameters
    ----------
    step_size : α, step of the inner loop
    outer_ratio : both variables move with ``step_size / outer_ratio``, unless `z_step` is given
    batch_size : has no effect, since every step is a full-batch pass
    barrier : κ; larger values enforce the inner problem more strongly
    barrier_of : "gradient" enforces a decrease of the gap of G by κ ||q||², "value" by κ times the gap itself
    z_step : step of z along the joint direction; None means that of x
    sampling : "full" only
    """

    n_inner_steps: int = whole(default=10)
    barrier: float = positive(default=0.5)
    barrier_of: str = one_of(("gradient", "value"), default="gradient")
    z_step: float | None = positive(default=None, optional=True, hint="; use None for the step of x")
    sampling: str = one_of(("full",), default="full", kw_only=True)
    needs_plain_outer_step = "z and x move by one step along one direction"
    complexity = Complexity("Õ((n+m) ε^-4)", "full batches; of the squared KKT residual")

    def init(self, oracles: Oracles, start: Point) -> PointState:
        return PointState(start)

    def step(self, oracles: Oracles, state: PointState, index: Array, draw: object) -> PointState:
        point = state.point
        lower = inner_descent(oracles, point, None, self.n_inner_steps, self.step_size)
        outer = oracles.outer(point)
        q_z = oracles.inner_grad(point)
        q_x = trees.subtract(oracles.inner_grad_outer(point), oracles.inner_grad_outer(lower))
        norm_sq = trees.norm_sq((q_z, q_x))
        overlap = trees.dot(outer.grad, q_z) + trees.dot(outer.grad_outer, q_x)
        if self.barrier_of == "value":
            gap = oracles.inner_value(point) - oracles.inner_value(lower)
            weight = jnp.maximum(self.barrier * gap - overlap, 0) / (norm_sq + _DAMPING)
        else:
            ratio = overlap / jnp.where(norm_sq > 0, norm_sq, 1)
            weight = jnp.where(norm_sq > 0, jnp.maximum(self.barrier - ratio, 0), 0)
        step = self.step_size / self.outer_ratio
        z_step = step if self.z_step is None else self.z_step
        z = move(point.inner_var, trees.add(outer.grad, trees.scale(weight, q_z)), z_step)
        direction = trees.add(outer.grad_outer, trees.scale(weight, q_x))
        return PointState(move_outer(oracles, point._replace(inner_var=z), direction, step))

    def calls(self, oracles: Oracles, draw: object, refresh: bool) -> Calls:
        n, m = oracles.n_inner, oracles.n_outer
        gradients = Calls(inner_grad=(self.n_inner_steps + 1) * n, inner_grad_outer=2 * n)
        values = 2 * n if self.barrier_of == "value" else 0
        return gradients._replace(outer_grad=m, outer_grad_outer=m, inner_value=values)

"""qNBO: quasi-Newton steps of z, and of v with the inverse Hessian that those of z have learned.

Fang, Liu, Yao, Yu, Zhang. qNBO: quasi-Newton Meets Bilevel Optimization. ICLR 2025, arXiv 2502.01076. Confidence:
low. Of the text only the abstract and reviews could be had. They print the steps of z; of v they say that quasi-Newton
steps without second derivatives correct what H gets wrong along ∇z F. Which steps is our choice.

H is α I at the start of each step and learns from all pairs of it, by BFGS or SR1. On one batch of each level,

    P times:   z ← z - α ∇z G
    T times:   s = -γ H ∇z G;   z ← z + s;   H learns (s, change of ∇z G)
    s = v;   ρ = ∇z F      the last v, or v = -H ∇z F
    Q times:   e = δ s/||s||;   g = ∇z G(z + e) - ∇z G(z);   H learns (e, g)
               ρ ← ρ + (||s||/δ) g;   s = -H ρ;   v ← v + s
    x ← x - (α/r)((∇²xz G) v + ∇x F)

with δ = ξ (1 + ||z||). So ρ is the residual of v, and falls superlinearly in Q. The paper lets Q grow with the steps;
here it stays, and v goes on from the last one, without which it would be biased. With Q = 0, v = -H ∇z F, as SHINE's.
The theory is of full-batch passes and of α <= 1/L.
Cost (P + T + Q + 2) n + 2m, or (P + T + Q + 4) b. Memory (2T + 2Q + 5) p + d. Adaptive:
the metric of the steps of z and v.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from bilevel import _tree as trees
from bilevel._types import Array, Calls, Point, Rows
from bilevel.oracles import SAMPLINGS, Oracles
from bilevel.solvers.base import Complexity, PointState, Solver, solver
from bilevel.solvers.fields import flag, fraction, one_of, positive, whole
from bilevel.solvers.moves import move, move_outer, repeat
from bilevel.solvers.quasi_newton import FORMS, InverseHessian, Pairs, no_pairs, put


class _Solve(NamedTuple):
    """v, its residual, its last step, and what is known of the inverse Hessian."""

    v: Array
    residual: Array
    step: Array
    pairs: Pairs


@solver
class QNBO(Solver[PointState, Rows]):
    """Quasi-Newton bilevel optimization.

    Parameters
    ----------
    step_size : α, the inverse Hessian before the first pair, and the step of the first steps of z
    n_gradient_steps : P, gradient steps of z before those of quasi-Newton
    n_inner_steps : T, quasi-Newton steps of z
    n_v_steps : Q, quasi-Newton steps of v; with 0, v is what the steps of z say of it
    form : "bfgs" or "sr1", how pairs change the inverse Hessian
    warm_start_v : go on from the last v; False begins with -H ∇z F, which converges only as Q grows
    damping : γ, the share that is taken of quasi-Newton steps
    difference : ξ, the length of the differences along v, as a share of 1 + ||z||
    sampling : "full", which the theory is of, or "blocks", "iid", "reshuffle"
    """

    n_gradient_steps: int = whole(default=1, least=0)
    n_inner_steps: int = whole(default=10)
    n_v_steps: int = whole(default=5, least=0)
    form: str = one_of(FORMS, default="bfgs")
    warm_start_v: bool = flag(default=True)
    damping: float = fraction(default=1.0)
    difference: float = positive(default=1e-3)
    sampling: str = one_of(SAMPLINGS, default="full", kw_only=True)
    needs_plain_step = "z moves by quasi-Newton steps"
    complexity = Complexity("a rate, not confirmed", "full batches, BFGS")

    def init(self, oracles: Oracles, start: Point) -> PointState:
        return PointState(start)

    def step(self, oracles: Oracles, state: PointState, index: Array, draw: Rows) -> PointState:
        first, unravel = ravel_pytree(state.point.inner_var)
        inverse, known = InverseHessian(self.form, self.step_size), self.n_inner_steps

        def slope(z: Array) -> Array:
            return ravel_pytree(oracles.inner_grad(state.point._replace(inner_var=unravel(z)), draw.inner))[0]

        def step_inner(place: Array, now: tuple[Array, Array, Pairs]) -> tuple[Array, Array, Pairs]:
            z, grad, pairs = now
            step = -self.damping * inverse.product(pairs, grad)
            ahead = slope(z + step)
            return z + step, ahead, put(pairs, place, inverse.pair(pairs, z, step, ahead - grad))

        z = repeat(self.n_gradient_steps, None, lambda z, _: move(z, slope(z), self.step_size), first)
        z, grad, pairs = jax.lax.fori_loop(0, known, step_inner, (z, slope(z), no_pairs(known + self.n_v_steps, z)))
        point = state.point._replace(inner_var=unravel(z))
        outer = oracles.outer(point, draw.outer)
        residual = ravel_pytree(outer.grad)[0]
        length = self.difference * (1 + jnp.linalg.norm(z))

        def step_v(place: Array, now: _Solve) -> _Solve:
            v, residual, step, pairs = now
            size = jnp.maximum(jnp.linalg.norm(step), jnp.finfo(step.dtype).tiny)
            probe = length / size * step
            change = slope(z + probe) - grad
            pairs = put(pairs, place, inverse.pair(pairs, z, probe, change))
            residual = residual + size / length * change
            step = -inverse.product(pairs, residual)
            return _Solve(v + step, residual, step, pairs)

        cold = not self.warm_start_v or self.n_v_steps == 0
        begin = -inverse.product(pairs, residual) if cold else ravel_pytree(state.point.v)[0]
        solve = _Solve(begin, residual, begin, pairs)
        solve = jax.lax.fori_loop(known, known + self.n_v_steps, step_v, solve)
        point = point._replace(v=unravel(solve.v))
        grad_outer = trees.add(oracles.cross(point, draw.inner), outer.grad_outer)
        return PointState(move_outer(oracles, point, grad_outer, self.step_size / self.outer_ratio))

    def calls(self, oracles: Oracles, draw: Rows, refresh: bool) -> Calls:
        n, m = oracles.count_inner(draw.inner), oracles.count_outer(draw.outer)
        gradients = self.n_gradient_steps + self.n_inner_steps + 1 + self.n_v_steps
        return Calls(inner_grad=gradients * n, cross=n, outer_grad=m, outer_grad_outer=m)

"""qNBO: quasi-Newton steps of z, and of v with the inverse Hessian built by the steps of z.

Fang, Liu, Yao, Yu, Zhang. qNBO: quasi-Newton Meets Bilevel Optimization. ICLR 2025, arXiv 2502.01076. Confidence:
low; only the abstract and reviews of the text were available. They print the steps of z. For v they state only that
quasi-Newton steps without second derivatives correct the errors of H along ∇z F; the form of these steps is our choice.

H is α I at the start of each step, and all pairs of the step update it by BFGS or SR1. On one batch of each level:

    P times:   z ← z - α ∇z G
    T times:   s = -γ H ∇z G;   z ← z + s;   update H by (s, change of ∇z G)
    v = last v, or -H ∇z F for a cold start;   s = v;   ρ = ∇z F
    Q times:   e = δ s/||s||;   g = ∇z G(z + e) - ∇z G(z);   update H by (e, g)
               ρ ← ρ + (||s||/δ) g;   s = -H ρ;   v ← v + s
    x ← x - (α/r)((∇²xz G) v + ∇x F)

with δ = ξ (1 + ||z||). ρ is the residual of v, and falls superlinearly in Q. In the paper Q grows with the steps; here
it is constant, and v continues from the last v, since it would be biased otherwise. With Q = 0, v = -H ∇z F, as in
SHINE. The theory is for full-batch passes and α <= 1/L.
Cost (P + T + Q + 2) n + 2m, or (P + T + Q + 4) b. Memory (2T + 2Q + 5) p + d. Adaptive: the metric of the steps of z
and v.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from bilevel._core import trees
from bilevel._core.types import AnyArray, Array, Calls, Point, Rows, Scalar
from bilevel.oracles import SAMPLINGS, Oracles
from bilevel.solvers.base import Complexity, PointState, Solver, solver
from bilevel.solvers.fields import flag, fraction, one_of, positive, whole
from bilevel.solvers.moves import move, repeat

FORMS = ("bfgs", "sr1")
_SMALLEST_COSINE = 1e-8  # of the angle between w and g, for SR1


class Pairs(NamedTuple):
    """Moves s (for SR1: w) and changes g, one per row, oldest first; and 1/(s·g), 0 for empty and rejected rows."""

    moves: AnyArray
    changes: AnyArray
    weights: AnyArray


def no_pairs(memory: int, like: AnyArray) -> Pairs:
    """Return ``memory`` empty rows."""
    rows = jnp.zeros((memory, like.size), like.dtype)
    return Pairs(rows, rows, jnp.zeros(memory, like.dtype))


@dataclass(frozen=True)
class InverseHessian:
    """H as a function of the pairs, starting from a multiple of the identity, without forming a matrix.

    A pair (s, g) of a move and the change of the gradient along it updates H by BFGS or by SR1:

        H ← (I - ρ s gᵀ) H (I - ρ g sᵀ) + ρ s sᵀ,  ρ = 1/(s·g);      H ← H + w wᵀ/(w·g),  w = s - H g

    BFGS multiplies by two loops over the pairs, and SR1 stores w instead of s. A pair is rejected if it has no positive
    curvature (BFGS), if w·g vanishes (SR1), or if the move is so short that g consists mostly of rounding errors.
    """

    form: str
    scale: Scalar

    def product(self, pairs: Pairs, vector: Array) -> Array:
        """Return H vector."""
        if self.form == "sr1":
            return self.scale * vector + (pairs.weights * (pairs.moves @ vector)) @ pairs.moves
        product, weights = jax.lax.scan(_backward, vector, pairs, reverse=True)
        return jax.lax.scan(_forward, self.scale * product, (pairs, weights))[0]

    def pair(self, pairs: Pairs, start: Array, move: Array, change: Array) -> Pairs:
        """Return the row of a new pair, for a move from ``start``; its weight is 0 if the pair is rejected."""
        eps = jnp.finfo(move.dtype).eps
        if self.form == "sr1":
            stored = move - self.product(pairs, change)
            curvature = stored @ change
            accepted = jnp.abs(curvature) > _SMALLEST_COSINE * jnp.linalg.norm(stored) * jnp.linalg.norm(change)
            accepted &= stored @ stored > eps * (move @ move)  # otherwise H g = s holds already
        else:
            stored, curvature = move, move @ change
            accepted = curvature > eps * (change @ change)
        accepted &= move @ move > eps * (start @ start)
        return Pairs(stored, change, jnp.where(accepted, 1 / jnp.where(accepted, curvature, 1), 0))


def _backward(product: Array, pair: Pairs) -> tuple[Array, Array]:
    weight = pair.weights * (pair.moves @ product)
    return product - weight * pair.changes, weight


def _forward(product: Array, pair_and_weight: tuple[Pairs, Array]) -> tuple[Array, None]:
    pair, weight = pair_and_weight
    return product + (weight - pair.weights * (pair.changes @ product)) * pair.moves, None


class _Solve(NamedTuple):
    """v, its residual, its last step, and the pairs of the inverse Hessian."""

    v: Array
    residual: Array
    step: Array
    pairs: Pairs


def _put(pairs: Pairs, row: Array, pair: Pairs) -> Pairs:
    """Return the pairs with one row replaced."""
    return jax.tree.map(lambda rows, new: rows.at[row].set(new), pairs, pair)


@solver
class QNBO(Solver[PointState, Rows]):
    """Quasi-Newton bilevel optimization.

    Parameters
    ----------
    step_size : α; the inverse Hessian before the first pair is α I, and the gradient steps of z have size α
    n_gradient_steps : P, gradient steps of z before the quasi-Newton steps
    n_inner_steps : T, quasi-Newton steps of z
    n_v_steps : Q, quasi-Newton steps of v; with 0, v = -H ∇z F
    form : "bfgs" or "sr1", the update of the inverse Hessian
    warm_start_v : continue from the last v; False starts from -H ∇z F, which converges only as Q grows
    damping : γ, factor of the quasi-Newton steps of z
    difference : ξ, the length of the differences along v relative to 1 + ||z||
    sampling : "full", as in the theory, or "blocks", "iid", "reshuffle"
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
        return PointState(start, self.moves.init(start))

    def step(self, oracles: Oracles, state: PointState, index: Array, draw: Rows) -> PointState:
        first, unravel = ravel_pytree(state.point.inner_var)
        inverse, n_z, n_v = InverseHessian(self.form, self.step_size), self.n_inner_steps, self.n_v_steps

        def inner_grad(z: Array) -> Array:
            return ravel_pytree(oracles.inner_grad(state.point._replace(inner_var=unravel(z)), draw.inner))[0]

        def step_z(row: Array, carry: tuple[Array, Array, Pairs]) -> tuple[Array, Array, Pairs]:
            z, grad, pairs = carry
            step = -self.damping * inverse.product(pairs, grad)
            new_grad = inner_grad(z + step)
            return z + step, new_grad, _put(pairs, row, inverse.pair(pairs, z, step, new_grad - grad))

        z = repeat(self.n_gradient_steps, None, lambda z, _: move(z, inner_grad(z), self.step_size), first)
        z, grad, pairs = jax.lax.fori_loop(0, n_z, step_z, (z, inner_grad(z), no_pairs(n_z + n_v, z)))
        point = state.point._replace(inner_var=unravel(z))
        outer = oracles.outer(point, draw.outer)
        residual = ravel_pytree(outer.grad)[0]
        length = self.difference * (1 + jnp.linalg.norm(z))

        def step_v(row: Array, carry: _Solve) -> _Solve:
            v, residual, step, pairs = carry
            size = jnp.maximum(jnp.linalg.norm(step), jnp.finfo(step.dtype).tiny)
            probe = length / size * step
            change = inner_grad(z + probe) - grad
            pairs = _put(pairs, row, inverse.pair(pairs, z, probe, change))
            residual = residual + size / length * change
            step = -inverse.product(pairs, residual)
            return _Solve(v + step, residual, step, pairs)

        is_cold = not self.warm_start_v or n_v == 0
        start = -inverse.product(pairs, residual) if is_cold else ravel_pytree(state.point.v)[0]
        solve = jax.lax.fori_loop(n_z, n_z + n_v, step_v, _Solve(start, residual, start, pairs))
        point = point._replace(v=unravel(solve.v))
        grad_outer = trees.add(oracles.cross(point, draw.inner), outer.grad_outer)
        step = self.step_size / self.outer_ratio
        return PointState(*self.moves.outer(oracles, point, state.moves, grad_outer, step))

    def calls(self, oracles: Oracles, draw: Rows, refresh: bool) -> Calls:
        n, m = oracles.count_inner(draw.inner), oracles.count_outer(draw.outer)
        gradients = self.n_gradient_steps + self.n_inner_steps + 1 + self.n_v_steps
        return Calls(inner_grad=gradients * n, cross=n, outer_grad=m, outer_grad_outer=m)

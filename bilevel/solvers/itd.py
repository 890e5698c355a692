"""ITD: iterative differentiation, the gradient of F(z_T(x), x) through T inner steps.

Franceschi, Donini, Frasconi, Pontil. Forward and Reverse Gradient-Based Hyperparameter Optimization. ICML 2017; Ji,
Yang, Liang. Bilevel Optimization: Convergence Analysis and Enhanced Design. ICML 2021. Confidence: high; the result
equals that of automatic differentiation through the loop.

    z_0 = z, independent of x;   z_k = z_{k-1} - α ∇z G_{B_k}(z_{k-1}, x),   k = 1, …, T
    w = ∇z F_C(z_T, x),  g = ∇x F_C(z_T, x);   for k = T, …, 1 at z_{k-1}:
        g ← g - α (∇²xz G_{B_k}) w;   if k > 1:  w ← w - α (∇²zz G_{B_k}) w
    z = z_T;   x ← x - (α/r) g

Cost (3T + 1) b. Memory (T + 2) p + d. Adaptive: nothing. The bias is of the order of (1 - α mu_G)^T, as that of
a Neumann series with η = α.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from bilevel._core.types import Array, Calls, Point, PyTree, Rows
from bilevel.oracles import Oracles
from bilevel.solvers.base import Complexity, Solver, solver
from bilevel.solvers.fields import flag, whole
from bilevel.solvers.moves import batch, move, move_outer


class ITDState(NamedTuple):
    """The iterate, and the first inner variable, for cold starts."""

    point: Point
    first_inner_var: PyTree


@solver
class ITD(Solver[ITDState, Rows]):
    """Iterative differentiation.

    Parameters
    ----------
    step_size : α, step of the inner loop
    """

    n_inner_steps: int = whole(default=10)
    warm_start: bool = flag(default=True)
    needs_plain_step = "it differentiates through plain steps of z"
    complexity = Complexity("Õ((n+m) ε^-1)", "full batches, T like log(1/ε)", "C^{1,1}", "C^{2,2}")

    def init(self, oracles: Oracles, start: Point) -> ITDState:
        return ITDState(start, start.inner_var)

    def draw(self, oracles: Oracles, key: Array, index: Array) -> Rows:
        return Rows(oracles.draw_inner(key, index, self.n_inner_steps), oracles.draw_outer(key, index))

    def step(self, oracles: Oracles, state: ITDState, index: Array, draw: Rows) -> ITDState:
        start = state.point if self.warm_start else state.point._replace(inner_var=state.first_inner_var)
        point, grad = self.unroll(oracles, start, draw)
        return state._replace(point=move_outer(oracles, point, grad, self.step_size / self.outer_ratio))

    def unroll(self, oracles: Oracles, start: Point, draw: Rows) -> tuple[Point, PyTree]:
        """Return the point after the inner steps, and the gradient of F there with respect to x."""

        def forward(z: PyTree, k: Array) -> tuple[PyTree, PyTree]:
            grad = oracles.inner_grad(start._replace(inner_var=z), batch(draw.inner, k))
            return move(z, grad, self.step_size), z

        last, path = jax.lax.scan(forward, start.inner_var, jnp.arange(self.n_inner_steps, dtype=jnp.int32))
        point = start._replace(inner_var=last)
        outer = oracles.outer(point, draw.outer)

        def at(k: Array | int, w: PyTree) -> Point:
            return Point(jax.tree.map(lambda leaf: leaf[k], path), start.outer_var, w)

        def backward(i: Array, carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
            (w, grad), k = carry, self.n_inner_steps - 1 - i
            here, rows = at(k, w), batch(draw.inner, k)
            grad = move(grad, oracles.cross(here, rows), self.step_size)
            return move(w, oracles.hvp(here, rows), self.step_size), grad

        w, grad = jax.lax.fori_loop(0, self.n_inner_steps - 1, backward, (outer.grad, outer.grad_outer))
        return point, move(grad, oracles.cross(at(0, w), batch(draw.inner, 0)), self.step_size)

    def calls(self, oracles: Oracles, draw: Rows, refresh: bool) -> Calls:
        loop = oracles.count_inner(draw.inner, self.n_inner_steps)
        outer = oracles.count_outer(draw.outer)
        first = oracles.count_inner(batch(draw.inner, 0))
        return Calls(inner_grad=loop, hvp=loop - first, cross=loop, outer_grad=outer, outer_grad_outer=outer)

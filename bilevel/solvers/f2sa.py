"""F²SA: fully first-order stochastic approximation, with a penalty instead of second derivatives.

Kwon, Kwon, Wright, Nowak. A Fully First-Order Method for Stochastic Bilevel Optimization. ICML 2023, arXiv 2301.10945.
Confidence: high; the paper's text was compared. It has the two loops at the old x, two independent inner batches in the
step of x (``shared_batch=False``), and λ >= 2 L_F/mu_G.

z tracks the minimizer of G, and y that of F/λ + G. With g = α t^-4/7,

    T times:  draw B;  z ← z - g ∇z G_B(z, x);   draw B', C;  y ← y - (g/2)(∇z F_C(y, x)/λ + ∇z G_B'(y, x))
    draw B, C;  x ← x - (α/r) t^-5/7 (∇x F_C(y, x) + λ(∇x G_B(y, x) - ∇x G_B(z, x)));   λ ← λ + δ_0 t^-6/7

so that λ grows like t^1/7. For comparisons, ``schedule="printed"`` is the schedule printed in the experiments of the
SRBA paper, λ ← λ + δ_0 t^-1/7, with the y step as published, y ← y - (α t^-5/7 / 2λ_0)(∇z F_C + λ ∇z G_B').
``schedule="constant"`` has constant steps, α of z and of y and α/r of x, and λ = λ_0. On full batches it is ALT-PBGD,
the alternating form of V-PBGD: Jiang, Xiao, Chen, Chen. arXiv 2511.16796, 2025, of which only the abstract was read.
With equal steps the errors of y and z are nearly equal and cancel; with α/2 of y, x diverged at large λ.
Cost (3T + 3) b, no second derivatives. Memory 2p + d. Adaptive: nothing.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bilevel._core import trees
from bilevel._core.types import Array, Calls, Point, PyTree, Scalar
from bilevel.oracles import Oracles
from bilevel.solvers.base import Complexity, Solver, solver
from bilevel.solvers.fields import flag, one_of, positive, whole
from bilevel.solvers.moves import MovesState, batch, decay, move, split


class F2SAState(NamedTuple):
    """The iterate, y, λ, and the states of transformations."""

    point: Point
    y: PyTree
    penalty: Array
    moves: MovesState


class F2SADraw(NamedTuple):
    """Batches of the loops over z and y, and of the outer move: inner rows for y and for z, and outer rows."""

    inner_loop: Any
    y_inner_loop: Any
    y_outer_loop: Any
    inner: Any
    inner_at_z: Any
    outer: Any


@solver
class F2SA(Solver[F2SAState, F2SADraw]):
    """Fully first-order stochastic approximation.

    Parameters
    ----------
    step_size : first step of the inner loops; steps decrease like t^-4/7
    outer_ratio : the outer variable moves with ``step_size / outer_ratio``, decreasing like t^-5/7
    n_inner_steps : T, steps of z and of y per outer step
    lambda_0 : first λ; the bias is of the order of 1/λ, and the theory requires at least 2 L_F / mu_G
    delta_0 : growth of λ; 0 keeps it constant. Has no effect if the schedule is "constant"
    shared_batch : use one inner batch for both gradients of the outer move; False draws two, as published, which makes
        the move about λ times as noisy
    schedule : "corrected"; "printed" for comparisons; or "constant" for constant steps and a constant λ, which suits
        full batches
    """

    n_inner_steps: int = whole(default=10)
    lambda_0: float = positive(default=1.0)
    delta_0: float = positive(default=0.1, off=True)
    shared_batch: bool = flag(default=True)
    schedule: str = one_of(("corrected", "printed", "constant"), default="corrected")
    faster_without_cuda_graph = True
    complexity = Complexity("O(ε^-7/2)", "general expectation", "C^{2,2}", "C^{2,2}")

    def init(self, oracles: Oracles, start: Point) -> F2SAState:
        return F2SAState(start, start.inner_var, jnp.asarray(self.lambda_0), self.moves.init(start))

    def draw(self, oracles: Oracles, key: Array, index: Array) -> F2SADraw:
        times = self.n_inner_steps
        rows = oracles.draw_inner(key, index, 2 * times + (1 if self.shared_batch else 2))
        inner_loop, y_inner_loop, at_y = split(rows, times, times, None)
        at_z = at_y if self.shared_batch else batch(rows, 2 * times + 1)
        y_outer_loop, outer = split(oracles.draw_outer(key, index, times + 1), times, None)
        return F2SADraw(inner_loop, y_inner_loop, y_outer_loop, at_y, at_z, outer)

    def step(self, oracles: Oracles, state: F2SAState, index: Array, draw: F2SADraw) -> F2SAState:
        point, y = self._inner_loops(oracles, state, index, draw)
        at_y = point._replace(inner_var=y)
        grad_y = oracles.inner_grad_outer(at_y, draw.inner)
        change = trees.subtract(grad_y, oracles.inner_grad_outer(point, draw.inner_at_z))
        grad = trees.add(oracles.outer_grad_outer(at_y, draw.outer), trees.scale(state.penalty, change))
        point, moves = self.moves.outer(oracles, point, state.moves, grad, self.outer_step(index))
        return F2SAState(point, y, state.penalty + self.growth(index), moves)

    def outer_step(self, index: Array) -> Array:
        """Return the step of x."""
        return self._decay(self.step_size / self.outer_ratio, index, 5 / 7)

    def growth(self, index: Array) -> Array:
        """Return the increase of λ."""
        if self.schedule == "constant":
            return jnp.zeros_like(self.delta_0)
        return decay(self.delta_0, index, 6 / 7 if self.schedule == "corrected" else 1 / 7)

    def y_step(self, penalty: Array, index: Array) -> Array:
        """Return the step of y along ∇z F/λ + ∇z G."""
        if self.schedule == "printed":
            return decay(self.step_size / (2 * self.lambda_0), index, 5 / 7) * penalty
        return self._decay(self.step_size, index, 4 / 7) / (1 if self.schedule == "constant" else 2)

    def _decay(self, step_size: Scalar, index: Array, power: float) -> Array:
        return decay(step_size, index, 0.0 if self.schedule == "constant" else power)

    def _inner_loops(self, oracles: Oracles, state: F2SAState, index: Array, draw: F2SADraw) -> tuple[Point, PyTree]:
        """Return the point with the new z, and the new y."""
        step = self._decay(self.step_size, index, 4 / 7)
        weight, y_step = 1 / state.penalty, self.y_step(state.penalty, index)

        def update(i: Array, carry: tuple[Point, Point]) -> tuple[Point, Point]:
            at_z, at_y = carry
            z = move(at_z.inner_var, oracles.inner_grad(at_z, batch(draw.inner_loop, i)), step)
            outer_grad = trees.scale(weight, oracles.outer_grad(at_y, batch(draw.y_outer_loop, i)))
            grad = trees.add(outer_grad, oracles.inner_grad(at_y, batch(draw.y_inner_loop, i)))
            return at_z._replace(inner_var=z), at_y._replace(inner_var=move(at_y.inner_var, grad, y_step))

        start = state.point, state.point._replace(inner_var=state.y)
        at_z, at_y = jax.lax.fori_loop(0, self.n_inner_steps, update, start)
        return at_z, at_y.inner_var

    def calls(self, oracles: Oracles, draw: F2SADraw, refresh: bool) -> Calls:
        times = self.n_inner_steps
        return Calls(
            inner_grad=oracles.count_inner(draw.inner_loop, times) + oracles.count_inner(draw.y_inner_loop, times),
            inner_grad_outer=oracles.count_inner(draw.inner) + oracles.count_inner(draw.inner_at_z),
            outer_grad=oracles.count_outer(draw.y_outer_loop, times),
            outer_grad_outer=oracles.count_outer(draw.outer),
        )

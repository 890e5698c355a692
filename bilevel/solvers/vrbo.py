"""VRBO: variance-reduced bilevel optimizer, with SPIDER estimates and an inner loop.

Yang, Ji, Liang. Provably Faster Algorithms for Bilevel Optimization. NeurIPS 2021, arXiv 2106.04692. Confidence:
high; estimates and loops were compared with the authors' code. There z moves T + 1 times, and no difference follows the
last move, so that the estimates lag behind by one move of z; and a full-batch pass is followed by a difference.

Estimates d_z of ∇z G and d_x of the hypergradient (truncated Neumann series) belong to the current (z, x):

    every q steps:  d_z, d_x by a full-batch pass
    (z', x') = (z, x);   x ← x - (α/r) d_x
    for k = 0, …, T:  draw batches;  d ← d + g(z, x) - g(z', x');  (z', x') = (z, x);  if k < T:  z ← z - α d_z

Cost 2(T + 1)(Q + 4) b, and (Q + 2) n + 2m every q steps. Memory 3p + 3d. Adaptive: nothing.
"""

from dataclasses import replace
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from bilevel._core import trees
from bilevel._core.types import Array, Calls, Point, PyTree, Rows
from bilevel.oracles import Oracles
from bilevel.problems import BilevelProblem
from bilevel.solvers import neumann
from bilevel.solvers.base import Complexity, Solver, solver
from bilevel.solvers.fields import given, positive, whole
from bilevel.solvers.moves import MovesState, batch, move, split


class VRBOState(NamedTuple):
    """The iterate, the estimates of ∇z G and of the hypergradient at it, and the states of transformations."""

    point: Point
    inner_estimate: PyTree
    outer_estimate: PyTree
    moves: MovesState


@solver
class VRBO(Solver[VRBOState, Rows]):
    """Variance-reduced bilevel optimizer.

    Parameters
    ----------
    step_size : α, step of the inner loop
    period : q, outer steps from one full-batch pass to the next; None means max(1, (n + m) // (2 batch_size))
    """

    period: int | None = whole(default=None, optional=True, hint="; use None for the default")
    n_inner_steps: int = whole(default=10)
    n_neumann: int = whole(default=10)
    neumann_step: float = positive(default=0.5)
    complexity = Complexity("Õ(ε^-3/2)", "general expectation", "C^{1,1}", "C^{2,2}")
    needs_finite_sum = faster_without_cuda_graph = True

    def configure(self, problem: BilevelProblem) -> Self:
        neumann.check_step(self, self.neumann_step, problem)
        return replace(self, period=self.period or max(1, (problem.n_inner + problem.n_outer) // sum(self.batches())))

    def init(self, oracles: Oracles, start: Point) -> VRBOState:
        zero = trees.zeros_like(start)
        return VRBOState(start, zero.inner_var, zero.outer_var, self.moves.init(start))

    def draw(self, oracles: Oracles, key: Array, index: Array) -> Rows:
        corrections, batches = self.n_inner_steps + 1, self.n_neumann + 2
        inner = oracles.draw_inner(key, index, corrections * batches)
        if inner is not None:
            inner = inner.reshape(corrections, batches, *inner.shape[1:])
        return Rows(inner, oracles.draw_outer(key, index, corrections))

    def refreshes(self, index: Array, draw: Rows) -> Array:
        return index % given(self.period) == 0

    def refresh(self, oracles: Oracles, state: VRBOState, index: Array, draw: Rows) -> VRBOState:
        exact = self._gradients(oracles, state.point, None, None)
        refreshed = VRBOState(state.point._replace(v=exact.v), exact.inner_var, exact.outer_var, state.moves)
        return self.step(oracles, refreshed, index, draw)

    def step(self, oracles: Oracles, state: VRBOState, index: Array, draw: Rows) -> VRBOState:
        step = self.step_size / self.outer_ratio
        moved, moves = self.moves.outer(oracles, state.point, state.moves, state.outer_estimate, step)
        after_x = self._correct(oracles, state._replace(point=moved, moves=moves), state.point, draw, 0)

        def inner_move(k: Array, state: VRBOState) -> VRBOState:
            z = move(state.point.inner_var, state.inner_estimate, self.step_size)
            next_state = state._replace(point=state.point._replace(inner_var=z))
            return self._correct(oracles, next_state, state.point, draw, k)

        return jax.lax.fori_loop(1, self.n_inner_steps + 1, inner_move, after_x)

    def _correct(self, oracles: Oracles, state: VRBOState, previous: Point, draw: Rows, k: Array | int) -> VRBOState:
        """Return the state with the change of both gradients since ``previous`` added to the estimates."""
        inner, outer = batch(draw.inner, k), batch(draw.outer, k)
        new = self._gradients(oracles, state.point, inner, outer)
        old = self._gradients(oracles, previous, inner, outer)
        return VRBOState(
            state.point._replace(v=new.v),
            trees.add(state.inner_estimate, trees.subtract(new.inner_var, old.inner_var)),
            trees.add(state.outer_estimate, trees.subtract(new.outer_var, old.outer_var)),
            state.moves,
        )

    def _gradients(self, oracles: Oracles, point: Point, inner: Any, outer: Any) -> Point:
        """Return (∇z G, hypergradient, v) on Q + 2 inner batches and one outer batch."""
        first, products, cross = split(inner, None, self.n_neumann, None)
        draw = neumann.NeumannDraw(products, cross, outer)
        hyper = neumann.hypergradient(oracles, point, draw, self.n_neumann, self.neumann_step)
        return hyper._replace(inner_var=oracles.inner_grad(point, first))

    def calls(self, oracles: Oracles, draw: Rows, refresh: bool) -> Calls:
        corrections, batches, n, m = self.n_inner_steps + 1, self.n_neumann + 2, oracles.n_inner, oracles.n_outer
        rows = None if draw.inner is None else draw.inner.reshape(-1, *draw.inner.shape[2:])
        inner = oracles.inner_samples.counts(rows, corrections * batches).reshape(corrections, batches)
        outer = 2 * oracles.count_outer(draw.outer, corrections)
        grads, products, cross = (2 * jnp.sum(inner[:, part], dtype=jnp.int32) for part in (0, slice(1, -1), -1))
        steps = Calls(inner_grad=grads, hvp=products, cross=cross, outer_grad=outer, outer_grad_outer=outer)
        full = Calls(inner_grad=n, hvp=self.n_neumann * n, cross=n, outer_grad=m, outer_grad_outer=m)
        return trees.add(steps, full) if refresh else steps

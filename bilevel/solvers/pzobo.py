"""PZOBO: partial zeroth-order bilevel optimizer.

Sow, Ji, Liang. On the Convergence Theory for Hessian-Free Bilevel Algorithms. NeurIPS 2022, arXiv 2110.07004.
Confidence: high; loops, batches and warm start were compared with the authors' code, where T = 10, K = 1, μ = 0.01.

    draw B_1, …, B_T;   z ← T steps of size α from z at x
    K times:  draw ξ ~ N(0, I);  z_ξ = the same steps from the same start on the same batches at x + μ ξ
    draw C;   x ← x - (α/r)(∇x F_C + (1/K) sum_ξ <(z_ξ - z)/μ, ∇z F_C> ξ)   at the new z

In the authors' code ξ is a unit vector, for each array of x, without a factor d. The mean of ξ ξ' is then I/d, and the
sum over ξ is 1/d of the one here: their step of x is d times ours.
Cost ((K + 1) T + 2) b, no second derivatives. Memory 3p + 2d. Adaptive: nothing. The variance grows with the size of x.
"""

from typing import Any, NamedTuple

import jax

from bilevel._core import threefry, trees
from bilevel._core.types import Array, Calls, Point, PyTree
from bilevel.oracles import Oracles
from bilevel.solvers.base import Complexity, PointState, Solver, solver
from bilevel.solvers.fields import positive, whole
from bilevel.solvers.moves import inner_descent


class PZOBODraw(NamedTuple):
    """Batches of the inner loop and of the outer gradients, and the key of the Gaussians."""

    inner_loop: Any
    outer: Any
    key: Array


@solver
class PZOBO(Solver[PointState, PZOBODraw]):
    """Partial zeroth-order bilevel optimizer.

    Parameters
    ----------
    step_size : α, step of the inner loop
    n_directions : K, random directions per outer step
    smoothing : μ; x is moved by μ ξ along each direction ξ
    """

    n_inner_steps: int = whole(default=10)
    n_directions: int = whole(default=1)
    smoothing: float = positive(default=0.01)
    needs_plain_step = "it compares loops of plain steps of z"
    complexity = Complexity("a rate, not confirmed")

    def init(self, oracles: Oracles, start: Point) -> PointState:
        return PointState(start, self.moves.init(start))

    def draw(self, oracles: Oracles, key: Array, index: Array) -> PZOBODraw:
        gaussian_key = threefry.fold_in(threefry.fold_in(key, 2), index)  # batches use the streams 0 and 1
        inner_loop = oracles.draw_inner(key, index, self.n_inner_steps)
        return PZOBODraw(inner_loop, oracles.draw_outer(key, index), gaussian_key)

    def step(self, oracles: Oracles, state: PointState, index: Array, draw: PZOBODraw) -> PointState:
        point = inner_descent(oracles, state.point, draw.inner_loop, self.n_inner_steps, self.step_size)
        outer = oracles.outer(point, draw.outer)

        def add_direction(k: Array, total: PyTree) -> PyTree:
            noise = gaussian_like(jax.random.fold_in(draw.key, k), point.outer_var)
            x = trees.add(state.point.outer_var, trees.scale(self.smoothing, noise))
            start = state.point._replace(outer_var=x)
            moved = inner_descent(oracles, start, draw.inner_loop, self.n_inner_steps, self.step_size)
            response = trees.dot(trees.subtract(moved.inner_var, point.inner_var), outer.grad) / self.smoothing
            return trees.add(total, trees.scale(response / self.n_directions, noise))

        grad = jax.lax.fori_loop(0, self.n_directions, add_direction, outer.grad_outer)
        step = self.step_size / self.outer_ratio
        return PointState(*self.moves.outer(oracles, point, state.moves, grad, step))

    def calls(self, oracles: Oracles, draw: PZOBODraw, refresh: bool) -> Calls:
        loop = oracles.count_inner(draw.inner_loop, self.n_inner_steps)
        outer = oracles.count_outer(draw.outer)
        return Calls(inner_grad=(self.n_directions + 1) * loop, outer_grad=outer, outer_grad_outer=outer)


def gaussian_like(key: Array, tree: PyTree) -> PyTree:
    """Draw N(0, I) in the shape of a tree."""
    leaves, structure = jax.tree.flatten(tree)
    draws = [jax.random.normal(jax.random.fold_in(key, i), leaf.shape, leaf.dtype) for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(structure, draws)

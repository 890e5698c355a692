"""ForwardMode: the gradient of F(z_T(x), x) through T inner steps, by tangents that are carried forward.

Franceschi, Donini, Frasconi, Pontil. Forward and Reverse Gradient-Based Hyperparameter Optimization. ICML 2017.
Confidence: high; FORWARD-HG and the real-time variant follow the paper's text, and the result equals that of ITD. Of
the work on random directions (Shen et al. Memory-Efficient Gradient Unrolling for Large-Scale Bi-level Optimization.
2024, arXiv 2406.14095) only the abstract was available.

With directions e_1, …, e_K of x, whose tangents are t_i = (dz/dx) e_i, and t_i = 0 at the start of the loop,

    T times:  draw B;  t_i ← t_i - α ((∇²zz G_B) t_i + (∇²zx G_B) e_i);   z ← z - α ∇z G_B        both at the old z
    draw C;   g = ∇x F_C + sum_i (t_i'∇z F_C) e_i;   x ← x - (α/r) g                               at the new z

Exact: the e_i are the d coordinate directions. Random: K < d directions with entries ±1, drawn in each step, and the
mean over i instead of the sum; g is an unbiased estimate, whose variance grows with d/K. In real time
(``reset=False``): the t_i of the d coordinates are never reset to 0, so that T may be small; moves of x bias them.
Cost ((2K + 1) T + 2) b, K = d by default. Memory (K + 1) p + d, whatever T is. Adaptive: nothing.
"""

from dataclasses import replace
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from bilevel._core import threefry, trees
from bilevel._core.types import Array, Calls, Point, PyTree
from bilevel.oracles import Oracles
from bilevel.problems import BilevelProblem
from bilevel.solvers.base import Complexity, Solver, solver
from bilevel.solvers.fields import flag, given, whole
from bilevel.solvers.moves import MovesState, move, repeat


class ForwardState(NamedTuple):
    """The iterate, the first inner variable for cold starts, the states of transformations, and the tangents.

    The tangents are () if each loop resets them.
    """

    point: Point
    first_inner_var: PyTree
    moves: MovesState
    tangents: PyTree


class ForwardDraw(NamedTuple):
    """Batches of the inner loop and of the outer gradients, and the key of random directions."""

    inner_loop: Any
    outer: Any
    key: Array


@solver
class ForwardMode(Solver[ForwardState, ForwardDraw]):
    """Differentiation of the inner loop in forward mode, for outer variables of few dimensions.

    Parameters
    ----------
    step_size : α, step of the inner loop
    n_inner_steps : T, inner steps per outer step
    n_directions : K, random directions per outer step; None, or at least the dimension of x, means its coordinates
    reset : begin each loop with tangents 0; False never resets them, which allows few inner steps per outer step
    """

    n_inner_steps: int = whole(default=10)
    n_directions: int | None = whole(default=None, optional=True, hint="; use None for all coordinates")
    warm_start: bool = flag(default=True)
    reset: bool = flag(default=True)
    needs_plain_step = "its tangents are those of plain steps of z"
    complexity = Complexity("none")

    def configure(self, problem: BilevelProblem) -> Self:
        size = sum(leaf.size for leaf in jax.tree.leaves(problem.start.outer_var))
        count = size if self.n_directions is None else min(self.n_directions, size)
        if not self.reset and (count < size or not self.warm_start):
            way = "leave `n_directions` and `warm_start` at their defaults"
            raise ValueError(f"`ForwardMode(reset=False)`: carries the tangents of all coordinates of x; {way}.")
        return replace(self, n_directions=count)

    def init(self, oracles: Oracles, start: Point) -> ForwardState:
        tangents = () if self.reset else self._no_tangents(start)
        return ForwardState(start, start.inner_var, self.moves.init(start), tangents)

    def _no_tangents(self, point: Point) -> PyTree:
        shape = (given(self.n_directions),)
        return jax.tree.map(lambda leaf: jnp.zeros(shape + leaf.shape, leaf.dtype), point.inner_var)

    def draw(self, oracles: Oracles, key: Array, index: Array) -> ForwardDraw:
        sign_key = threefry.fold_in(threefry.fold_in(key, 2), index)  # batches use the streams 0 and 1
        inner_loop = oracles.draw_inner(key, index, self.n_inner_steps)
        return ForwardDraw(inner_loop, oracles.draw_outer(key, index), sign_key)

    def step(self, oracles: Oracles, state: ForwardState, index: Array, draw: ForwardDraw) -> ForwardState:
        start = state.point if self.warm_start else state.point._replace(inner_var=state.first_inner_var)
        tangents = self._no_tangents(start) if self.reset else state.tangents
        point, grad, tangents = self.unroll(oracles, start, tangents, draw)
        point, moves = self.moves.outer(oracles, point, state.moves, grad, self.step_size / self.outer_ratio)
        return state._replace(point=point, moves=moves, tangents=() if self.reset else tangents)

    def unroll(
        self, oracles: Oracles, start: Point, tangents: PyTree, draw: ForwardDraw
    ) -> tuple[Point, PyTree, PyTree]:
        """Return the point after the inner steps, the gradient of F there with respect to x, and the new tangents."""
        directions, weight = self.directions(start.outer_var, draw.key)

        def advance(carry: tuple[PyTree, PyTree], rows: Any) -> tuple[PyTree, PyTree]:
            z, tangents = carry
            change = oracles.inner_tangents(start._replace(inner_var=z), tangents, directions, rows)
            return move(z, change[0], self.step_size), move(tangents, change[1], self.step_size)

        z, tangents = repeat(self.n_inner_steps, draw.inner_loop, advance, (start.inner_var, tangents))
        point = start._replace(inner_var=z)
        outer = oracles.outer(point, draw.outer)
        slopes = weight * jax.vmap(lambda tangent: trees.dot(tangent, outer.grad))(tangents)
        implicit = jax.tree.map(lambda leaf: jnp.tensordot(slopes, leaf, 1), directions)
        return point, trees.add(outer.grad_outer, implicit), tangents

    def directions(self, outer_var: PyTree, key: Array) -> tuple[PyTree, float]:
        """Return the directions of x, stacked, and the weight of each in the gradient."""
        flat, tree_of = ravel_pytree(outer_var)
        count = given(self.n_directions)
        if count == flat.size:
            return jax.vmap(tree_of)(jnp.eye(flat.size, dtype=flat.dtype)), 1.0
        signs = 2 * threefry.integers(key, (count, flat.size), 2) - 1
        return jax.vmap(tree_of)(signs.astype(flat.dtype)), 1 / count

    def calls(self, oracles: Oracles, draw: ForwardDraw, refresh: bool) -> Calls:
        loop = oracles.count_inner(draw.inner_loop, self.n_inner_steps)
        products, outer = given(self.n_directions) * loop, oracles.count_outer(draw.outer)
        return Calls(inner_grad=loop, hvp=products, cross=products, outer_grad=outer, outer_grad_outer=outer)

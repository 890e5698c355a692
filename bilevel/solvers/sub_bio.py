"""SubBiO: v from the plane of ∇z F and of the last v after one step of its system.

Yang, Gao, Yuan. LancBiO: Dynamic Lanczos-aided Bilevel Optimization via Krylov Subspace. ICLR 2025, arXiv 2404.03331.
Confidence: medium; only the opening of the text was available, and the formulas are those of the authors' code, whose
synthetic example takes one product at another point, which is a slip. The system is H v = b with b = -∇z F:

    T times:  draw B;  z ← z - α ∇z G_B
    draw B, C;   w = v - θ H_B v;   W = (b, w);   v ← W (W'H_B W)⁻¹ W'b                            at the new z
    draw B;   x ← x - (α/r)((∇²xz G_B) v + ∇x F_C)                                                at the new v

As x converges, the plane contains the solution v = w + θ b. Computed here from an orthonormal basis of the same plane;
a second vector that consists of rounding errors (its square is below ε ||w||², where ε is the unit roundoff), as at the
first step, where v = 0, is left out.
Cost (T + 6) b. Memory 6p + d. Adaptive: nothing.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from bilevel._core import trees
from bilevel._core.types import Array, Calls, Point, PyTree, Scalar
from bilevel.oracles import SAMPLINGS, Oracles
from bilevel.solvers.base import Complexity, PointState, Solver, solver
from bilevel.solvers.fields import one_of, positive, whole
from bilevel.solvers.moves import move, split
from bilevel.solvers.neumann import LoopDraw, NeumannDraw, hypergradient_calls


class Subspace(NamedTuple):
    """Q, one vector per row; the diagonal of S = Q'HQ, 1 for empty rows of Q; and the entries next to it."""

    basis: PyTree
    diagonal: Array
    off_diagonal: Array


@solver
class SubBiO(Solver[PointState, LoopDraw]):
    """Bilevel optimizer with v from a plane.

    Parameters
    ----------
    step_size : α, step of the inner loop
    plane_step : θ, step of v along H v that gives the second vector of the plane; None means α
    sampling : "full", for which it is designed, or "blocks", "iid", "reshuffle"
    """

    sampling: str = one_of(SAMPLINGS, default="full", kw_only=True)
    n_inner_steps: int = whole(default=10)
    plane_step: float | None = positive(default=None, optional=True, hint="; use None for `step_size`")
    complexity = Complexity("none")
    needs_plain_step = None

    def init(self, oracles: Oracles, start: Point) -> PointState:
        return PointState(start, self.moves.init(start))

    def draw(self, oracles: Oracles, key: Array, index: Array) -> LoopDraw:
        rows = oracles.draw_inner(key, index, self.n_inner_steps + 2)
        inner_loop, products, cross = split(rows, self.n_inner_steps, None, None)
        return LoopDraw(inner_loop, NeumannDraw(products, cross, oracles.draw_outer(key, index)))

    def step(self, oracles: Oracles, state: PointState, index: Array, draw: LoopDraw) -> PointState:
        rows, times = draw.inner_loop, self.n_inner_steps
        point, moves = self.moves.inner_steps(oracles, state.point, state.moves, rows, times, self.step_size)
        outer = oracles.outer(point, draw.neumann.outer)
        right = trees.scale(-1, outer.grad)

        def product(vector: PyTree) -> PyTree:
            return oracles.hvp(point._replace(v=vector), draw.neumann.products)

        first = unit(right, 0)
        w = move(point.v, product(point.v), self.step_size if self.plane_step is None else self.plane_step)
        rounding = jnp.finfo(jnp.result_type(*jax.tree.leaves(w))).eps * trees.norm_sq(w)
        second = unit(move(w, first, trees.dot(first, w)), rounding)
        image, other = product(first), product(second)
        curvatures = jnp.stack([_curvature(first, image), _curvature(second, other)])
        off_diagonal = jnp.stack([jnp.zeros_like(rounding), trees.dot(second, image)])
        plane = Subspace(jax.tree.map(lambda *pair: jnp.stack(pair), first, second), curvatures, off_diagonal)
        point = point._replace(v=solve(plane, right))
        grad = trees.add(oracles.cross(point, draw.neumann.cross), outer.grad_outer)
        return PointState(*self.moves.outer(oracles, point, moves, grad, self.step_size / self.outer_ratio))

    def calls(self, oracles: Oracles, draw: LoopDraw, refresh: bool) -> Calls:
        loop = oracles.count_inner(draw.inner_loop, self.n_inner_steps)
        products = 3 * oracles.count_inner(draw.neumann.products)
        return hypergradient_calls(oracles, draw.neumann, 1)._replace(inner_grad=loop, hvp=products)


def unit(vector: PyTree, least: Scalar) -> PyTree:
    """Return the vector with length 1, or 0 if its square is at most ``least``."""
    square = trees.norm_sq(vector)
    return trees.scale(jnp.where(square > least, 1 / jnp.sqrt(jnp.where(square > least, square, 1)), 0), vector)


def _curvature(vector: PyTree, image: PyTree) -> Array:
    return jnp.where(trees.norm_sq(vector) > 0, trees.dot(vector, image), 1)


def solve(subspace: Subspace, right: PyTree) -> PyTree:
    """Return Q S⁻¹ Q' times the right-hand side."""
    basis, diagonal, off_diagonal = subspace
    upper = jnp.diag(off_diagonal[1:], 1)
    parts = jax.tree.map(lambda rows, leaf: jnp.tensordot(rows, leaf, leaf.ndim), basis, right)
    weights = jnp.linalg.solve(jnp.diag(diagonal) + upper + upper.T, sum(jax.tree.leaves(parts)))
    return jax.tree.map(lambda rows: jnp.tensordot(weights, rows, 1), basis)

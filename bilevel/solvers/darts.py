"""DARTS: one inner step is differentiated, with a difference of gradients instead of a cross product.

Liu, Simonyan, Yang. DARTS: Differentiable Architecture Search. ICLR 2019, arXiv 1806.09055. Confidence: high; the steps
are those of the authors' code.

    draw B, C;   z' = z - α ∇z G_B;   w = ∇z F_C(z', x);   ε = R/||w||
    g = ∇x F_C(z', x) - α (∇x G_B(z + ε w, x) - ∇x G_B(z - ε w, x)) / 2ε
    x ← x - (α/r) g;   z ← z - α ∇z G_B(z, x)      at the new x, on the same B;   z' is discarded

The difference approximates (∇²xz G_B) w with an error of order ε², and is exact on quadratics: g is then the gradient
of ITD with one inner step, and has the same bias. First order is g = ∇x F_C(z, x), which takes z as independent of x.
With an `inner_optimizer`, z' is a step of it from its current state, which z' does not change, and α w is replaced by
the derivative of that step with respect to its gradient, transposed, times w. For SGD with momentum that is what the
authors' code does. Their other settings are R = 0.01, Adam for x with the step 3e-4, and a decreasing step for z.
Cost 6b, of first order 2b; no second derivatives. Memory 3p + d. Adaptive: nothing.
"""

from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from bilevel._core import trees
from bilevel._core.compilation import arithmetic
from bilevel._core.types import Array, Calls, Point, PyTree, Rows, Scalar
from bilevel.oracles import Oracles
from bilevel.problems import BilevelProblem
from bilevel.problems.exact import derivative
from bilevel.solvers.base import Complexity, PointState, Solver, solver
from bilevel.solvers.fields import flag, positive
from bilevel.solvers.moves import Moves, MovesState, as_inner, batch, transform


@solver
class DARTS(Solver[PointState, Rows]):
    """Differentiable architecture search.

    Parameters
    ----------
    step_size : α, step of the inner variable, and of the trial step that is differentiated
    perturbation : R, distance of the two points of the difference from z
    first_order : move x along ∇x F alone; refused if F does not depend on x, which would then never move
    """

    perturbation: float = positive(default=0.01)
    first_order: bool = flag(default=False)
    needs_plain_step = None
    complexity = Complexity("none")

    def configure(self, problem: BilevelProblem) -> Self:
        if self.first_order and not outer_grad_outer_is_nonzero(problem, self.batch_size):
            raise ValueError(
                "`DARTS(first_order=True)`: it moves x along ∇x F alone, which is 0 on this problem because F does not "
                "depend on x, so that x would never move; use `first_order=False`."
            )
        return self

    def init(self, oracles: Oracles, start: Point) -> PointState:
        return PointState(start, self.moves.init(start))

    def draw(self, oracles: Oracles, key: Array, index: Array) -> Rows:
        return Rows(oracles.draw_inner(key, index, 1), oracles.draw_outer(key, index))

    def step(self, oracles: Oracles, state: PointState, index: Array, draw: Rows) -> PointState:
        point, moves = state
        if self.first_order:
            grad = oracles.outer_grad_outer(point, draw.outer)
        else:
            grad = self._unrolled_grad(oracles, point, moves, draw)
        point, moves = self.moves.outer(oracles, point, moves, grad, self.step_size / self.outer_ratio)
        return PointState(*self.moves.inner_steps(oracles, point, moves, draw.inner, 1, self.step_size))

    def _unrolled_grad(self, oracles: Oracles, point: Point, moves: MovesState, draw: Rows) -> PyTree:
        """Return g."""
        rows = batch(draw.inner, 0)
        gradient = oracles.inner_grad(point, rows)
        change, transposed, _ = inner_step(self.moves, point, gradient, moves, self.step_size)
        trial = point._replace(inner_var=trees.subtract(point.inner_var, change))
        outer = oracles.outer(trial, draw.outer)
        response, _ = cross_difference(oracles, point, transposed(outer.grad), self.perturbation, rows)
        return trees.subtract(outer.grad_outer, response)

    def calls(self, oracles: Oracles, draw: Rows, refresh: bool) -> Calls:
        inner, outer = oracles.count_inner(batch(draw.inner, 0)), oracles.count_outer(draw.outer)
        if self.first_order:
            return Calls(inner_grad=inner, outer_grad_outer=outer)
        return Calls(inner_grad=2 * inner, inner_grad_outer=2 * inner, outer_grad=outer, outer_grad_outer=outer)


def inner_step(
    moves: Moves, point: Point, gradient: PyTree, state: MovesState, step: Scalar
) -> tuple[PyTree, Callable[[PyTree], PyTree], MovesState]:
    """Return what a step subtracts from z, its transposed derivative by the gradient, and the new states."""
    optimizer = as_inner(moves.inner_optimizer)
    if optimizer is None:
        return trees.scale(step, gradient), lambda w: trees.scale(step, w), state

    def update(gradient: PyTree) -> tuple[PyTree, Any]:
        return transform(optimizer, gradient, state.inner, point.inner_var)

    change, pull_back, inner = jax.vjp(update, gradient, has_aux=True)

    def transposed(w: PyTree) -> PyTree:
        # The root in Adam has no derivative where all gradients were 0.
        return jax.tree.map(lambda leaf: jnp.where(jnp.isnan(leaf), 0, leaf), pull_back(w)[0])

    return change, transposed, state._replace(inner=inner)


def cross_difference(
    oracles: Oracles, point: Point, direction: PyTree, distance: Scalar, rows: Any, length: Array | None = None
) -> tuple[PyTree, PyTree]:
    """Return (∇²xz G) y as (∇x G(z + ε y, x) - ∇x G(z - ε y, x)) / 2ε with ε = distance/length, and z - ε y.

    By default ``length`` is the norm of y, so that ``distance`` is that of the two points from z.
    """
    length = trees.norm(direction) if length is None else length
    epsilon = distance / jnp.where(length > 0, length, 1)
    shift = trees.scale(epsilon, direction)
    ahead, behind = (combine(point.inner_var, shift) for combine in (trees.add, trees.subtract))
    one, other = (oracles.inner_grad_outer(point._replace(inner_var=z), rows) for z in (ahead, behind))
    return trees.scale(1 / (2 * epsilon), trees.subtract(one, other)), behind


def outer_grad_outer_is_nonzero(problem: BilevelProblem, batch_size: int) -> bool:
    """Return whether ∇x F of a batch has an entry other than 0 at the start, or at a random point near it."""
    rng, oracles = np.random.default_rng(0), problem.oracles.with_batches(batch_size, "blocks")
    near = jax.tree.map(lambda leaf: leaf + rng.standard_normal(np.shape(leaf)).astype(leaf.dtype), problem.start)
    with arithmetic(problem.dtype, problem):
        points = problem.start, near._replace(outer_var=oracles.project(near.outer_var))
        gradients = [derivative(oracles, "outer_grad_outer", point, np.int32(0)) for point in points]
        return any(bool(np.any(np.asarray(leaf))) for leaf in jax.tree.leaves(gradients))

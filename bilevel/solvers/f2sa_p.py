"""F²SA-p: the fully first-order method with a difference of order p in the place of the forward difference.

Chen, Li, Chayti, Zhang. Faster Gradient Methods for Highly-Smooth Stochastic Bilevel Optimization. ICLR 2026, arXiv
2509.02937. Confidence: high for even p, whose Algorithm 1 was read; of odd p the nodes were, and the rest is alike.

∇h is the derivative at ν = 0 of ∇x (νF + G)(y(ν), x), where y(ν) minimizes νF + G. F²SA takes a forward difference of
it, with ν = 1/λ; nodes jν and weights a_j with an error of order ν^p are taken here. With constant steps,

    for each j, T times:  draw B, C;  y_j ← y_j - α (jν ∇z F_C(y_j, x) + ∇z G_B(y_j, x))
    draw B, C, for all j;  Φ = Σ_j a_j (j ∇x F_C(y_j, x) + ∇x G_B(y_j, x)/ν);   x ← x - (α/r) Φ / ||Φ||

j runs through ±1, …, ±p/2 for even p, and for odd p from -(p-1)/2 to (p+1)/2. p = 1 is F²SA with a constant λ, p = 2
the central difference. As published, the move of x has the length α/r whatever Φ is; ``normalized=False`` is the plain
one, for which the authors expect the same rates. Their experiments draw batches for each j apart in Φ and average the
y_j before each loop, which the paper does not. It does not say what z is: here it is y_0, or for even p what the y_j
say at 0 by interpolation, which is as precise as Φ.
Cost 2p (T + 1) b for even p, (2p + 1)(T + 1) b for odd p, no second derivatives. Memory: x, z and p more like z.
Adaptive: nothing; moves of x have one length.
"""

from fractions import Fraction
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bilevel import _tree as trees
from bilevel._types import Array, Calls, Point, PyTree
from bilevel.oracles import Oracles
from bilevel.solvers.base import Complexity, Solver, solver
from bilevel.solvers.fields import flag, positive, whole
from bilevel.solvers.moves import batch, inner_descent, move, move_outer, split


class F2SApState(NamedTuple):
    """The iterate, and y_j for each j but 0 along a leading axis."""

    point: Point
    y: PyTree


class F2SApDraw(NamedTuple):
    """Batches of the loops, one after the other over j, with those of j = 0 apart; and of the outer move."""

    inner_loops: Any
    outer_loops: Any
    inner_loop_at_zero: Any
    inner: Any
    outer: Any


@solver
class F2SAp(Solver[F2SApState, F2SApDraw]):
    """Fully first-order method with differences of higher order.

    Parameters
    ----------
    outer_ratio : the outer variable moves by ``step_size / outer_ratio``, which is the length of the move if normalized
    n_inner_steps : T, steps of each y_j per outer step
    order : p, the order of the difference
    perturbation : ν, the weight of F beside G; the bias is of the order of ν^p, the noise of 1/ν
    normalized : divide the outer direction by its norm
    """

    n_inner_steps: int = whole(default=10)
    order: int = whole(default=2)
    perturbation: float = positive(default=0.1)
    normalized: bool = flag(default=True)
    complexity = Complexity("Õ(p ε^-2-1/p)", "general expectation, derivatives of order p in z")

    @property
    def nodes(self) -> list[int]:
        """Return every j but 0."""
        return [j for j in range(-(self.order // 2), (self.order + 1) // 2 + 1) if j != 0]

    def init(self, oracles: Oracles, start: Point) -> F2SApState:
        every = len(self.nodes)
        return F2SApState(start, jax.tree.map(lambda leaf: jnp.stack([leaf] * every), start.inner_var))

    def draw(self, oracles: Oracles, key: Array, index: Array) -> F2SApDraw:
        at_zero, loops = self._at_zero * self.n_inner_steps, len(self.nodes) * self.n_inner_steps
        rows = oracles.draw_inner(key, index, loops + at_zero + 1)
        inner_loops, inner_loop_at_zero, inner = split(rows, loops, at_zero, None)
        outer_loops, outer = split(oracles.draw_outer(key, index, loops + 1), loops, None)
        return F2SApDraw(inner_loops, outer_loops, inner_loop_at_zero, inner, outer)

    def step(self, oracles: Oracles, state: F2SApState, index: Array, draw: F2SApDraw) -> F2SApState:
        y, slopes = self._at_nodes(oracles, state, draw)
        weights = _derivative_at_zero([*self.nodes, *[0] * self._at_zero])
        if self._at_zero:
            point = inner_descent(oracles, state.point, draw.inner_loop_at_zero, self.n_inner_steps, self.step_size)
            at_zero = oracles.inner_grad_outer(point, draw.inner)
            slopes = jax.tree.map(lambda stack, last: jnp.concatenate([stack, last[None]]), slopes, at_zero)
        else:
            point = state.point._replace(inner_var=_combine(_value_at_zero(self.nodes), y))
        grad = trees.scale(1 / self.perturbation, _combine(weights, slopes))
        if self.normalized:
            norm = jnp.sqrt(trees.norm_sq(grad))
            grad = trees.scale(1 / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny), grad)
        return F2SApState(move_outer(oracles, point, grad, self.step_size / self.outer_ratio), y)

    def _at_nodes(self, oracles: Oracles, state: F2SApState, draw: F2SApDraw) -> tuple[PyTree, PyTree]:
        """Return y_j after its loop and ∇x (jνF + G) there, for each j but 0."""
        every, times = len(self.nodes), self.n_inner_steps

        def at(node: tuple[Array, PyTree, Any, Any]) -> tuple[PyTree, PyTree]:
            pull, y, inner_rows, outer_rows = node

            def once(i: Array, point: Point) -> Point:
                slope = trees.scale(pull, oracles.outer_grad(point, batch(outer_rows, i)))
                slope = trees.add(slope, oracles.inner_grad(point, batch(inner_rows, i)))
                return point._replace(inner_var=move(point.inner_var, slope, self.step_size))

            point = jax.lax.fori_loop(0, times, once, state.point._replace(inner_var=y))
            slope = trees.scale(pull, oracles.outer_grad_outer(point, draw.outer))
            return point.inner_var, trees.add(slope, oracles.inner_grad_outer(point, draw.inner))

        stacks = jax.tree.map(lambda rows: rows.reshape(every, times, *rows.shape[1:]), draw[:2])
        pulls = self.perturbation * jnp.asarray(self.nodes, jnp.result_type(self.perturbation))
        return jax.lax.map(at, (pulls, state.y, *stacks))

    @property
    def _at_zero(self) -> int:
        return self.order % 2

    def calls(self, oracles: Oracles, draw: F2SApDraw, refresh: bool) -> Calls:
        every, times = len(self.nodes), self.n_inner_steps
        loops = oracles.count_inner(draw.inner_loops, every * times)
        if self._at_zero:
            loops = loops + oracles.count_inner(draw.inner_loop_at_zero, times)
        return Calls(
            inner_grad=loops,
            inner_grad_outer=(every + self._at_zero) * oracles.count_inner(draw.inner),
            outer_grad=oracles.count_outer(draw.outer_loops, every * times),
            outer_grad_outer=every * oracles.count_outer(draw.outer),
        )


def _combine(weights: list[float], stack: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: sum(w * row for w, row in zip(weights, leaf, strict=True)), stack)


def _value_at_zero(nodes: list[int]) -> list[float]:
    """Return the weights of values at the nodes that give the polynomial through them at 0."""
    return [float(prod(Fraction(-k, j - k) for k in nodes if k != j)) for j in nodes]


def _derivative_at_zero(nodes: list[int]) -> list[float]:
    """Return the weights that give its derivative there."""

    def weight(j: int) -> Fraction:
        others = [k for k in nodes if k != j]
        value = Fraction(0)
        for i in others:
            value += prod((Fraction(-k, j - k) for k in others if k != i), start=Fraction(1, j - i))
        return value

    return [float(weight(j)) for j in nodes]

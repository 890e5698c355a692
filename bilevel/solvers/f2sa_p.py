"""F²SA-p: the fully first-order method with a difference of order p instead of the forward difference.

Chen, Li, Chayti, Zhang. Faster Gradient Methods for Highly-Smooth Stochastic Bilevel Optimization. ICLR 2026, arXiv
2509.02937. Confidence: high for even p, whose Algorithm 1 was read. For odd p only the nodes were read; the rest is the
same as for even p.

∇h is the derivative at ν = 0 of ∇x (νF + G)(y(ν), x), where y(ν) minimizes νF + G. F²SA takes a forward difference of
it, with ν = 1/λ. Here the nodes jν have weights a_j such that the error is of order ν^p. With constant steps,

    for each j, T times:  draw B, C;  y_j ← y_j - α (jν ∇z F_C(y_j, x) + ∇z G_B(y_j, x))
    draw B, C, for all j;  Φ = Σ_j a_j (j ∇x F_C(y_j, x) + ∇x G_B(y_j, x)/ν);   x ← x - (α/r) Φ / ||Φ||

where j runs through ±1, …, ±p/2 for even p, and from -(p-1)/2 to (p+1)/2 for odd p. p = 1 is F²SA with a constant λ,
and p = 2 the central difference. As published, every move of x has length α/r; ``normalized=False`` is the plain move,
for which the authors expect the same rates. Their experiments draw separate batches for each j in Φ and average the y_j
before each loop; the paper does neither. It does not define z: here z is y_0 for odd p, and for even p the value at
ν = 0 of the polynomial through the y_j, whose error is of the same order as that of Φ.
Cost 2p (T + 1) b for even p, (2p + 1)(T + 1) b for odd p, no second derivatives. Memory: (p + 1) p_z + d, where p_z is
the size of z. Adaptive: nothing; moves of x have constant length.
"""

from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bilevel._core import trees
from bilevel._core.types import Array, Calls, Point, PyTree, Scalar
from bilevel.oracles import Oracles
from bilevel.solvers.base import Complexity, Solver, solver
from bilevel.solvers.fields import flag, positive, whole
from bilevel.solvers.moves import MovesState, batch, inner_descent, move, split


class F2SApState(NamedTuple):
    """The iterate, y_j for each j ≠ 0, stacked along a leading axis, and the states of transformations."""

    point: Point
    y: PyTree
    moves: MovesState


class F2SApDraw(NamedTuple):
    """Batches of the loops for all j ≠ 0, one loop after the other; of the loop for j = 0; and of the outer move."""

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
    perturbation : ν, the weight of F relative to G; the bias is of the order of ν^p, and the noise of 1/ν
    normalized : divide the outer direction by its norm
    """

    n_inner_steps: int = whole(default=10)
    order: int = whole(default=2)
    perturbation: float = positive(default=0.1)
    normalized: bool = flag(default=True)
    complexity = Complexity("Õ(p ε^-2-1/p)", "general expectation, derivatives of order p in z")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.outer_optimizer is not None and self.normalized:
            raise ValueError(
                "`F2SAp(outer_optimizer=…)`: its moves of x have a given length; set normalized=False, or leave it out."
            )

    @property
    def nodes(self) -> list[int]:
        """Return all j ≠ 0."""
        return [j for j in range(-(self.order // 2), (self.order + 1) // 2 + 1) if j != 0]

    def init(self, oracles: Oracles, start: Point) -> F2SApState:
        y = jax.tree.map(lambda leaf: jnp.stack([leaf] * len(self.nodes)), start.inner_var)
        return F2SApState(start, y, self.moves.init(start))

    def draw(self, oracles: Oracles, key: Array, index: Array) -> F2SApDraw:
        loops, loop_at_zero = len(self.nodes) * self.n_inner_steps, self._has_zero * self.n_inner_steps
        rows = oracles.draw_inner(key, index, loops + loop_at_zero + 1)
        inner_loops, inner_loop_at_zero, inner = split(rows, loops, loop_at_zero, None)
        outer_loops, outer = split(oracles.draw_outer(key, index, loops + 1), loops, None)
        return F2SApDraw(inner_loops, outer_loops, inner_loop_at_zero, inner, outer)

    def step(self, oracles: Oracles, state: F2SApState, index: Array, draw: F2SApDraw) -> F2SApState:
        y, grads = self._at_nodes(oracles, state, draw)
        nodes = self.nodes
        if self._has_zero:
            point = inner_descent(oracles, state.point, draw.inner_loop_at_zero, self.n_inner_steps, self.step_size)
            at_zero = oracles.inner_grad_outer(point, draw.inner)
            grads = jax.tree.map(lambda stack, last: jnp.concatenate([stack, last[None]]), grads, at_zero)
            nodes = [*nodes, 0]
        else:
            point = state.point._replace(inner_var=_combine(_interpolation_weights(nodes, 0), y))
        grad = trees.scale(1 / self.perturbation, _combine(_interpolation_weights(nodes, 1), grads))
        scale: Scalar = 1
        if self.normalized:
            norm = jnp.sqrt(trees.norm_sq(grad))
            scale = 1 / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny)
            grad = trees.scale(scale, grad)
        point, moves = self.moves.outer(oracles, point, state.moves, grad, self.step_size / self.outer_ratio, scale)
        return F2SApState(point, y, moves)

    def _at_nodes(self, oracles: Oracles, state: F2SApState, draw: F2SApDraw) -> tuple[PyTree, PyTree]:
        """Return y_j after its loop and ∇x (jνF + G) there, for each j ≠ 0."""

        def at_node(node: tuple[Array, PyTree, Any, Any]) -> tuple[PyTree, PyTree]:
            weight, y, inner_rows, outer_rows = node

            def update(i: Array, point: Point) -> Point:
                outer_grad = trees.scale(weight, oracles.outer_grad(point, batch(outer_rows, i)))
                grad = trees.add(outer_grad, oracles.inner_grad(point, batch(inner_rows, i)))
                return point._replace(inner_var=move(point.inner_var, grad, self.step_size))

            point = jax.lax.fori_loop(0, self.n_inner_steps, update, state.point._replace(inner_var=y))
            outer_grad = trees.scale(weight, oracles.outer_grad_outer(point, draw.outer))
            return point.inner_var, trees.add(outer_grad, oracles.inner_grad_outer(point, draw.inner))

        shape = len(self.nodes), self.n_inner_steps
        rows = jax.tree.map(lambda rows: rows.reshape(*shape, *rows.shape[1:]), draw[:2])
        weights = self.perturbation * jnp.asarray(self.nodes, jnp.result_type(self.perturbation))
        return jax.lax.map(at_node, (weights, state.y, *rows))

    @property
    def _has_zero(self) -> int:
        return self.order % 2

    def calls(self, oracles: Oracles, draw: F2SApDraw, refresh: bool) -> Calls:
        nodes, times = len(self.nodes), self.n_inner_steps
        loops = oracles.count_inner(draw.inner_loops, nodes * times)
        if self._has_zero:
            loops = loops + oracles.count_inner(draw.inner_loop_at_zero, times)
        return Calls(
            inner_grad=loops,
            inner_grad_outer=(nodes + self._has_zero) * oracles.count_inner(draw.inner),
            outer_grad=oracles.count_outer(draw.outer_loops, nodes * times),
            outer_grad_outer=nodes * oracles.count_outer(draw.outer),
        )


def _combine(weights: list[float], stack: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: sum(w * row for w, row in zip(weights, leaf, strict=True)), stack)


def _interpolation_weights(nodes: list[int], derivative: int) -> list[float]:
    """Return the weights of values at the nodes in the interpolating polynomial at 0, or in its derivative there."""
    weights = []
    for j in nodes:
        value, slope = Fraction(1), Fraction(0)  # of the Lagrange polynomial of node j, at 0
        for k in nodes:
            if k != j:
                value, slope = value * Fraction(-k, j - k), slope * Fraction(-k, j - k) + value * Fraction(1, j - k)
        weights.append(float((value, slope)[derivative]))
    return weights

"""ITD: iterative differentiation, the gradient of F(z_T(x), x) through T inner steps.

Franceschi, Donini, Frasconi, Pontil. Forward and Reverse Gradient-Based Hyperparameter Optimization. ICML 2017; Ji,
Yang, Liang. Bilevel Optimization: Convergence Analysis and Enhanced Design. ICML 2021. Confidence: high; REVERSE-HG of
the first paper is these equations, but for its printed loop, which leaves out the term of k = 1. With momentum they are
those of Maclaurin, Duvenaud, Adams. Gradient-based Hyperparameter Optimization through Reversible Learning. ICML 2015.

    z_0 = z, independent of x;   u_0 = 0;   for k = 1, …, T:
        u_k = γ u_{k-1} + (1 - γ) ∇z G_{B_k}(z_{k-1}, x);   z_k = z_{k-1} - α u_k
    w = ∇z F_C(z_T, x),  g = ∇x F_C(z_T, x),  q = 0;   for k = T, …, 1 at z_{k-1}:
        q ← γ q + w;   g ← g - α (1 - γ) (∇²xz G_{B_k}) q;   if k > 1:  w ← w - α (1 - γ) (∇²zz G_{B_k}) q
    z = z_T;   x ← x - (α/r) g

γ = 0, so that q = w, without momentum. With checkpoints, z_k and u_k are kept for every sqrt(T)-th k, and the steps in
between are repeated; z_k is kept for all k otherwise.
Cost (3T + 1) b, less than T b more with checkpoints. Memory (T + 2) p + d, or (2 sqrt(T) + 2) p + d with checkpoints,
2p and sqrt(T) p more with momentum. Adaptive: nothing. The bias is at most of the order of T (1 - α mu_G)^T (Grazzi,
Franceschi, Pontil, Salzo. ICML 2020), and once z is close to its solution of that of a Neumann series with η = α.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bilevel._core import trees
from bilevel._core.types import Array, Calls, Point, PyTree, Rows
from bilevel.oracles import Oracles
from bilevel.solvers.base import Complexity, Solver, solver
from bilevel.solvers.fields import flag, fraction, whole
from bilevel.solvers.moves import MovesState, as_inner, batch, init_transformation, move, split, transform


class ITDState(NamedTuple):
    """The iterate, the first inner variable, for cold starts, and the states of transformations."""

    point: Point
    first_inner_var: PyTree
    moves: MovesState


@solver
class ITD(Solver[ITDState, Rows]):
    """Iterative differentiation.

    Parameters
    ----------
    step_size : α, step of the inner loop
    momentum : γ, the fraction of the last velocity of z that is kept; None means plain steps
    checkpoints : keep only every sqrt(T)-th inner iterate and repeat the steps in between, to save memory
    """

    n_inner_steps: int = whole(default=10)
    warm_start: bool = flag(default=True)
    momentum: float | None = fraction(default=None, optional=True)
    checkpoints: bool = flag(default=False)
    needs_plain_step = None
    complexity = Complexity("Õ((n+m) ε^-1)", "full batches, T like log(1/ε)", "C^{1,1}", "C^{2,2}")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.momentum == 1:
            raise ValueError("`ITD(momentum=1.0)`: z would never move; use a number below 1, or None for plain steps.")
        if self.momentum is not None and self.inner_optimizer is not None:
            raise ValueError("`ITD(momentum=…)`: `inner_optimizer` replaces these steps; leave one of the two out.")

    def init(self, oracles: Oracles, start: Point) -> ITDState:
        return ITDState(start, start.inner_var, self.moves.init(start))

    def draw(self, oracles: Oracles, key: Array, index: Array) -> Rows:
        return Rows(oracles.draw_inner(key, index, self.n_inner_steps), oracles.draw_outer(key, index))

    def step(self, oracles: Oracles, state: ITDState, index: Array, draw: Rows) -> ITDState:
        start = state.point if self.warm_start else state.point._replace(inner_var=state.first_inner_var)
        point, grad = self.unroll(oracles, start, draw)
        point, moves = self.moves.outer(oracles, point, state.moves, grad, self.step_size / self.outer_ratio)
        return state._replace(point=point, moves=moves)

    def unroll(self, oracles: Oracles, start: Point, draw: Rows) -> tuple[Point, PyTree]:
        """Return the point after the inner steps, and the gradient of F there with respect to x."""
        if self.inner_optimizer is not None:
            return self._unroll_transformation(oracles, start, draw)
        length, n_segments = self._segments()
        share = 1.0 if self.momentum is None else 1 - self.momentum
        step = share * self.step_size

        def forward(state: Any, k: Array | int) -> tuple[Any, PyTree]:
            z, velocity = state
            grad = oracles.inner_grad(start._replace(inner_var=z), batch(draw.inner, k))
            velocity, kept = self._accumulate(velocity, grad, share)
            return (move(z, velocity, self.step_size), kept), z

        def follow(state: Any, first: Array | int, count: int) -> tuple[Any, Any]:
            steps = first + jnp.arange(count, dtype=jnp.int32)
            state, path = jax.lax.scan(forward, state, steps)
            return state, (path, steps)

        def backward(carry: Any, place: Any) -> tuple[Any, None]:
            (w, q, grad), (z, k) = carry, place
            q, kept = self._accumulate(q, w, 1.0)
            here, rows = Point(z, start.outer_var, q), batch(draw.inner, k)
            grad = move(grad, oracles.cross(here, rows), step)
            return (move(w, oracles.hvp(here, rows), step), kept, grad), None

        def repeat_segment(carry: Any, segment: Any) -> tuple[Any, None]:
            state, first = segment
            return jax.lax.scan(backward, carry, follow(state, first, length)[1], reverse=True)[0], None

        # The first step is apart from the others because its Hessian is not needed.
        zero = () if self.momentum is None else trees.zeros_like(start.inner_var)
        state, z = forward((start.inner_var, zero), 0)
        firsts = 1 + length * jnp.arange(n_segments, dtype=jnp.int32)
        if n_segments:
            state, kept = jax.lax.scan(lambda state, k: (follow(state, k, length)[0], state), state, firsts)
        n_before = 1 + length * n_segments
        (last, _), path = follow(state, n_before, self.n_inner_steps - n_before)
        point = start._replace(inner_var=last)
        outer = oracles.outer(point, draw.outer)
        carry = jax.lax.scan(backward, (outer.grad, zero, outer.grad_outer), path, reverse=True)[0]
        if n_segments:
            carry = jax.lax.scan(repeat_segment, carry, (kept, firsts), reverse=True)[0]
        w, q, grad = carry
        here = Point(z, start.outer_var, self._accumulate(q, w, 1.0)[0])
        return point, move(grad, oracles.cross(here, batch(draw.inner, 0)), step)

    def _unroll_transformation(self, oracles: Oracles, start: Point, draw: Rows) -> tuple[Point, PyTree]:
        def final_value(x: PyTree) -> tuple[Array, PyTree]:
            point = self.adapt(oracles, start._replace(outer_var=x), draw)
            return oracles.outer_value(point, draw.outer), point.inner_var

        grad, z = jax.grad(final_value, has_aux=True)(start.outer_var)
        return start._replace(inner_var=z), oracles.average_outer(grad)

    def adapt(self, oracles: Oracles, point: Point, draw: Rows) -> Point:
        """Return the point after the inner steps."""
        optimizer, share = as_inner(self.inner_optimizer), 1.0 if self.momentum is None else 1 - self.momentum

        def step(state: tuple[PyTree, Any], k: Array) -> tuple[tuple[PyTree, Any], None]:
            z, memory = state
            grad = oracles.inner_grad(point._replace(inner_var=z), batch(draw.inner, k))
            if optimizer is None:
                velocity, memory = self._accumulate(memory, grad, share)
                return (move(z, velocity, self.step_size), memory), None
            change, memory = transform(optimizer, grad, memory, z)
            return (move(z, change, 1), memory), None

        memory = init_transformation(optimizer, point.inner_var)
        if self.momentum is not None:
            memory = trees.zeros_like(point.inner_var)
        steps = jnp.arange(self.n_inner_steps, dtype=jnp.int32)
        scan = partial(scan_in_segments, n_steps=self.n_inner_steps) if self.checkpoints else last_state
        return point._replace(inner_var=scan(step, (point.inner_var, memory), steps)[0])

    def _accumulate(self, old: PyTree, new: PyTree, share: Any) -> tuple[PyTree, PyTree]:
        """Return γ old + share new, and what must be kept of it."""
        if self.momentum is None:
            return new, ()
        total = jax.tree.map(lambda old, new: self.momentum * old + share * new, old, new)
        return total, total

    def _segments(self) -> tuple[int, int]:
        """Return the length of the segments of inner steps that are repeated, and their number."""
        length = math.isqrt(self.n_inner_steps) + 1
        return length, max(self.n_inner_steps - 2, 0) // length if self.checkpoints else 0

    def calls(self, oracles: Oracles, draw: Rows, refresh: bool) -> Calls:
        repeated = math.prod(self._segments())
        first, again = split(draw.inner, None, repeated)
        loop, outer = oracles.count_inner(draw.inner, self.n_inner_steps), oracles.count_outer(draw.outer)
        return Calls(
            inner_grad=loop + oracles.count_inner(again, repeated),
            hvp=loop - oracles.count_inner(first),
            cross=loop,
            outer_grad=outer,
            outer_grad_outer=outer,
        )


def last_state(step: Callable[..., Any], state: PyTree, entries: PyTree) -> PyTree:
    """Return the state after a scan, of which reverse mode keeps all states."""
    return jax.lax.scan(step, state, entries)[0]


def scan_in_segments(step: Callable[..., Any], state: PyTree, entries: PyTree, n_steps: int) -> PyTree:
    """Return the state after a scan in segments, of which reverse mode keeps only the first states."""
    length = math.isqrt(n_steps)
    n_whole = n_steps // length

    def cut(leaf: Array) -> Array:
        return leaf[: n_whole * length].reshape(n_whole, length, *leaf.shape[1:])

    @partial(jax.checkpoint, prevent_cse=False)  # a loop already prevents it
    def segment(state: PyTree, entries: PyTree) -> tuple[PyTree, None]:
        return jax.lax.scan(step, state, entries)

    state, _ = jax.lax.scan(segment, state, jax.tree.map(cut, entries))
    rest = jax.tree.map(lambda leaf: leaf[n_whole * length :], entries)
    return segment(state, rest)[0] if n_whole * length < n_steps else state

"""Eight methods as one would write them in JAX directly from their papers.

Arrays are rows × features, blocks are drawn inside the loop, the loss of a batch is differentiated by `grad`, `jvp` and
`vjp`, `cond` selects steps with a full-batch pass, and there are no compiler options.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from bilevel._core.compilation import arithmetic


@dataclass(frozen=True)
class Losses:
    """Two losses, functions of (z, x, rows) that return the mean over the rows, and their derivatives."""

    inner: Callable[..., Any]
    outer: Callable[..., Any]

    def inner_grad(self, z, x, rows):
        return jax.grad(self.inner)(z, x, rows)

    def inner_grad_outer(self, z, x, rows):
        return jax.grad(self.inner, argnums=1)(z, x, rows)

    def outer_grads(self, z, x, rows):
        return jax.grad(self.outer, argnums=(0, 1))(z, x, rows)

    def hvp(self, z, x, v, rows):
        return jax.jvp(lambda z: self.inner_grad(z, x, rows), (z,), (v,))[1]

    def cross(self, z, x, v, rows):
        return jax.vjp(lambda x: self.inner_grad(z, x, rows), x)[1](v)[0]

    def inner_pass(self, z, x, v, rows):
        """Return ∇z G, (∇²zz G) v and (∇²xz G) v."""
        grad, products = jax.vjp(lambda z, x: self.inner_grad(z, x, rows), z, x)
        return grad, *products(v)

    def direction(self, point, inner, outer):
        """Return D = (D_z, D_x, D_v)."""
        z, x, v = point
        grad, hvp, cross = self.inner_pass(z, x, v, inner)
        outer_grad, outer_grad_outer = self.outer_grads(z, x, outer)
        return grad, cross + outer_grad_outer, hvp + outer_grad

    def hypergradient(self, z, x, inner, outer, eta):
        """Return (∇²xz G) v + ∇x F, with v by a Neumann series; the last batch is for the cross product."""
        first, outer_grad_outer = self.outer_grads(z, x, outer)

        def multiply(i, carry):
            term, total = carry
            term = term - eta * self.hvp(z, x, term, inner(i))
            return term, total + term

        _, total = jax.lax.fori_loop(0, inner.count - 1, multiply, (first, first))
        return self.cross(z, x, -eta * total, inner(inner.count - 1)) + outer_grad_outer


@dataclass(frozen=True)
class Batches:
    """The drawn blocks of one level. A call with i returns the rows of block i, a slice returns some of the blocks."""

    rows: Any
    blocks: Any
    size: int

    @property
    def count(self):
        return self.blocks.shape[0]

    def __call__(self, i):
        take = partial(jax.lax.dynamic_slice_in_dim, start_index=self.blocks[i] * self.size, slice_size=self.size)
        return jax.tree.map(take, self.rows)

    def __getitem__(self, part):
        return Batches(self.rows, self.blocks[part], self.size)


@dataclass(frozen=True)
class EveryRow:
    """All rows as every batch."""

    rows: Any
    count: int

    def __call__(self, i):
        return self.rows


@dataclass(frozen=True)
class Method(ABC):
    """A textbook solver with T = ``loops``, Q = ``products`` and the Neumann step ``eta``."""

    losses: Losses
    step_size: float
    outer_step: float
    period: int
    n_blocks: tuple[int, int]
    loops: int = 10
    products: int = 10
    eta: float = 0.5

    def batches(self) -> tuple[int, int]:
        """Return the batches per step on each level."""
        return 1, 1

    @abstractmethod
    def start(self, z, x):
        """Return the state before the first step, whose first entry is the point (z, x) or (z, x, v)."""

    @abstractmethod
    def step(self, index, state, inner, outer):
        """Return the state after a step on these batches."""


def draw_blocks(method, key, index):
    """Draw uniform blocks for one step, without a short last block."""
    pairs = zip(jax.random.split(jax.random.fold_in(key, index)), method.batches(), method.n_blocks, strict=True)
    return [jax.random.randint(key, (count,), 0, blocks, dtype=jnp.int32) for key, count, blocks in pairs]


def build(cls, shape, batch, outer_ratio=1.0, **settings):
    """Return the textbook version of a method on a shape, with the default period of SRBA."""
    n, m = shape.problem.n_inner, shape.problem.n_outer
    losses = Losses(shape.inner_loss, shape.outer_loss)
    outer_step = shape.step_size / outer_ratio
    period, n_blocks = max(1, (n + m) // (2 * batch)), (n // batch, m // batch)
    return cls(losses, shape.step_size, outer_step, period, n_blocks, **settings)


def compiled(method, shape, batch, draw=draw_blocks):
    """Return a function from a number of steps to the state after them."""

    @jax.jit
    def many_steps(start, inner_rows, outer_rows, steps):
        key = jax.random.key(0)

        def step(index, state):
            inner, outer = draw(method, key, index)
            return method.step(index, state, Batches(inner_rows, inner, batch), Batches(outer_rows, outer, batch))

        return jax.lax.fori_loop(0, steps, step, method.start(*start))

    problem = shape.problem
    with arithmetic(problem.dtype):
        arguments = jax.tree.map(jnp.asarray, (problem.start[:2], shape.inner_rows, shape.outer_rows))

    def run(steps):
        with arithmetic(problem.dtype):
            return jax.block_until_ready(many_steps(*arguments, jnp.int32(steps)))

    return run


def timed(method, shape, batch):
    """Return a function from a number of steps to the seconds that they take."""
    run = compiled(method, shape, batch)

    def seconds(steps):
        began = time.perf_counter()
        run(steps)
        return time.perf_counter() - began

    return seconds


# Methods. Batches are numbered in the order in which the solvers of the library draw them.


def moved(variables, directions, *steps):
    return tuple(w - step * d for w, d, step in zip(variables, directions, steps, strict=True))


def decayed(step, index, power, like):
    return step * (index + 1).astype(like.dtype) ** -power


class SOBA(Method):
    def start(self, z, x):
        return ((z, x, jnp.zeros_like(z)),)

    def step(self, index, state, inner, outer):
        (point,) = state
        direction = self.losses.direction(point, inner(0), outer(0))
        step, outer_step = (decayed(s, index, 0.5, point[0]) for s in (self.step_size, self.outer_step))
        return (moved(point, direction, step, outer_step, step),)


class SRBA(Method):
    def start(self, z, x):
        point = (z, x, jnp.zeros_like(z))
        return point, point, jax.tree.map(jnp.zeros_like, point)

    def step(self, index, state, inner, outer):
        point, previous, estimate = state

        def on_all_rows():
            return self.losses.direction(point, inner.rows, outer.rows)

        def recursive():
            rows = inner(0), outer(0)
            new, old = self.losses.direction(point, *rows), self.losses.direction(previous, *rows)
            return jax.tree.map(lambda d, a, b: d + a - b, estimate, new, old)

        estimate = jax.lax.cond(index % self.period == 0, on_all_rows, recursive)
        return moved(point, estimate, self.step_size, self.outer_step, self.step_size), point, estimate


class SABA(Method):
    def start(self, z, x):
        def zeros(blocks, *like):
            return tuple(jnp.zeros((blocks, *w.shape), w.dtype) for w in like)

        inner, outer = zeros(self.n_blocks[0], z, z, x), zeros(self.n_blocks[1], z, x)
        means = tuple(jax.tree.map(jnp.zeros_like, kinds) for kinds in ((z, z, x), (z, x)))
        return (z, x, jnp.zeros_like(z)), (inner, outer), means

    def step(self, index, state, inner, outer):
        point, tables, means = state
        z, x, v = point
        fresh = self.losses.inner_pass(z, x, v, inner(0)), self.losses.outer_grads(z, x, outer(0))
        blocks = inner.blocks[0], outer.blocks[0]
        levels = zip(fresh, tables, means, blocks, self.n_blocks, strict=True)
        reduced, tables, means = zip(*(_averaged(*level) for level in levels), strict=True)
        (grad, hvp, cross), (outer_grad, outer_grad_outer) = reduced
        direction = grad, cross + outer_grad_outer, hvp + outer_grad
        return moved(point, direction, self.step_size, self.outer_step, self.step_size), tables, means


def _averaged(fresh, tables, means, block, n_blocks):
    """Return the direction of SAGA and the new tables and means."""
    change = tuple(new - table[block] for new, table in zip(fresh, tables, strict=True))
    reduced = tuple(c + mean for c, mean in zip(change, means, strict=True))
    tables = tuple(table.at[block].set(new) for new, table in zip(fresh, tables, strict=True))
    return reduced, tables, tuple(mean + c / n_blocks for c, mean in zip(change, means, strict=True))


class AmIGO(Method):
    def batches(self):
        return 2 * self.loops + 1, 1

    def start(self, z, x):
        return ((z, x, jnp.zeros_like(z)),)

    def step(self, index, state, inner, outer):
        ((z, x, v),) = state
        z = _inner_descent(self, z, x, inner)
        outer_grad, outer_grad_outer = self.losses.outer_grads(z, x, outer(0))

        def follow(i, v):
            return v - self.step_size * (self.losses.hvp(z, x, v, inner(self.loops + i)) + outer_grad)

        v = jax.lax.fori_loop(0, self.loops, follow, v)
        cross = self.losses.cross(z, x, v, inner(2 * self.loops))
        return ((z, x - self.outer_step * (cross + outer_grad_outer), v),)


def _inner_descent(method, z, x, inner):
    def descend(i, z):
        return z - method.step_size * method.losses.inner_grad(z, x, inner(i))

    return jax.lax.fori_loop(0, method.loops, descend, z)


class StocBiO(Method):
    def batches(self):
        return self.loops + self.products + 1, 1

    def start(self, z, x):
        return ((z, x),)

    def step(self, index, state, inner, outer):
        ((z, x),) = state
        z = _inner_descent(self, z, x, inner)
        grad = self.losses.hypergradient(z, x, inner[self.loops :], outer(0), self.eta)
        return ((z, x - self.outer_step * grad),)


class MRBO(Method):
    momentum = 0.5

    def batches(self):
        return self.products + 2, 1

    def start(self, z, x):
        return (z, x), (z, x), (jnp.zeros_like(z), jnp.zeros_like(x))

    def step(self, index, state, inner, outer):
        point, previous, estimate = state
        here, there = (_gradients(self, w, inner[:1], inner[1:], outer(0)) for w in (point, previous))
        # At the first step 0^-⅔ is infinite and the share is 1, so the empty estimate is discarded.
        share = jnp.minimum(1, self.momentum * index.astype(point[0].dtype) ** (-2 / 3))
        estimate = jax.tree.map(lambda new, d, old: new + (1 - share) * (d - old), here, estimate, there)
        steps = (decayed(s, index, 1 / 3, point[0]) for s in (self.step_size, self.outer_step))
        return moved(point, estimate, *steps), point, estimate


def _gradients(method, point, first, series, outer):
    z, x = point
    grad = method.losses.inner_grad(z, x, first(0))
    return grad, method.losses.hypergradient(z, x, series, outer, method.eta)


class VRBO(Method):
    def batches(self):
        return (self.loops + 1) * (self.products + 2), self.loops + 1

    def start(self, z, x):
        return (z, x), (jnp.zeros_like(z), jnp.zeros_like(x))

    def step(self, index, state, inner, outer):
        point, estimate = state

        def on_all_rows():
            every = EveryRow(inner.rows, self.products + 1)
            return _gradients(self, point, every, every, outer.rows)

        estimate = jax.lax.cond(index % self.period == 0, on_all_rows, lambda: estimate)
        z, x = point
        first = (z, x - self.outer_step * estimate[1])

        def inner_move(k, carry):
            (z, x), estimate = carry
            after = (z - self.step_size * estimate[0], x)
            return after, self._corrected(after, (z, x), estimate, inner, outer, k)

        carry = first, self._corrected(first, point, estimate, inner, outer, 0)
        return jax.lax.fori_loop(1, self.loops + 1, inner_move, carry)

    def _corrected(self, point, previous, estimate, inner, outer, k):
        """Return the estimates plus the difference over the last move."""
        blocks = inner.blocks.reshape(self.loops + 1, self.products + 2)[k]
        series = type(inner)(inner.rows, blocks, inner.size)
        rows = series[:1], series[1:], outer(k)
        here, there = _gradients(self, point, *rows), _gradients(self, previous, *rows)
        return jax.tree.map(lambda d, a, b: d + a - b, estimate, here, there)


class F2SA(Method):
    lambda_0, delta_0 = 1.0, 0.1

    def batches(self):
        return 2 * self.loops + 1, self.loops + 1

    def start(self, z, x):
        return (z, x), z, jnp.asarray(self.lambda_0, z.dtype)

    def step(self, index, state, inner, outer):
        (z, x), y, penalty = state
        losses, step = self.losses, decayed(self.step_size, index, 4 / 7, z)

        def once(i, carry):
            z, y = carry
            pull = losses.outer_grads(y, x, outer(i))[0] / penalty
            slope = pull + losses.inner_grad(y, x, inner(self.loops + i))
            return z - step * losses.inner_grad(z, x, inner(i)), y - step / 2 * slope

        z, y = jax.lax.fori_loop(0, self.loops, once, (z, y))
        rows = inner(2 * self.loops)
        slope = losses.inner_grad_outer(y, x, rows) - losses.inner_grad_outer(z, x, rows)
        grad = losses.outer_grads(y, x, outer(self.loops))[1] + penalty * slope
        x = x - decayed(self.outer_step, index, 5 / 7, x) * grad
        return (z, x), y, penalty + decayed(self.delta_0, index, 6 / 7, z)


METHODS = {cls.__name__: cls for cls in (SRBA, SABA, SOBA, StocBiO, AmIGO, MRBO, VRBO, F2SA)}

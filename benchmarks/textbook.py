"""How a method is written in JAX straight from its paper: what all textbook versions have in common.

Rows × features, blocks drawn inside the loop, a loss on a batch differentiated by `grad`, `jvp` and `vjp`, `cond` where
a step may begin with a full-batch pass, no compiler options. The methods themselves are in `textbook_methods.py`.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from bilevel._precision import arithmetic


@dataclass(frozen=True)
class Losses:
    """Two losses (z, x, rows) -> mean over the rows, and their derivatives."""

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
        """∇z G, (∇²zz G) v and (∇²xz G) v."""
        grad, products = jax.vjp(lambda z, x: self.inner_grad(z, x, rows), z, x)
        return grad, *products(v)

    def direction(self, point, inner, outer):
        """D = (D_z, D_x, D_v)."""
        z, x, v = point
        grad, hvp, cross = self.inner_pass(z, x, v, inner)
        outer_grad, outer_grad_outer = self.outer_grads(z, x, outer)
        return grad, cross + outer_grad_outer, hvp + outer_grad

    def hypergradient(self, z, x, inner, outer, eta):
        """(∇²xz G) v + ∇x F with v by a Neumann series on a list of batches; the last is for the cross product."""
        first, outer_grad_outer = self.outer_grads(z, x, outer)

        def multiply(i, carry):
            term, total = carry
            term = term - eta * self.hvp(z, x, term, inner(i))
            return term, total + term

        _, total = jax.lax.fori_loop(0, inner.count - 1, multiply, (first, first))
        return self.cross(z, x, -eta * total, inner(inner.count - 1)) + outer_grad_outer


@dataclass(frozen=True)
class Batches:
    """The drawn blocks of one level: called with i, it gives the rows of the i-th; sliced, fewer of them."""

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
    """All rows in the place of every batch."""

    rows: Any
    count: int

    def __call__(self, i):
        return self.rows


@dataclass(frozen=True)
class Method(ABC):
    """A textbook solver: T = ``loops``, Q = ``products``, the Neumann step ``eta``."""

    losses: Losses
    step_size: float
    outer_step: float
    period: int
    n_blocks: tuple[int, int]
    loops: int = 10
    products: int = 10
    eta: float = 0.5

    def batches(self) -> tuple[int, int]:
        """Batches per step on each level."""
        return 1, 1

    @abstractmethod
    def start(self, z, x):
        """The state before the first step; the point (z, x) or (z, x, v) is its first entry."""

    @abstractmethod
    def step(self, index, state, inner, outer):
        """The state after a step on these batches."""


def draw_blocks(method, key, index):
    """Uniform blocks for one step; what a short last block would hold is left out."""
    pairs = zip(jax.random.split(jax.random.fold_in(key, index)), method.batches(), method.n_blocks, strict=True)
    return [jax.random.randint(key, (count,), 0, blocks, dtype=jnp.int32) for key, count, blocks in pairs]


def build(cls, shape, batch, outer_ratio=1.0, **settings):
    """The textbook version of a method on one of the shapes, with the period that is SRBA's default."""
    n, m = shape.problem.n_inner, shape.problem.n_outer
    losses = Losses(shape.inner_loss, shape.outer_loss)
    outer_step = shape.step_size / outer_ratio
    period, n_blocks = max(1, (n + m) // (2 * batch)), (n // batch, m // batch)
    return cls(losses, shape.step_size, outer_step, period, n_blocks, **settings)


def compiled(method, shape, batch, draw=draw_blocks):
    """A function from a number of steps to the state after them."""

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
    """A function from a number of steps to the seconds they take."""
    run = compiled(method, shape, batch)

    def seconds(steps):
        began = time.perf_counter()
        run(steps)
        return time.perf_counter() - began

    return seconds

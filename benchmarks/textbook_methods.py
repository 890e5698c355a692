"""Eight methods as their papers print them. Batches are numbered in the order in which the library's solvers draw."""

import jax
import jax.numpy as jnp
from textbook import EveryRow, Method


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
    """SAGA's direction, and the tables and means after it."""
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
        # At the first step 0^-⅔ is infinite and the share 1: nothing of the empty estimate is kept.
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
        """The estimates with the difference over the last move."""
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

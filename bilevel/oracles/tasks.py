"""Oracles of problems with one inner variable per task.

With tasks t = 1, …, n, of which each has an inner variable z_t of its own,

    min over x of  h(x) = (1/n) sum_t F_t(z_t(x), x)

There are two kinds. If inner variables are *kept*, z_t(x) minimizes G_t(., x), and z_t and v_t go from step to step. If
they are *restarted*, z_t(x) is what some inner steps reach from a start z_t,0(x), as in MAML. The oracles are then
those of d_t = z_t - z_t,0(x), which starts at 0: its loss G_t(z_t,0(x) + d_t, x) depends on x also through the start,
so that a solver which differentiates its inner steps differentiates the start too.

A step takes a batch of tasks, and is the step of a small problem for each of them (`OneTask`). What such a step
computes for x is averaged over the batch, by a collective of `vmap`. Each task has its own step of z and v: derivatives
with respect to z_t are not divided by the number of tasks.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import jax
import jax.numpy as jnp

from bilevel._core import trees
from bilevel._core.types import Array, InnerPass, OuterPass, Point, PyTree
from bilevel.oracles.autodiff import AutodiffOracles, Loss
from bilevel.oracles.base import Oracles
from bilevel.oracles.samples import STATIC, Samples

AXIS = "tasks"  # of `vmap` over the tasks of a batch
_TOGETHER = 64  # tasks that are evaluated together
InnerStart = Callable[..., PyTree]  # of x, a task, and optionally a key


def takes_start_key(inner_start: InnerStart | None) -> bool:
    """Return True if a start has an argument `key`, which makes it random."""
    return inner_start is not None and "key" in inspect.signature(inner_start).parameters


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class OneTask(AutodiffOracles):
    """The oracles of one task, whose derivatives with respect to x are averages over the tasks of its batch.

    Attributes
    ----------
    share : weight of the task in the average; None for a task without a batch
    """

    share: Array | None = None

    def average_outer(self, tree: PyTree) -> PyTree:
        return tree if self.share is None else jax.lax.psum(trees.scale(self.share, tree), AXIS)

    def _inner(self, point: Point, data: PyTree, weights: Array) -> InnerPass:
        grad, hvp, cross = super()._inner(point, data, weights)
        return InnerPass(grad, hvp, self.average_outer(cross))

    def _inner_grad_outer(self, point: Point, data: PyTree, weights: Array) -> PyTree:
        return self.average_outer(super()._inner_grad_outer(point, data, weights))

    def _outer(self, point: Point, data: PyTree, weights: Array) -> OuterPass:
        grad, grad_outer = super()._outer(point, data, weights)
        return OuterPass(grad, self.average_outer(grad_outer))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TaskOracles(Oracles):
    """Derivatives at points whose inner variable and v have a leading axis: all tasks, or the first ones.

    Derivatives with respect to z and v have this axis too; those with respect to x and values are means over tasks.

    Attributes
    ----------
    inner_loss, outer_loss : the losses of z_t, x and a task
    inner_start : the start z_t,0 of x, a task, and optionally a key, if inner variables are restarted; otherwise None
    make_task : a function that makes a task from a key, if the samples are seeds; otherwise None
    """

    inner_loss: Loss = field(metadata=STATIC)
    outer_loss: Loss = field(metadata=STATIC)
    inner_start: InnerStart | None = field(default=None, metadata=STATIC)
    make_task: Callable[[Array], PyTree] | None = field(default=None, metadata=STATIC)

    shares_rows = True

    def with_batches(self, batch_size: int, sampling: str, outer_batch_size: int | None = None) -> Self:
        tasks = self.inner_samples.with_slices(batch_size, sampling)
        return self._on(tasks, tasks)

    def with_tasks(self, tasks: PyTree) -> Self:
        """Return the same oracles with other tasks: NumPy arrays with a leading axis."""
        samples = Samples.from_rows(tasks, self.inner_samples.dtype, narrow=0)
        return self._on(samples, samples)

    # One task

    def one(self, task: PyTree, key: Array | None = None, share: Array | None = None) -> OneTask:
        """Return the oracles of one task, with the words of the key of its start and its weight in the average."""
        task = self.made(task)
        data = jax.tree.map(lambda leaf: leaf[None], task if key is None else (task, key))
        axes = (0,) * len(jax.tree.leaves(data))
        samples = Samples(data, 1, axes, self.inner_samples.dtype)
        inner_loss, outer_loss = self._from_start(self.inner_loss), self._from_start(self.outer_loss)
        levels = samples, samples, self.outer_bounds, self.outer_term
        return OneTask(*levels, inner_loss=inner_loss, outer_loss=outer_loss, share=share)

    def first(self) -> OneTask:
        """Return the oracles of the first task, which stands for the others where only shapes and counts matter."""
        task = jax.tree.map(lambda leaf: leaf[0], trees.cast(self.inner_samples.leaves, self.inner_samples.dtype))
        return self.one(task, jnp.zeros(2, jnp.uint32) if takes_start_key(self.inner_start) else None)

    def _from_start(self, loss: Loss) -> Loss:
        """Return a loss of d_t instead of z_t, if inner variables are restarted."""
        if self.inner_start is None:
            return loss
        is_random = takes_start_key(self.inner_start)

        def shifted(change: PyTree, outer_var: PyTree, data: PyTree) -> Array:
            task, key = data if is_random else (data, None)
            return loss(trees.add(self.start_of(outer_var, task, key), change), outer_var, task)

        return shifted

    def made(self, task: PyTree) -> PyTree:
        """Return a task as the losses take it."""
        if self.make_task is None:
            return task
        made = self.make_task(jax.random.key(task, impl="threefry2x32"))
        return jax.tree.map(jnp.asarray, made)

    def start_of(self, outer_var: PyTree, task: PyTree, key: Array | None) -> PyTree:
        """Return the start of the inner variable of a task."""
        assert self.inner_start is not None
        if key is None:
            return self.inner_start(outer_var, task)
        return self.inner_start(outer_var, task, key=jax.random.wrap_key_data(key, impl="threefry2x32"))

    def starts(self, outer_var: PyTree, count: int) -> PyTree:
        """Return the starts of the first tasks, stacked."""
        tasks, keys = self._first_tasks(count)
        return jax.vmap(lambda task, key: self.start_of(outer_var, self.made(task), key))(tasks, keys)

    # Batches of tasks

    def take(self, rows: Any) -> tuple[PyTree, Array]:
        """Return the drawn tasks and their weights in an average."""
        return self.inner_samples.take(rows)

    def places(self, rows: Any) -> Array:
        """Return the places of the drawn tasks among all tasks."""
        samples = self.inner_samples
        if rows is None:
            return jnp.arange(samples.n, dtype=jnp.int32)
        if samples.sampling == "iid":
            return rows
        # As with all slices, a short last block begins with tasks of the block before it, whose weight is 0.
        first = jnp.minimum(rows * samples.batch_size, samples.n - samples.batch_size)
        return first + jnp.arange(samples.batch_size, dtype=jnp.int32)

    @staticmethod
    def start_keys(words: Array, count: int) -> Array:
        """Return the words of the keys of random starts, for each task of a batch."""
        return jax.random.key_data(jax.random.split(jax.random.wrap_key_data(words, impl="threefry2x32"), count))

    # All tasks, or the first ones, whose number is that of the inner variable of the point

    def on_each(self, function: Callable[[OneTask, Point], PyTree], point: Point) -> PyTree:
        """Return a function of the oracles and the point of each task, stacked, computed for some tasks together."""
        count = len(jax.tree.leaves(point.inner_var)[0])
        tasks, keys = self._first_tasks(count)

        def on_one(entry: Any) -> PyTree:
            z, v, task, key = entry
            return function(self.one(task, key), Point(z, point.outer_var, v))

        return jax.lax.map(on_one, (point.inner_var, point.v, tasks, keys), batch_size=min(count, _TOGETHER))

    def _first_tasks(self, count: int) -> tuple[PyTree, Array | None]:
        """Return the first tasks, and the words of the keys of their starts, which are the same in all evaluations."""
        tasks = jax.tree.map(lambda leaf: leaf[:count], self.inner_samples.take(None)[0])
        is_random = takes_start_key(self.inner_start)
        return tasks, self.start_keys(jnp.zeros(2, jnp.uint32), count) if is_random else None

    def inner(self, point: Point, rows: Any = None) -> InnerPass:
        each: InnerPass = self.on_each(lambda one, at: one.inner(at), point)
        return each._replace(cross=_mean(each.cross))

    def outer(self, point: Point, rows: Any = None) -> OuterPass:
        each: OuterPass = self.on_each(lambda one, at: one.outer(at), point)
        return each._replace(grad_outer=_mean(each.grad_outer))

    def inner_grad_outer(self, point: Point, rows: Any = None) -> PyTree:
        return _mean(self.on_each(lambda one, at: one.inner_grad_outer(at), point))

    def inner_value(self, point: Point, rows: Any = None) -> Array:
        return _mean(self.on_each(lambda one, at: one.inner_value(at), point))

    def outer_value(self, point: Point, rows: Any = None) -> Array:
        return _mean(self.on_each(lambda one, at: one.outer_value(at), point))

    def _inner(self, point: Point, data: PyTree, weights: Array) -> InnerPass:
        raise NotImplementedError(_NOT_OF_ROWS)

    def _inner_grad_outer(self, point: Point, data: PyTree, weights: Array) -> PyTree:
        raise NotImplementedError(_NOT_OF_ROWS)

    def _outer(self, point: Point, data: PyTree, weights: Array) -> OuterPass:
        raise NotImplementedError(_NOT_OF_ROWS)

    def _inner_value(self, point: Point, data: PyTree, weights: Array) -> Array:
        raise NotImplementedError(_NOT_OF_ROWS)

    def _outer_value(self, point: Point, data: PyTree, weights: Array) -> Array:
        raise NotImplementedError(_NOT_OF_ROWS)


_NOT_OF_ROWS = "tasks are not rows of one sum; their derivatives are those of `OneTask`"


def _mean(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), tree)

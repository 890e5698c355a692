"""What steps are made of: moves of the variables, schedules, batches handed out one by one, and the inner loop."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from bilevel import _threefry
from bilevel import _tree as trees
from bilevel._types import Array, Calls, Count, Point, PyTree, Scalar
from bilevel.oracles import Oracles

T = TypeVar("T")


class LoopState(NamedTuple):
    """The iterate, and where an inner loop starts that does not go on from it."""

    point: Point
    first_inner_var: PyTree
    inner: Any = ()  # of the transformation of its inner steps, if there is one


def descend(oracles: Oracles, point: Point, direction: Point, step: Scalar, outer_step: Scalar) -> Point:
    """Move the three variables at once."""
    z = move(point.inner_var, direction.inner_var, step)
    x = oracles.project(move(point.outer_var, direction.outer_var, outer_step))
    return Point(z, x, move(point.v, direction.v, step))


def move(variable: PyTree, direction: PyTree, step: Scalar) -> PyTree:
    """Return variable - step * direction."""
    return trees.subtract(variable, trees.scale(step, direction))


def move_outer(oracles: Oracles, point: Point, direction: PyTree, step: Scalar) -> Point:
    """Return the point with its outer variable moved, and projected onto the bounds of the problem."""
    return point._replace(outer_var=oracles.project(move(point.outer_var, direction, step)))


def decay(step_size: Scalar, index: Array, power: float) -> Array:
    """Return step_size * t^-power with t = index + 1."""
    return step_size * (index + 1).astype(jnp.result_type(step_size)) ** -power


def decay_share(scale: Scalar, index: Array, power: float) -> Array:
    """Return min(1, scale * t^-power) with t = index + 1."""
    return jnp.minimum(decay(scale, index, power), jnp.ones_like(scale))


def storm(momentum: Array, new: PyTree, estimate: PyTree, old: PyTree) -> PyTree:
    """Return new + (1 - momentum)(estimate - old): STORM's estimate, with both gradients on one sample."""
    return jax.tree.map(lambda new, estimate, old: new + (1 - momentum) * (estimate - old), new, estimate, old)


def direction_calls(inner_rows: Count, outer_rows: Count) -> Calls:
    """Return the cost of one direction D on so many rows of each level."""
    n, m = inner_rows, outer_rows
    return Calls(inner_grad=n, hvp=n, cross=n, outer_grad=m, outer_grad_outer=m)


def inner_batch(oracles: Oracles) -> int:
    """Return how many inner rows a batch has."""
    samples = oracles.inner_samples
    return oracles.n_inner if samples.sampling == "full" else samples.batch_size


def split(rows: Any, *sizes: int | None) -> tuple[Any, ...]:
    """Cut stacked batches into stacks of the given sizes; None takes one batch. ``rows`` of a full batch stay None."""
    if rows is None:
        return (None,) * len(sizes)
    parts, begin = [], 0
    for size in sizes:
        parts.append(rows[begin] if size is None else rows[begin : begin + size])
        begin += 1 if size is None else size
    return tuple(parts)


def batch(rows: Any, index: Array | int) -> Any:
    """Return one batch of a stack."""
    return None if rows is None else rows[index]


def draw_below(key: Array, index: Array, limit: int) -> Array:
    """Draw an integer in {0, …, limit - 1} for step ``index``, independently of its batches."""
    return _threefry.integers(_threefry.fold_in(_threefry.fold_in(key, 2), index), (), limit)


def repeat(times: int | Array, rows: Any, update: Callable[[T, Any], T], state: T) -> T:
    """Apply ``update(state, batch)`` for the first batches of a stack; one copy is compiled for all."""
    return jax.lax.fori_loop(0, times, lambda i, state: update(state, batch(rows, i)), state)


def inner_descent(oracles: Oracles, point: Point, rows: Any, times: int, step: Scalar) -> Point:
    """Return the point after z ← z - step ∇z G on each of ``times`` batches."""

    def once(point: Point, batch: Any) -> Point:
        return point._replace(inner_var=move(point.inner_var, oracles.inner_grad(point, batch), step))

    return repeat(times, rows, once, point)

"""Moves of the variables: steps, projections, bounds and optax transformations; schedules; loops over batches.

A solver computes a direction D = (D_z, D_v, D_x), and `Moves` applies it. With steps ρ and γ, projections P, and
transformations T_z and T_x where they are given,

    z ← z - ρ D_z   or   z + T_z(D_z)        v ← P(v - ρ D_v)        x ← P(x - γ D_x)   or   P(x + T_x(D_x))

If the problem has a term R of x, then x ← P(prox of γ R at x - γ D_x), or another step that the term defines.

Unused parts add nothing to a state or to a compiled program.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from bilevel._core import threefry, trees
from bilevel._core.compilation import arithmetic
from bilevel._core.types import Array, Calls, Count, Point, PyTree, Scalar
from bilevel.oracles import Oracles
from bilevel.problems.checks import check_bounds
from bilevel.solvers.fields import bounds_text

T = TypeVar("T")


class MovesState(NamedTuple):
    """The states of the transformations of z and of x; empty without a transformation."""

    inner: Any = ()
    outer: Any = ()


@dataclass(frozen=True)
class Moves:
    """How the variables of a solver move along a direction: the parameters of these names, or None if they are off."""

    v_radius: Scalar | None = None
    inner_optimizer: Any = None
    outer_optimizer: Any = None
    outer_bounds: Any = None

    @classmethod
    def of(cls, solver: Any) -> Self:
        """Return the moves that the parameters of a solver describe; parameters that it lacks are off."""
        return cls(**{field.name: getattr(solver, field.name, None) for field in fields(cls)})

    def init(self, start: Point) -> MovesState:
        """Return the states of the transformations before the first move."""
        inner = init_transformation(as_inner(self.inner_optimizer), start.inner_var)
        return MovesState(inner, init_transformation(as_outer(self.outer_optimizer), start.outer_var))

    def apply(
        self, oracles: Oracles, point: Point, state: MovesState, direction: Point, step: Scalar, outer_step: Scalar
    ) -> tuple[Point, MovesState]:
        """Return the point moved along a direction, all variables at once, and the new states."""
        z, inner = _step(as_inner(self.inner_optimizer), point.inner_var, direction.inner_var, state.inner, step)
        moved = point._replace(inner_var=z, v=move(point.v, direction.v, step))
        return self.outer(oracles, moved, state._replace(inner=inner), direction.outer_var, outer_step)

    def outer(
        self, oracles: Oracles, point: Point, state: MovesState, direction: PyTree, step: Scalar, scale: Scalar = 1
    ) -> tuple[Point, MovesState]:
        """Return the point with only x moved, and the new states; the direction is ``scale`` times that of ∇h."""
        x, outer = point.outer_var, state.outer
        if oracles.outer_term is None:
            x, outer = _step(as_outer(self.outer_optimizer), x, direction, outer, step)
        else:  # a run refuses transformations
            x = oracles.outer_term.move(x, direction, step, scale)
        return self.project(point._replace(outer_var=oracles.project(x))), state._replace(outer=outer)

    def project(self, point: Point) -> Point:
        """Return the point with x inside the bounds of these moves and v inside its ball."""
        if self.outer_bounds is not None:
            lower, upper = (_broadcast(bound, point.outer_var) for bound in self.outer_bounds)
            point = point._replace(outer_var=jax.tree.map(jnp.clip, point.outer_var, lower, upper))
        if self.v_radius is not None:
            norm = jnp.sqrt(trees.norm_sq(point.v))
            point = point._replace(v=trees.scale(jnp.where(norm > self.v_radius, self.v_radius / norm, 1), point.v))
        return point

    def inner_steps(
        self, oracles: Oracles, point: Point, state: MovesState, rows: Any, times: int, step: Scalar
    ) -> tuple[Point, MovesState]:
        """Return the point after a step of z along ∇z G on each of ``times`` batches, and the new states."""

        def once(carry: tuple[Point, MovesState], batch: Any) -> tuple[Point, MovesState]:
            point, state = carry
            gradient = oracles.inner_grad(point, batch)
            z, inner = _step(as_inner(self.inner_optimizer), point.inner_var, gradient, state.inner, step)
            return point._replace(inner_var=z), state._replace(inner=inner)

        return repeat(times, rows, once, (point, state))

    def check(self, solver: str, start: Point) -> None:
        """Raise ValueError if bounds or transformations do not fit the start of a run."""
        if self.outer_bounds is not None:
            named = f"`{solver}(outer_bounds={bounds_text(self.outer_bounds)})`"
            check_bounds(self.outer_bounds, start.outer_var, named)
        _check_transformation(f"`{solver}(outer_optimizer=…)`", as_outer(self.outer_optimizer), start.outer_var)
        _check_transformation(f"`{solver}(inner_optimizer=…)`", as_inner(self.inner_optimizer), start.inner_var)


def _step(optimizer: Any, variable: PyTree, direction: PyTree, state: Any, step: Scalar) -> tuple[PyTree, Any]:
    """Return a variable moved by the plain step or by a transformation, and the new state of the transformation."""
    if optimizer is None:
        return move(variable, direction, step), state
    change, state = transform(optimizer, direction, state, variable)
    return move(variable, change, 1), state


# Plain moves


def move(variable: PyTree, direction: PyTree, step: Scalar) -> PyTree:
    """Return variable - step * direction."""
    return trees.subtract(variable, trees.scale(step, direction))


def move_outer(oracles: Oracles, point: Point, direction: PyTree, step: Scalar, scale: Scalar = 1) -> Point:
    """Return the point with its outer variable moved, for solvers that refuse transformations of x."""
    return Moves().outer(oracles, point, MovesState(), direction, step, scale)[0]


def inner_descent(oracles: Oracles, point: Point, rows: Any, times: int, step: Scalar) -> Point:
    """Return the point after z ← z - step ∇z G on each of ``times`` batches."""
    return Moves().inner_steps(oracles, point, MovesState(), rows, times, step)[0]


# Schedules


def decay(step_size: Scalar, index: Array, power: float) -> Array:
    """Return step_size * t^-power with t = index + 1."""
    return step_size * (index + 1).astype(jnp.result_type(step_size)) ** -power


def decay_share(scale: Scalar, index: Array, power: float) -> Array:
    """Return min(1, scale * t^-power) with t = index + 1."""
    return jnp.minimum(decay(scale, index, power), jnp.ones_like(scale))


def storm(momentum: Scalar, new: PyTree, estimate: PyTree, old: PyTree) -> PyTree:
    """Return new + (1 - momentum)(estimate - old): STORM's estimate, with both gradients on one sample."""
    return jax.tree.map(lambda new, estimate, old: new + (1 - momentum) * (estimate - old), new, estimate, old)


# Costs and batches


def direction_calls(inner_rows: Count, outer_rows: Count) -> Calls:
    """Return the cost of one direction D on these numbers of rows."""
    n, m = inner_rows, outer_rows
    return Calls(inner_grad=n, hvp=n, cross=n, outer_grad=m, outer_grad_outer=m)


def recursive_calls(oracles: Oracles, draw: Any, refresh: bool) -> Calls:
    """Return the cost of a full-batch pass, or of D on the same batches at two points."""
    if refresh:
        return direction_calls(oracles.n_inner, oracles.n_outer)
    return direction_calls(2 * oracles.count_inner(draw.inner), 2 * oracles.count_outer(draw.outer))


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


def repeat(times: int | Array, rows: Any, update: Callable[[T, Any], T], state: T) -> T:
    """Apply ``update(state, batch)`` for the first batches of a stack; one copy is compiled for all."""
    return jax.lax.fori_loop(0, times, lambda i, state: update(state, batch(rows, i)), state)


def draw_below(key: Array, index: Array, limit: Count) -> Array:
    """Draw an integer in {0, …, limit - 1} for step ``index``, independently of its batches."""
    return threefry.integers(threefry.fold_in(threefry.fold_in(key, 2), index), (), limit)


# Transformations

# The step of Adam for x is _RATE (1 + t / _DELAY)^-½: it decreases forever, so no budget has to be known.
_RATE, _DELAY = 1e-2, 1000.0
_FIRST_GRADIENT = 2.0**24  # makes the ε = 1e-8 of Adam 1e-15 of the first gradient
_INNER_RATE = 1e-3  # a common rate for training networks


def as_inner(optimizer: Any) -> Any:
    """Return the transformation of z that a parameter stands for."""
    if not isinstance(optimizer, str):
        return optimizer
    import optax

    return optax.adam(_INNER_RATE)


def as_outer(optimizer: Any) -> Any:
    """Return the transformation of x that a parameter stands for."""
    if not isinstance(optimizer, str):
        return optimizer
    import optax

    adam = optax.adam(lambda count: _RATE / jnp.sqrt(1 + count / _DELAY))

    def zero_like(variable: PyTree) -> Array:
        return jnp.zeros((), jnp.result_type(*jax.tree.leaves(variable)))

    # The ε of Adam is absolute, and the squares of its gradients may underflow.
    return optax.chain(optax.GradientTransformation(zero_like, _rescale), adam)


def _rescale(gradient: PyTree, unit: Array, variable: PyTree = None) -> tuple[PyTree, Array]:
    """Multiply by the power of two that brings the first nonzero gradient to about `_FIRST_GRADIENT`."""
    unit = jnp.where(unit > 0, unit, trees.largest(gradient))
    power = jnp.where(unit > 0, jnp.frexp(unit)[1], 0)
    return jax.tree.map(lambda leaf: _FIRST_GRADIENT * jnp.ldexp(leaf, -power), gradient), unit


def init_transformation(optimizer: Any, variable: PyTree) -> Any:
    """Return the state of a transformation before its first update; () without a transformation."""
    if optimizer is None:
        return ()
    with jax.numpy_dtype_promotion("standard"):
        return optimizer.init(variable)


def transform(optimizer: Any, direction: PyTree, state: Any, variable: PyTree) -> tuple[PyTree, Any]:
    """Return what a transformation subtracts from a variable with this direction, and its new state."""
    # optax promotes its integer counts to floats, which strict promotion would refuse.
    with jax.numpy_dtype_promotion("standard"):
        updates, new = optimizer.update(direction, state, variable)
    # Updates are added where directions are subtracted.
    return trees.scale(-1, _cast_like(updates, variable)), _cast_like(new, state)


def _cast_like(tree: PyTree, template: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf, old: jnp.asarray(leaf, jnp.asarray(old).dtype), tree, template)


def describe_transformations(solver: Any, start: Point) -> dict[str, list[float]]:
    """Return numbers that change with the settings of each transformation that is given as an object."""
    variables = {"inner_optimizer": start.inner_var, "outer_optimizer": start.outer_var}
    given = {name: getattr(solver, name, None) for name in variables}
    return {name: _describe(one, variables[name]) for name, one in given.items() if not isinstance(one, str | None)}


def _describe(optimizer: Any, like: PyTree) -> list[float]:
    numbers = []
    with arithmetic(np.float64):
        variable = jax.tree.map(lambda leaf: np.cos(1.0 + np.arange(np.size(leaf))).reshape(np.shape(leaf)), like)
        state = init_transformation(optimizer, variable)
        # Gradients of many sizes reveal clipping and small constants, and high counts reveal schedules.
        for count, size in ((0, 1.0), (1, 1e-6), (10, 1e3), (1000, 1.0), (100_000, 1e-3)):
            ahead = jax.tree.map(lambda leaf, count=count: _count_from(leaf, count), state)
            change, state = transform(optimizer, trees.scale(size, variable), ahead, variable)
            numbers.append(float(trees.norm_sq(change)))
    return [*numbers, *_constants(optimizer.update, set())]


def _constants(part: Any, seen: set[int]) -> Iterator[float]:
    """Yield the numbers in the closures of a function, such as the boundaries of a schedule."""
    if isinstance(part, int | float | np.ndarray | np.generic | jax.Array):
        yield from np.ravel(np.asarray(part, float)).tolist()
    elif isinstance(part, tuple | list):
        for one in part:
            yield from _constants(one, seen)
    elif isinstance(part, dict):
        yield from _constants([*part, *part.values()], seen)
    elif isinstance(part, partial):
        yield from _constants([part.func, part.args, part.keywords], seen)
    elif isinstance(part, FunctionType) and id(part) not in seen:
        seen.add(id(part))
        cells = [cell.cell_contents for cell in part.__closure__ or ()]
        yield from _constants([cells, part.__defaults__ or (), part.__kwdefaults__ or {}], seen)


def _count_from(leaf: Any, count: int) -> Any:
    return jnp.full_like(leaf, count) if jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.integer) else leaf


# Checks


def _check_transformation(named: str, optimizer: Any, variable: PyTree) -> None:
    if optimizer is None:
        return
    try:
        jax.eval_shape(lambda x: transform(optimizer, x, init_transformation(optimizer, x), x), variable)
    except TypeError as error:
        raise ValueError(
            f"{named}: the transformation requires more than gradients, its state and parameters ({error}); use one "
            "that does not."
        ) from error


def _broadcast(bound: PyTree, like: PyTree) -> PyTree:
    """Return a bound with the structure of another tree; a single number is used for all leaves."""
    is_number = jax.tree_util.treedef_is_leaf(jax.tree.structure(bound)) and jnp.ndim(bound) == 0
    return jax.tree.map(lambda _: bound, like) if is_number else bound

"""Moves by an optax transformation: of x, or of z in the place of the plain step.

With T a transformation that has a state of its own, and perhaps a schedule,

    z ← z + T(∇z G)      x ← P(x + T(D_x))

None is no transformation, and leaves nothing in a state and nothing in a compiled program.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from bilevel import _tree as trees
from bilevel._precision import arithmetic
from bilevel._types import Array, Point, PyTree, Scalar
from bilevel.oracles import Oracles
from bilevel.solvers.base import PointState, Solver, SolverBase, State
from bilevel.solvers.directions import inner_descent, move, repeat

# Adam's step of x is _RATE (1 + t / _DELAY)^-½: it falls without an end, so that no budget has to be known.
_RATE, _DELAY = 1e-2, 1000.0
_FIRST_GRADIENT = 2.0**24  # which makes Adam's ε a share of 1e-15 of it
_INNER_RATE = 1e-3  # what networks are commonly trained with


def init_state(optimizer: Any, variable: PyTree) -> Any:
    """Return the state of a transformation before its first update."""
    if optimizer is None:
        return ()
    with jax.numpy_dtype_promotion("standard"):
        return _transformation(optimizer).init(variable)


def find_move(optimizer: Any, direction: PyTree, state: Any, variable: PyTree) -> tuple[PyTree, Any]:
    """Return what to subtract from a variable that is to move along a direction, and the new state."""
    # optax promotes its integer counts to floats, which strict promotion would refuse.
    with jax.numpy_dtype_promotion("standard"):
        updates, new = _transformation(optimizer).update(direction, state, variable)
    # Updates are added where directions are subtracted.
    return trees.scale(-1, _cast_like(updates, variable)), _cast_like(new, state)


def inner_transformation(solver: Solver) -> Any:
    """Return the transformation of z; "adam" stands for one of z's own."""
    if not isinstance(solver.inner_optimizer, str):
        return solver.inner_optimizer
    import optax

    return optax.adam(_INNER_RATE)


@dataclass(frozen=True)
class InnerLoopSolver(Solver):
    """A solver with a loop of inner steps, by a transformation where one is given. Its states have a field `inner`."""

    needs_plain_step: ClassVar[str | None] = None

    def init(self, oracles: Oracles, start: Point) -> State:
        return PointState(start, self.init_inner(start))

    def init_inner(self, start: Point) -> Any:
        """Return the state of the transformation, () where there is none."""
        return init_state(inner_transformation(self), start.inner_var)

    def check_start(self, start: Point) -> None:
        check_transformation(self, "inner_optimizer", start.inner_var)

    def inner_steps(self, oracles: Oracles, state: State, rows: Any, times: int, step: Scalar) -> State:
        """Return the state after so many inner steps on these batches."""
        if self.inner_optimizer is None:
            return state._replace(point=inner_descent(oracles, state.point, rows, times, step))

        def once(state: State, batch: Any) -> State:
            point = state.point
            grad = oracles.inner_grad(point, batch)
            change, inner = find_move(inner_transformation(self), grad, state.inner, point.inner_var)
            return state._replace(point=point._replace(inner_var=move(point.inner_var, change, 1)), inner=inner)

        return repeat(times, rows, once, state)


def check_transformation(solver: Solver, name: str, variable: PyTree) -> None:
    """Refuse a transformation that asks for more than gradients, its state and parameters."""
    if getattr(solver, name) is None:
        return
    optimizer = _transformation(getattr(solver, name))
    try:
        with jax.numpy_dtype_promotion("standard"):
            jax.eval_shape(lambda x: optimizer.update(x, optimizer.init(x), x), variable)
    except TypeError as error:
        told = f"`{type(solver).__name__}({name}=…)`: it is given gradients, its state and parameters"
        raise ValueError(f"{told}, and asks for more ({error}); take a transformation that does not.") from error


def describe_transformations(solver: SolverBase, start: Point) -> dict[str, list[float]]:
    """Return sizes of some moves of each transformation of the user: numbers that change with its settings."""
    variables = {"inner_optimizer": start.inner_var, "outer_optimizer": start.outer_var}
    given = {name: getattr(solver, name, None) for name in variables}
    own = {name: optimizer for name, optimizer in given.items() if not isinstance(optimizer, str | None)}
    return {name: _describe(optimizer, variables[name]) for name, optimizer in own.items()}


def _describe(optimizer: Any, like: PyTree) -> list[float]:
    numbers = []
    with arithmetic(np.float64):
        variable = jax.tree.map(lambda leaf: np.cos(1.0 + np.arange(np.size(leaf))).reshape(np.shape(leaf)), like)
        state = init_state(optimizer, variable)
        # Gradients of many sizes show clipping and small constants, and counts far ahead show schedules.
        for count, size in ((0, 1.0), (1, 1e-6), (10, 1e3), (1000, 1.0), (100_000, 1e-3)):
            ahead = jax.tree.map(lambda leaf, count=count: _count_from(leaf, count), state)
            change, state = find_move(optimizer, trees.scale(size, variable), ahead, variable)
            numbers.append(float(trees.norm_sq(change)))
    return numbers


def _count_from(leaf: Any, count: int) -> Any:
    return jnp.full_like(leaf, count) if jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.integer) else leaf


def _transformation(optimizer: Any) -> Any:
    if not isinstance(optimizer, str):
        return optimizer
    import optax

    adam = optax.adam(lambda count: _RATE / jnp.sqrt(1 + count / _DELAY))
    # The ε = 1e-8 of Adam is absolute, and the squares of its gradients may underflow.
    return optax.chain(optax.GradientTransformation(_init_unit, _rescale), adam)


def _init_unit(variable: PyTree) -> Array:
    return jnp.zeros((), jnp.result_type(*jax.tree.leaves(variable)))


def _rescale(gradient: PyTree, unit: Array, variable: PyTree = None) -> tuple[PyTree, Array]:
    """Multiply by the power of two that brings the first gradient that is not 0 to about `_FIRST_GRADIENT`."""
    unit = jnp.where(unit > 0, unit, trees.largest(gradient))
    power = jnp.where(unit > 0, jnp.frexp(unit)[1], 0)
    return jax.tree.map(lambda leaf: _FIRST_GRADIENT * jnp.ldexp(leaf, -power), gradient), unit


def _cast_like(tree: PyTree, template: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf, old: jnp.asarray(leaf, jnp.asarray(old).dtype), tree, template)

"""Steps of a solver on a batch of tasks: one step for each task, which all move the same x.

A step of the solver is `vmap`ped over the tasks of a batch, whose oracles average what it computes for x. In a state,
the parts of z and v have a leading axis of all tasks if inner variables are kept, and remain at the start otherwise.
"""

import itertools
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey, tree_map_with_path

from bilevel._core import threefry, trees
from bilevel._core.compilation import Compiled, arithmetic
from bilevel._core.types import Array, Calls, Point, PyTree
from bilevel.oracles import Oracles, TaskOracles
from bilevel.oracles.tasks import AXIS, OneTask, takes_start_key
from bilevel.problems import BilevelProblem
from bilevel.problems.checks import check_data
from bilevel.solvers.base import Solver, SolverBase

_START_STREAM = 4  # of the keys of random starts; rows, lengths and losses have the streams before it
_OF_TASKS = {"inner_var", "v", "first_inner_var", "y"}  # fields of states, and of points in them, that a task has


@runtime_checkable
class Adapting(Protocol):
    """A solver whose steps begin with inner steps that can also be taken alone, which restarted variables require."""

    def adapt(self, oracles: Oracles, point: Point, draw: Any) -> Point:
        """Return the point after the inner steps of a step."""


class TaskDraw(NamedTuple):
    """The drawn tasks, the words of the key of their random starts, and the draw of the solver for each of them."""

    tasks: Any
    key: Array | None
    own: Any


class OnTasks:
    """A solver that takes its steps on batches of tasks."""

    def __init__(self, solver: Solver[Any, Any]) -> None:
        self.solver = solver

    def init(self, oracles: TaskOracles, start: Point) -> Any:
        """Return the state before the first step."""
        one = oracles.first()

        def init(z: PyTree, v: PyTree) -> Any:
            return self.solver.init(one, Point(z, start.outer_var, v))

        first = jax.tree.map(lambda leaf: leaf[0], (start.inner_var, start.v))
        axes = _axes(_own_parts(jax.eval_shape(init, *first)))
        return jax.vmap(init, out_axes=axes)(start.inner_var, start.v)

    def init_calls(self, oracles: TaskOracles) -> Calls:
        """Return the exact cost of `init`."""
        return Calls(*(oracles.n_inner * kind for kind in self.solver.init_calls(oracles.first())))

    def draw(self, oracles: TaskOracles, key: Array, index: Array) -> TaskDraw:
        """Return the tasks of step ``index``, and the random numbers that all of them share."""
        words = jax.random.key_data(threefry.fold_in(threefry.fold_in(key, _START_STREAM), index))
        own = self.solver.draw(oracles.first(), key, index)
        return TaskDraw(oracles.draw_inner(key, index), words if takes_start_key(oracles.inner_start) else None, own)

    def refreshes(self, index: Array, draw: TaskDraw) -> None:
        """Return None, since solvers with full-batch passes are refused."""

    def calls(self, oracles: TaskOracles, draw: TaskDraw, refresh: bool) -> Calls:
        """Return the exact cost of a step: a call is a derivative of the loss of one task."""
        count = oracles.count_inner(draw.tasks)
        return Calls(*(count * kind for kind in self.solver.calls(oracles.first(), draw.own, refresh)))

    def step(self, oracles: TaskOracles, state: Any, index: Array, draw: TaskDraw) -> Any:
        """Return the state after step ``index``."""
        return (self._step if oracles.inner_start is None else self._step_from_start)(oracles, state, index, draw)

    def _step(self, oracles: TaskOracles, state: Any, index: Array, draw: TaskDraw) -> Any:
        """Return the state after a step from the inner variables of the drawn tasks, which are kept."""
        (tasks, shares), places = oracles.take(draw.tasks), oracles.places(draw.tasks)
        own = _own_parts(state)

        def step(state: Any, task: PyTree, share: Array) -> Any:
            return self.solver.step(oracles.one(task, None, share), state, index, draw.own)

        def put(own: bool, whole: Array, old: Array, new: Array) -> Array:
            if not own:
                return new
            drawn = jnp.reshape(shares > 0, (-1, *(1,) * (new.ndim - 1)))  # some may only fill a short block
            return whole.at[places].set(jnp.where(drawn, new, old))

        batch = jax.tree.map(lambda own, leaf: leaf[places] if own else leaf, own, state)
        new = jax.vmap(step, (_axes(own), 0, 0), _axes(own), axis_name=AXIS)(batch, tasks, shares)
        return jax.tree.map(put, own, state, batch, new)

    def _step_from_start(self, oracles: TaskOracles, state: Any, index: Array, draw: TaskDraw) -> Any:
        """Return the state after a step from the start of the inner variables, of which only x and its parts change."""
        tasks, shares = oracles.take(draw.tasks)
        own = _own_parts(state)

        def step(task: PyTree, key: Array | None, share: Array) -> Any:
            one = oracles.one(task, key, share)
            zero = trees.zeros_like(jax.tree.map(lambda leaf: leaf[0], (state.point.inner_var, state.point.v)))
            fresh = self.solver.init(one, Point(zero[0], state.point.outer_var, zero[1]))
            return self.solver.step(one, _merge(own, fresh, state), index, draw.own)

        keys = None if draw.key is None else oracles.start_keys(draw.key, len(shares))
        new = jax.vmap(step, (0, 0, 0), _axes(own), axis_name=AXIS)(tasks, keys, shares)
        return _merge(own, state, new)

    def adapt(self, oracles: TaskOracles, point: Point) -> Point:
        """Return the point after the inner steps of the first tasks, whose number is that of the point."""
        solver = self.solver
        assert isinstance(solver, Adapting), "others are refused for problems that restart inner variables"
        key = jax.random.key(0, impl="threefry2x32")
        draw = solver.draw(oracles.first(), key, jnp.int32(0))  # all rows of a task, so nothing is random

        def adapt(one: OneTask, point: Point) -> PyTree:
            return solver.adapt(one, trees.zeros_like(point)._replace(outer_var=point.outer_var), draw).inner_var

        return point._replace(inner_var=oracles.on_each(adapt, point))


def adapt(problem: BilevelProblem, solver: Solver[Any, Any], outer_var: PyTree, tasks: PyTree | None = None) -> PyTree:
    """Return inner variables after the inner steps of a solver from their starts, for new tasks or those of a problem.

    Parameters
    ----------
    problem : a problem of :meth:`bilevel.BilevelProblem.from_task_losses` that restarts inner variables
    solver : ITD or AIDCG, whose number of inner steps and step size are used
    outer_var : x, such as ``result.point.outer_var``
    tasks : pytree of arrays, first axis = tasks; by default the tasks at which runs are evaluated

    Returns
    -------
    inner_var : like the inner variable of a task, with the axis of the tasks in front

    Examples
    --------
    >>> import numpy as np, bilevel
    >>> centers = np.array([[0.0, 2.0], [1.0, 4.0], [2.0, 6.0]])
    >>> def loss(z, x, center):
    ...     return ((z - center) ** 2).sum() / 2
    >>> problem = bilevel.BilevelProblem.from_task_losses(
    ...     loss, loss, centers, lambda x, center: x, np.zeros(2), dtype="float64"
    ... )
    >>> solver = bilevel.ITD(step_size=0.5, n_inner_steps=1, batch_size=3)
    >>> result = bilevel.run(problem, solver, max_steps=200)
    >>> result.point.outer_var.round(6)
    array([1., 4.])
    >>> bilevel.adapt(problem, solver, result.point.outer_var, np.array([[3.0, 4.0]])).round(6)
    array([[2., 4.]])
    """
    oracles, dtype = problem.oracles, problem.dtype
    if not isinstance(oracles, TaskOracles) or oracles.inner_start is None:
        raise ValueError("`adapt`: the problem has no inner variables that are restarted; see `from_task_losses`.")
    if not isinstance(solver, Adapting):
        raise ValueError(f"`adapt(solver={type(solver).__name__}(…))`: must be a solver that restarts: ITD or AIDCG.")
    x = jax.tree.map(lambda leaf, like: np.asarray(leaf, like.dtype), outer_var, problem.start.outer_var)
    with arithmetic(dtype, problem):
        if tasks is not None:
            oracles = replace(oracles.with_tasks(check_data("tasks", tasks)), make_task=None)
        count = oracles.n_inner if tasks is not None else len(jax.tree.leaves(problem.start.inner_var)[0])
        like = jax.tree.map(lambda leaf: np.zeros((count, *leaf.shape[1:]), dtype), problem.start.inner_var)
        return trees.to_numpy(_adapt(solver.cast(dtype), oracles, Point(like, x, like)))


@Compiled
def _adapt(solver: Any, oracles: TaskOracles, point: Point) -> PyTree:
    change = OnTasks(solver).adapt(oracles, point).inner_var
    return trees.add(oracles.starts(point.outer_var, len(jax.tree.leaves(change)[0])), change)


def on_tasks(solver: Any, oracles: Oracles) -> Any:
    """Return what takes the steps of a solver on a problem: the solver, or `OnTasks`."""
    return OnTasks(solver) if isinstance(oracles, TaskOracles) else solver


def evaluation_point(solver: SolverBase[Any], oracles: Oracles, state: Any) -> Point:
    """Return the point that metrics are evaluated at. Restarted variables are adapted there."""
    point = solver.monitor.evaluation_point(state)
    if isinstance(oracles, TaskOracles) and oracles.inner_start is not None:
        return on_tasks(solver, oracles).adapt(oracles, point)
    return point


def check_on_tasks(solver: SolverBase[Any], oracles: TaskOracles, start: Point) -> None:
    """Raise ValueError if a solver cannot take its steps on tasks."""
    me, use = type(solver).__name__, "use a solver such as SOBA, MASOBA, StocBiO, AIDCG or ITD"
    if not isinstance(solver, Solver) or solver.needs_finite_sum:
        raise ValueError(f"`{me}`: it sums over all rows of one inner variable, and each task has its own; {use}.")
    if oracles.inner_start is not None and not isinstance(solver, Adapting):
        reason = "inner variables are restarted in each step, so it must differentiate inner steps or their solution"
        raise ValueError(f"`{me}`: {reason}; use ITD or AIDCG, or keep inner variables with `keep=True`.")
    taking, index = OnTasks(solver), jnp.int32(0)

    def step(oracles: TaskOracles, start: Point) -> tuple[Any, Any]:
        state = taking.init(oracles, start)
        draw = taking.draw(oracles, jax.random.key(0, impl="threefry2x32"), index)
        return taking.step(oracles, state, index, draw), solver.refreshes(index, draw.own)

    try:
        state, refreshes = jax.eval_shape(step, oracles, start)
    except ValueError as error:
        if "vmap" not in str(error):
            raise
        raise ValueError(f"`{me}`: what it computes for x is not an average over tasks; {use}.") from error
    if refreshes is not None or hasattr(state, "previous"):
        reason = "it compares batches with full-batch passes or at two points, and each batch has other tasks"
        raise ValueError(f"`{me}`: {reason}; {use}.")


def _own_parts(state: Any) -> Any:
    """Return a tree of booleans: which leaves of a state belong to a task, and not to x."""

    def is_own(path: tuple[Any, ...], leaf: Any) -> bool:
        names = [key.name for key in path if isinstance(key, GetAttrKey)]
        return not _OF_TASKS.isdisjoint(names) or ("moves", "inner") in itertools.pairwise(names)

    return tree_map_with_path(is_own, state)


def _axes(own: Any) -> Any:
    """Return the axes of `vmap` for a state."""
    return jax.tree.map(lambda own: 0 if own else None, own)


def _merge(own: Any, of_task: Any, of_outer: Any) -> Any:
    """Return a state with the parts of a task from one state, and the other parts from another."""
    return jax.tree.map(lambda own, a, b: a if own else b, own, of_task, of_outer)

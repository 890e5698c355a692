"""Problems with one inner variable per task: their oracles and start, and inner variables of new tasks."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from bilevel._core import trees
from bilevel._core.compilation import arithmetic, resolve_dtype
from bilevel._core.types import Array, Point, PyTree
from bilevel.oracles import HostData, Samples, TaskOracles
from bilevel.oracles.autodiff import BatchLoss, Loss, takes_key
from bilevel.problems.checks import check_bounds, check_data, check_flag, check_sizes, check_variable, make_rng

_N_SEEDS = 2**16  # of tasks that a function makes


def task_oracles(
    inner_loss: Loss,
    outer_loss: Loss,
    tasks: PyTree | Callable[[Array], PyTree],
    inner_start: Any,
    outer_var: PyTree,
    *,
    keep: bool,
    n_evaluated: int,
    outer_bounds: Any,
    dtype: DTypeLike | None,
    seed: int,
) -> tuple[TaskOracles, Point]:
    """Return the oracles and the start of a problem of tasks; `BilevelProblem.from_task_losses` has the parameters."""
    check_flag(keep=keep)
    [n_evaluated] = check_sizes(n_evaluated=n_evaluated)
    for name, loss in (("inner_loss", inner_loss), ("outer_loss", outer_loss)):
        if isinstance(loss, BatchLoss) or not callable(loss) or takes_key(loss):
            raise ValueError(f"`{name}`: must be a function of one inner variable, x and one task, without a `key`.")
    make_task = tasks if callable(tasks) else None
    if isinstance(tasks, HostData):
        raise ValueError("`tasks`: a `HostData` is not taken; give arrays, or a function that makes a task from a key.")
    rows = np.arange(_N_SEEDS, dtype=np.uint32) if make_task else check_data("tasks", tasks)
    if make_task and keep:
        raise ValueError("`keep=True`: tasks from a function are new each time; give arrays of tasks.")
    dtype = resolve_dtype(dtype, tasks=outer_var if make_task else tasks)
    x = check_variable("outer_var", outer_var, dtype)
    with arithmetic(dtype):
        samples = Samples.from_rows(rows, dtype, make_rng(seed), narrow=0)
        oracles = TaskOracles(
            *(samples, samples, check_bounds(outer_bounds, x)),
            inner_loss=inner_loss,
            outer_loss=outer_loss,
            inner_start=_as_start(inner_start, dtype),
            make_task=make_task,
        )
        start = _start(oracles, x, samples.n if keep else min(samples.n, n_evaluated), keep)
        oracles = replace(oracles, inner_start=None if keep else oracles.inner_start)
        one, point = oracles.first(), jax.tree.map(lambda leaf: leaf[0], (start.inner_var, start.v))
        for level in ("inner", "outer"):  # raises a sentence for a loss that fails
            jax.eval_shape(getattr(one, level), Point(point[0], x, point[1]))
    return oracles, start


def _as_start(inner_start: Any, dtype: np.dtype) -> Callable[..., PyTree]:
    """Return a function for a start that is the same for all tasks."""
    if callable(inner_start):
        return inner_start
    variable = check_variable("inner_start", inner_start, dtype)
    return lambda outer_var, task: jax.tree.map(jnp.asarray, variable)


def _start(oracles: TaskOracles, x: PyTree, count: int, keep: bool) -> Point:
    """Return the start of all tasks, or of the differences from the starts of those that are evaluated."""
    z = oracles.starts(x, count)
    for leaf in jax.tree.leaves(z):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(f"`inner_start` returned an array of {leaf.dtype}; inner variables are floats.")
    z = check_variable("inner_start", trees.to_numpy(z), oracles.inner_samples.dtype)
    z = z if keep else jax.tree.map(np.zeros_like, z)
    return Point(z, x, jax.tree.map(np.zeros_like, z))

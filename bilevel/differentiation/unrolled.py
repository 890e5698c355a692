"""Differentiation through a training loop, with memory that grows like the root of its number of steps."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from bilevel._core.types import Array, PyTree
from bilevel.problems.checks import check_choice, check_sizes
from bilevel.solvers.itd import scan_in_segments

Train = Callable[..., PyTree]  # (state, hyper, batches) -> state


def unrolled(update: Callable[..., PyTree], n_steps: int, *, last_steps: int | None = None) -> Train:
    """Return a training loop that can be differentiated with respect to hyperparameters and the initial state.

    For derivatives in reverse mode, such as ``jax.grad``, the states of every √T-th step are kept and the steps in
    between are repeated. That takes about a third more time than to keep everything, and memory for 2 √T steps instead
    of T. The loop also works in forward mode, under ``jit`` and ``vmap``.

    Parameters
    ----------
    update : ``update(state, hyper, batch, step) -> state``, a training step of your own. The state is a pytree, such as
        weights and the state of an optax optimizer, and so is ``hyper``; ``step`` counts from 0
    n_steps : T, the number of calls of ``update``
    last_steps : number of last steps that are differentiated, as if the state before them depended neither on the
        hyperparameters nor on the initial state; None means all. The gradient is biased, and takes less time

    Returns
    -------
    function
        ``train(state, hyper, batches=None)`` returns the state after the last step. ``batches`` is a pytree of arrays
        whose leading axis has an entry for each step, a function of the step, or None

    See Also
    --------
    unrolled_gradient : the value and the gradient of a loss of the final state

    Examples
    --------
    >>> import jax, jax.numpy as jnp, bilevel
    >>> def update(w, log_rate, batch, step):
    ...     return w - jnp.exp(log_rate) * (w - batch)
    >>> train = bilevel.unrolled(update, n_steps=20)
    >>> slope = jax.grad(lambda log_rate: (train(jnp.zeros(()), log_rate, jnp.ones(20)) - 1) ** 2)
    >>> bool(slope(-3.0) < 0)
    True
    """
    [n_steps] = check_sizes(n_steps=n_steps)
    n_differentiated = n_steps if last_steps is None else min(check_sizes(last_steps=last_steps)[0], n_steps)

    def train(state: PyTree, hyper: PyTree, batches: Any = None) -> PyTree:
        given = None if callable(batches) else batches
        _check_batches(given, n_steps)
        steps = jnp.arange(n_steps, dtype=jnp.int32)

        def one_step(hyper: PyTree, state: PyTree, entry: tuple[PyTree, Array]) -> tuple[PyTree, None]:
            batch, step = entry
            new = update(state, hyper, batches(step) if callable(batches) else batch, step)
            return _like(new, state), None

        def run_steps(hyper: PyTree, state: PyTree, first: int, stop: int) -> PyTree:
            entries = jax.tree.map(lambda leaf: leaf[first:stop], (given, steps))
            return scan_in_segments(partial(one_step, hyper), state, entries, stop - first)

        state, hyper = jax.tree.map(jnp.asarray, (state, hyper))
        if n_differentiated < n_steps:
            state = jax.lax.stop_gradient(run_steps(jax.lax.stop_gradient(hyper), state, 0, n_steps - n_differentiated))
        return run_steps(hyper, state, n_steps - n_differentiated, n_steps)

    return train


def unrolled_gradient(
    loss: Callable[..., Any],
    train: Train,
    state: PyTree,
    hyper: PyTree,
    batches: Any = None,
    *,
    mode: str = "reverse",
) -> tuple[Array, PyTree]:
    """Return the value and the gradient with respect to hyperparameters of a loss of the state after training.

    Parameters
    ----------
    loss : ``loss(state, hyper) -> number``
    train : a function that :func:`bilevel.unrolled` has returned
    state, hyper, batches : arguments of ``train``
    mode : "reverse", whose memory grows with the number of steps, or "forward", whose time grows with the number of
        hyperparameters, all of which are then carried forward together
    """
    check_choice("mode", mode, ("reverse", "forward"))
    for leaf in jax.tree.leaves(hyper):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            dtype = jnp.result_type(leaf).name
            raise ValueError(
                f"`hyper` has a leaf of {dtype}, which has no gradient; use floats, or put it into `state`."
            )

    def value(hyper: PyTree) -> tuple[Array, Array]:
        found = loss(train(state, hyper, batches), hyper)
        if not isinstance(found, jax.Array | float) or jnp.shape(found):
            raise ValueError(f"`loss` must return one number; it returned {jax.tree.map(jnp.shape, found)}.")
        return jnp.asarray(found), jnp.asarray(found)

    derivative = jax.grad if mode == "reverse" else jax.jacfwd
    gradient, found = derivative(value, has_aux=True)(hyper)
    return found, gradient


def _check_batches(batches: PyTree, n_steps: int) -> None:
    for leaf in jax.tree.leaves(batches):
        if not jnp.ndim(leaf) or jnp.shape(leaf)[0] != n_steps:
            shape = jnp.shape(leaf)
            raise ValueError(
                f"`batches` has a leaf of shape {shape}; its leading axis must have an entry for each of {n_steps} "
                "steps. For batches that are drawn on the way, give a function of the step."
            )


def _like(new: PyTree, old: PyTree) -> PyTree:
    """Return the new state, which must have the structure, shapes and dtypes of the old one."""
    described = [jax.tree.map(lambda leaf: (jnp.shape(leaf), jnp.result_type(leaf).name), tree) for tree in (new, old)]
    if described[0] != described[1]:
        raise ValueError(f"`update` must return a state like its first argument, {described[1]}; got {described[0]}.")
    return new

"""Loops on an NVIDIA GPU, where a turn costs as much as three kernels, and one more for each array that it carries.

A step of a linear model is half a dozen kernels. So a turn takes several steps, and hands on what they carry instead of
copying it. In one run small loops within a step, such as the ten inner steps of a two-loop method, are unrolled, too.
Every step still ends with its state in memory: XLA would otherwise compute all steps of a turn anew in each kernel.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, jaxpr_as_fun
from jax.extend.core.primitives import scan_p, while_p

from bilevel._jaxprs import called_by, changed
from bilevel._types import Array

T = TypeVar("T")
STEPS_PER_TURN = 4  # even, so that what steps carry ends where it was; with 8 SRBA would gain 8 %
_MOST_EQUATIONS = 1500  # of what is unrolled: all of it is compiled, and long steps gain nothing


def unrolled_loop_in_turns(start: Array, stop: Array, step: Callable[[Array, T], T], state: T) -> T:
    """Return what `jax.lax.fori_loop` returns; the small loops of a step are unrolled."""
    return loop_in_turns(start, stop, changed(step, _unroll), state)


def loop_in_turns(start: Array, stop: Array, step: Callable[[Array, T], T], state: T) -> T:
    """Return what `jax.lax.fori_loop` returns; short steps without loops are taken several in a turn."""
    traced = jax.make_jaxpr(step)(start, state)
    if STEPS_PER_TURN * _n_equations(traced) > _MOST_EQUATIONS or _has_loops(traced):
        return jax.lax.fori_loop(start, stop, step, state)

    def turn(i: Array, state: T) -> T:
        for k in range(STEPS_PER_TURN):
            state = _finished(step(start + i * STEPS_PER_TURN + k, state))
        return state

    n_turns = jnp.maximum(stop - start, 0) // STEPS_PER_TURN
    state = jax.lax.fori_loop(0, n_turns, turn, state)
    return jax.lax.fori_loop(start + n_turns * STEPS_PER_TURN, stop, step, state)


def _n_equations(traced: Any) -> int:
    return sum(_n_equations_of(equation) for equation in traced.eqns)


def _n_equations_of(equation: JaxprEqn) -> int:
    within = sum(map(_n_equations, called_by(equation)))
    return within * equation.params["unroll"] if equation.primitive is scan_p else max(1, within)


def _has_loops(traced: Any) -> bool:
    return any(_is_loop(equation) or any(map(_has_loops, called_by(equation))) for equation in traced.eqns)


def _is_loop(equation: JaxprEqn) -> bool:
    params = equation.params
    return equation.primitive is while_p or (equation.primitive is scan_p and params["unroll"] < params["length"])


def _unroll(equation: JaxprEqn) -> JaxprEqn:
    if equation.primitive is not scan_p:
        return equation
    params = equation.params
    if params["length"] * _n_equations(params["jaxpr"]) > _MOST_EQUATIONS:
        return equation
    body = jaxpr_as_fun(params["jaxpr"])
    finished = jax.make_jaxpr(lambda *values: _finished(body(*values)))(*params["jaxpr"].in_avals)
    return equation.replace(params=params | {"jaxpr": finished, "unroll": params["length"]})


def _finished(state: T) -> T:
    """Have the numbers of a state in memory; a counter may be folded into what counts with it."""
    leaves, structure = jax.tree.flatten(state)
    numbers = {i: leaf for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)}
    numbers = jax.lax.optimization_barrier(numbers)
    return jax.tree.unflatten(structure, [numbers.get(i, leaf) for i, leaf in enumerate(leaves)])

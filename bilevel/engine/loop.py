"""The compiled part of a run: draws for many steps at once, then steps without a branch or a draw."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bilevel._types import Array, Calls, Point
from bilevel.oracles import Oracles
from bilevel.solvers.base import Draw, Solver, State


class Page(NamedTuple):
    """Draws and costs of consecutive steps, from step ``first`` on.

    ``next_refresh[i]`` is the first position after i that refreshes, or the length of the page.
    """

    first: Array
    draws: Draw
    calls: Calls
    refreshes: Array
    next_refresh: Array


def run_key(seed: int) -> Array:
    """Return the key of a run; the generator is named so that no global setting changes it."""
    return jax.random.key(seed, impl="threefry2x32")


@jax.jit
def initial_state(solver: Solver, oracles: Oracles, start: Point) -> State:
    """Return the state before the first step."""
    return solver.init(oracles, start)


@partial(jax.jit, static_argnames="length")
def draw_page(solver: Solver, oracles: Oracles, key: Array, first: Array, length: int) -> Page:
    """Draw the steps first, …, first + length - 1; what a step draws does not depend on the page it is on."""

    def one(index: Array) -> tuple[Draw, Array, Calls]:
        draw = solver.draw(oracles, key, index)
        cost = solver.calls(oracles, draw, refresh=False)
        if not solver.restarts:
            return draw, jnp.array(False), _int32(cost)
        refreshes = solver.refreshes(index, draw)
        refresh_cost = solver.calls(oracles, draw, refresh=True)
        cost = jax.tree.map(partial(jnp.where, refreshes), _int32(refresh_cost), _int32(cost))
        return draw, refreshes, cost

    positions = jnp.arange(length, dtype=jnp.int32)
    draws, refreshes, calls = jax.vmap(one)(first + positions)
    # The minimum over positions >= i, then moved by one for positions > i.
    at_or_after = jax.lax.cummin(jnp.where(refreshes, positions, length), reverse=True)
    next_refresh = jnp.append(at_or_after[1:], jnp.int32(length))
    return Page(first, draws, calls, refreshes, next_refresh)


def _int32(calls: Calls) -> Calls:
    return jax.tree.map(lambda count: jnp.asarray(count, jnp.int32), calls)


def advanced(solver: Solver, oracles: Oracles, state: State, page: Page, start: Array, stop: Array) -> State:
    """Return the state after the steps at positions start, …, stop - 1 of the page."""

    def draw_at(position: Array) -> Any:
        return jax.tree.map(lambda leaf: leaf[position], page.draws)

    def step(position: Array, state: State) -> State:
        return solver.step(oracles, state, page.first + position, draw_at(position))

    def refresh(position: Array, state: State) -> State:
        return solver.refresh(oracles, state, page.first + position, draw_at(position))

    def steps(start: Array, stop: Array, state: State) -> State:
        return jax.lax.fori_loop(start, stop, step, state)

    def segment(carry: tuple[Array, State]) -> tuple[Array, State]:
        position, state = carry
        due = page.refreshes[position]
        state = jax.lax.cond(due, refresh, lambda _, state: state, position, state)
        end = jnp.minimum(page.next_refresh[position], stop)
        return end, steps(position + due.astype(jnp.int32), end, state)

    if not solver.restarts:
        return steps(start, stop, state)
    return jax.lax.while_loop(lambda carry: carry[0] < stop, segment, (start, state))[1]


class Compiled:
    """A function whose first argument is a solver, compiled as the solver needs it.

    XLA copies every table of SABA in every step unless copies are placed by an analysis that is off by default. Only
    solvers with tables ask for it: with loops compiled whole it has been seen to overwrite values of nested loops.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._plain = jax.jit(function)
        self._in_place = jax.jit(function, compiler_options={"xla_cpu_copy_insertion_use_region_analysis": True})

    def of(self, solver: Solver) -> Any:
        """Return the jitted function for solvers of this class."""
        return self._in_place if solver.keeps_tables else self._plain

    def __call__(self, solver: Solver, *arguments: Any) -> Any:
        """Call it."""
        return self.of(solver)(solver, *arguments)


advance = Compiled(advanced)

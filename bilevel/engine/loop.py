"""The compiled part of a run: draws for many steps at once, then steps without a branch or a draw."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.backend import get_backend

from bilevel._process import may_be_fused
from bilevel._programs import Compiled, compiled
from bilevel._types import Array, Calls, Point, Rows
from bilevel.engine.metrics import cheap_metrics
from bilevel.oracles import Oracles
from bilevel.solvers.base import Draw, Solver, SolverBase, State
from bilevel.solvers.f2sa import F2SA
from bilevel.solvers.mrbo import MRBO
from bilevel.solvers.pnpbo import PnPBO
from bilevel.solvers.saba import SABA
from bilevel.solvers.vrbo import VRBO


class Page(NamedTuple):
    """Draws and costs of consecutive steps, from step ``first`` on."""

    first: Array
    draws: Draw
    calls: Calls
    refreshes: Array
    next_refresh: Array  # for each position, the first one after it that refreshes, or the length of the page
    keys: Array | None = None  # of each step, where losses take keys
    rows: Rows = Rows()  # drawn in each step, of levels whose rows stay on the host


def run_key(seed: int) -> Array:
    """Return the key of a run; the generator is named so that no global setting changes it."""
    return jax.random.key(seed, impl="threefry2x32")


@Compiled
def initial_state(solver: Solver, oracles: Oracles, start: Point) -> State:
    """Return the state before the first step."""
    return solver.init(oracles, start)


@compiled("length")
def draw_page(solver: Solver, oracles: Oracles, key: Array, first: Array, length: int) -> Page:
    """Draw the steps first, …, first + length - 1; what a step draws does not depend on the page it is on."""

    def one(index: Array) -> tuple[Draw, Array, Calls, Array | None, Rows]:
        listening = oracles.recording()
        draw, words = solver.draw(listening, key, index), oracles.step_key(key, index)
        rows = listening.recorded()

        def cost(refresh: bool) -> Calls:
            return jax.tree.map(lambda count: jnp.asarray(count, jnp.int32), solver.calls(oracles, draw, refresh))

        if not solver.restarts:
            return draw, jnp.array(False), cost(refresh=False), words, rows
        refreshes = solver.refreshes(index, draw)
        costs = jax.tree.map(partial(jnp.where, refreshes), cost(refresh=True), cost(refresh=False))
        return draw, refreshes, costs, words, rows

    positions = jnp.arange(length, dtype=jnp.int32)
    draws, refreshes, calls, keys, rows = jax.vmap(one)(first + positions)
    # The minimum over positions >= i, then moved by one for positions > i.
    at_or_after = jax.lax.cummin(jnp.where(refreshes, positions, length), reverse=True)
    return Page(first, draws, calls, refreshes, jnp.append(at_or_after[1:], jnp.int32(length)), keys, rows)


def take_steps(
    solver: Solver,
    oracles: Oracles,
    state: State,
    page: Page,
    start: Array,
    stop: Array,
) -> State:
    """Return the state after the steps at positions start, …, stop - 1 of the page."""

    def take(method: Callable[..., State], position: Array, state: State) -> State:
        index, here = page.first + position, oracles.with_key(None if page.keys is None else page.keys[position])
        return method(here, state, index, jax.tree.map(lambda leaf: leaf[position], page.draws))

    step, refresh = partial(take, solver.step), partial(take, solver.refresh)

    def segment(carry: tuple[Array, State]) -> tuple[Array, State]:
        position, state = carry
        due = page.refreshes[position]
        state = jax.lax.cond(due, refresh, lambda _, state: state, position, state)
        end = jnp.minimum(page.next_refresh[position], stop)
        return end, jax.lax.fori_loop(position + due.astype(jnp.int32), end, step, state)

    if not solver.restarts:
        return jax.lax.fori_loop(start, stop, step, state)
    return jax.lax.while_loop(lambda carry: carry[0] < stop, segment, (start, state))[1]


# Solvers with tables whose fused loops a test compares with loops in pieces: tests/engine/test_cpu_loops.py.
COMPARED_WHEN_FUSED: tuple[type[Solver], ...] = (SABA, PnPBO)
# On an H200, µs of a step launched kernel by kernel, and in a graph: 156 and 199, 103 and 125, 1815 and 2212.
FASTER_WITHOUT_GRAPH: tuple[type[Solver], ...] = (MRBO, F2SA, VRBO)
IN_PLACE: dict[str, bool | str] = {"xla_cpu_copy_insertion_use_region_analysis": True}
COMMAND_BUFFERS = "xla_gpu_enable_command_buffer"
IN_A_GRAPH: dict[str, bool | str] = {
    COMMAND_BUFFERS: "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE",
    "xla_gpu_enable_while_loop_double_buffering": True,
}


def compiler_options(solver: Solver) -> dict[str, bool | str]:
    """Return what XLA is asked for, by the device and the solver.

    On a CPU XLA copies every table in every step unless copies are placed by an analysis that is off by default. With
    fused loops that analysis has been seen to overwrite values of nested loops, without an error. So only solvers with
    tables ask for it, and with fused loops only those that a test compares.
    """
    if has_cuda():
        return compiler_options_on_cuda(solver)
    in_place = solver.keeps_tables and (type(solver) in COMPARED_WHEN_FUSED or not may_be_fused())
    return IN_PLACE if in_place else {}


def compiler_options_on_cuda(solver: Solver) -> dict[str, bool | str]:
    """Return what XLA is asked for on an NVIDIA GPU.

    There the host launches every kernel of every step, unless the loop is a graph that the device runs by itself.
    Whoever says in ``XLA_FLAGS`` what is to be in such graphs has it so.
    """
    by_user = COMMAND_BUFFERS in os.environ.get("XLA_FLAGS", "")
    return {} if by_user or isinstance(solver, FASTER_WITHOUT_GRAPH) else IN_A_GRAPH


def has_cuda() -> bool:
    """Tell whether the default device is an NVIDIA GPU."""
    return "cuda" in get_backend().platform_version.lower()


def _take_steps_of_one_run(
    solver: Solver, oracles: Oracles, state: State, page: Page, start: Array, stop: Array
) -> State:
    if get_backend().platform == "cpu":
        oracles = oracles.for_one_run()
    return take_steps(solver, oracles, state, page, start, stop)


def _options_of_steps(solver: Solver, *_: Any) -> dict[str, bool | str]:
    return compiler_options(solver)


advance = Compiled(_take_steps_of_one_run, options=_options_of_steps)
# Numbers of a state by name: the cheap metrics, those of the problem that are compiled, those of the solver.
Evaluation: TypeAlias = tuple[dict[str, Array], dict[str, Array], dict[str, Array]]


class Programs(NamedTuple):
    """The compiled parts of a run, or of runs that step together, whose states have ``axes`` axes in front."""

    axes: int
    init: Callable[..., State]  # without the axis of seeds, which start alike
    draw: Callable[..., Page]
    advance: Callable[..., State]
    evaluate: Callable[..., Evaluation]
    points: Callable[..., Point]


def _evaluate(solver: SolverBase, oracles: Oracles, metrics: dict[str, Any], state: State) -> Evaluation:
    point = solver.evaluation_point(state)
    own = {name: metric(point) for name, metric in metrics.items()}
    return cheap_metrics(oracles, point), own, solver.diagnostics(state)


def _point(solver: SolverBase, state: State) -> Point:
    return solver.evaluation_point(state)


ONE_RUN = Programs(0, initial_state, draw_page, advance, Compiled(_evaluate), Compiled(_point))
ON_HOST = ONE_RUN._replace(evaluate=_evaluate, points=_point)  # the state may hold anything

_init_settings = Compiled(jax.vmap(initial_state, in_axes=(0, None, None)))
_advance_settings = jax.vmap(take_steps, in_axes=(0, None, 0, None, None, None))
_evaluate_settings = jax.vmap(_evaluate, in_axes=(None, None, None, 0))
_point_settings = jax.vmap(_point, in_axes=(None, 0))
SETTINGS = Programs(
    axes=1,
    init=_init_settings,
    draw=draw_page,
    advance=Compiled(_advance_settings, options=_options_of_steps),
    evaluate=Compiled(_evaluate_settings),
    points=Compiled(_point_settings),
)

# Draws and costs belong to a seed; full-batch passes must come at the same steps for all seeds of a program.
PAGE_AXES = Page(first=None, draws=0, calls=0, refreshes=None, next_refresh=None, keys=0, rows=0)  # type: ignore[arg-type]


@compiled("length")
def _draw_seeds(solver: Solver, oracles: Oracles, keys: tuple[Array, ...], first: Array, length: int) -> Page:
    pages = jax.vmap(lambda key: draw_page(solver, oracles, key, first, length))(jnp.stack(keys))
    return pages._replace(first=first, refreshes=pages.refreshes[0], next_refresh=pages.next_refresh[0])


_advance_seeds = jax.vmap(_advance_settings, in_axes=(None, None, 0, PAGE_AXES, None, None))
_evaluate_seeds = jax.vmap(_evaluate_settings, in_axes=(None, None, None, 0))
_point_seeds = jax.vmap(_point_settings, in_axes=(None, 0))
SEEDS_AND_SETTINGS = Programs(
    axes=2,
    init=_init_settings,
    draw=_draw_seeds,
    advance=Compiled(_advance_seeds, options=_options_of_steps),
    evaluate=Compiled(_evaluate_seeds),
    points=Compiled(_point_seeds),
)

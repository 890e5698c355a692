"""The compiled part of a run: draws for many steps at once, then steps without a branch or a draw."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.backend import get_backend

from bilevel._core.compilation import Compiled, compiled
from bilevel._core.types import Array, Calls, Point, Rows
from bilevel._process import may_be_fused
from bilevel.engine.metrics import cheap_metrics
from bilevel.oracles import Oracles
from bilevel.solvers import SOLVERS
from bilevel.solvers.base import Solver, SolverBase

State: TypeAlias = Any


class Page(NamedTuple):
    """Draws and costs of consecutive steps, starting with step ``first``.

    Attributes
    ----------
    refreshes : which steps are refreshes; None for a solver without refreshes
    next_refresh : for each position, the next position that is a refresh, or the length of the page
    keys : the key of each step, if losses take keys
    rows : the rows drawn in each step, of levels whose data stay on the host
    """

    first: Array
    draws: Any
    calls: Calls
    refreshes: Array | None
    next_refresh: Array | None
    keys: Array | None = None
    rows: Rows = Rows()


def run_key(seed: int) -> Array:
    """Return the key of a run; the generator is named so that no global setting changes it."""
    return jax.random.key(seed, impl="threefry2x32")


@Compiled
def initial_state(solver: Solver, oracles: Oracles, start: Point) -> State:
    """Return the state before the first step."""
    return solver.init(oracles, start)


@compiled("length")
def draw_page(solver: Solver, oracles: Oracles, key: Array, first: Array, length: int) -> Page:
    """Draw the steps first, …, first + length - 1; the draws of a step do not depend on the page it is on."""

    def one(index: Array) -> tuple[Any, Array | None, Calls, Array | None, Rows]:
        listening = oracles.recording()
        draw, words = solver.draw(listening, key, index), oracles.step_key(key, index)
        rows = listening.recorded()

        def cost(refresh: bool) -> Calls:
            return jax.tree.map(lambda count: jnp.asarray(count, jnp.int32), solver.calls(oracles, draw, refresh))

        refreshes = solver.refreshes(index, draw)
        if refreshes is None:
            return draw, None, cost(refresh=False), words, rows
        costs = jax.tree.map(partial(jnp.where, refreshes), cost(refresh=True), cost(refresh=False))
        return draw, refreshes, costs, words, rows

    positions = jnp.arange(length, dtype=jnp.int32)
    draws, refreshes, calls, keys, rows = jax.vmap(one)(first + positions)
    if refreshes is None:
        return Page(first, draws, calls, None, None, keys, rows)
    # The minimum over positions >= i, shifted by one to positions > i.
    at_or_after = jax.lax.cummin(jnp.where(refreshes, positions, length), reverse=True)
    return Page(first, draws, calls, refreshes, jnp.append(at_or_after[1:], jnp.int32(length)), keys, rows)


def for_one_run(oracles: Oracles) -> Oracles:
    """Return the oracles for steps of a single run, which no ``vmap`` batches."""
    return oracles.for_one_run() if get_backend().platform == "cpu" else oracles


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

    if page.refreshes is None or page.next_refresh is None:
        return jax.lax.fori_loop(start, stop, step, state)
    refreshes, next_refresh = page.refreshes, page.next_refresh

    def segment(carry: tuple[Array, State]) -> tuple[Array, State]:
        position, state = carry
        due = refreshes[position]
        state = jax.lax.cond(due, refresh, lambda _, state: state, position, state)
        end = jnp.minimum(next_refresh[position], stop)
        return end, jax.lax.fori_loop(position + due.astype(jnp.int32), end, step, state)

    return jax.lax.while_loop(lambda carry: carry[0] < stop, segment, (start, state))[1]


IN_PLACE: dict[str, bool | str] = {"xla_cpu_copy_insertion_use_region_analysis": True}
COMMAND_BUFFERS = "xla_gpu_enable_command_buffer"
IN_A_GRAPH: dict[str, bool | str] = {
    COMMAND_BUFFERS: "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE",
    "xla_gpu_enable_while_loop_double_buffering": True,
}


def compiler_options(solver: Solver, *_: Any) -> dict[str, bool | str]:
    """Return the compiler options of the loop of a solver.

    On a CPU, XLA copies every table in every step unless an analysis that is off by default places the copies. With
    fused loops this analysis has been seen to overwrite values of nested loops without an error. So only solvers with
    tables use it, and with fused loops only those of this package, for which a test compares the results.
    """
    if has_cuda():
        return compiler_options_on_cuda(solver)
    is_tested = SOLVERS.get(type(solver).__name__) is type(solver)
    return IN_PLACE if solver.keeps_tables and (is_tested or not may_be_fused()) else {}


def compiler_options_on_cuda(solver: Solver) -> dict[str, bool | str]:
    """Return the compiler options of the loop of a solver on an NVIDIA GPU.

    The host launches every kernel of every step there, unless the loop is a graph that the device runs by itself. A
    value set by the user in ``XLA_FLAGS`` takes precedence.
    """
    by_user = COMMAND_BUFFERS in os.environ.get("XLA_FLAGS", "")
    return {} if by_user or solver.faster_without_cuda_graph else IN_A_GRAPH


def has_cuda() -> bool:
    """Return True if the default device is an NVIDIA GPU."""
    return "cuda" in get_backend().platform_version.lower()


advance = Compiled(take_steps, options=compiler_options)
# Numbers of a state by name: the cheap metrics, the compiled metrics of the problem, the diagnostics of the solver.
Evaluation: TypeAlias = tuple[dict[str, Array], dict[str, Array], dict[str, Array]]


class Programs(NamedTuple):
    """The compiled parts of a run, or of runs that step together, whose states have ``axes`` leading axes."""

    axes: int
    init: Callable[..., State]  # without the axis of seeds, which all have the same start
    draw: Callable[..., Page]
    advance: Callable[..., State]
    evaluate: Callable[..., Evaluation]
    points: Callable[..., Point]


def _evaluate(solver: SolverBase, oracles: Oracles, metrics: dict[str, Any], state: State) -> Evaluation:
    monitor = solver.monitor
    point = monitor.evaluation_point(state)
    own = {name: metric(point) for name, metric in metrics.items()}
    return cheap_metrics(oracles, point), own, monitor.diagnostics(state)


def _point(solver: SolverBase, state: State) -> Point:
    return solver.monitor.evaluation_point(state)


ONE_RUN = Programs(0, initial_state, draw_page, advance, Compiled(_evaluate), Compiled(_point))
ON_HOST = ONE_RUN._replace(evaluate=_evaluate, points=_point)  # a state may contain anything

_init_settings = Compiled(jax.vmap(initial_state, in_axes=(0, None, None)))
_advance_settings = jax.vmap(take_steps, in_axes=(0, None, 0, None, None, None))
_evaluate_settings = jax.vmap(_evaluate, in_axes=(None, None, None, 0))
_point_settings = jax.vmap(_point, in_axes=(None, 0))
SETTINGS = Programs(
    axes=1,
    init=_init_settings,
    draw=draw_page,
    advance=Compiled(_advance_settings, options=compiler_options),
    evaluate=Compiled(_evaluate_settings),
    points=Compiled(_point_settings),
)

# Draws and costs belong to a seed; all seeds of a program must have their full-batch passes at the same steps.
PAGE_AXES = Page(first=None, draws=0, calls=0, refreshes=None, next_refresh=None, keys=0, rows=0)  # type: ignore[arg-type]


@compiled("length")
def _draw_seeds(solver: Solver, oracles: Oracles, keys: tuple[Array, ...], first: Array, length: int) -> Page:
    pages = jax.vmap(lambda key: draw_page(solver, oracles, key, first, length))(jnp.stack(keys))
    if pages.refreshes is None or pages.next_refresh is None:
        return pages._replace(first=first)
    return pages._replace(first=first, refreshes=pages.refreshes[0], next_refresh=pages.next_refresh[0])


_advance_seeds = jax.vmap(_advance_settings, in_axes=(None, None, 0, PAGE_AXES, None, None))
_evaluate_seeds = jax.vmap(_evaluate_settings, in_axes=(None, None, None, 0))
_point_seeds = jax.vmap(_point_settings, in_axes=(None, 0))
SEEDS_AND_SETTINGS = Programs(
    axes=2,
    init=_init_settings,
    draw=_draw_seeds,
    advance=Compiled(_advance_seeds, options=compiler_options),
    evaluate=Compiled(_evaluate_seeds),
    points=Compiled(_point_seeds),
)

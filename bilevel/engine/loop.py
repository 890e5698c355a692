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
from bilevel.solvers.tasks import evaluation_point, on_tasks

State: TypeAlias = Any


class Page(NamedTuple):
    """Draws and costs of consecutive steps, starting with step ``first``."""

    first: Array
    draws: Any
    calls: Calls
    refreshes: Array | None  # which steps are refreshes; None for a solver without refreshes
    next_refresh: Array | None  # for each position, the next position that is a refresh, or the length of the page
    keys: Array | None = None  # of each step, if losses take keys
    rows: Rows = Rows()  # drawn in each step, of levels whose data stay on the host


def run_key(seed: int) -> Array:
    """Return the key of a run; the generator is named so that no global setting changes it."""
    return jax.random.key(seed, impl="threefry2x32")


@Compiled
def initial_state(solver: Solver, oracles: Oracles, start: Point) -> State:
    """Return the state before the first step."""
    return on_tasks(solver, oracles).init(oracles, start)


@compiled("length")
def draw_page(solver: Solver, oracles: Oracles, key: Array, first: Array, length: int) -> Page:
    """Draw the steps first, …, first + length - 1; the draws of a step do not depend on the page it is on."""
    solver = on_tasks(solver, oracles)

    def one(index: Array) -> Page:
        listening = oracles.recording()
        draw = solver.draw(listening, key, index)
        refreshes = solver.refreshes(index, draw)

        def cost(refresh: bool) -> Calls:
            return jax.tree.map(lambda count: jnp.asarray(count, jnp.int32), solver.calls(oracles, draw, refresh))

        calls = cost(refresh=False)
        if refreshes is not None:
            calls = jax.tree.map(partial(jnp.where, refreshes), cost(refresh=True), calls)
        return Page(index, draw, calls, refreshes, None, oracles.step_key(key, index), listening.recorded())

    positions = jnp.arange(length, dtype=jnp.int32)
    page = jax.vmap(one)(first + positions)._replace(first=first)
    if page.refreshes is None:
        return page
    # The minimum over positions >= i, shifted by one to positions > i.
    at_or_after = jax.lax.cummin(jnp.where(page.refreshes, positions, length), reverse=True)
    return page._replace(next_refresh=jnp.append(at_or_after[1:], jnp.int32(length)))


def for_one_run(oracles: Oracles) -> Oracles:
    """Return the oracles for steps of a single run, which no ``vmap`` batches."""
    return oracles.for_one_run() if get_backend().platform == "cpu" else oracles


def take_steps(solver: Solver, oracles: Oracles, state: State, page: Page, start: Array, stop: Array) -> State:
    """Return the state after the steps at positions start, …, stop - 1 of the page."""
    solver = on_tasks(solver, oracles)

    def take(method: Callable[..., State], position: Array, state: State) -> State:
        index, here = page.first + position, oracles.with_key(None if page.keys is None else page.keys[position])
        return method(here, state, index, jax.tree.map(lambda leaf: leaf[position], page.draws))

    step = partial(take, solver.step)
    if page.refreshes is None or page.next_refresh is None:
        return jax.lax.fori_loop(start, stop, step, state)
    refresh, refreshes, next_refresh = partial(take, solver.refresh), page.refreshes, page.next_refresh

    def segment(carry: tuple[Array, State]) -> tuple[Array, State]:
        position, state = carry
        due = refreshes[position]
        state = jax.lax.cond(due, refresh, lambda _, state: state, position, state)
        end = jnp.minimum(next_refresh[position], stop)
        return end, jax.lax.fori_loop(position + due.astype(jnp.int32), end, step, state)

    return jax.lax.while_loop(lambda carry: carry[0] < stop, segment, (start, state))[1]


IN_ORDER: dict[str, bool | str] = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
IN_PLACE: dict[str, bool | str] = {"xla_cpu_copy_insertion_use_region_analysis": True}
COMMAND_BUFFERS = "xla_gpu_enable_command_buffer"
IN_A_GRAPH: dict[str, bool | str] = {
    COMMAND_BUFFERS: "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE",
    "xla_gpu_enable_while_loop_double_buffering": True,
}


def compiler_options(solver: Solver, *_: Any) -> dict[str, bool | str]:
    """Return the compiler options of the loop of a solver.

    On an NVIDIA GPU, the host launches every kernel of every step, unless the loop is a graph that the device runs by
    itself. A value set by the user in ``XLA_FLAGS`` takes precedence.

    On a CPU, XLA copies every table in every step unless an analysis that is off by default places the copies. With
    fused loops this analysis has been seen to overwrite values of nested loops without an error. So only solvers with
    tables use it, and with fused loops only those of this package, for which a test compares the results.
    """
    if "cuda" in get_backend().platform_version.lower():
        by_user = COMMAND_BUFFERS in os.environ.get("XLA_FLAGS", "")
        return {} if by_user or solver.faster_without_cuda_graph else IN_A_GRAPH
    is_tested = SOLVERS.get(type(solver).__name__) is type(solver)
    return IN_PLACE if solver.keeps_tables and (is_tested or not may_be_fused()) else {}


def options_together(solver: Solver, *_: Any) -> dict[str, bool | str]:
    """Return the compiler options of the loop of several runs that step together.

    On a CPU their operations run one after the other. With JAX 0.10, a sweep of AutoSRBA on data cleaning never ended
    if XLA ran them concurrently: all of its threads waited for each other.
    """
    in_order = IN_ORDER if get_backend().platform == "cpu" and not may_be_fused() else {}
    return compiler_options(solver) | in_order


advance = Compiled(take_steps, options=compiler_options)
# The cheap metrics, the compiled metrics of the problem, and the diagnostics of the solver, by name.
Evaluation: TypeAlias = dict[str, Array]


class Programs(NamedTuple):
    """The compiled parts of a run, or of runs that step together, whose states have ``axes`` leading axes."""

    axes: int
    init: Callable[..., State]  # without the axis of seeds, which all have the same start
    draw: Callable[..., Page]
    advance: Compiled[State]
    evaluate: Callable[..., Evaluation]
    point: Callable[..., Point]


def _evaluate(solver: SolverBase, oracles: Oracles, metrics: dict[str, Any], state: State) -> Evaluation:
    point = evaluation_point(solver, oracles, state)
    own = {name: metric(point) for name, metric in metrics.items()}
    return cheap_metrics(oracles, point) | own | solver.monitor.diagnostics(state)


def _point(solver: SolverBase, state: State) -> Point:
    return solver.monitor.evaluation_point(state)


# Draws and costs belong to a seed; all seeds of a program must have their full-batch passes at the same steps.
PAGE_AXES = Page(first=None, draws=0, calls=0, refreshes=None, next_refresh=None, keys=0, rows=0)  # type: ignore[arg-type]


@compiled("length")
def _draw_seeds(solver: Solver, oracles: Oracles, keys: tuple[Array, ...], first: Array, length: int) -> Page:
    pages = jax.vmap(lambda key: draw_page(solver, oracles, key, first, length))(jnp.stack(keys))
    one = jax.tree.map(lambda leaf: leaf[0], (pages.refreshes, pages.next_refresh))
    return pages._replace(first=first, refreshes=one[0], next_refresh=one[1])


def _step_together(axes: int) -> Programs:
    """Return the programs of all settings with one seed, or of all seeds and settings."""
    take = jax.vmap(take_steps, in_axes=(0, None, 0, None, None, None))
    evaluate, point = jax.vmap(_evaluate, in_axes=(0, None, None, 0)), jax.vmap(_point, in_axes=(0, 0))
    draw = draw_page
    if axes == 2:
        take, draw = jax.vmap(take, in_axes=(None, None, 0, PAGE_AXES, None, None)), _draw_seeds
        evaluate, point = jax.vmap(evaluate, in_axes=(None, None, None, 0)), jax.vmap(point, in_axes=(None, 0))
    init = Compiled(jax.vmap(initial_state, in_axes=(0, None, None)))
    return Programs(axes, init, draw, Compiled(take, options=options_together), Compiled(evaluate), Compiled(point))


ONE_RUN = Programs(0, initial_state, draw_page, advance, Compiled(_evaluate), Compiled(_point))
ON_HOST = ONE_RUN._replace(evaluate=_evaluate, point=_point)  # a state may contain anything
SETTINGS, SEEDS_AND_SETTINGS = _step_together(1), _step_together(2)

"""Steps of runs, with their clock and their count of oracle calls.

The runs of a sweep step together: each seed with each setting. The program of a single run has no batch axes.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from threading import Semaphore
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bilevel._core import trees
from bilevel._core.compilation import arithmetic
from bilevel._core.types import Point, Rows
from bilevel.engine.loop import ON_HOST, ONE_RUN, Evaluation, Page, Programs, State, for_one_run, run_key
from bilevel.engine.metrics import check_metrics
from bilevel.oracles import HostSamples, Oracles, TaskOracles
from bilevel.oracles.host_samples import AHEAD, in_thread
from bilevel.problems import BilevelProblem
from bilevel.problems.base import NOT_SOLVED
from bilevel.problems.checks import memory_bytes
from bilevel.solvers.base import Solver, SolverBase
from bilevel.solvers.host import HostSolver, OutOfTime, time_limit
from bilevel.solvers.tasks import check_on_tasks, on_tasks

PAGE_LENGTH, PAGE_BYTES = 4096, 2**28  # steps drawn at once, and the largest size of their draws
_PART_BYTES = 2**26  # rows of the host are transferred in parts of this size


class Prepared(NamedTuple):
    """A solver with its defaults filled in, and the oracles and the start of its steps."""

    solver: SolverBase
    oracles: Oracles
    start: Point
    dtype: np.dtype


def prepare(problem: BilevelProblem, solver: SolverBase) -> Prepared:
    """Fill in the defaults of the solver, lay out the batches, and raise an error if they do not fit the problem."""
    check_metrics(problem.metrics)
    _check_kind(problem, solver)
    dtype = np.dtype(np.float64) if isinstance(solver, HostSolver) else problem.dtype
    _check_floats(solver, dtype)
    with arithmetic(dtype, problem):
        start = trees.to_numpy(problem.start, dtype)
        solver = configure(problem, solver)
        _check_batches(problem, solver)
        inner, outer = solver.batches()
        oracles = problem.oracles.with_batches(inner, solver.sampling, outer)
        if oracles.full_inner and solver.sampling == "iid":  # would draw with replacement
            oracles = replace(oracles, inner_samples=oracles.inner_samples.with_batches(inner, "blocks"))
        if isinstance(oracles, TaskOracles):
            check_on_tasks(solver, oracles, start)
        if isinstance(solver, HostSolver):
            oracles = oracles.astype(dtype)
        if oracles.is_on_host:
            _check_tables(solver, oracles, start)
    return Prepared(solver, oracles, start, dtype)


def configure(problem: BilevelProblem, solver: SolverBase) -> SolverBase:
    """Return the solver with its defaults filled in, after checking its bounds and transformations."""
    if problem.oracles.full_inner and isinstance(solver, Solver):
        solver = replace(solver, batch_size=problem.n_inner, outer_batch_size=solver.batches()[1])
    solver = solver.configure(problem)
    if isinstance(solver, Solver):
        solver.moves.check(type(solver).__name__, problem.start)
    return solver


def _check_kind(problem: BilevelProblem, solver: SolverBase) -> None:
    """Raise ValueError if the solver does not fit the kind of the rows, of the losses or of the outer term."""
    me, oracles = type(solver).__name__, problem.oracles
    if oracles.is_on_host and not isinstance(solver, Solver):
        raise ValueError(f"`{me}`: {NOT_SOLVED}. Take a solver such as SRBA or SOBA.")
    if oracles.takes_keys and (not isinstance(solver, Solver) or solver.needs_finite_sum):
        raise ValueError(
            f"`{me}`: it remembers derivatives of rows, and these losses take a `key`, so that their derivatives "
            "differ each time. Use a solver such as SOBA, or losses without `key`."
        )
    options = [f"({name}=…)" for name in ("outer_optimizer", "outer_bounds") if getattr(solver, name, None) is not None]
    if oracles.outer_term is not None and (options or not solver.takes_outer_term):
        use = "use a solver such as SRBA, SOBA or HOAG without such options, and give bounds to the problem"
        # The defaults of a solver that takes no term in any case are not to blame.
        where = f"`{me}{options[0] if solver.takes_outer_term else ''}`"
        raise ValueError(f"{where}: it would not take the step of x that `with_outer_term` defines; {use}.")


def _check_floats(solver: SolverBase, dtype: np.dtype) -> None:
    limits = np.finfo(dtype)
    low, high = float(limits.smallest_subnormal), float(limits.max)
    for name, value in solver.parameters().items():
        if isinstance(value, float) and value and not low <= abs(value) <= high:
            way = "build the problem with dtype='float64', or take another"
            raise ValueError(f"`{type(solver).__name__}({name}={value!r})`: is out of the range of {dtype}; {way}.")


def _check_batches(problem: BilevelProblem, solver: SolverBase) -> None:
    """Raise ValueError if a batch is larger than its level."""
    me, n_inner, n_outer = type(solver).__name__, problem.n_inner, problem.n_outer
    inner, outer = solver.batches()
    if inner != outer and problem.oracles.shares_rows:
        raise ValueError(
            f"`{me}(outer_batch_size={outer})`: both levels of this problem share each batch; leave it out."
        )
    sizes = {"batch_size": (inner, n_inner), "outer_batch_size": (outer, n_outer)}
    if inner == outer:
        sizes = {"batch_size": (inner, min(n_inner, n_outer))}
    for name, (size, most) in sizes.items():
        if size > most and solver.sampling != "full":
            there = f"{n_inner} inner and {n_outer} outer samples"
            way = f"use {name} <= {most}, or sampling='full'"
            raise ValueError(f"`{me}({name}={size})` exceeds the data: {there}; {way}.")


def _check_tables(solver: SolverBase, oracles: Oracles, start: Point) -> None:
    """Raise ValueError if the state does not fit into memory: there may be very many rows on the host."""
    state = jax.eval_shape(solver.init, oracles, start)
    needed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    there = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", memory_bytes())
    if needed > there:
        raise ValueError(
            f"`{type(solver).__name__}`: its tables take {needed / 2**30:.3g} GiB, and there are {there / 2**30:.3g}; "
            "use larger batches, or a solver without tables such as SRBA."
        )


class Position(NamedTuple):
    """The state of runs and their costs so far; ``calls`` by seed and kind."""

    state: State
    step: int
    calls: np.ndarray
    seconds: float


class Steps(ABC):
    """Takes steps of one run, or of several (the settings of each seed, in this order), within `arithmetic(dtype)`."""

    programs: Programs = ONE_RUN
    n_seeds = n_settings = 1
    position: Position
    settings: Any  # the solver; for several runs, one whose floats have an axis of the settings
    steps_per_second = 0.0
    max_seconds = math.inf  # a step of a `HostSolver` that takes until twice this time is given up
    finite = True  # False if the step after the present position gives an iterate that is not finite
    target = 0  # the step that the last call of `advance` was to reach

    def __init__(self, prepared: Prepared) -> None:
        self.solver, self.oracles, self.start, self.dtype = prepared
        self.alone = self.programs.axes == 0  # a single run has a clock of its own
        self.begin()

    @abstractmethod
    def begin(self) -> None:
        """Go to the start; the clock includes what a solver computes there."""

    @abstractmethod
    def last_steps(self, max_calls: float) -> np.ndarray:
        """Return, by run, a step up to which at most ``max_calls`` are made; the present one if no further step is."""

    @abstractmethod
    def advance(self, stop: int) -> None:
        """Go towards ``stop``, at least one step. With ``stop`` at the present step, this only compiles."""

    def evaluate(self, metrics: dict[str, Any]) -> Evaluation:
        """Return the metrics by name, each an array with an entry per run."""
        found = self.programs.evaluate(self.settings, self.oracles, metrics, self.position.state)
        return jax.tree.map(lambda column: np.asarray(column, np.float64).reshape(-1), found)

    def points(self) -> Point:
        """Return the points at which the states are evaluated, in NumPy, with an axis of the runs in front."""
        points = trees.to_numpy(self.programs.point(self.settings, self.position.state))
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[self.programs.axes :]), points)


class HostSteps(Steps):
    """Steps of a solver that is not compiled, one at a time."""

    programs = ON_HOST
    solver: HostSolver

    def __init__(self, prepared: Prepared) -> None:
        self.settings = prepared.solver
        super().__init__(prepared)
        self.solver.warm_up(self.oracles, self.start)

    def begin(self) -> None:
        state = self.solver.init(self.oracles, self.start)
        self.position, self.finite = Position(state, 0, np.array([state.calls]), 0.0), True

    def last_steps(self, max_calls: float) -> np.ndarray:
        _, step, calls, _ = self.position
        return np.array([step + int(calls.sum() < max_calls)])

    def advance(self, stop: int) -> None:
        before, began = self.position, time.perf_counter()
        if stop == before.step:
            return
        self.target, after = before.step + 1, before
        try:
            with time_limit(2 * self.max_seconds - before.seconds):  # a step that began in time may finish
                state = self.solver.step(self.oracles, before.state, before.step)
            self.finite = trees.is_finite(state.point)
            if self.finite:
                after = Position(state, before.step + 1, np.array([state.calls]), 0.0)
        except OutOfTime:  # the step is discarded
            pass
        self.position = after._replace(seconds=before.seconds + time.perf_counter() - began)


class _OpenPage(NamedTuple):
    """The page that holds the next step; ``calls[:, k]`` are the calls after k of its steps, by seed and kind."""

    draws: Page
    first: int
    last: int
    calls: np.ndarray
    totals: np.ndarray


class CompiledSteps(Steps):
    """Compiled steps of all settings with one seed, or with several that take the same steps."""

    solver: Solver

    def __init__(
        self, prepared: Prepared, seeds: Sequence[int], settings: Sequence[Solver] = (), programs: Programs = ONE_RUN
    ) -> None:
        assert isinstance(prepared.solver, Solver)
        keys = tuple(run_key(seed) for seed in seeds)
        self._key: Any = keys if programs.axes == 2 else keys[0]
        prepared = prepared._replace(solver=prepared.solver.cast(prepared.dtype))
        self.settings = prepared.solver
        if settings:
            casts = [setting.cast(prepared.dtype) for setting in settings]
            self.settings = jax.tree.map(lambda *leaves: np.stack(leaves), *casts)
        self.programs, self.n_seeds, self.n_settings = programs, len(seeds), max(1, len(settings))
        self._page: _OpenPage | None = None
        self._page_length = _page_length(prepared, self.n_seeds)
        self._oracles_of_steps = for_one_run(prepared.oracles) if programs.axes == 0 else prepared.oracles
        is_on_host = prepared.oracles.is_on_host
        self._feed = Feed(self._oracles_of_steps, prepared.dtype, self._page_length) if is_on_host else None
        super().__init__(prepared)

    def begin(self) -> None:
        first = on_tasks(self.solver, self.oracles).init_calls(self.oracles)
        calls = np.tile(np.array(first, np.int64), (self.n_seeds, 1))
        began = time.perf_counter()
        state = self.programs.init(self.settings, self.oracles, self.start)
        if self.programs.axes == 2:
            state = jax.tree.map(lambda leaf: jnp.stack([leaf] * self.n_seeds), state)
        jax.block_until_ready(state)
        self.position, self._page, self.finite = Position(state, 0, calls, time.perf_counter() - began), None, True

    def last_steps(self, max_calls: float) -> np.ndarray:
        page = self._open_page()
        # Seeds differ in cost because of short blocks, so each has a last step of its own.
        lasts = page.first + np.array([np.searchsorted(total, max_calls, side="right") for total in page.totals])
        return np.repeat(lasts, self.n_settings)

    def advance(self, stop: int) -> None:
        page, before = self._open_page(), self.position
        self.target = stop = min(stop, page.last)
        parts: Any = [(self._oracles_of_steps, before.step - page.first, stop - page.first)]
        if self._feed is not None:
            parts = self._feed.parts(*parts[0][1:])
        state, began = before.state, time.perf_counter()
        for oracles, *positions in parts:
            previous = state
            program, leaves = self.programs.advance.find(
                self.settings, oracles, state, page.draws, *map(np.int32, positions)
            )
            state = program(leaves)
            jax.block_until_ready(previous)  # the rows of at most two parts are on the device
        jax.block_until_ready(state)
        elapsed = time.perf_counter() - began
        # In a sweep, runs are checked when they are evaluated, because the others continue.
        if self.alone and not trees.is_finite(self.programs.point(self.settings, state)):
            self._approach(before, stop)
            return
        self.steps_per_second = (stop - before.step) / elapsed
        self.position = Position(state, stop, page.calls[:, stop - page.first], before.seconds + elapsed)

    def _approach(self, before: Position, stop: int) -> None:
        """Go to the last finite state before ``stop`` by bisection; steps repeat bit for bit."""
        middle = (before.step + stop) // 2
        if middle == before.step:
            self.finite = False
            return
        self.advance(middle)
        if self.finite:
            self.advance(stop)

    def _open_page(self) -> _OpenPage:
        """Return the page that holds the next step; the clock includes drawing it."""
        state, step, calls, seconds = self.position
        if self._page is not None and step < self._page.last:
            return self._page
        began = time.perf_counter()
        draws = self.programs.draw(self.solver, self.oracles, self._key, np.int32(step), self._page_length)
        jax.block_until_ready(draws)
        if self._feed is not None:
            self._feed.open(draws.rows, self.n_seeds)
            draws = draws._replace(rows=Rows())
        self.position = Position(state, step, calls, seconds + time.perf_counter() - began)
        costs = np.stack([np.asarray(kind, np.int64).reshape(self.n_seeds, -1) for kind in draws.calls], axis=-1)
        after = np.cumsum(np.concatenate([calls[:, None], costs], axis=1), axis=1)
        self._page = _OpenPage(draws, step, step + self._page_length, after, after[:, 1:].sum(axis=2))
        return self._page


def _page_length(prepared: Prepared, n_seeds: int) -> int:
    """Return how many steps are drawn at once, or raise ValueError if a single draw is too large."""
    solver, drawing = prepared.solver, on_tasks(prepared.solver, prepared.oracles)
    draw = jax.eval_shape(lambda: drawing.draw(prepared.oracles, run_key(0), jnp.zeros((), jnp.int32)))
    size = max(1, 4 * sum(leaf.size for leaf in jax.tree.leaves(draw)))
    if size > PAGE_BYTES:
        sizes = [f"{name}={value}" for name, value in solver.parameters().items() if type(value) is int]
        raise ValueError(
            f"`{type(solver).__name__}({', '.join(sizes)})`: one step draws {size / 2**30:.3g} GiB of rows, at most "
            f"{PAGE_BYTES / 2**30:.3g} are possible; use fewer or smaller batches."
        )
    return max(1, min(PAGE_LENGTH, PAGE_BYTES // (n_seeds * size)))


class Feed:
    """Reads the rows of a page from the host, part by part, in a thread and ahead of the steps."""

    def __init__(self, oracles: Oracles, dtype: np.dtype, page_length: int) -> None:
        self._oracles, self._dtype, self._page_length = oracles, dtype, page_length
        levels = {"inner_samples": oracles.inner_samples, "outer_samples": oracles.outer_samples}
        self._levels = {name: level for name, level in levels.items() if isinstance(level, HostSamples)}
        self._gate = Semaphore(1)  # parts are read one at a time
        self._parts: dict[int, Future[Oracles]] = {}
        self._rows: dict[str, np.ndarray] = {}  # by level: the rows of the page, by seed, step and draw

    def open(self, rows: Rows, n_seeds: int) -> None:
        """Begin a page with these draws."""
        for part in self._parts.values():
            part.cancel()
        self._parts = {}
        drawn = {"inner_samples": rows.inner, "outer_samples": rows.outer}
        drawn = {name: np.asarray(drawn[name]) for name in self._levels if drawn[name] is not None}
        self._rows = {name: one.reshape(n_seeds, -1, one.shape[-1]) for name, one in drawn.items()}
        step_bytes = 0
        for name, one in self._rows.items():
            level = self._levels[name]
            row_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(level.reader.data.head))
            step_bytes += row_bytes * one[:, 0].size * (1 if level.sampling == "iid" else level.batch_size)
        self._length = max(1, min(self._page_length, _PART_BYTES // max(1, step_bytes)))

    def parts(self, start: int, stop: int) -> Iterator[tuple[Oracles, int, int]]:
        """Yield oracles that hold the rows of some steps, with the positions of these steps, from start to stop."""
        for number in range(start // self._length, max(start, stop - 1) // self._length + 1):
            first = number * self._length
            yield self._held(number), max(start, first), min(stop, first + self._length)

    def _held(self, number: int) -> Oracles:
        last = -(-self._page_length // self._length) - 1
        for coming in range(number, min(number + AHEAD, last) + 1):
            if coming not in self._parts:
                self._parts[coming] = in_thread(self._hold, coming, gate=self._gate)
        self._parts = {coming: part for coming, part in self._parts.items() if coming >= number}
        return self._parts[number].result()

    def _hold(self, number: int) -> Oracles:
        """Return oracles that hold the rows of a part; it runs in a thread, which has JAX settings of its own."""
        held: dict[str, Any] = {}
        with arithmetic(self._dtype):
            for name, rows in self._rows.items():
                level = self._levels[name]
                part = rows[:, number * self._length : (number + 1) * self._length]
                units = level.n if level.sampling == "iid" else level.n_blocks
                held[name] = level.hold(np.unique(part), min(units, self._length * rows[:, 0].size))
            return replace(self._oracles, **held)

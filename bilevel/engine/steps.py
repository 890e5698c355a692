"""Steps of runs, with their clock and their count of oracle calls.

`Steps` holds an array of runs, seeds by settings, that step together. A single run is an array of shape (1, 1), and its
program has no batch axes.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from threading import Semaphore
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from bilevel._core import trees
from bilevel._core.compilation import arithmetic
from bilevel._core.types import Point, Rows
from bilevel.engine.loop import ON_HOST, ONE_RUN, Evaluation, Page, Programs, State, for_one_run, run_key
from bilevel.engine.metrics import check_metrics
from bilevel.oracles import HostSamples, Oracles, Samples
from bilevel.oracles.host_samples import in_thread
from bilevel.problems import BilevelProblem
from bilevel.problems.base import NOT_SOLVED
from bilevel.problems.checks import memory_bytes
from bilevel.solvers.base import Solver, SolverBase
from bilevel.solvers.host import HostSolver, OutOfTime, time_limit

PAGE_LENGTH, PAGE_BYTES = 4096, 2**28  # steps drawn at once, and the largest size of their draws
_PART_BYTES = 2**26  # rows of the host are transferred in parts of this size
# A function of a step, the calls up to it, the first step of a page and the calls after each step of the page. It
# returns the position on the page at whose end an evaluation is due, which may lie beyond the page.
NextEvaluation: TypeAlias = Callable[[int, int, int, np.ndarray], int]


class Prepared(NamedTuple):
    """A solver with its defaults filled in, and the oracles and the start of its steps."""

    solver: SolverBase
    oracles: Oracles
    start: Point
    dtype: np.dtype


def prepare(problem: BilevelProblem, solver: SolverBase) -> Prepared:
    """Fill in the defaults of the solver, lay out the batches, and raise an error if they do not fit the problem."""
    check_metrics(problem.metrics)
    _check_host(problem, solver)
    _check_keys(problem, solver)
    dtype = np.dtype(np.float64) if isinstance(solver, HostSolver) else problem.dtype
    _check_floats(solver, dtype)
    with arithmetic(dtype):
        start = trees.to_numpy(problem.start, dtype)
        solver = configure(problem, solver)
        _check_batches(problem, solver)
        inner, outer = solver.batches()
        oracles = problem.oracles.with_batches(inner, solver.sampling, outer)
        if isinstance(solver, HostSolver):
            oracles = oracles.astype(dtype)
        if oracles.is_on_host:
            _check_tables(solver, oracles, start)
    return Prepared(solver, oracles, start, dtype)


def configure(problem: BilevelProblem, solver: SolverBase) -> SolverBase:
    """Return the solver with its defaults filled in, after checking its bounds and transformations."""
    solver = solver.configure(problem)
    if isinstance(solver, Solver):
        solver.moves.check(type(solver).__name__, problem.start)
    return solver


def _check_host(problem: BilevelProblem, solver: SolverBase) -> None:
    """Raise ValueError if the solver needs all rows at once and they stay on the host."""
    if problem.oracles.is_on_host and not isinstance(solver, Solver):
        raise ValueError(f"`{type(solver).__name__}`: {NOT_SOLVED}. Take a solver such as SRBA or SOBA.")


def _check_tables(solver: SolverBase, oracles: Oracles, start: Point) -> None:
    """Raise ValueError if the state does not fit into memory: there may be very many rows on the host."""
    state = jax.eval_shape(solver.init, oracles, start)
    needed, there = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)), _device_bytes()
    if needed > there:
        raise ValueError(
            f"`{type(solver).__name__}`: its tables take {needed / 2**30:.3g} GiB, and there are {there / 2**30:.3g}; "
            "use larger batches, or a solver without tables such as SRBA."
        )


def _device_bytes() -> float:
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("bytes_limit", memory_bytes())


def _check_keys(problem: BilevelProblem, solver: SolverBase) -> None:
    """Raise ValueError if losses are random and the solver remembers derivatives of rows, or solves the inner level."""
    if problem.oracles.takes_keys and (not isinstance(solver, Solver) or solver.needs_finite_sum):
        raise ValueError(
            f"`{type(solver).__name__}`: it remembers derivatives of rows, and these losses take a `key`, so that "
            "their derivatives differ each time. Use a solver such as SOBA, or losses without `key`."
        )


def _check_batches(problem: BilevelProblem, solver: SolverBase) -> None:
    """Raise ValueError if a batch is larger than its level."""
    me, there = type(solver).__name__, f"{problem.n_inner} inner and {problem.n_outer} outer samples"
    inner, outer = solver.batches()
    if inner != outer and problem.oracles.shares_rows:
        raise ValueError(
            f"`{me}(outer_batch_size={outer})`: both levels of this problem share each batch; leave it out."
        )
    if solver.sampling == "full":
        return
    given = {"batch_size": inner, "outer_batch_size": outer} if inner != outer else {"batch_size": inner}
    limits = {"batch_size": problem.n_inner, "outer_batch_size": problem.n_outer}
    if len(given) == 1:
        limits["batch_size"] = min(limits.values())
    for name, size in given.items():
        if size > limits[name]:
            use = f"use {name} <= {limits[name]}, or sampling='full'"
            raise ValueError(f"`{me}({name}={size})` exceeds the data: {there}; {use}.")


def _check_floats(solver: SolverBase, dtype: np.dtype) -> None:
    limits = np.finfo(dtype)
    low, high = float(limits.smallest_subnormal), float(limits.max)
    for name, value in solver.parameters().items():
        if isinstance(value, float) and value and not low <= abs(value) <= high:
            problem = "build the problem with dtype='float64', or take another"
            raise ValueError(f"`{type(solver).__name__}({name}={value!r})`: is out of the range of {dtype}; {problem}.")


class Position(NamedTuple):
    """The state of runs and their costs so far; ``calls`` by seed and kind."""

    state: State
    step: int
    calls: np.ndarray
    seconds: float


class Steps(ABC):
    """Takes steps, within `arithmetic(dtype)`, beginning at the start.

    Attributes
    ----------
    alone : True for a single run, which has a clock of its own
    max_seconds : budget of seconds; a step of a `HostSolver` that takes until twice this time is given up
    finite : False if the step after the present position gives an iterate that is not finite
    target : the step that the last call of `advance` was to reach
    """

    programs: Programs = ONE_RUN
    alone = True
    shape: tuple[int, int] = (1, 1)
    solver: SolverBase
    position: Position
    steps_per_second = 0.0
    max_seconds = math.inf
    finite = True
    target = 0

    def __init__(self, prepared: Prepared) -> None:
        self.solver, self.oracles, self.start, self.dtype = prepared
        self.begin()

    @abstractmethod
    def begin(self) -> None:
        """Go to the start; the clock includes what a solver computes there."""

    @abstractmethod
    def last_steps(self, max_calls: float) -> np.ndarray:
        """Return, by seed, a step that is within the budget; the present one if no further step is."""

    @abstractmethod
    def advance(self, stop: int, due: NextEvaluation | None) -> bool:
        """Go towards ``stop``, but not past an evaluation, and return whether one is due.

        With ``stop`` at the present step, this only compiles.
        """

    def evaluate(self, metrics: dict[str, Any]) -> Evaluation:
        """Return the metrics of all runs by name, each an array with the shape of the runs."""
        found = self._read(self.programs.evaluate(self.solver, self.oracles, metrics, self.position.state))
        return jax.tree.map(lambda column: np.asarray(column, np.float64).reshape(self.shape), found)

    def _read(self, computed: Any) -> Any:
        """Wait for the result of a program, and raise the error of a reader that was held back until then."""
        jax.block_until_ready(computed)
        for reader in self.oracles.readers:
            reader.raise_held_back()
        return computed

    def points(self) -> Point:
        """Return the points at which the states are evaluated, in NumPy, with the axes of the runs in front."""
        points = trees.to_numpy(self.programs.points(self.solver, self.position.state))
        return jax.tree.map(lambda leaf: leaf.reshape(*self.shape, *leaf.shape[self.programs.axes :]), points)


class HostSteps(Steps):
    """Steps of a solver that is not compiled, one at a time."""

    programs = ON_HOST
    solver: HostSolver

    def __init__(self, prepared: Prepared) -> None:
        super().__init__(prepared)
        self.solver.warm_up(self.oracles, self.start)

    def begin(self) -> None:
        state = self.solver.init(self.oracles, self.start)
        self.position, self.finite = Position(state, 0, np.array([state.calls]), 0.0), True

    def last_steps(self, max_calls: float) -> np.ndarray:
        _, step, calls, _ = self.position
        return np.array([step + int(calls.sum() < max_calls)])

    def advance(self, stop: int, due: NextEvaluation | None) -> bool:
        before, began = self.position, time.perf_counter()
        if stop == before.step:
            return False
        self.target = before.step + 1
        try:
            with time_limit(2 * self.max_seconds - before.seconds):  # a step that began in time may finish
                state = self.solver.step(self.oracles, before.state, before.step)
        except OutOfTime:
            self.position = before._replace(seconds=before.seconds + time.perf_counter() - began)
            return False
        seconds = before.seconds + time.perf_counter() - began
        if not trees.is_finite(state.point):
            self.position, self.finite = before._replace(seconds=seconds), False
            return False
        calls = np.array([state.calls])
        self.position = Position(state, before.step + 1, calls, seconds)
        return due is not None and due(before.step, int(before.calls.sum()), before.step, calls.sum(axis=1)) == 1


class _OpenPage(NamedTuple):
    """The page that holds the next step; ``calls[:, k]`` are the calls after k of its steps, by seed and kind."""

    draws: Page
    first: int
    last: int
    calls: np.ndarray
    totals: np.ndarray


def _page_length(prepared: Prepared, n_seeds: int) -> int:
    """Return how many steps are drawn at once, or raise ValueError if a single draw is too large."""
    solver = prepared.solver
    assert isinstance(solver, Solver)
    draw = jax.eval_shape(lambda: solver.draw(prepared.oracles, run_key(0), jnp.zeros((), jnp.int32)))
    size = max(1, 4 * sum(leaf.size for leaf in jax.tree.leaves(draw)))
    if size > PAGE_BYTES:
        sizes = [f"{name}={value}" for name, value in solver.parameters().items() if type(value) is int]
        raise ValueError(
            f"`{type(solver).__name__}({', '.join(sizes)})`: one step draws {size / 2**30:.3g} GiB of rows, at most "
            f"{PAGE_BYTES / 2**30:.3g} are possible; use fewer or smaller batches."
        )
    return max(1, min(PAGE_LENGTH, PAGE_BYTES // (n_seeds * size)))


class CompiledSteps(Steps):
    """Compiled steps of all settings with one seed, or with several that take the same steps."""

    solver: Solver

    def __init__(
        self, prepared: Prepared, seeds: Sequence[int], settings: Sequence[Solver] = (), programs: Programs = ONE_RUN
    ) -> None:
        keys = tuple(run_key(seed) for seed in seeds)
        self._key: Any = keys if programs.axes == 2 else keys[0]
        assert isinstance(prepared.solver, Solver)
        self._traced = self._settings = prepared.solver.cast(prepared.dtype)
        if settings:
            casts = [setting.cast(prepared.dtype) for setting in settings]
            self._settings = jax.tree.map(lambda *leaves: np.stack(leaves), *casts)
            prepared = prepared._replace(solver=self._traced)
        self._page_length = _page_length(prepared, len(seeds))
        self._page: _OpenPage | None = None
        self._oracles_of_steps = for_one_run(prepared.oracles) if programs.axes == 0 else prepared.oracles
        # Sharded rows are requested by each device itself.
        is_fed = prepared.oracles.is_on_host and not prepared.oracles.is_sharded
        self._feed = Feed(self._oracles_of_steps, prepared.dtype, self._page_length) if is_fed else None
        self.programs, self.alone, self.shape = programs, programs.axes == 0, (len(seeds), max(1, len(settings)))
        super().__init__(prepared)

    def begin(self) -> None:
        calls = np.tile(np.array(self.solver.init_calls(self.oracles), np.int64), (self.shape[0], 1))
        began = time.perf_counter()
        state = self.programs.init(self._settings, self.oracles, self.start)
        if self.programs.axes == 2:
            state = jax.tree.map(lambda leaf: jnp.stack([leaf] * self.shape[0]), state)
        self._read(state)
        self.position, self._page, self.finite = Position(state, 0, calls, time.perf_counter() - began), None, True

    def last_steps(self, max_calls: float) -> np.ndarray:
        page = self._open_page()
        # Seeds differ in cost because of short blocks, so each has a last step of its own.
        return page.first + np.array([np.searchsorted(total, max_calls, side="right") for total in page.totals])

    def advance(self, stop: int, due: NextEvaluation | None) -> bool:
        page, before = self._open_page(), self.position
        evaluation = page.last + 1
        if due is not None:
            evaluation = page.first + due(before.step, int(before.calls[0].sum()), page.first, page.totals[0])
        self.target = stop = min(stop, page.last, evaluation)
        state, began = before.state, time.perf_counter()
        for part in self._parts(before.step - page.first, stop - page.first):
            previous, positions = state, (np.int32(part.start), np.int32(part.stop))
            state = self.programs.advance(self._settings, part.oracles, state, page.draws, *positions)
            jax.block_until_ready(previous)  # the rows of at most two parts are on the device
        self._read(state)
        elapsed = time.perf_counter() - began
        # In a sweep, runs are checked when they are evaluated, because the others continue.
        if self.alone and not trees.is_finite(self.programs.points(self.solver, state)):
            return self._approach(before, stop)
        self.steps_per_second = (stop - before.step) / elapsed
        self.position = Position(state, stop, page.calls[:, stop - page.first], before.seconds + elapsed)
        return stop == evaluation

    def _approach(self, before: Position, stop: int) -> bool:
        """Go to the last finite state before ``stop`` by bisection; steps repeat bit for bit."""
        middle = (before.step + stop) // 2
        if middle == before.step:
            self.finite = False
            return False
        self.advance(middle, None)
        return self.advance(stop, None) if self.finite else False

    def _parts(self, start: int, stop: int) -> "Iterable[Part]":
        return [Part(self._oracles_of_steps, start, stop)] if self._feed is None else self._feed.parts(start, stop)

    def _open_page(self) -> _OpenPage:
        """Return the page that holds the next step; the clock includes drawing it."""
        state, step, calls, seconds = self.position
        if self._page is not None and step < self._page.last:
            return self._page
        began = time.perf_counter()
        draws = self.programs.draw(self._traced, self.oracles, self._key, np.int32(step), self._page_length)
        jax.block_until_ready(draws)
        if self._feed is not None:
            self._feed.open(draws.rows, self.shape[0])
            draws = draws._replace(rows=Rows())
        self.position = Position(state, step, calls, seconds + time.perf_counter() - began)
        costs = np.stack([np.asarray(kind, np.int64).reshape(self.shape[0], -1) for kind in draws.calls], axis=-1)
        after = np.cumsum(np.concatenate([calls[:, None], costs], axis=1), axis=1)
        self._page = _OpenPage(draws, step, step + self._page_length, after, after[:, 1:].sum(axis=2))
        return self._page


class Part(NamedTuple):
    """Steps of a page, from one position to another, and oracles that hold their rows."""

    oracles: Oracles
    start: int
    stop: int


class Feed:
    """Reads the rows of a page from the host, part by part, in a thread and ahead of the steps.

    Attributes
    ----------
    rows : the rows drawn in each step of the page, by seed, step and draw
    """

    def __init__(self, oracles: Oracles, dtype: np.dtype, page_length: int) -> None:
        self._oracles, self._dtype, self._page_length = oracles, dtype, page_length
        self._gate = Semaphore(1)  # parts are read one at a time
        hosts = [level for level in (oracles.inner_samples, oracles.outer_samples) if isinstance(level, HostSamples)]
        self._ahead = max(level.reader.data.prefetch for level in hosts)
        self._parts: dict[int, Future[Oracles]] = {}
        self.rows = Rows()

    def open(self, rows: Rows, n_seeds: int) -> None:
        """Begin a page with these draws."""
        for part in self._parts.values():
            part.cancel()
        self._parts = {}
        self.rows = jax.tree.map(lambda drawn: np.asarray(drawn).reshape(n_seeds, -1, drawn.shape[-1]), rows)
        sizes = [_unit_bytes(level) * drawn[:, 0].size for level, drawn in self._levels()]
        self._length = max(1, min(self._page_length, _PART_BYTES // max(1, sum(sizes))))

    def _levels(self) -> list[tuple[HostSamples, np.ndarray]]:
        pairs = zip((self._oracles.inner_samples, self._oracles.outer_samples), self.rows, strict=True)
        return [(level, drawn) for level, drawn in pairs if isinstance(level, HostSamples) and drawn is not None]

    def parts(self, start: int, stop: int) -> Iterator[Part]:
        """Yield the steps from start to stop, in at least one part."""
        while True:
            number = start // self._length
            end = min(stop, (number + 1) * self._length)
            yield Part(self._held(number), start, end)
            start = end
            if start >= stop:
                return

    def _held(self, number: int) -> Oracles:
        last = -(-self._page_length // self._length) - 1
        for coming in range(number, min(number + self._ahead, last) + 1):
            if coming not in self._parts:
                self._parts[coming] = in_thread(self._hold, coming, gate=self._gate)
        self._parts = {coming: part for coming, part in self._parts.items() if coming >= number}
        return self._parts[number].result()

    def _hold(self, number: int) -> Oracles:
        """Return oracles that hold the rows of a part; it runs in a thread, which has JAX settings of its own."""

        def hold(level: Samples, drawn: np.ndarray | None) -> Samples:
            if not isinstance(level, HostSamples) or drawn is None:
                return level
            part = drawn[:, number * self._length : (number + 1) * self._length]
            units = level.n if level.sampling == "iid" else level.n_blocks
            return level.hold(np.unique(part), min(units, self._length * drawn[:, 0].size))

        with arithmetic(self._dtype):
            inner = hold(self._oracles.inner_samples, self.rows.inner)
            outer = hold(self._oracles.outer_samples, self.rows.outer)
            return replace(self._oracles, inner_samples=inner, outer_samples=outer)


def _unit_bytes(samples: HostSamples) -> int:
    """Return the bytes of a row if rows are drawn, and otherwise of a block."""
    row = sum(leaf.nbytes for leaf in jax.tree.leaves(samples.reader.data.head))
    return row if samples.sampling == "iid" else row * samples.batch_size

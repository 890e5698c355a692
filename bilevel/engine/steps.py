"""Taking steps, with the clock and the count of oracle calls.

`Steps` sees an array of runs, seeds by settings, which step together; of a single run it is 1 by 1, and not vmapped.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from bilevel import _tree as trees
from bilevel._precision import arithmetic
from bilevel._types import Point, Rows
from bilevel.engine.feed import Feed, Part
from bilevel.engine.loop import ON_HOST, ONE_RUN, Evaluation, Page, Programs, run_key
from bilevel.engine.metrics import check_metrics
from bilevel.oracles import Oracles
from bilevel.problems import BilevelProblem
from bilevel.problems.base import NOT_SOLVED
from bilevel.problems.checks import memory_bytes
from bilevel.solvers.base import Solver, SolverBase, State
from bilevel.solvers.host import HostSolver, OutOfTime, time_limit

PAGE_LENGTH, PAGE_BYTES = 4096, 2**28  # of steps drawn at once
# From a step, the calls up to it, the first step of a page, and the calls after each of the page's steps: the position
# on the page at whose end an evaluation is due; it may lie beyond the page.
NextEvaluation: TypeAlias = Callable[[int, int, int, np.ndarray], int]


class Prepared(NamedTuple):
    """A solver with its defaults filled in, and the oracles and start that it takes its steps with."""

    solver: SolverBase
    oracles: Oracles
    start: Point
    dtype: np.dtype


def prepare(problem: BilevelProblem, solver: SolverBase) -> Prepared:
    """Lay out the batches, fill in the defaults of the solver, and refuse what does not fit the problem."""
    check_metrics(problem.metrics)
    _check_host(problem, solver)
    if solver.needs_strong_convexity and problem.exact_solver is None:
        build = "where the inner loss is so, build the problem with `strongly_convex=True`"
        raise ValueError(f"`{type(solver).__name__}` needs a strongly convex inner level; {build}.")
    solver = solver.fit_rows(problem.n_inner, problem.n_outer)
    _check_batches(problem, solver)
    _check_keys(problem, solver)
    dtype = np.dtype(np.float64) if isinstance(solver, HostSolver) else problem.dtype
    _check_floats(solver, dtype)
    with arithmetic(dtype):
        inner, outer = solver.batches()
        oracles = problem.oracles.with_batches(inner, solver.sampling, outer)
        start = trees.to_numpy(problem.start, dtype)
        if problem.exact_solver is None:
            solver = solver.fit_start(oracles, start)
        solver = solver.resolve(oracles)
        solver.check_start(start)
        solver.check_losses(oracles, start)
        if isinstance(solver, HostSolver):
            oracles = oracles.astype(dtype)
        if oracles.is_on_host:
            _check_tables(solver, oracles, start)
    return Prepared(solver, oracles, start, dtype)


def _check_host(problem: BilevelProblem, solver: SolverBase) -> None:
    """Refuse rows that stay on the host where all of them are needed at once."""
    if problem.oracles.is_on_host and not isinstance(solver, Solver):
        raise ValueError(f"`{type(solver).__name__}`: {NOT_SOLVED}. Take a solver such as SRBA or SOBA.")


def _check_tables(solver: SolverBase, oracles: Oracles, start: Point) -> None:
    """Refuse tables of blocks that memory cannot hold: rows on the host may be very many."""
    state = jax.eval_shape(solver.init, oracles, start)
    needed, there = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)), _device_bytes()
    if needed > there:
        much = f"its tables take {needed / 2**30:.3g} GiB, and there are {there / 2**30:.3g}"
        raise ValueError(f"`{type(solver).__name__}`: {much}; take larger batches, or a solver without tables as SRBA.")


def _device_bytes() -> float:
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("bytes_limit", memory_bytes())


def _check_keys(problem: BilevelProblem, solver: SolverBase) -> None:
    """Refuse random losses where a solver remembers derivatives of rows, or solves the inner level."""
    if problem.oracles.takes_keys and (not isinstance(solver, Solver) or solver.needs_finite_sum):
        why = "it remembers what rows gave, and these losses take a `key`: they give something else each time"
        raise ValueError(f"`{type(solver).__name__}`: {why}. Take a solver such as SOBA, or leave `key` out.")


def _check_batches(problem: BilevelProblem, solver: SolverBase) -> None:
    """Refuse batches larger than their level."""
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
    """How far runs have come; ``calls`` by seed and kind."""

    state: State
    step: int
    calls: np.ndarray
    seconds: float


class Steps(ABC):
    """Takes steps, within `arithmetic(dtype)`. Made, it is at the start; a single run has compiled, off the clock."""

    programs: Programs = ONE_RUN
    alone = True  # a single run, with a clock of its own
    shape: tuple[int, int] = (1, 1)
    solver: SolverBase  # evaluates states
    position: Position
    compile_seconds = steps_per_second = 0.0
    max_seconds = math.inf  # the budget; a step from Python that goes on for twice as long is given up
    diverged = False  # found while stepping; the position is then the last finite one
    aim = 0  # the step that the last `advance` was to reach

    def __init__(self, prepared: Prepared) -> None:
        self.solver, self.oracles, self.start, self.dtype = prepared
        if self.alone:
            began = time.perf_counter()
            self.begin()
            self._warm_up()
            if not self.oracles.is_on_host:  # a pass over rows that may take minutes to read
                self.evaluate({})
            self.compile_seconds = time.perf_counter() - began
        self.begin()

    def _warm_up(self) -> None:
        self.advance(0, None)  # compiles what steps call

    @abstractmethod
    def begin(self) -> None:
        """Go to the start; what a solver computes there is on the clock."""

    @abstractmethod
    def last_steps(self, max_calls: float) -> np.ndarray:
        """Return, by seed, a step that it may go to; it is the present one where no further one is affordable."""

    @abstractmethod
    def advance(self, stop: int, due: NextEvaluation | None) -> bool:
        """Go towards ``stop``, not past an evaluation, and tell whether one is due."""

    def evaluate(self, metrics: dict[str, Any]) -> Evaluation:
        """Return numbers of the states, each an array of runs."""
        found = self._read(self.programs.evaluate(self.solver, self.oracles, metrics, self.position.state))
        return jax.tree.map(lambda column: np.asarray(column, np.float64).reshape(self.shape), found)

    def _read(self, computed: Any) -> Any:
        """Wait for what a program computes, and raise what reading its rows raised, if the reader held that back."""
        jax.block_until_ready(computed)
        for reader in self.oracles.readers:
            reader.raise_held_back()
        return computed

    def points(self) -> Point:
        """Return the points that stand for the states, in NumPy, with the axes of the runs in front."""
        points = trees.to_numpy(self.programs.points(self.solver, self.position.state))
        return jax.tree.map(lambda leaf: leaf.reshape(*self.shape, *leaf.shape[self.programs.axes :]), points)


class HostSteps(Steps):
    """Steps of a solver that is not compiled, one at a time."""

    programs = ON_HOST
    solver: HostSolver

    def _warm_up(self) -> None:
        self.solver.warm_up(self.oracles, self.start)

    def begin(self) -> None:
        state = self.solver.init(self.oracles, self.start)
        self.position, self.diverged = Position(state, 0, np.array([state.calls]), 0.0), False

    def last_steps(self, max_calls: float) -> np.ndarray:
        _, step, calls, _ = self.position
        return np.array([step + int(calls.sum() < max_calls)])

    def advance(self, stop: int, due: NextEvaluation | None) -> bool:
        before, began = self.position, time.perf_counter()
        self.aim = before.step + 1
        try:
            with time_limit(2 * self.max_seconds - before.seconds):  # what was begun in time may be done
                state = self.solver.step(self.oracles, before.state, before.step)
        except OutOfTime:
            self.position = before._replace(seconds=before.seconds + time.perf_counter() - began)
            return False
        seconds = before.seconds + time.perf_counter() - began
        if not trees.is_finite(state.point):
            self.position, self.diverged = before._replace(seconds=seconds), True
            return False
        calls = np.array([state.calls])
        self.position = Position(state, before.step + 1, calls, seconds)
        return due is not None and due(before.step, int(before.calls.sum()), before.step, calls.sum(axis=1)) == 1


class _OpenPage(NamedTuple):
    draws: Page
    first: int
    last: int
    calls: np.ndarray  # [:, k] after k of its steps, by seed and kind
    totals: np.ndarray


def _page_length(prepared: Prepared, n_seeds: int) -> int:
    """Return how many steps are drawn at once, fewer where a draw is large; refuse a solver whose draws are immense."""
    solver = prepared.solver
    assert isinstance(solver, Solver)
    draw = jax.eval_shape(lambda: solver.draw(prepared.oracles, run_key(0), jnp.zeros((), jnp.int32)))
    size = max(1, 4 * sum(leaf.size for leaf in jax.tree.leaves(draw)))
    if size > PAGE_BYTES:
        sizes = [f"{name}={value}" for name, value in solver.parameters().items() if type(value) is int]
        much = f"one step draws {size / 2**30:.3g} GiB of rows, at most {PAGE_BYTES / 2**30:.3g}"
        raise ValueError(f"`{type(solver).__name__}({', '.join(sizes)})`: {much}; take fewer or smaller batches.")
    return max(1, min(PAGE_LENGTH, PAGE_BYTES // (n_seeds * size)))


class CompiledSteps(Steps):
    """Compiled steps of all settings with one seed, or with several that take the same steps."""

    solver: Solver

    def __init__(
        self, prepared: Prepared, seeds: Sequence[int], settings: Sequence[Solver] = (), programs: Programs = ONE_RUN
    ) -> None:
        keys = tuple(run_key(seed) for seed in seeds)
        self._key: Any = keys if programs.axes == 2 else keys[0]  # a seed's, or those of all seeds
        assert isinstance(prepared.solver, Solver)
        self._traced = self._settings = prepared.solver.cast(prepared.dtype)
        if settings:
            casts = [setting.cast(prepared.dtype) for setting in settings]
            self._settings = jax.tree.map(lambda *leaves: np.stack(leaves), *casts)
            prepared = prepared._replace(solver=self._traced)
        self._page_length = _page_length(prepared, len(seeds))
        self._page: _OpenPage | None = None
        # Several devices each call for their rows.
        is_fed = prepared.oracles.is_on_host and not prepared.oracles.is_sharded
        self._feed = Feed(prepared.oracles, prepared.dtype, self._page_length) if is_fed else None
        self.programs, self.alone, self.shape = programs, programs.axes == 0, (len(seeds), max(1, len(settings)))
        super().__init__(prepared)

    def begin(self) -> None:
        calls = np.tile(np.array(self.solver.init_calls(self.oracles), np.int64), (self.shape[0], 1))
        began = time.perf_counter()
        state = self.programs.init(self._settings, self.oracles, self.start)
        if self.programs.axes == 2:
            state = jax.tree.map(lambda leaf: jnp.stack([leaf] * self.shape[0]), state)
        self._read(state)
        self.position, self._page, self.diverged = Position(state, 0, calls, time.perf_counter() - began), None, False

    def last_steps(self, max_calls: float) -> np.ndarray:
        page = self._open_page()
        # Short blocks make seeds differ in cost, so each has a last step of its own.
        return page.first + np.array([np.searchsorted(total, max_calls, side="right") for total in page.totals])

    def advance(self, stop: int, due: NextEvaluation | None) -> bool:
        page, before = self._open_page(), self.position
        evaluation = page.last + 1
        if due is not None:
            evaluation = page.first + due(before.step, int(before.calls[0].sum()), page.first, page.totals[0])
        self.aim = stop = min(stop, page.last, evaluation)
        began = time.perf_counter()
        state = self._take(page.draws, before.state, before.step - page.first, stop - page.first)
        elapsed = time.perf_counter() - began
        self.steps_per_second = (stop - before.step) / elapsed
        # Of many runs each is looked at when it is evaluated: the others go on.
        if self.alone and not trees.is_finite(self.programs.points(self.solver, state)):
            state, stop = self._last_finite(page, before, stop)
            self.diverged = True
        self.position = Position(state, stop, page.calls[:, stop - page.first], before.seconds + elapsed)
        return stop == evaluation

    def _open_page(self) -> _OpenPage:
        """Return the page that holds the next step; drawing it is on the clock."""
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

    def _take(self, page: Page, state: State, start: int, stop: int) -> State:
        if self._feed is not None:
            return self._take_parts(self._feed.parts(start, stop), page, state)
        positions = np.int32(start), np.int32(stop)
        return self._read(self.programs.advance(self._settings, self.oracles, state, page, *positions))

    def _take_parts(self, parts: Iterable[Part], page: Page, state: State) -> State:
        """Take steps whose rows come from the host: those of the next part are waited for while the device computes."""
        for oracles, start, stop in parts:
            before, positions = state, (np.int32(start), np.int32(stop))
            state = self.programs.advance(self._settings, oracles, state, page, *positions)
            jax.block_until_ready(before)  # no more than two parts are on the device
        return jax.block_until_ready(state)

    def _last_finite(self, page: _OpenPage, before: Position, diverged: int) -> tuple[State, int]:
        """Return the last finite state and its step, by bisection; steps repeat bit for bit."""
        state, step = before.state, before.step
        while diverged - step > 1:
            middle = (step + diverged) // 2
            trial = self._take(page.draws, state, step - page.first, middle - page.first)
            if trees.is_finite(self.programs.points(self.solver, trial)):
                state, step = trial, middle
            else:
                diverged = middle
        return state, step

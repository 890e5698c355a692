"""One run: the clock, the ledger, budgets, evaluations, status."""

import time
import warnings
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bilevel import _tree as trees
from bilevel._optional import Reporter, progress_bar
from bilevel._precision import arithmetic
from bilevel._types import Calls, Point
from bilevel.engine.budget import Budget, EvaluationSchedule
from bilevel.engine.logs import About, Log, Recorder, recording
from bilevel.engine.loop import Page, advance, draw_page, initial_state, run_key
from bilevel.engine.metrics import cheap_metrics, exact_metrics
from bilevel.engine.result import RunResult, Status, columns
from bilevel.problems import BilevelProblem, ExactSolution
from bilevel.problems.certificate import Certifier
from bilevel.solvers.base import SolverBase, State
from bilevel.solvers.host import HostSolver

PAGE_LENGTH = 4096
_LOOK_SECONDS = 0.1  # between two looks at a clock that has a limit, or at the progress bar


@dataclass(frozen=True)
class Position:
    """How far a run has come; ``calls`` by kind."""

    state: State
    step: int
    calls: np.ndarray
    seconds: float


@dataclass(frozen=True)
class OpenPage:
    """A page of draws on the host: where it begins, and the ledger after each of its steps."""

    draws: Page
    first: int
    calls_after: np.ndarray
    total_after: np.ndarray


class Runner:
    """One run. Making it checks the input and compiles; `finish` drives it to its end."""

    def __init__(
        self,
        problem: BilevelProblem,
        solver: SolverBase,
        seed: int,
        budget: Budget,
        eval_every: int | None,
        log: Log | None = None,
    ) -> None:
        _check_input(problem, solver, seed, budget, log)
        self.problem, self.seed, self.budget = problem, seed, budget
        self.schedule = EvaluationSchedule(eval_every, epoch=problem.n_inner + problem.n_outer)
        self.certifier = None if budget.certified_tolerance is None else _certifier(problem)
        self.rows: list[dict[str, Any]] = []
        self.log = log if problem.oracles.n_processes == 1 or jax.process_index() == 0 else None
        self.recorder = Recorder(None, 0)
        self.reference: ExactSolution | None = None
        self.page: OpenPage | None = None
        self.steps_per_second = 0.0
        self.dtype = np.dtype(np.float64) if isinstance(solver, HostSolver) else problem.dtype
        with arithmetic(self.dtype):
            self.oracles = problem.oracles.with_batches(solver.batch_size, solver.sampling)
            self.solver = solver.resolve(self.oracles)
            if isinstance(solver, HostSolver):
                self.oracles = self.oracles.astype(self.dtype)
            self.start = trees.to_numpy(problem.start, self.dtype)
            self.solver.check_start(self.start)
            self.traced: Any = self.solver.cast(self.dtype)
            self.key = run_key(seed)
            self.compile_seconds = self._compile()
            self.position = self._begin()

    def _compile(self) -> float:
        """Call everything once, with no step to take, so that no compilation falls into the clock."""
        began = time.perf_counter()
        if isinstance(self.solver, HostSolver):
            self.solver.warm_up(self.oracles, self.start)
            jax.block_until_ready(cheap_metrics(self.oracles, self.start))
            return time.perf_counter() - began
        state = initial_state(self.traced, self.oracles, self.start)
        page = draw_page(self.traced, self.oracles, self.key, np.int32(0), PAGE_LENGTH)
        jax.block_until_ready(advance(self.traced, self.oracles, state, page, np.int32(0), np.int32(0)))
        jax.block_until_ready(cheap_metrics(self.oracles, state.point))
        return time.perf_counter() - began

    def _begin(self) -> Position:
        if isinstance(self.solver, HostSolver):
            state = self.solver.init(self.oracles, self.start)
            return Position(state, 0, np.array(state.calls), 0.0)
        began = time.perf_counter()
        state = jax.block_until_ready(initial_state(self.traced, self.oracles, self.start))
        seconds = time.perf_counter() - began
        return Position(state, 0, np.array(self.traced.init_calls(self.oracles), np.int64), seconds)

    def restore(self, state_leaves: list[np.ndarray], rows: list[dict[str, Any]]) -> None:
        """Take the place where a saved run stopped."""
        expected, structure = jax.tree.flatten(self.position.state)
        if [(a.shape, a.dtype) for a in expected] != [(a.shape, a.dtype) for a in state_leaves]:
            raise ValueError("the saved state does not fit this solver and problem.")
        with arithmetic(self.dtype):
            state = jax.tree.unflatten(structure, [jnp.asarray(leaf) for leaf in state_leaves])
        last = rows[-1]
        calls = np.array([last[f"calls_{kind}"] for kind in Calls._fields], np.int64)
        self.position = Position(state, int(last["step"]), calls, float(last["seconds"]))
        with arithmetic(self.dtype):
            self.rows = [*rows[:-1], last | self._certified()]

    def finish(self, progress: bool) -> RunResult:
        """Step and evaluate until the run ends."""
        about = About(self.problem.name, type(self.solver).__name__, self.solver.parameters(), self.seed)
        title = f"{about.solver} on {about.problem}"
        with (
            arithmetic(self.dtype),
            recording(self.log, about, tuple(self.rows)) as self.recorder,
            progress_bar(title, progress) as report,
        ):
            # Looks at the clock would make the processes of one run go apart.
            status = self._drive(report, watched=progress and self.oracles.n_processes == 1)
            point = trees.to_numpy(self._point(), self.problem.dtype)
        if status is not Status.diverged:
            self._warn()
        return RunResult(
            status=status,
            point=point,
            history=columns(self.rows),
            solver=self.solver,
            seed=self.seed,
            compile_seconds=self.compile_seconds,
            problem=self.problem,
            state=self.position.state,
        )

    def _drive(self, report: Reporter, watched: bool) -> Status:
        try:
            self._evaluate()
            while not self._converged():
                stop, evaluation_due = self._next_stop(watched)
                if stop == self.position.step:
                    self._evaluate()
                    return self._final_status()
                if isinstance(self.solver, HostSolver):
                    stayed_finite, evaluation_due = self._take_step()
                else:
                    stayed_finite = self._advance_to(stop)
                if evaluation_due or not stayed_finite:
                    self._evaluate()
                if not (stayed_finite and self._measurable()):
                    return Status.diverged
                self._report(report)
            return Status.converged
        except KeyboardInterrupt:
            self._evaluate()
            return Status.interrupted

    def _next_stop(self, watched: bool) -> tuple[int, bool]:
        """Return the step to go to without another look, and whether an evaluation is due there."""
        step, budget = self.position.step, self.budget
        seconds_left = budget.seconds_left(self.position.seconds)
        if step >= budget.last_step or seconds_left <= 0:
            return step, False
        if isinstance(self.solver, HostSolver):
            spent = budget.max_calls is not None and self.position.calls.sum() >= budget.max_calls
            return step if spent else step + 1, False
        page = self._page_at(step)
        evaluation = page.first + self.schedule.next_position(
            step, int(self.position.calls.sum()), page.first, page.total_after
        )
        limits = [page.first + PAGE_LENGTH, budget.last_step, evaluation]
        if budget.max_calls is not None:
            limits.append(page.first + int(np.searchsorted(page.total_after, budget.max_calls, side="right")))
        if watched or budget.max_seconds is not None:
            look_after = self.steps_per_second * min(_LOOK_SECONDS, seconds_left)
            limits.append(step + max(1, int(look_after)))
        stop = min(limits)
        return stop, stop == evaluation

    def _page_at(self, step: int) -> OpenPage:
        """Return the page that holds this step; drawing it is on the clock."""
        if self.page is not None and step < self.page.first + PAGE_LENGTH:
            return self.page
        began = time.perf_counter()
        draws = jax.block_until_ready(draw_page(self.traced, self.oracles, self.key, np.int32(step), PAGE_LENGTH))
        self._tick(began)
        calls = np.stack([np.asarray(kind, np.int64) for kind in draws.calls], axis=1)
        calls_after = self.position.calls + np.cumsum(calls, axis=0)
        self.page = OpenPage(draws, step, calls_after, calls_after.sum(axis=1))
        return self.page

    def _tick(self, began: float) -> None:
        seconds = self.position.seconds + time.perf_counter() - began
        self.position = Position(self.position.state, self.position.step, self.position.calls, seconds)

    def _advance_to(self, stop: int) -> bool:
        """Take steps up to ``stop`` and return True, or up to the last finite point and return False."""
        before, page = self.position, self.page
        assert page is not None
        began = time.perf_counter()
        state = jax.block_until_ready(self._advanced(page, before.state, before.step, stop))
        elapsed = time.perf_counter() - began
        self.steps_per_second = (stop - before.step) / elapsed
        stayed_finite = trees.is_finite(self.solver.evaluation_point(state))
        if not stayed_finite:
            state, stop = self._last_finite(page, before, stop)
        calls = page.calls_after[stop - page.first - 1] if stop > page.first else before.calls
        self.position = Position(state, stop, calls, before.seconds + elapsed)
        return stayed_finite

    def _take_step(self) -> tuple[bool, bool]:
        """Take one step of a solver that is not compiled; return whether it is finite, and due for evaluation."""
        before = self.position
        assert isinstance(self.solver, HostSolver)
        began = time.perf_counter()
        state = self.solver.step(self.oracles, before.state, before.step)
        seconds = before.seconds + time.perf_counter() - began
        if not trees.is_finite(state.point):
            self.position = Position(before.state, before.step, before.calls, seconds)
            return False, False
        self.position = Position(state, before.step + 1, np.array(state.calls), seconds)
        total_after = self.position.calls.sum(keepdims=True)
        return True, self.schedule.next_position(before.step, int(before.calls.sum()), before.step, total_after) == 1

    def _advanced(self, page: OpenPage, state: State, start: int, stop: int) -> State:
        positions = np.int32(start - page.first), np.int32(stop - page.first)
        return advance(self.traced, self.oracles, state, page.draws, *positions)

    def _last_finite(self, page: OpenPage, before: Position, diverged: int) -> tuple[State, int]:
        """Return the last finite state and its step, by bisection; steps repeat bit for bit."""
        state, step = before.state, before.step
        while diverged - step > 1:
            middle = (step + diverged) // 2
            trial = self._advanced(page, state, step, middle)
            if trees.is_finite(self.solver.evaluation_point(trial)):
                state, step = trial, middle
            else:
                diverged = middle
        return state, step

    def _evaluate(self) -> None:
        """Add a row to the history, unless the last one is of this very step, and log what is new."""
        if not self.rows or self.rows[-1]["step"] != self.position.step:
            self.rows.append(self._row())
        self.recorder.catch_up(self.rows)

    def _row(self) -> dict[str, Any]:
        position = self.position
        total = int(position.calls.sum())
        row = {"step": position.step, "seconds": position.seconds, "calls": total}
        row |= {f"calls_{kind}": int(n) for kind, n in zip(Calls._fields, position.calls, strict=True)}
        row["epochs"] = total / (self.problem.n_inner + self.problem.n_outer)
        judged = self._point()
        row |= _floats(cheap_metrics(self.oracles, judged))
        exact, self.reference = exact_metrics(self.problem, judged, self.reference)
        row |= exact | self._certified()
        point = trees.to_numpy(judged, self.problem.dtype)
        row |= _floats({name: metric(point) for name, metric in self.problem.metrics.items()})
        return row | _floats(self.solver.diagnostics(position.state))

    def _point(self) -> Point:
        return self.solver.evaluation_point(self.position.state)

    def _certified(self) -> dict[str, float]:
        if self.certifier is None:
            return {}
        certificate = self.certifier(self._point())
        bound = certificate.hypergrad_norm_bound
        return {"certified_error": certificate.error_bound, "certified_norm_sq": bound * bound}

    def _final_status(self) -> Status:
        if not self._measurable():
            return Status.diverged
        return Status.converged if self._converged() else Status.out_of_budget

    def _measurable(self) -> bool:
        """Tell whether the last evaluation was finite; a point may be finite where F overflows."""
        row = self.rows[-1]
        return bool(np.isfinite(row["outer_value"]) and np.isfinite(row["direction_norm_sq"]))

    def _converged(self) -> bool:
        row, budget = self.rows[-1], self.budget
        if row["step"] != self.position.step:
            return False
        limits = {"hypergrad_norm_sq": budget.tolerance, "certified_norm_sq": budget.certified_tolerance}
        return any(limit is not None and row[name] <= limit for name, limit in limits.items())

    def _report(self, report: Reporter) -> None:
        row, position = self.rows[-1], self.position
        total = int(position.calls.sum())
        metric = (
            f"|∇h|² {row['hypergrad_norm_sq']:.1e}" if "hypergrad_norm_sq" in row else f"F {row['outer_value']:.3g}"
        )
        epochs = total / (self.problem.n_inner + self.problem.n_outer)
        report(self.budget.fraction(position.step, total, position.seconds), f"{epochs:.3g} epochs, {metric}")

    def _warn(self) -> None:
        sentence = self.solver.warning(self.rows[-1], self.problem.dtype)
        if sentence:
            warnings.warn(sentence, RuntimeWarning, stacklevel=4)


def _floats(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def _check_input(problem: BilevelProblem, solver: SolverBase, seed: int, budget: Budget, log: Log | None) -> None:
    if not isinstance(problem, BilevelProblem):
        raise TypeError(f"`problem` must be a BilevelProblem, got {type(problem).__name__}.")
    if not isinstance(solver, SolverBase):
        raise TypeError(f"`solver` must be a solver such as bilevel.SRBA(), got {solver!r}.")
    if isinstance(seed, bool) or not isinstance(seed, Integral) or not 0 <= seed < 2**32:
        raise ValueError(f"`seed={seed!r}`: must be an integer in [0, 2**32).")
    if log is not None and not isinstance(log, Log):
        raise TypeError(f"`log` must be a bilevel.Log such as bilevel.CSVLog('run.csv'), got {log!r}.")
    check_batch(problem, solver)
    if budget.max_seconds is not None and problem.oracles.n_processes > 1:
        raise ValueError(
            f"`max_seconds={budget.max_seconds!r}`: the {problem.oracles.n_processes} processes of this run have "
            "clocks of their own and would stop at different steps; use `max_steps` or `max_calls`."
        )
    if budget.tolerance is not None and problem.exact_solver is None:
        raise ValueError(
            "`tolerance` needs exact hypergradients, which this problem does not offer; build it with "
            "strongly_convex=True if its inner loss is, or leave `tolerance` out."
        )


def _certifier(problem: BilevelProblem) -> Certifier:
    certifier = Certifier(problem)
    if not certifier.certified:
        raise ValueError(f"`certified_tolerance`: nothing is proved of this problem. {certifier.why}")
    return certifier


def check_batch(problem: BilevelProblem, solver: SolverBase) -> None:
    """Refuse batches that are larger than the data."""
    smallest = min(problem.n_inner, problem.n_outer)
    if solver.sampling != "full" and solver.batch_size > smallest:
        raise ValueError(
            f"`{type(solver).__name__}(batch_size={solver.batch_size})` exceeds the data: there are {problem.n_inner} "
            f"inner and {problem.n_outer} outer samples. Use batch_size <= {smallest}, or sampling='full'."
        )

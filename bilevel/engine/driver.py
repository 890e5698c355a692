"""The driver of one run, or of all runs of a sweep: budgets, evaluations off the clock, and how runs end."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import numpy as np

from bilevel._core import trees
from bilevel._core.compilation import arithmetic
from bilevel._core.extras import Reporter
from bilevel._core.types import INT32_MAX, Calls, Point, as_float, is_number
from bilevel.engine.logs import Recorder, warn_user
from bilevel.engine.loop import SEEDS_AND_SETTINGS, SETTINGS, Evaluation, draw_page, run_key
from bilevel.engine.metrics import default_metric, exact_metrics, metric
from bilevel.engine.result import NO_BEST, CheckpointWriter, Status
from bilevel.engine.steps import PAGE_LENGTH, CompiledSteps, Steps, configure, prepare
from bilevel.problems import BilevelProblem, ExactSolution
from bilevel.problems.certificate import Certifier
from bilevel.solvers.base import Solver

_LOOK_SECONDS = 0.1  # between two looks at a clock that has a limit, the keyboard or the progress
_PER_DOUBLING = 4  # evaluations per doubling of the calls, from 1/64 of an epoch on


def _is_limit(value: Any) -> bool:
    return isinstance(as_float(value), float) and 0 <= value < math.inf


@dataclass(frozen=True)
class EarlyStopping:
    """Stop a run when a metric has not improved for some evaluations; ``result.best_point`` is its best point.

    Only the history is used, so a resumed run stops at the same step as an uninterrupted one.

    Parameters
    ----------
    metric : a column of the history, such as "test_error", "outer_value" or a metric of your problem
    patience : number of evaluations of the metric without an improvement after which the run stops
    better : "lower" or "higher"; by default the direction of a metric of the library, and "lower" for your own metrics
    """

    metric: str
    patience: int = 10
    better: str | None = None

    def __post_init__(self) -> None:
        me = "`EarlyStopping"
        if not isinstance(self.metric, str):
            raise ValueError(f"{me}(metric={self.metric!r})`: must be the name of a column of the history.")
        if not is_number(self.patience, Integral) or self.patience < 1:
            raise ValueError(f"{me}(patience={self.patience!r})`: must be an integer of at least 1.")
        if self.better not in (None, "lower", "higher"):
            raise ValueError(f"{me}(better={self.better!r})`: must be 'lower', 'higher' or None.")

    def best_row(self, rows: Sequence[Mapping[str, Any]]) -> int:
        """Return the index of the first row with the best value; -1 if no row has the metric."""
        values = self._values(rows)
        return -1 if np.isnan(values).all() else int(np.nanargmin(values))

    def is_over(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        """Return True if the metric has not improved for `patience` evaluations."""
        return bool(np.sum(~np.isnan(self._values(rows)[self.best_row(rows) + 1 :])) >= self.patience)

    def _values(self, rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """Return the metric of all rows, negative if higher is better."""
        better = metric(self.metric).better if self.better is None else self.better
        values = np.array([row.get(self.metric, np.nan) for row in rows], float)
        return -values if better == "higher" else values


@dataclass(frozen=True)
class CertifiedTolerance:
    """Stop a run at the first evaluation with a certified bound of ‖∇h‖² of at most ``bound``.

    The bound is proved without an exact solution (:mod:`bilevel.problems.certificate`); the problem must have known
    constants. It adds the columns ``certified_error``, the bound of ‖D_x - ∇h‖, and ``certified_norm_sq``, the bound of
    ‖∇h‖².

    Parameters
    ----------
    bound : a number of at least 0
    """

    bound: float

    def __post_init__(self) -> None:
        if not _is_limit(self.bound):
            raise ValueError(f"`CertifiedTolerance(bound={self.bound!r})`: must be a finite number of at least 0.")


Criterion: TypeAlias = float | CertifiedTolerance | EarlyStopping


@dataclass(frozen=True)
class Budget:
    """Limits on a whole run, including the part before it was resumed, and how often it is evaluated.

    `bilevel.run` describes the fields.
    """

    max_steps: int | None = None
    max_calls: int | None = None
    max_seconds: float | None = None
    stop: Any = ()  # a criterion or several, stored as a tuple
    eval_every: int | None = None

    def __post_init__(self) -> None:
        several = () if self.stop is None else self.stop if isinstance(self.stop, tuple | list) else (self.stop,)
        object.__setattr__(self, "stop", tuple(several))
        for name, least in {"max_steps": 0, "max_calls": 0, "eval_every": 1}.items():
            value = getattr(self, name)
            if value is not None and not (is_number(value, Integral) and value >= least):
                raise ValueError(f"`{name}={value!r}`: must be an integer of at least {least}, or None.")
        if self.max_seconds is not None and not _is_limit(self.max_seconds):
            raise ValueError(f"`max_seconds={self.max_seconds!r}`: must be a finite number of at least 0, or None.")
        if self.max_steps is not None and self.max_steps > INT32_MAX:
            raise ValueError(f"`max_steps={self.max_steps}`: steps are counted in 32 bits, at most {INT32_MAX}.")
        if self.max_steps is None and self.max_calls is None and self.max_seconds is None:
            raise ValueError("no budget: give at least one of `max_steps`, `max_calls`, `max_seconds`.")
        for criterion in self.stop:
            if not _is_limit(criterion) and not isinstance(criterion, CertifiedTolerance | EarlyStopping):
                raise ValueError(
                    f"`stop={criterion!r}`: must be a number of at least 0, a bilevel.CertifiedTolerance, a "
                    "bilevel.EarlyStopping, or a tuple of these."
                )

    @property
    def tolerance(self) -> float | None:
        """The largest ‖∇h‖² at which the run stops."""
        return max((criterion for criterion in self.stop if is_number(criterion)), default=None)

    @property
    def certified_tolerance(self) -> float | None:
        """The largest certified bound of ‖∇h‖² at which the run stops."""
        return max((one.bound for one in self.stop if isinstance(one, CertifiedTolerance)), default=None)

    @property
    def early_stopping(self) -> EarlyStopping | None:
        """The criterion of a metric."""
        return next((criterion for criterion in self.stop if isinstance(criterion, EarlyStopping)), None)

    def next_evaluation(self, epoch: int, step: int, calls: int) -> tuple[float, float]:
        """Return the step and the oracle calls of which the first one reached makes an evaluation due.

        They do not depend on the clock, so that the histories of two runs can be compared.
        """
        if self.eval_every is not None:
            return step - step % self.eval_every + self.eval_every, math.inf
        targets = (epoch / 64 * 2 ** (number / _PER_DOUBLING) for number in itertools.count())
        return math.inf, next(target for target in targets if target > calls)


class Driver:
    """Runs on one problem, driven together, each until it ends.

    If ``exact`` is true, every row has exact metrics; otherwise `add_exact` adds them to the last row.
    """

    def __init__(self, problem: BilevelProblem, steps: Steps, *, exact: bool) -> None:
        self.problem, self.steps, self.exact = problem, steps, exact
        self.epoch = problem.n_inner + problem.n_outer
        n_runs = steps.n_seeds * steps.n_settings
        self.rows: list[list[dict[str, Any]]] = [[] for _ in range(n_runs)]  # of each run
        self.points: dict[int, Point] = {}  # of each run at its last row
        self._ended = {status: np.full(n_runs, False) for status in Status}  # which runs have a reason to end so
        self.budget, self.best, self.recorder = Budget(max_steps=0), NO_BEST, Recorder()
        self.evaluates_first = False  # even if no evaluation is due
        self.certifier: Certifier | None = None
        self.checkpoints = CheckpointWriter()
        self.report: Reporter | None = None
        self.stopped: Callable[[], bool] | None = None  # called every tenth of a second
        self._reference: ExactSolution | None = None
        self._failed_metrics: set[str] = set()
        self.unsolved = ""  # why the last exact solution could not be computed
        own = problem.metrics.items()
        self._compiled_metrics = {} if exact else {name: m for name, m in own if _is_traceable(m, steps.start)}
        self._host_metrics = {name: m for name, m in own if name not in self._compiled_metrics}

    def status(self, run: int = 0) -> Status:
        """Return how a run ends if it takes no further step. No other place decides this."""
        return next((status for status, runs in self._ended.items() if runs[run]), Status.out_of_budget)

    @property
    def running(self) -> np.ndarray:
        """Which runs can continue."""
        return ~np.any(list(self._ended.values()), axis=0)

    def drive(self, budget: Budget) -> None:
        """Take steps until all runs have ended."""
        self.budget = budget
        last = INT32_MAX if budget.max_steps is None else int(budget.max_steps)
        max_calls, max_seconds = (math.inf if n is None else n for n in (budget.max_calls, budget.max_seconds))
        self.steps.max_seconds = max_seconds
        # A run that is resumed from a checkpoint is evaluated at the steps of an uninterrupted run.
        if self.evaluates_first or not self.rows[0] or self.rows[0][-1]["step"] == self.steps.position.step:
            self._observe(self.running)
        if (stopping := budget.early_stopping) is not None and stopping.metric not in self.rows[0][0]:
            there = ", ".join(self.rows[0][0])
            raise ValueError(f"`EarlyStopping(metric={stopping.metric!r})`: the history has {there}.")
        while (running := self.running).any():
            if self.stopped is not None and self.stopped():
                return self.interrupt()
            _, step, calls, seconds = self.steps.position
            is_over = step >= last or seconds >= max_seconds
            lasts = np.full(len(self.rows), step) if is_over else self.steps.last_steps(max_calls)
            ending = running & (lasts <= step)
            if ending.any():
                self._observe(ending)
                self._ended[Status.out_of_budget] |= ending
                continue
            due_step, due_calls = budget.next_evaluation(self.epoch, step, int(calls[0].sum()))
            reached = self.steps.last_steps(np.nextafter(due_calls, 0))[0] + 1  # these calls, by the first run
            stop = min(last, lasts[running].min(), due_step, reached, self.checkpoints.next_step(step))
            if self.stopped is not None or max_seconds < math.inf:
                seconds = min(_LOOK_SECONDS, max_seconds - self.steps.position.seconds)
                stop = min(stop, step + max(1, int(self.steps.steps_per_second * seconds)))
            self.advance(int(stop))
            before, (_, step, calls, _) = calls, self.steps.position
            is_due = step >= due_step or calls[0].sum() >= due_calls
            if is_due or not self.steps.finite or np.array_equal(calls, before):  # no calls: the solver has ended
                self._observe(running)
            self.checkpoints.write_if_due(step)
            if self.report is not None and self.running.any():
                self._report(self.report)

    def advance(self, stop: int) -> None:
        """Take steps towards ``stop``, and record if the iterates became non-finite."""
        self.steps.advance(stop)
        self._ended[Status.diverged] |= not self.steps.finite

    def _observe(self, runs: np.ndarray) -> None:
        """Evaluate these runs, and compare them with tolerances and with the criteria of solver and early stopping."""
        self.evaluate(runs)
        stopping = self.budget.early_stopping
        limits = {"hypergrad_norm_sq": self.budget.tolerance, "certified_norm_sq": self.budget.certified_tolerance}
        for run in np.flatnonzero(runs & ~self._ended[Status.diverged]).tolist():
            row = self.rows[run][-1]
            by_solver = self.steps.solver.monitor.end(row) is not None
            by_tolerance = any(limit is not None and row[name] <= limit for name, limit in limits.items())
            self._ended[Status.converged][run] = by_solver or by_tolerance
            self._ended[Status.stopped_early][run] = stopping is not None and stopping.is_over(self.rows[run])

    def evaluate(self, runs: np.ndarray) -> None:
        """Add a row to each of these runs, unless its last row is of this step, and record which runs are finite."""
        step = self.steps.position.step
        new = runs & [not rows or rows[-1]["step"] != step for rows in self.rows]
        if new.any():
            found, points = self.steps.evaluate(self._compiled_metrics), self.steps.points()
            # F may overflow at a finite point. The square of a direction may overflow as well, which means nothing.
            undefined = np.where(np.isnan(found["direction_norm_sq"]), np.nan, 0)
            parts = [found["outer_value"], undefined, *jax.tree.leaves(points)]
            finite = np.all([np.isfinite(part).all(axis=tuple(range(1, part.ndim))) for part in parts], axis=0)
            for run in np.flatnonzero(new & (finite | self.steps.alone)).tolist():
                self._add_row(run, found, jax.tree.map(lambda leaf, run=run: leaf[run], points))
            self._ended[Status.diverged] |= new & ~finite
        self.recorder.catch_up(self.rows[0])

    def _add_row(self, run: int, found: Evaluation, point: Point) -> None:
        row = self._costs(run) | {name: float(column[run]) for name, column in found.items()}
        row |= self._exact(point, sound=True) if self.exact else {}
        row |= self.certified(point) | {name: self._measure(name, point) for name in self._host_metrics}
        self.rows[run].append(row)
        self.points[run] = point
        self._keep_best(self.rows[run], point)

    def _keep_best(self, rows: list[dict[str, Any]], point: Point) -> None:
        """Keep the point of the last row if it is the best by the metric of early stopping, or by its exact value."""
        here, stopping = len(rows) - 1, self.budget.early_stopping
        name = "value" if stopping is None else stopping.metric
        value = rows[here].get(name, np.nan)
        if value < self.best[1] if stopping is None else stopping.best_row(rows) == here:
            self.best = trees.to_numpy(point, self.problem.dtype), value, here

    def _costs(self, run: int) -> dict[str, Any]:
        _, step, by_seed, seconds = self.steps.position
        calls = by_seed[run // self.steps.n_settings]
        total, kinds = int(calls.sum()), zip(Calls._fields, calls.tolist(), strict=True)
        # The seconds of a program of many runs cannot be attributed to one of them.
        costs: dict[str, Any] = {"step": step} | ({"seconds": seconds} if self.steps.alone else {})
        return costs | {"calls": total} | {f"calls_{kind}": n for kind, n in kinds} | {"epochs": total / self.epoch}

    def interrupt(self) -> None:
        """Evaluate a run, and record that it was stopped from the keyboard."""
        self.evaluate(np.ones(1, bool))
        self._ended[Status.interrupted][:] = True

    def fail(self) -> None:
        """Record that a step or an evaluation raised, in a row without metrics."""
        self._ended[Status.failed][:] = True
        if not self.rows[0] or self.rows[0][-1]["step"] != self.steps.position.step:
            self.rows[0].append(self._costs(0))

    def _exact(self, point: Point, *, sound: bool) -> dict[str, float]:
        try:
            metrics, reference = exact_metrics(self.problem, point, self._reference)
        except (np.linalg.LinAlgError, ValueError) as error:
            # The run continues, and `warn_unsolved` explains the NaN at its end.
            self.unsolved = str(error)
            return {"value": np.nan, "hypergrad_norm_sq": np.nan}
        if sound and np.isfinite(metrics.get("value", np.nan)):
            self._reference = reference  # the start of the next solve; a point far away would be a bad one
        return metrics

    def certified(self, point: Point) -> dict[str, float]:
        """Return the bounds of the certificate at a point; nothing without a `certified_tolerance`."""
        if self.certifier is None:
            return {}
        certificate = self.certifier(point)
        bound = certificate.hypergrad_norm_bound
        return {"certified_error": certificate.error_bound, "certified_norm_sq": bound * bound}

    def _measure(self, name: str, point: Point) -> float:
        """Return a metric of the problem. If it raises, its column is NaN and the run continues."""
        try:
            return float(self._host_metrics[name](trees.to_numpy(point, self.problem.dtype)))
        except Exception as error:
            if name not in self._failed_metrics:
                warn_user(f"`metrics`: {name!r} failed ({error!r}) and is NaN in such rows; the run continues.")
            self._failed_metrics.add(name)
            return np.nan

    def add_exact(self, run: int) -> list[dict[str, Any]]:
        """Return the rows of a run, the last one with its exact metrics."""
        sound = not self._ended[Status.diverged][run]
        for row in self.rows[run][-1:]:
            row |= self._exact(self.points[run], sound=sound)
        if sound:
            self.warn_unsolved(self.rows[run])
        return self.rows[run]

    def warn_unsolved(self, rows: list[dict[str, Any]]) -> None:
        """Warn if there was no exact solution in some rows of a run that did not diverge."""
        if missing := sum(np.isnan(row.get("value", 0.0)) for row in rows):
            why = self.unsolved or "these are evaluations of the saved run, which warned about them."
            warn_user(f"`value` is NaN in {missing} of {len(rows)} evaluations, and `best_value` ignores them: {why}")

    def _report(self, report: Reporter) -> None:
        row, budget, (_, step, calls, seconds) = self.rows[0][-1], self.budget, self.steps.position
        total, metric = int(calls[0].sum()), default_metric(row)
        text = f"{total / self.epoch:.3g} epochs, {metric.label} {row[metric.name]:.3g}"
        used = (step, budget.max_steps), (total, budget.max_calls), (seconds, budget.max_seconds)
        report(max(now / limit if limit else 1.0 for now, limit in used if limit is not None), text)


def _is_traceable(metric: Any, start: Point) -> bool:
    """Return True if a metric can be compiled: it is a pytree of arrays that JAX can trace."""
    try:
        return jax.eval_shape(lambda metric, point: metric(point), metric, start).shape == ()
    except Exception:  # a function of the user may raise anything
        return False


# Sweeps


class CellResult(NamedTuple):
    """The result of one setting with one seed: a row per evaluation, and how the run ended."""

    rows: list[dict[str, Any]]
    status: Status
    memory_bytes: int


def sweep(
    problem: BilevelProblem,
    solvers: Sequence[Solver],
    seeds: Sequence[int],
    max_calls: int,
    *,
    together: bool = False,
    exact: bool = True,
) -> list[list[CellResult]]:
    """Run every setting with every seed until its calls are used up; results by seed, then by setting.

    All settings step together in one program, and rows are drawn once per seed. The solvers are of one class and differ
    only in traced numbers. Only the last row has exact metrics, or no row if ``exact`` is false; rows have no seconds.
    With ``together`` all seeds step in one program too, which is faster on a GPU; all rows except the last are then at
    the steps where the first seed is evaluated.
    """
    prepared = prepare(problem, solvers[0])
    solvers = [cast(Solver, prepared.solver), *(cast(Solver, configure(problem, solver)) for solver in solvers[1:])]
    results = []
    with arithmetic(prepared.dtype, problem):
        if together:  # all seeds must have their full-batch passes at the same steps, which random passes do not
            first = solvers[0].cast(prepared.dtype), prepared.oracles
            drawn = [draw_page(*first, run_key(seed), np.int32(0), PAGE_LENGTH).refreshes for seed in seeds]
            together = all(np.array_equal(np.asarray(refreshes), np.asarray(drawn[0])) for refreshes in drawn)
        groups, programs = ([seeds], SEEDS_AND_SETTINGS) if together else ([[seed] for seed in seeds], SETTINGS)
        for group in groups:
            driver = Driver(problem, CompiledSteps(prepared, group, solvers, programs), exact=False)
            driver.drive(Budget(max_calls=max_calls))
            runs = range(len(driver.rows))
            memory = sum(leaf.nbytes // len(runs) for leaf in jax.tree.leaves(driver.steps.position.state))
            rows = [driver.add_exact(run) if exact else driver.rows[run] for run in runs]
            cells = [CellResult(rows[run], driver.status(run), memory) for run in runs]
            results += [cells[i : i + len(solvers)] for i in range(0, len(cells), len(solvers))]
    return results

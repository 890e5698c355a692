"""The driver of one run, or of all runs of a sweep: budgets, evaluations off the clock, and how runs end."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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

_LOOK_SECONDS = 0.1  # between two looks at a clock that has a limit, the keyboard or the progress bar
_PER_DOUBLING = 4  # evaluations per doubling of the calls, from 1/64 of an epoch on


@dataclass(frozen=True)
class EarlyStopping:
    """Stop a run when a metric has not improved for some evaluations; ``result.best_point`` is its best point.

    Only the history is used, so a resumed run stops at the same step as an uninterrupted one.

    Parameters
    ----------
    metric : a column of the history, such as "test_error", "outer_value" or a metric of your problem
    patience : number of evaluations of the metric without an improvement after which the run stops
    min_change : smallest change that counts as an improvement
    better : "lower" or "higher"; by default the direction of a metric of the library, and "lower" for your own metrics
    """

    metric: str
    patience: int = 10
    min_change: float = 0.0
    better: str | None = None

    def __post_init__(self) -> None:
        me = "`EarlyStopping"
        if not isinstance(self.metric, str):
            raise ValueError(f"{me}(metric={self.metric!r})`: must be the name of a column of the history.")
        if not is_number(self.patience, Integral) or self.patience < 1:
            raise ValueError(f"{me}(patience={self.patience!r})`: must be an integer of at least 1.")
        if not isinstance(as_float(self.min_change), float) or not 0 <= self.min_change < math.inf:
            raise ValueError(f"{me}(min_change={self.min_change!r})`: must be a finite number of at least 0.")
        if self.better not in (None, "lower", "higher"):
            raise ValueError(f"{me}(better={self.better!r})`: must be 'lower', 'higher' or None.")

    def best_row(self, rows: Sequence[Mapping[str, Any]]) -> int:
        """Return the index of the row with the last improvement; -1 if no row has the metric."""
        best, found = np.nan, -1
        for number, row in enumerate(rows):
            value = self._sign() * row.get(self.metric, np.nan)
            if value < best - self.min_change or (np.isnan(best) and not np.isnan(value)):
                best, found = value, number
        return found

    def is_over(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        """Return True if the metric has not improved for `patience` evaluations."""
        later = rows[self.best_row(rows) + 1 :] if self.best_row(rows) >= 0 else ()
        return sum(not np.isnan(row.get(self.metric, np.nan)) for row in later) >= self.patience

    def check_known(self, row: Mapping[str, Any]) -> None:
        """Raise ValueError if the first row of a run does not have the metric."""
        if self.metric not in row:
            raise ValueError(f"`EarlyStopping(metric={self.metric!r})`: the history has {', '.join(row)}.")

    def _sign(self) -> int:
        better = metric(self.metric).better if self.better is None else self.better
        return -1 if better == "higher" else 1


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
        if not isinstance(as_float(self.bound), float) or not 0 <= self.bound < math.inf:
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
    stop: Criterion | Sequence[Criterion] | None = None
    eval_every: int | tuple[int | None, int] | None = None

    def __post_init__(self) -> None:
        for name in ("max_steps", "max_calls"):
            if (value := getattr(self, name)) is not None and not (is_number(value, Integral) and value >= 0):
                raise ValueError(f"`{name}={value!r}`: must be an integer of at least 0, or None.")
        if self.max_seconds is not None:
            seconds = as_float(self.max_seconds)
            if not isinstance(seconds, float) or not 0 <= seconds < math.inf:
                raise ValueError(f"`max_seconds={self.max_seconds!r}`: must be a finite number of at least 0, or None.")
            object.__setattr__(self, "max_seconds", seconds)
        if self.max_steps is not None and self.max_steps > INT32_MAX:
            raise ValueError(f"`max_steps={self.max_steps}`: steps are counted in 32 bits, at most {INT32_MAX}.")
        if self.max_steps is None and self.max_calls is None and self.max_seconds is None:
            raise ValueError("no budget: give at least one of `max_steps`, `max_calls`, `max_seconds`.")
        for criterion in self._criteria:
            is_tolerance = is_number(criterion) and 0 <= criterion < math.inf
            if not is_tolerance and not isinstance(criterion, CertifiedTolerance | EarlyStopping):
                raise ValueError(
                    f"`stop={criterion!r}`: must be a number of at least 0, a bilevel.CertifiedTolerance, a "
                    "bilevel.EarlyStopping, or a tuple of these."
                )
        numbers = self.eval_every if isinstance(self.eval_every, tuple | list) else (self.eval_every, None)
        if len(numbers) != 2 or not all(n is None or (is_number(n, Integral) and n >= 1) for n in numbers):
            raise ValueError(
                f"`eval_every={self.eval_every!r}`: must be an integer of at least 1, or a pair of such integers."
            )

    @property
    def _criteria(self) -> tuple[Any, ...]:
        if self.stop is None:
            return ()
        return tuple(self.stop) if isinstance(self.stop, tuple | list) else (self.stop,)

    @property
    def tolerance(self) -> float | None:
        """The largest ‖∇h‖² at which the run stops."""
        return min((criterion for criterion in self._criteria if is_number(criterion)), default=None)

    @property
    def certified_tolerance(self) -> float | None:
        """The largest certified bound of ‖∇h‖² at which the run stops."""
        return min((one.bound for one in self._criteria if isinstance(one, CertifiedTolerance)), default=None)

    @property
    def early_stopping(self) -> EarlyStopping | None:
        """The criterion of a metric."""
        return next((criterion for criterion in self._criteria if isinstance(criterion, EarlyStopping)), None)

    @property
    def every(self) -> Any:
        """Number of steps between two evaluations; None means four per doubling of the calls."""
        return self.eval_every[0] if isinstance(self.eval_every, tuple | list) else self.eval_every

    @property
    def metrics_every(self) -> Any:
        """Number of steps between two evaluations of the problem's own metrics; None means at each evaluation."""
        return self.eval_every[-1] if isinstance(self.eval_every, tuple | list) else None

    def next_evaluation(self, epoch: int, step: int, calls: int, page_first: int, calls_after: np.ndarray) -> int:
        """Return the step of the next evaluation, as `steps.NextEvaluation` describes.

        It does not depend on the clock, so that the histories of two runs can be compared.
        """
        multiples = [step - step % n + n - page_first for n in (self.every, self.metrics_every) if n is not None]
        if self.every is not None:
            return min(multiples)
        target = epoch / 64
        if calls >= target:
            target *= 2 ** (math.floor(math.log2(calls / target) * _PER_DOUBLING) / _PER_DOUBLING)
        while target <= calls:
            target *= 2 ** (1 / _PER_DOUBLING)
        return min([int(np.searchsorted(calls_after, target)) + 1, *multiples])


class Facts(NamedTuple):
    """What the steps, the evaluations and the solver report about a run, from which its status follows."""

    failed: bool = False  # a step or an evaluation raised
    interrupted: bool = False  # by Ctrl-C
    finite: bool = True  # the iterates and F
    reached: bool = False  # a tolerance, or the criterion of the solver
    improving: bool = True  # the metric of early stopping
    affordable: bool = True  # another step is within the budget

    def status(self) -> Status | None:
        """Return how the run has ended, or None if it can continue. No other place decides this."""
        if self.failed:
            return Status.failed
        if self.interrupted:
            return Status.interrupted
        if not self.finite:
            return Status.diverged
        if self.reached:
            return Status.converged
        if not self.improving:
            return Status.stopped_early
        return None if self.affordable else Status.out_of_budget


class Driver:
    """Runs on one problem, driven together, each until it ends.

    If ``exact`` is true, every row has exact metrics; otherwise `add_exact` adds them to the last row.
    """

    def __init__(self, problem: BilevelProblem, steps: Steps, *, exact: bool) -> None:
        self.problem, self.steps, self.exact = problem, steps, exact
        self.epoch = problem.n_inner + problem.n_outer
        n_seeds, n_settings = steps.shape
        self.rows: list[list[list[dict[str, Any]]]] = [[[] for _ in range(n_settings)] for _ in range(n_seeds)]
        self.kept = steps.points()  # at the last finite evaluation of each run
        self.failed = self.interrupted = False
        self.finite, self.improving, self.affordable = (np.full(steps.shape, True) for _ in range(3))
        self.reached = np.full(steps.shape, False)
        self.best, self.recorder = NO_BEST, Recorder()
        self.evaluates_first = False  # even if no evaluation is due
        self.certifier: Certifier | None = None
        self.checkpoints, self.early_stopping = CheckpointWriter(), cast(EarlyStopping | None, None)
        self._reference: ExactSolution | None = None
        self._failed_metrics: set[str] = set()
        self.unsolved = ""  # why the last exact solution could not be computed
        own = problem.metrics.items()
        self._compiled_metrics = {} if exact else {name: m for name, m in own if _is_traceable(m, steps.start)}
        self._host_metrics = {name: m for name, m in own if name not in self._compiled_metrics}

    def status(self, i: int, j: int) -> Status | None:
        """Return how a run has ended, or None if it can continue."""
        of_run = (array[i, j] for array in (self.finite, self.reached, self.improving, self.affordable))
        return Facts(self.failed, self.interrupted, *of_run).status()

    @property
    def running(self) -> np.ndarray:
        """Which runs can continue."""
        places = np.ndindex(self.steps.shape)
        return np.reshape([self.status(*place) is None for place in places], self.steps.shape)

    def drive(self, budget: Budget, report: Reporter | None = None, stopped: Callable[[], bool] | None = None) -> None:
        """Take steps until all runs have ended, or until ``stopped``, called every tenth of a second, returns True."""
        due = partial(budget.next_evaluation, self.epoch)
        last = INT32_MAX if budget.max_steps is None else int(budget.max_steps)
        max_calls, max_seconds = (math.inf if n is None else n for n in (budget.max_calls, budget.max_seconds))
        self.steps.max_seconds = max_seconds
        self.early_stopping = budget.early_stopping
        # A run that is resumed from a checkpoint is evaluated at the steps of an uninterrupted run.
        if self.evaluates_first or not self.rows[0][0] or self.rows[0][0][-1]["step"] == self.steps.position.step:
            self._observe(self.running, budget)
        if budget.early_stopping is not None:
            budget.early_stopping.check_known(self.rows[0][0][0])
        while (running := self.running).any():
            if stopped is not None and stopped():
                self.evaluate(running)
                self.interrupted = True
                return
            _, step, _, seconds = self.steps.position
            is_over = step >= last or seconds >= max_seconds
            lasts = np.full(len(self.rows), step) if is_over else self.steps.last_steps(max_calls)
            ending = running & (lasts <= step)[:, None]
            if ending.any():
                self._observe(ending, budget)
                self.affordable &= ~ending
                continue
            stop = min(last, int(lasts[running.any(axis=1)].min()))
            if stopped is not None or max_seconds < math.inf:
                seconds = min(_LOOK_SECONDS, max_seconds - self.steps.position.seconds)
                stop = min(stop, step + max(1, int(self.steps.steps_per_second * seconds)))
            if self.steps.advance(self.checkpoints.cap(step, stop), due) or not self.steps.finite:
                every = budget.metrics_every
                self._observe(running, budget, measure=every is None or self.steps.position.step % every == 0)
            self.checkpoints.write_if_due(self.steps.position.step)
            if report is not None and self.running.any():
                self._report(report, budget)

    def _observe(self, runs: np.ndarray, budget: Budget, *, measure: bool = True) -> None:
        """Evaluate these runs, and compare them with tolerances and with the criteria of solver and early stopping."""
        self.evaluate(runs, measure=measure)
        limits = {"hypergrad_norm_sq": budget.tolerance, "certified_norm_sq": budget.certified_tolerance}
        for i, j in np.argwhere(runs & self.finite):
            row = self.rows[i][j][-1]
            by_solver = self.steps.solver.monitor.end(row) is not None
            by_tolerance = any(limit is not None and row[name] <= limit for name, limit in limits.items())
            self.reached[i, j] = by_solver or by_tolerance
            self.improving[i, j] = budget.early_stopping is None or not budget.early_stopping.is_over(self.rows[i][j])

    def evaluate(self, runs: np.ndarray, *, measure: bool = True) -> None:
        """Add a row to each of these runs, unless its last row is of this step, and record which runs are finite.

        The metrics of the problem are included if ``measure`` is true.
        """
        step = self.steps.position.step
        new = runs & [[not rows or rows[-1]["step"] != step for rows in of_seed] for of_seed in self.rows]
        if new.any():
            found, points = self.steps.evaluate(self._compiled_metrics if measure else {}), self.steps.points()
            # F may overflow at a finite point. The square of a direction may overflow as well, which means nothing.
            undefined = np.where(np.isnan(found[0]["direction_norm_sq"]), np.nan, 0)
            parts = [found[0]["outer_value"], undefined, *jax.tree.leaves(points)]
            finite = np.all([np.isfinite(part).all(axis=tuple(range(2, part.ndim))) for part in parts], axis=0)
            for i, j in np.argwhere(new & (finite | self.steps.alone)):
                self._add_row(i, j, found, jax.tree.map(lambda leaf, at=(i, j): leaf[at], points), measure)
            for kept, leaf in zip(jax.tree.leaves(self.kept), jax.tree.leaves(points), strict=True):
                kept[new & finite] = leaf[new & finite]
            self.finite &= finite | ~new
        self.finite &= self.steps.finite | ~runs
        self.recorder.catch_up(self.rows[0][0])

    def _add_row(self, i: int, j: int, found: Evaluation, point: Point, measure: bool) -> None:
        costs = self._costs(i)
        cheap, own, diagnostics = ({name: float(c[i, j]) for name, c in columns.items()} for columns in found)
        exact = self._exact(point, sound=True) if self.exact else {}
        measured = {name: self._measure(name, point) for name in self._host_metrics if measure}
        row = costs | cheap | exact | self.certified(point) | own | measured | diagnostics
        self.rows[i][j].append(row)
        self._keep_best(self.rows[i][j], point)

    def _keep_best(self, rows: list[dict[str, Any]], point: Point) -> None:
        """Keep the point of the last row if it is the best by the metric of early stopping, or by its exact value."""
        here, stopping = len(rows) - 1, self.early_stopping
        name = "value" if stopping is None else stopping.metric
        value = rows[here].get(name, np.nan)
        if value < self.best[1] if stopping is None else stopping.best_row(rows) == here:
            self.best = trees.to_numpy(point, self.problem.dtype), value, here

    def _costs(self, i: int) -> dict[str, Any]:
        _, step, calls, seconds = self.steps.position
        total, kinds = int(calls[i].sum()), zip(Calls._fields, calls[i].tolist(), strict=True)
        # The seconds of a program of many runs cannot be attributed to one of them.
        costs: dict[str, Any] = {"step": step} | ({"seconds": seconds} if self.steps.alone else {})
        return costs | {"calls": total} | {f"calls_{kind}": n for kind, n in kinds} | {"epochs": total / self.epoch}

    def fail(self) -> None:
        """Record that a step or an evaluation raised, in a row without metrics."""
        self.failed = True
        if not self.rows[0][0] or self.rows[0][0][-1]["step"] != self.steps.position.step:
            self.rows[0][0].append(self._costs(0))

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

    def add_exact(self, i: int, j: int) -> list[dict[str, Any]]:
        """Return the rows of a run, the last one with the exact metrics of its last finite evaluation."""
        point = jax.tree.map(lambda leaf: leaf[i, j], self.kept)
        exact = self._exact(point, sound=self.finite[i, j])
        for row in self.rows[i][j][-1:]:
            row |= exact
        if self.finite[i, j]:
            self.warn_unsolved(self.rows[i][j])
        return self.rows[i][j]

    def warn_unsolved(self, rows: list[dict[str, Any]]) -> None:
        """Warn if there was no exact solution in some rows of a run that did not diverge."""
        if missing := sum(np.isnan(row.get("value", 0.0)) for row in rows):
            why = self.unsolved or "these are evaluations of the saved run, which warned about them."
            warn_user(f"`value` is NaN in {missing} of {len(rows)} evaluations, and `best_value` ignores them: {why}")

    def _report(self, report: Reporter, budget: Budget) -> None:
        row, (_, step, calls, seconds) = self.rows[0][0][-1], self.steps.position
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

    All settings step together in one program, and rows are drawn once per seed. The solvers are of one class
    and differ only in traced numbers. Only the last row has exact metrics, or no row if
    ``exact`` is false. Rows have no seconds, since the time of a program of many runs cannot be attributed to one of
    them. With ``together`` all seeds step in one program too, which is faster on a GPU; all rows except the last are
    then at the steps where the first seed is evaluated.
    """
    prepared = prepare(problem, solvers[0])
    solvers = [cast(Solver, prepared.solver), *(cast(Solver, configure(problem, solver)) for solver in solvers[1:])]
    results = []
    with arithmetic(prepared.dtype):
        if together:  # all seeds must have their full-batch passes at the same steps, which random passes do not
            first = solvers[0].cast(prepared.dtype), prepared.oracles
            drawn = [draw_page(*first, run_key(seed), np.int32(0), PAGE_LENGTH).refreshes for seed in seeds]
            together = all(np.array_equal(np.asarray(refreshes), np.asarray(drawn[0])) for refreshes in drawn)
        groups, programs = ([seeds], SEEDS_AND_SETTINGS) if together else ([[seed] for seed in seeds], SETTINGS)
        for group in groups:
            driver = Driver(problem, CompiledSteps(prepared, group, solvers, programs), exact=False)
            driver.drive(Budget(max_calls=max_calls))
            memory = sum(leaf.nbytes // driver.finite.size for leaf in jax.tree.leaves(driver.steps.position.state))
            for i in range(len(group)):
                rows = [driver.add_exact(i, j) if exact else driver.rows[i][j] for j in range(len(solvers))]
                results.append(
                    [CellResult(own, driver.status(i, j) or Status.out_of_budget, memory) for j, own in enumerate(rows)]
                )
    return results

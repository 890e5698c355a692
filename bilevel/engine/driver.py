"""The driver of one run, or of all runs of a sweep: how far they go, their evaluations off the clock, how they end."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from numbers import Integral, Real
from typing import Any, cast

import jax
import numpy as np

from bilevel import _tree as trees
from bilevel._progress import Reporter
from bilevel._types import INT32_MAX, Calls, Point, as_float, is_number
from bilevel.engine.checkpoints import Checkpoints
from bilevel.engine.logs import Recorder, warn_user
from bilevel.engine.loop import Evaluation
from bilevel.engine.metrics import default_metric, exact_metrics, metric
from bilevel.engine.result import NO_BEST, Status
from bilevel.engine.steps import Steps
from bilevel.problems import BilevelProblem, ExactSolution
from bilevel.problems.certificate import Certifier

_LOOK_SECONDS = 0.1  # between two looks at a clock that has a limit, the keyboard or the progress bar
_PER_DOUBLING = 4  # evaluations per doubling of the calls, from 1/64 of an epoch on


@dataclass(frozen=True)
class EarlyStopping:
    """Stop a run where a metric has not improved for some evaluations; ``result.best_point`` has its best one.

    It reads the history alone: a resumed run stops where one does that was never interrupted.

    Parameters
    ----------
    metric : a column of the history, such as "test_error", "outer_value" or a metric of your problem
    patience : evaluations of the metric without an improvement after which the run stops
    min_change : what counts as an improvement
    better : "lower" or "higher"; by default as the library knows the metric, and lower for your own
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
        """Return the row with the last improvement; -1 where the metric is in none."""
        best, found = np.nan, -1
        for number, row in enumerate(rows):
            value = self._sign() * row.get(self.metric, np.nan)
            if value < best - self.min_change or (np.isnan(best) and not np.isnan(value)):
                best, found = value, number
        return found

    def is_over(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        """Tell whether patience is at its end."""
        later = rows[self.best_row(rows) + 1 :] if self.best_row(rows) >= 0 else ()
        return sum(not np.isnan(row.get(self.metric, np.nan)) for row in later) >= self.patience

    def check_known(self, row: Mapping[str, Any]) -> None:
        """Refuse a metric that the first row of a run does not have."""
        if self.metric not in row:
            raise ValueError(f"`EarlyStopping(metric={self.metric!r})`: the history has {', '.join(row)}.")

    def _sign(self) -> int:
        better = metric(self.metric).better if self.better is None else self.better
        return -1 if better == "higher" else 1


@dataclass(frozen=True)
class Budget:
    """Limits on a whole run, resumed or not, and how often it is evaluated."""

    max_steps: int | None = None
    max_calls: int | None = None
    max_seconds: float | None = None
    tolerance: float | None = None
    certified_tolerance: float | None = None
    eval_every: int | None = None
    metrics_every: int | None = None
    early_stopping: EarlyStopping | None = None

    def __post_init__(self) -> None:
        if self.early_stopping is not None and not isinstance(self.early_stopping, EarlyStopping):
            raise ValueError(f"`early_stopping={self.early_stopping!r}`: must be a bilevel.EarlyStopping, or None.")
        for field in fields(self)[:-1]:
            value, least = getattr(self, field.name), 1 if field.name.endswith("_every") else 0
            kind, what = (Integral, "an integer") if field.type == int | None else (Real, "a finite number")
            known = isinstance(value, kind) and not isinstance(value, bool)
            if value is not None and not (known and least <= value < math.inf):
                raise ValueError(f"`{field.name}={value!r}`: must be {what} of at least {least}, or None.")
        if self.max_steps is not None and self.max_steps > INT32_MAX:
            raise ValueError(f"`max_steps={self.max_steps}`: steps are counted in 32 bits, at most {INT32_MAX}.")
        if self.max_steps is None and self.max_calls is None and self.max_seconds is None:
            raise ValueError("no budget: give at least one of `max_steps`, `max_calls`, `max_seconds`.")

    def next_evaluation(self, epoch: int, step: int, calls: int, page_first: int, calls_after: np.ndarray) -> int:
        """Be a `steps.NextEvaluation` once epoch is given. It does not look at the clock, so that histories compare."""
        multiples = [step - step % n + n - page_first for n in (self.eval_every, self.metrics_every) if n is not None]
        if self.eval_every is not None:
            return min(multiples)
        target = epoch / 64
        if calls >= target:
            target *= 2 ** (math.floor(math.log2(calls / target) * _PER_DOUBLING) / _PER_DOUBLING)
        while target <= calls:
            target *= 2 ** (1 / _PER_DOUBLING)
        return min([int(np.searchsorted(calls_after, target)) + 1, *multiples])


class Driver:
    """Runs on one problem, driven together: each to the end of its budget, to a tolerance, or until it diverges.

    Exact metrics are in every row where ``exact`` is true; else `add_exact` adds them to the last one.
    """

    def __init__(self, problem: BilevelProblem, steps: Steps, *, exact: bool) -> None:
        self.problem, self.steps, self.exact = problem, steps, exact
        self.epoch = problem.n_inner + problem.n_outer
        n_seeds, n_settings = steps.shape
        self.rows: list[list[list[dict[str, Any]]]] = [[[] for _ in range(n_settings)] for _ in range(n_seeds)]
        self.kept = steps.points()
        self.running, self.diverged, self.converged = (np.full(steps.shape, value) for value in (True, False, False))
        self.stopped = np.full(steps.shape, False)  # early, by a metric
        self.best, self.recorder, self.interrupted, self.failed = NO_BEST, Recorder(), False, False
        self.evaluates_first = False  # also where no evaluation is due
        self.certifier: Certifier | None = None
        self.checkpoints, self.early_stopping = Checkpoints(), cast(EarlyStopping | None, None)
        self._reference: ExactSolution | None = None
        self._failed_metrics: set[str] = set()
        self.unsolved = ""  # why the last exact solution that failed did so
        own = problem.metrics.items()
        self._compiled_metrics = {} if exact else {name: m for name, m in own if _is_traceable(m, steps.start)}
        self._host_metrics = {name: m for name, m in own if name not in self._compiled_metrics}

    def drive(self, budget: Budget, report: Reporter | None = None, stopped: Callable[[], bool] | None = None) -> None:
        """Go to the end, or until ``stopped`` says so, which is asked every tenth of a second."""
        due = partial(budget.next_evaluation, self.epoch)
        last = INT32_MAX if budget.max_steps is None else int(budget.max_steps)
        max_calls, max_seconds = (math.inf if n is None else n for n in (budget.max_calls, budget.max_seconds))
        self.running[:] = True
        self.steps.max_seconds = max_seconds
        self.early_stopping = budget.early_stopping
        # A run that goes on from a checkpoint is evaluated where it would have been without one.
        if self.evaluates_first or not self.rows[0][0] or self.rows[0][0][-1]["step"] == self.steps.position.step:
            self._look(self.running, budget)
        if budget.early_stopping is not None:
            budget.early_stopping.check_known(self.rows[0][0][0])
        while self.running.any():
            if stopped is not None and stopped():
                self.interrupted = True
                return self.evaluate(self.running)
            _, step, _, seconds = self.steps.position
            is_over = step >= last or seconds >= max_seconds
            lasts = np.full(len(self.rows), step) if is_over else self.steps.last_steps(max_calls)
            ending = self.running & (lasts <= step)[:, None]
            if ending.any():
                self._look(ending, budget)
                self.running &= ~ending
                continue
            stop = min(last, int(lasts[self.running.any(axis=1)].min()))
            if stopped is not None or max_seconds < math.inf:
                seconds = min(_LOOK_SECONDS, max_seconds - self.steps.position.seconds)
                stop = min(stop, step + max(1, int(self.steps.steps_per_second * seconds)))
            if self.steps.advance(self.checkpoints.cap(step, stop), due) or self.steps.diverged:
                every = budget.metrics_every
                self._look(self.running, budget, measure=every is None or self.steps.position.step % every == 0)
            self.checkpoints.look(self.steps.position.step)
            if report is not None and self.running.any():
                self._report(report, budget)

    def _look(self, runs: np.ndarray, budget: Budget, *, measure: bool = True) -> None:
        self.evaluate(runs, measure=measure)
        limits = {"hypergrad_norm_sq": budget.tolerance, "certified_norm_sq": budget.certified_tolerance}
        for i, j in np.argwhere(runs & ~self.diverged):
            row = self.rows[i][j][-1]
            is_over = self.steps.solver.end(row) is not None
            reached = any(limit is not None and row[name] <= limit for name, limit in limits.items())
            self.converged[i, j] = is_over or reached
            self.stopped[i, j] = budget.early_stopping is not None and budget.early_stopping.is_over(self.rows[i][j])
        self.running &= ~(self.diverged | self.converged | self.stopped)

    def evaluate(self, runs: np.ndarray, *, measure: bool = True) -> None:
        """Add a row to each of these runs, unless the last one is of this very step, and find who has diverged.

        The problem's own metrics are in it where ``measure`` is true.
        """
        step = self.steps.position.step
        new = runs & [[not rows or rows[-1]["step"] != step for rows in of_seed] for of_seed in self.rows]
        if new.any():
            found, points = self.steps.evaluate(self._compiled_metrics if measure else {}), self.steps.points()
            # A point may be finite where F overflows. The square of a direction may overflow too, and says nothing.
            undefined = np.where(np.isnan(found[0]["direction_norm_sq"]), np.nan, 0)
            parts = [found[0]["outer_value"], undefined, *jax.tree.leaves(points)]
            finite = np.all([np.isfinite(part).all(axis=tuple(range(2, part.ndim))) for part in parts], axis=0)
            for i, j in np.argwhere(new & (finite | self.steps.alone)):
                self._add_row(i, j, found, jax.tree.map(lambda leaf, at=(i, j): leaf[at], points), measure)
            for kept, leaf in zip(jax.tree.leaves(self.kept), jax.tree.leaves(points), strict=True):
                kept[new & finite] = leaf[new & finite]
            self.diverged |= new & ~finite
        self.diverged |= runs & self.steps.diverged
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
        """Remember the last row's point where it is the best by the metric of early stopping, or by its exact value."""
        here, stopping = len(rows) - 1, self.early_stopping
        name = "value" if stopping is None else stopping.metric
        value = rows[here].get(name, np.nan)
        if value < self.best[1] if stopping is None else stopping.best_row(rows) == here:
            self.best = trees.to_numpy(point, self.problem.dtype), value, here

    def _costs(self, i: int) -> dict[str, Any]:
        _, step, calls, seconds = self.steps.position
        total, kinds = int(calls[i].sum()), zip(Calls._fields, calls[i].tolist(), strict=True)
        # The seconds of a program of many runs belong to none of them.
        costs: dict[str, Any] = {"step": step} | ({"seconds": seconds} if self.steps.alone else {})
        return costs | {"calls": total} | {f"calls_{kind}": n for kind, n in kinds} | {"epochs": total / self.epoch}

    def fail(self) -> None:
        """Add a row of costs alone, at a point that cannot be evaluated."""
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
            self._reference = reference  # near the next, as one far out is not
        return metrics

    def certified(self, point: Point) -> dict[str, float]:
        """Return what the certificate proves of a point; nothing where none was asked for."""
        if self.certifier is None:
            return {}
        certificate = self.certifier(point)
        bound = certificate.hypergrad_norm_bound
        return {"certified_error": certificate.error_bound, "certified_norm_sq": bound * bound}

    def _measure(self, name: str, point: Point) -> float:
        """Return a metric of the problem; what it raises costs its column, not the run."""
        try:
            return float(self._host_metrics[name](trees.to_numpy(point, self.problem.dtype)))
        except Exception as error:
            if name not in self._failed_metrics:
                warn_user(f"`metrics`: {name!r} failed ({error!r}) and is NaN where it does; the run goes on.")
            self._failed_metrics.add(name)
            return np.nan

    def add_exact(self, i: int, j: int) -> list[dict[str, Any]]:
        """Return the rows of a run, with the exact metrics of its last finite evaluation in the last one."""
        point = jax.tree.map(lambda leaf: leaf[i, j], self.kept)
        exact = self._exact(point, sound=not self.diverged[i, j])
        for row in self.rows[i][j][-1:]:
            row |= exact
        if not self.diverged[i, j]:
            self.warn_unsolved(self.rows[i][j])
        return self.rows[i][j]

    def warn_unsolved(self, rows: list[dict[str, Any]]) -> None:
        """Warn if there was no exact solution in some rows of a run that did not diverge."""
        if missing := sum(np.isnan(row.get("value", 0.0)) for row in rows):
            told = f"`value` is NaN in {missing} of {len(rows)} evaluations, which `best_value` leaves out"
            warn_user(f"{told}: {self.unsolved or 'those of the saved run, which warned of them.'}")

    def status(self, i: int, j: int) -> Status:
        if self.failed or self.interrupted:
            return Status.failed if self.failed else Status.interrupted
        if self.diverged[i, j]:
            return Status.diverged
        if self.stopped[i, j] and not self.converged[i, j]:
            return Status.stopped_early
        return Status.converged if self.converged[i, j] else Status.out_of_budget

    def _report(self, report: Reporter, budget: Budget) -> None:
        row, (_, step, calls, seconds) = self.rows[0][0][-1], self.steps.position
        total, metric = int(calls[0].sum()), default_metric(row)
        text = f"{total / self.epoch:.3g} epochs, {metric.label} {row[metric.name]:.3g}"
        used = (step, budget.max_steps), (total, budget.max_calls), (seconds, budget.max_seconds)
        report(max(now / limit if limit else 1.0 for now, limit in used if limit is not None), text)


def _is_traceable(metric: Any, start: Point) -> bool:
    """Tell whether a metric can be compiled: a pytree of arrays, which JAX can trace."""
    try:
        return jax.eval_shape(lambda metric, point: metric(point), metric, start).shape == ()
    except Exception:  # a function of the user's may raise anything
        return False

"""Running a solver for an estimator, and what the estimator tells of the run."""

import warnings
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state

from bilevel.estimators.between import Start
from bilevel.problems import BilevelProblem
from bilevel.result import Status
from bilevel.run import run
from bilevel.solvers import SRBA, Exact
from bilevel.solvers.base import Solver
from bilevel.types import Point

_EVALUATIONS = 10
_BATCH = 64
_SMALL = 1e7  # multiplications in a Hessian of the inner problem


class Trail:
    """As a metric, how far x is from its start; it remembers each x that it was asked for."""

    def __init__(self) -> None:
        self.visited: list[np.ndarray] = []

    def __call__(self, point: Point) -> float:
        """Return ||x - start|| and remember x."""
        self.visited.append(np.asarray(point.outer_var, np.float64))
        return float(np.linalg.norm(self.visited[-1] - self.visited[0]))


class Outcome(NamedTuple):
    """The best x that is known, and how the run ended."""

    outer_var: np.ndarray
    status: Status


def drawn_seed(random_state: Any) -> int:
    """Return the seed of the split and of the run."""
    return int(check_random_state(random_state).randint(np.iinfo(np.int32).max))


def solve(estimator: Any, start: Start, seed: int, untuned: Solver) -> Outcome:
    """Run the estimator's solver, or this one, and note `history_`, `n_calls_`, `n_iter_`, `status_`."""
    problem, trail = start.problem, Trail()
    solver = untuned if estimator.solver is None else estimator.solver
    with warnings.catch_warnings():
        # The best x, by exact values, is kept, however far estimates have drifted since.
        warnings.filterwarnings("ignore", "SRBA's recursive estimate", RuntimeWarning)
        result = run(
            replace(problem, metrics={"moved": trail}),
            solver,
            seed=seed,
            max_steps=estimator.max_iter,
            tolerance=(estimator.tol * start.value) ** 2,
            eval_every=max(1, estimator.max_iter // _EVALUATIONS) if solver.compiled else 1,
            progress=estimator.verbose > 0,
        )
    estimator.history_ = result.history
    estimator.n_calls_ = sum(result.calls)
    estimator.n_iter_ = max(1, int(result.history["step"][-1]))
    estimator.status_ = str(result.status)
    values = np.nan_to_num(result.history["value"], nan=np.inf)
    improved = values.min() < start.value
    return Outcome(trail.visited[int(values.argmin())] if improved else start.outer_var, result.status)


def stochastic(problem: BilevelProblem) -> Solver:
    """Return the stochastic solver that needs no tuning."""
    return SRBA(step_size="auto", batch_size=min(_BATCH, problem.n_inner, problem.n_outer))


def exact_where_cheap(problem: BilevelProblem) -> Solver:
    """Return exact steps for few rows and features, where they take a second in all, else stochastic ones."""
    return Exact() if problem.n_inner * problem.start.inner_var.size**2 <= _SMALL else stochastic(problem)


def announce(estimator: Any, status: Status) -> None:
    """Warn of a run that did not end well; pass Ctrl-C on, now that what it found is kept."""
    if status is Status.interrupted:
        raise KeyboardInterrupt
    name, steps = type(estimator).__name__, estimator.n_iter_
    if status is Status.diverged:
        message = f"{name}: the solver left the finite numbers after {steps} steps; the best point before is kept."
        warnings.warn(message, ConvergenceWarning, stacklevel=3)
    elif status is Status.out_of_budget and _still_falls(estimator.history_["value"]):
        message = f"{name} took max_iter={steps} steps and the loss on validation rows was still falling, "
        fall = "from {:.4g} to {:.4g} since the last evaluation but one. Increase max_iter."
        warnings.warn(message + fall.format(*estimator.history_["value"][-2:]), ConvergenceWarning, stacklevel=3)


def _still_falls(values: np.ndarray) -> bool:
    """Tell whether more steps would help: the last value is the best, by one in a hundred."""
    return len(values) > 1 and values[-1] < 0.99 * np.nanmin(values[:-1])

"""Running a solver for an estimator, and what the estimator tells of the run."""

import warnings
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state

from bilevel.problems import BilevelProblem
from bilevel.result import Status
from bilevel.run import run
from bilevel.solvers import SRBA, Exact
from bilevel.solvers.base import Solver
from bilevel.types import Point

_EVALUATIONS = 10
_PARTS = np.linspace(0, 1, 5)
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


class Start(NamedTuple):
    """A problem to solve from where it starts, and an x to improve on, with h there."""

    problem: BilevelProblem
    outer_var: np.ndarray
    value: float


def started(problem: BilevelProblem, candidates: list[np.ndarray], lead: int = 0) -> Start:
    """Start a problem near the best of some outer variables, with z and v exact there.

    Parameters
    ----------
    problem : with a referee
    candidates : outer variables to try
    lead : how many places before the best of them to start
    """
    assert problem.referee is not None
    references = [problem.referee(candidates[0], None)]
    for outer_var in candidates[1:]:
        references.append(problem.referee(outer_var, references[-1]))
    best = int(np.argmin([reference.value for reference in references]))
    first = max(0, best - lead)
    point = references[first].inner_var, candidates[first], references[first].v
    moved = replace(problem, start=Point(*(part.astype(problem.dtype) for part in point)))
    return Start(moved, candidates[best], references[best].value)


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


def shrunk(exchanged: BilevelProblem, start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the best x between two, and how far from the first it is, by rows that did not judge the second.

    Parameters
    ----------
    exchanged : the problem with training and validation rows in each other's place
    start, end : where x came from, and what the validation rows made of it; they may have made too much of it
    """
    assert exchanged.referee is not None
    reference, values = None, []
    for part in _PARTS:
        reference = exchanged.referee((1 - part) * start + part * end, reference)
        values.append(reference.value)
    part = float(_PARTS[int(np.argmin(values))])
    return (1 - part) * start + part * end, part


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
        message = f"{name} left the finite numbers after {steps} steps and kept the best point before. Scale the data."
        warnings.warn(message, ConvergenceWarning, stacklevel=3)
    elif status is Status.out_of_budget and _still_falls(estimator.history_["value"]):
        message = f"{name} took max_iter={steps} steps and the loss on validation rows was still falling, "
        fall = "from {:.4g} to {:.4g} since the last evaluation but one. Increase max_iter."
        warnings.warn(message + fall.format(*estimator.history_["value"][-2:]), ConvergenceWarning, stacklevel=3)


def _still_falls(values: np.ndarray) -> bool:
    """Tell whether more steps would help: the last value is the best, by one in a hundred."""
    return len(values) > 1 and values[-1] < 0.99 * np.nanmin(values[:-1])

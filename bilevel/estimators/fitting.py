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
from bilevel.solvers import SRBA
from bilevel.types import Point

_EVALUATIONS = 10
_BATCH = 64


class Trail:
    """As a metric, how far x is from its start; it remembers each x that it was asked for."""

    def __init__(self) -> None:
        self.visited: list[np.ndarray] = []

    def __call__(self, point: Point) -> float:
        """Return ||x - start|| and remember x."""
        self.visited.append(np.asarray(point.outer_var, np.float64))
        return float(np.linalg.norm(self.visited[-1] - self.visited[0]))


class Outcome(NamedTuple):
    """The best x that was evaluated, and how the run ended."""

    outer_var: np.ndarray
    status: Status


def drawn_seed(random_state: Any) -> int:
    """Return the seed of the split and of the run."""
    return int(check_random_state(random_state).randint(np.iinfo(np.int32).max))


def started(problem: BilevelProblem, candidates: list[np.ndarray]) -> BilevelProblem:
    """Return the problem started at the best of some outer variables, with z and v exact there."""
    assert problem.referee is not None
    references = [problem.referee(candidates[0], None)]
    for outer_var in candidates[1:]:
        references.append(problem.referee(outer_var, references[-1]))
    best = int(np.argmin([reference.value for reference in references]))
    point = references[best].inner_var, candidates[best], references[best].v
    return replace(problem, start=Point(*(part.astype(problem.dtype) for part in point)))


def solve(estimator: Any, problem: BilevelProblem, seed: int) -> Outcome:
    """Run the estimator's solver on its problem, and note `history_`, `n_calls_`, `n_iter_`, `status_`."""
    solver, trail = estimator.solver, Trail()
    if solver is None:
        solver = SRBA(step_size="auto", batch_size=min(_BATCH, problem.n_inner, problem.n_outer))
    with warnings.catch_warnings():
        # The best x that was evaluated exactly is kept, however far estimates have drifted since.
        warnings.filterwarnings("ignore", "SRBA's recursive estimate", RuntimeWarning)
        result = run(
            replace(problem, metrics={"moved": trail}),
            solver,
            seed=seed,
            max_steps=estimator.max_iter,
            tolerance=estimator.tol**2,
            eval_every=max(1, estimator.max_iter // _EVALUATIONS),
            progress=estimator.verbose > 0,
        )
    estimator.history_ = result.history
    estimator.n_calls_ = sum(result.calls)
    estimator.n_iter_ = max(1, int(result.history["step"][-1]))
    estimator.status_ = str(result.status)
    values = result.history["value"]
    return Outcome(trail.visited[int(np.nanargmin(values))], result.status)


def announce(estimator: Any, status: Status) -> None:
    """Warn of a run that did not end well; pass Ctrl-C on, now that what it found is kept."""
    if status is Status.interrupted:
        raise KeyboardInterrupt
    name, steps = type(estimator).__name__, estimator.n_iter_
    if status is Status.diverged:
        message = f"{name} left the finite numbers after {steps} steps and kept the last finite point. Scale the data."
        warnings.warn(message, ConvergenceWarning, stacklevel=3)
    elif status is Status.out_of_budget:
        slope = np.sqrt(estimator.history_["hypergrad_norm_sq"][-1])
        message = f"{name} took max_iter={steps} steps and has slope {slope:.2g} > tol={estimator.tol} left."
        warnings.warn(message + " Increase max_iter or tol.", ConvergenceWarning, stacklevel=3)

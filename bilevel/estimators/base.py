"""What all estimators share: parameters refused in scikit-learn's words, the rows, the run, linear predictions."""

import warnings
from abc import abstractmethod
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any, ClassVar, NamedTuple

import numpy as np
from scipy.special import expit, log_expit, log_softmax, softmax
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.extmath import safe_sparse_dot
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from bilevel._types import Point
from bilevel.engine.run import run
from bilevel.estimators.rows import Scaling, Split, check_validation_rows, split
from bilevel.problems import BilevelProblem
from bilevel.solvers import SRBA, Exact
from bilevel.solvers.base import SolverBase
from bilevel.solvers.host import HostSolver

DTYPE = "float32"  # of runs, whatever JAX is set to; exact solutions are in float64
_EVALUATIONS = 10
_BATCH = 64
_SMALL = 1e7  # multiplications in a Hessian of the inner problem


def refuse(estimator: Any, name: str, wanted: str) -> None:
    """Raise the error that scikit-learn raises for a parameter out of place."""
    value = getattr(estimator, name)
    raise ValueError(f"The {name!r} parameter of {type(estimator).__name__} must be {wanted}. Got {value!r} instead.")


def check_interval(
    estimator: Any, name: str, kind: type[Any], low: float, high: float = float("inf"), *, left: str = "["
) -> None:
    """Refuse what is not a number of this kind below ``high`` and above ``low``, or at it where ``left`` is "["."""
    value: Any = getattr(estimator, name)
    inside = isinstance(value, kind) and not isinstance(value, bool) and low <= value < high
    if not inside or (left == "(" and value == low):
        refuse(estimator, name, f"{'a float' if kind is Real else 'an int'} in the range {left}{low}, {high})")


def check_bools(estimator: Any, *names: str) -> None:
    """Refuse what is neither True nor False."""
    for name in names:
        if not isinstance(getattr(estimator, name), bool):
            refuse(estimator, name, "an instance of 'bool'")


def draw_seed(random_state: Any) -> int:
    """Return the seed of the split and of the run."""
    return int(check_random_state(random_state).randint(np.iinfo(np.int32).max))


class Start(NamedTuple):
    """A problem to solve from where it starts, and an x to improve on, with h there."""

    problem: BilevelProblem
    outer_var: np.ndarray
    value: float


def find_start(problem: BilevelProblem, candidates: list[np.ndarray], lead: int = 0) -> Start:
    """Start a problem ``lead`` places before the best of some outer variables, with z and v exact there."""
    assert problem.exact_solver is not None
    solutions = [problem.exact_solver(candidates[0], None)]
    for outer_var in candidates[1:]:
        solutions.append(problem.exact_solver(outer_var, solutions[-1]))
    best = int(np.argmin([solution.value for solution in solutions]))
    first = max(0, best - lead)
    point = Point(solutions[first].inner_var, candidates[first], solutions[first].v)
    start = Point(*(part.astype(problem.dtype) for part in point))
    return Start(replace(problem, start=start), candidates[best], solutions[best].value)


def choose_solver(problem: BilevelProblem, *, exact_if_small: bool) -> SolverBase:
    """Return a solver that needs no tuning: stochastic, or exact where that takes a second in all."""
    if exact_if_small and problem.n_inner * problem.start.inner_var.size**2 <= _SMALL:
        return Exact()
    return SRBA(step_size="auto", batch_size=min(_BATCH, problem.n_inner, problem.n_outer))


@dataclass(eq=False, repr=False, kw_only=True)
class BilevelEstimator(BaseEstimator):
    """A linear model that minimizes a loss on training rows, with outer variables learned on validation rows."""

    fit_intercept: bool = True
    standardize: bool = True
    validation_fraction: float = 0.25
    solver: SolverBase | None = None
    max_iter: int = 3000
    tol: float = 1e-3
    random_state: Any = None
    verbose: int = 0

    _constant: ClassVar[float] = 1.0  # the column of the intercept
    _classifies: ClassVar[bool]
    coef_: np.ndarray = field(init=False)
    intercept_: Any = field(init=False)

    def __sklearn_tags__(self) -> Any:
        """Say that sparse rows are taken."""
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    @abstractmethod
    def _encode(self, y: np.ndarray, y_val: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        """Return targets as the problem takes them, and note what predictions need to decode them."""

    def _check_parameters(self) -> None:
        check_interval(self, "validation_fraction", Real, 0.0, 1.0, left="(")
        check_interval(self, "tol", Real, 0.0)
        check_interval(self, "max_iter", Integral, 1)
        check_bools(self, "fit_intercept", "standardize")
        if not isinstance(self.verbose, Integral) or self.verbose < 0:
            refuse(self, "verbose", "an int in the range [0, inf)")
        if self.solver is not None and not isinstance(self.solver, SolverBase):
            refuse(self, "solver", "None or a solver of `bilevel`, such as bilevel.SRBA(step_size=0.1)")

    def _prepare(self, X: Any, y: Any, X_val: Any, y_val: Any, seed: int) -> tuple[Split, Scaling]:
        """Return checked, encoded, split and scaled rows, without the column of the intercept."""
        numeric = not self._classifies
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float64, ensure_min_samples=2, y_numeric=numeric)
        X_val, y_val = check_validation_rows(self, X_val, y_val, y_numeric=numeric)
        y, y_val = self._encode(y, y_val)
        rows = split(X, y, X_val, y_val, self.validation_fraction, seed, stratified=self._classifies)
        scaling = Scaling.fit(rows.X, center=self.fit_intercept, divide=self.standardize)
        return rows.map_columns(scaling.transform), scaling

    def _add_constant(self, X: np.ndarray) -> np.ndarray:
        return np.column_stack([X, np.full(len(X), self._constant)]) if self.fit_intercept else X

    def _part(self, inner_var: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the weights of the features, and the intercept."""
        if self.fit_intercept:
            return inner_var[:-1], self._constant * inner_var[-1]
        return inner_var, np.zeros_like(inner_var[0])

    def _score(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, accept_sparse="csr")
        return safe_sparse_dot(X, self.coef_.T, dense_output=True) + self.intercept_

    def _solve(self, start: Start, seed: int, untuned: SolverBase) -> np.ndarray:
        """Return the best x found by the solver, or by the untuned one, and note how the run went."""
        solver = untuned if self.solver is None else self.solver
        with warnings.catch_warnings():
            # The best x, by exact values, is kept, however far estimates have drifted since.
            warnings.filterwarnings("ignore", "SRBA's recursive estimate", RuntimeWarning)
            result = run(
                start.problem,
                solver,
                seed=seed,
                max_steps=self.max_iter,
                tolerance=(self.tol * start.value) ** 2,
                eval_every=1 if isinstance(solver, HostSolver) else max(1, self.max_iter // _EVALUATIONS),
                progress=self.verbose > 0,
            )
        self.history_ = result.history
        self.n_calls_ = sum(result.calls)
        self.n_iter_ = max(1, int(result.history["step"][-1]))
        self.status_ = str(result.status)
        best = result.best_point
        if best is None or not result.best_value < start.value:
            return start.outer_var
        return np.asarray(best.outer_var, np.float64)

    def _report_status(self) -> None:
        """Warn of a run that did not end well; pass Ctrl-C on, now that what it found is kept."""
        if self.status_ == "interrupted":
            raise KeyboardInterrupt
        name, steps, values = type(self).__name__, self.n_iter_, self.history_["value"]
        # More steps would help where the last value is the best, by one in a hundred.
        still_falls = len(values) > 1 and values[-1] < 0.99 * np.nanmin(values[:-1])
        if self.status_ == "diverged":
            message = f"{name}: the solver became non-finite after {steps} steps; the best point before is kept."
            warnings.warn(message, ConvergenceWarning, stacklevel=3)
        elif self.status_ == "out_of_budget" and still_falls:
            message = f"{name} took max_iter={steps} steps and the loss on validation rows was still falling, "
            fall = f"from {values[-2]:.4g} to {values[-1]:.4g} since the last evaluation but one. Increase max_iter."
            warnings.warn(message + fall, ConvergenceWarning, stacklevel=3)


class LinearClassifier(ClassifierMixin, BilevelEstimator):
    """Scores, classes and probabilities; one score for two classes, one per class for more."""

    _classifies = True
    classes_: np.ndarray

    def _encode(self, y: np.ndarray, y_val: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        """Return labels as places in `classes_`."""
        check_classification_targets(y)
        self.classes_, y = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"{type(self).__name__} needs samples of at least 2 classes in y, "
                f"but there is only one class: {self.classes_[0]!r}."
            )
        if y_val is None:
            return y, None
        unknown = np.setdiff1d(y_val, self.classes_)
        if unknown.size:
            raise ValueError(f"y_val contains labels that y does not: {unknown[:5].tolist()}.")
        return y, np.searchsorted(self.classes_, y_val)

    def _set_model(self, weights: np.ndarray, intercept: np.ndarray, scaling: Scaling) -> None:
        columns = weights.reshape(len(weights), -1)
        self.coef_, self.intercept_ = scaling.unscale(columns.T, np.atleast_1d(intercept))

    def decision_function(self, X: Any) -> np.ndarray:
        """Return the score of each row, (samples,), or of each row and class."""
        scores = self._score(X)
        return scores[:, 0] if scores.shape[1] == 1 else scores

    def predict(self, X: Any) -> np.ndarray:
        """Return the likeliest class of each row."""
        scores = self.decision_function(X)
        return self.classes_[(scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(axis=1)]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probability of each class, (samples, classes)."""
        scores = self.decision_function(X)
        return np.column_stack([expit(-scores), expit(scores)]) if scores.ndim == 1 else softmax(scores, axis=1)

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Return the logarithms of the probabilities."""
        scores = self.decision_function(X)
        if scores.ndim == 1:
            return np.column_stack([log_expit(-scores), log_expit(scores)])
        return log_softmax(scores, axis=1)

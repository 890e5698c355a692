"""What all estimators share: parameters refused in scikit-learn's words, the rows, the run, linear predictions."""

import warnings
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Any, ClassVar, Self

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
from bilevel.problems import BilevelProblem, ExactSolution
from bilevel.solvers import SRBA, Exact, HostSolver, SolverBase

DTYPE = "float32"  # of runs, whatever JAX is set to; exact solutions are in float64
_EVALUATIONS, _BATCH = 10, 64
_SMALL = 1e7  # multiplications in a Hessian of the inner problem
_INTERVALS: dict[str, tuple[type, str, float, float]] = {  # "(" where the lower end is left out
    "validation_fraction": (Real, "(", 0.0, 1.0),
    "regularization": (Real, "(", 0.0, np.inf),
    "tol": (Real, "[", 0.0, np.inf),
    "max_iter": (Integral, "[", 1, np.inf),
    "verbose": (Integral, "[", 0, np.inf),
}


def refuse(estimator: Any, name: str, wanted: str) -> None:
    """Raise the error that scikit-learn raises for a parameter out of place."""
    value = getattr(estimator, name)
    raise ValueError(f"The {name!r} parameter of {type(estimator).__name__} must be {wanted}. Got {value!r} instead.")


def draw_seed(random_state: Any) -> int:
    """Return the seed of the split and of the run."""
    return int(check_random_state(random_state).randint(np.iinfo(np.int32).max))


def solve_all(problem: BilevelProblem, outer_vars: Sequence[np.ndarray]) -> tuple[list[ExactSolution], int]:
    """Return the exact solutions at some x, each found from the one before, and the number of the best."""
    assert problem.exact_solver is not None
    solutions: list[ExactSolution] = []
    for outer_var in outer_vars:
        solutions.append(problem.exact_solver(outer_var, solutions[-1] if solutions else None))
    return solutions, int(np.argmin([solution.value for solution in solutions]))


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
    _exact_if_small: ClassVar[bool] = True
    _classifies: ClassVar[bool]
    coef_: np.ndarray = field(init=False)
    intercept_: Any = field(init=False)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    @abstractmethod
    def _encode(self, y: np.ndarray, y_val: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        """Return targets as the problem takes them, and note what predictions need to decode them."""

    @abstractmethod
    def _learn(self, rows: Split, seed: int) -> np.ndarray:
        """Learn the outer variables, note them as attributes, and return z*, with the intercept last."""

    @abstractmethod
    def _set_model(self, weights: np.ndarray, intercept: np.ndarray, scaling: Scaling) -> None:
        """Note `coef_` and `intercept_` in the user's units; weights are (features, …)."""

    def fit(self, X: Any, y: Any, X_val: Any = None, y_val: Any = None) -> Self:
        """Learn the penalties or the weights of the rows, fit the model with them, and return the estimator.

        Parameters
        ----------
        X : dense or sparse, (samples, features)
        y : one target per row
        X_val, y_val : rows to learn by, with targets to trust; by default `validation_fraction` of the rows of X
        """
        self._check_parameters()
        seed, numeric = draw_seed(self.random_state), not self._classifies
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float64, ensure_min_samples=2, y_numeric=numeric)
        X_val, y_val = check_validation_rows(self, X_val, y_val, y_numeric=numeric)
        y, y_val = self._encode(y, y_val)
        rows = split(X, y, X_val, y_val, self.validation_fraction, seed, stratified=self._classifies)
        scaling = Scaling.fit(rows.X, center=self.fit_intercept, divide=self.standardize)
        weights = self._learn(rows.map_columns(scaling.transform), seed)
        intercept = np.zeros_like(weights[0])
        if self.fit_intercept:
            weights, intercept = weights[:-1], self._constant * weights[-1]
        self._set_model(weights, intercept, scaling)
        self._report_status()
        return self

    def _check_parameters(self) -> None:
        for parameter in fields(self):
            name = parameter.name
            value: Any = getattr(self, name, None)
            if parameter.type is bool and not isinstance(value, bool):
                refuse(self, name, "an instance of 'bool'")
            if name in _INTERVALS:
                kind, left, low, high = _INTERVALS[name]
                is_number = isinstance(value, kind) and (name == "verbose" or not isinstance(value, bool))
                if not is_number or not low <= value < high or (left == "(" and value == low):
                    refuse(self, name, f"{'a float' if kind is Real else 'an int'} in the range {left}{low}, {high})")
        if self.solver is not None and not isinstance(self.solver, SolverBase):
            refuse(self, "solver", "None or a solver of `bilevel`, such as bilevel.SRBA(step_size=0.1)")

    def _add_constant(self, X: np.ndarray) -> np.ndarray:
        return np.column_stack([X, np.full(len(X), self._constant)]) if self.fit_intercept else X

    def _score(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, accept_sparse="csr")
        return safe_sparse_dot(X, self.coef_.T, dense_output=True) + self.intercept_

    def _default_solver(self, problem: BilevelProblem) -> SolverBase:
        """Return one that needs no tuning: stochastic, or exact where that takes a second in all."""
        if self._exact_if_small and problem.n_inner * problem.start.inner_var.size**2 <= _SMALL:
            return Exact()
        return SRBA(step_size="auto", batch_size=min(_BATCH, problem.n_inner, problem.n_outer))

    def _solve(
        self, problem: BilevelProblem, candidates: Sequence[np.ndarray], seed: int, lead: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the best candidate and the best x of a run that starts ``lead`` places before it, z and v exact."""
        solutions, best = solve_all(problem, candidates)
        first, least = max(0, best - lead), solutions[best].value
        point = Point(solutions[first].inner_var, candidates[first], solutions[first].v)
        problem = replace(problem, start=Point(*(part.astype(problem.dtype) for part in point)))
        solver = self.solver or self._default_solver(problem)
        every = 1 if isinstance(solver, HostSolver) else max(1, self.max_iter // _EVALUATIONS)
        limits: dict[str, Any] = {"max_steps": self.max_iter, "tolerance": (self.tol * least) ** 2}
        with warnings.catch_warnings():
            # The best x, by exact values, is kept, however far estimates have drifted since.
            warnings.filterwarnings("ignore", "SRBA's recursive estimate", RuntimeWarning)
            result = run(problem, solver, seed=seed, **limits, eval_every=every, progress=self.verbose > 0)
        self.history_, self.n_calls_, self.status_ = result.history, sum(result.calls), str(result.status)
        self.n_iter_ = max(1, int(result.history["step"][-1]))
        if result.best_point is None or not result.best_value < least:
            return candidates[best], candidates[best]
        return candidates[best], np.asarray(result.best_point.outer_var, np.float64)

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
        check_classification_targets(y)
        self.classes_, y = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            name, found = type(self).__name__, self.classes_[0]
            raise ValueError(f"{name} needs at least 2 classes in y, but there is only one class: {found!r}.")
        if y_val is None:
            return y, None
        if (unknown := np.setdiff1d(y_val, self.classes_)).size:
            raise ValueError(f"y_val contains labels that y does not: {unknown[:5].tolist()}.")
        return y, np.searchsorted(self.classes_, y_val)

    def _set_model(self, weights: np.ndarray, intercept: np.ndarray, scaling: Scaling) -> None:
        self.coef_, self.intercept_ = scaling.unscale(weights.reshape(len(weights), -1).T, np.atleast_1d(intercept))

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

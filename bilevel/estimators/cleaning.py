"""A classifier that learns a weight for each training row, by stochastic steps on JAX."""

import warnings
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from scipy.special import expit
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import validate_data

from bilevel._types import Point
from bilevel.engine.run import run
from bilevel.estimators.base import LinearClassifier, check_parameters, check_validation_rows, refuse
from bilevel.estimators.folds import Scaling
from bilevel.estimators.rows import Split, split
from bilevel.problems import BilevelProblem, ExactSolution, data_cleaning
from bilevel.solvers import SRBA, HostSolver, SolverBase

DTYPE = "float32"  # of runs, whatever JAX is set to; exact solutions are in float64
_EVALUATIONS, _BATCH = 10, 64
_CONSTANT = 10.0  # the column of the intercept, so that it is penalized by a hundredth of what a coefficient is


def solve_exactly(problem: BilevelProblem, outer_var: np.ndarray) -> ExactSolution:
    """Return the exact solution at x."""
    assert problem.exact_solver is not None
    return problem.exact_solver(outer_var, None)


@dataclass(eq=False, repr=False, kw_only=True)
class DataCleaningClassifier(LinearClassifier):
    """Softmax regression with a weight in (0, 1) for each training row, learned on validation rows that are trusted.

    The weights minimize the log-loss on validation rows of the model that minimizes, on training rows,
    mean weight_i log-loss_i + regularization ||coef||². Rows with wrong labels end with small weights.

    Parameters
    ----------
    regularization : above 0
    fit_intercept : whether to fit an intercept, which is penalized by a hundredth of the regularization
    standardize : whether features are centered and divided by their deviation for the fit
    validation_fraction : of the rows of X, held out at random with all classes, where `fit` gets no `X_val`; such rows
        may be wrong themselves: give rows that you trust, if you have any
    solver : a solver of `bilevel`; None means SRBA(step_size="auto"), which needs no tuning
    tol : stop where the loss on validation rows changes by less than this part of it, per unit of a logit of a weight
    max_iter, random_state, verbose : as in `BilevelLogisticRegression`

    Attributes
    ----------
    sample_weights_ : (samples,), the weight of each row of X; 1 for rows that were held out
    suspicious_ : numbers of the rows of X that have a learned weight, from the smallest weight to the largest
    held_out_ : numbers of the rows of X that were held out for validation
    coef_, intercept_, classes_ : as in `BilevelLogisticRegression`
    history_, n_calls_, n_iter_, status_, n_features_in_, feature_names_in_ : as there

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> from sklearn.utils import shuffle
    >>> from bilevel.estimators import DataCleaningClassifier
    >>> X, y = shuffle(*load_digits(return_X_y=True), random_state=0)
    >>> y[:100] = (y[:100] + 1) % 10
    >>> model = DataCleaningClassifier(random_state=0).fit(X[:1200], y[:1200], X[1200:], y[1200:])
    >>> sum(model.suspicious_[:100] < 100) > 75  # of 1200 rows the first 100 are wrong
    np.True_
    """

    regularization: float = field(default=0.01, kw_only=False)
    validation_fraction: float = 0.25
    solver: SolverBase | None = None
    max_iter: int = 3000
    tol: float = 1e-3
    verbose: int = 0

    def fit(self, X: Any, y: Any, X_val: Any = None, y_val: Any = None) -> Self:
        """Learn the weights of the rows, fit the model with them, and return the estimator.

        Parameters
        ----------
        X : dense or sparse, (samples, features)
        y : one label per row
        X_val, y_val : rows to learn by, with labels to trust; by default `validation_fraction` of the rows of X
        """
        check_parameters(self)
        if self.solver is not None and not isinstance(self.solver, SolverBase):
            refuse(self, "solver", "None or a solver of `bilevel`, such as bilevel.SRBA(step_size=0.1)")
        seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float64, ensure_min_samples=2)
        X_val, y_val = check_validation_rows(self, X_val, y_val, y_numeric=False)
        y, y_val = self._encode_classes(y, y_val)
        rows = split(X, y, X_val, y_val, self.validation_fraction, seed)
        scaling = Scaling.fit(rows.X, np.ones(len(rows.X)), center=self.fit_intercept, divide=self.standardize)
        weights = self._learn(rows.map_columns(scaling.transform), seed)
        intercept = np.zeros(weights.shape[1])
        if self.fit_intercept:
            weights, intercept = weights[:-1], _CONSTANT * weights[-1]
        self.coef_, self.intercept_ = scaling.unscale(weights.T, intercept)
        self._report_status()
        return self

    def _learn(self, rows: Split, seed: int) -> np.ndarray:
        """Learn the weights of rows, note them as attributes, and return coefficients, the intercept last."""
        rows = rows.map_columns(self._add_constant)
        problem = data_cleaning(*rows[:4], regularization=self.regularization, seed=seed, dtype=DTYPE)
        logits = self._solve(problem, seed)
        self.sample_weights_ = np.ones(len(rows.fitted_on) + len(rows.held_out))
        self.sample_weights_[rows.fitted_on] = expit(logits)
        self.suspicious_ = rows.fitted_on[np.argsort(logits, kind="stable")]
        self.held_out_ = rows.held_out
        inner_var = solve_exactly(problem, logits).inner_var
        return inner_var[:, 1:] - inner_var[:, :1] if len(self.classes_) == 2 else inner_var

    def _add_constant(self, X: np.ndarray) -> np.ndarray:
        return np.column_stack([X, np.full(len(X), _CONSTANT)]) if self.fit_intercept else X

    def _solve(self, problem: BilevelProblem, seed: int) -> np.ndarray:
        """Return the best x of a run from the start of the problem, z and v exact."""
        x0 = problem.start.outer_var
        start = solve_exactly(problem, x0)
        point = Point(start.inner_var, x0, start.v)
        problem = replace(problem, start=Point(*(part.astype(problem.dtype) for part in point)))
        solver = self.solver or SRBA(step_size="auto", batch_size=min(_BATCH, problem.n_inner, problem.n_outer))
        every = 1 if isinstance(solver, HostSolver) else max(1, self.max_iter // _EVALUATIONS)
        limits: dict[str, Any] = {"max_steps": self.max_iter, "tolerance": (self.tol * start.value) ** 2}
        with warnings.catch_warnings():
            # The best x, by exact values, is kept, however far estimates have drifted since.
            warnings.filterwarnings("ignore", "SRBA's recursive estimate", RuntimeWarning)
            result = run(problem, solver, seed=seed, **limits, eval_every=every, progress=self.verbose > 0)
        self.history_, self.n_calls_, self.status_ = result.history, sum(result.calls), str(result.status)
        self.n_iter_ = max(1, int(result.history["step"][-1]))
        if result.best_point is None or not result.best_value < start.value:
            return x0
        return np.asarray(result.best_point.outer_var, np.float64)

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

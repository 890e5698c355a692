"""A classifier that learns how far to trust each training row."""

from typing import Any, Self

import numpy as np
from scipy.special import expit
from sklearn.base import BaseEstimator

from bilevel.estimators.logistic import LinearClassifier
from bilevel.estimators.rows import Rows, Scaling, numbered, split, validated, validated_apart
from bilevel.estimators.selection import announce, check_common, check_real, drawn_seed, solve, started, stochastic
from bilevel.problems import data_cleaning
from bilevel.solvers.base import SolverBase

_CONSTANT = 10.0  # the intercept is penalized by a hundredth of what a coefficient is


class DataCleaningClassifier(LinearClassifier, BaseEstimator):
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
    max_iter : most steps of the solver
    tol : stop where the loss on validation rows changes by less than this part of it, per unit of the logits of the
        weights
    random_state : of the split and of the solver's batches
    verbose : 1 shows a bar

    Attributes
    ----------
    coef_ : (1, features), or (classes, features)
    intercept_ : (1,), or (classes,)
    sample_weights_ : (samples,), the weight of each row of X; 1 for rows that were held out
    suspicious_ : numbers of the rows of X that have a learned weight, from the smallest weight to the largest
    held_out_ : numbers of the rows of X that were held out for validation
    classes_ : labels, sorted
    history_ : columns of the run, one entry per evaluation: "step", "seconds", "calls", "value" on validation rows, …
    n_calls_ : derivatives of one row's loss that were computed
    n_iter_ : steps of the solver
    status_ : "converged", "out_of_budget" or "diverged"
    n_features_in_, feature_names_in_ : of X

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

    def __init__(
        self,
        regularization: float = 0.01,
        *,
        fit_intercept: bool = True,
        standardize: bool = True,
        validation_fraction: float = 0.25,
        solver: SolverBase | None = None,
        max_iter: int = 3000,
        tol: float = 1e-3,
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        self.regularization = regularization
        self.fit_intercept = fit_intercept
        self.standardize = standardize
        self.validation_fraction = validation_fraction
        self.solver = solver
        self.max_iter = max_iter
        self.tol = tol
        self.random_state = random_state
        self.verbose = verbose

    def __sklearn_tags__(self) -> Any:
        """Say that sparse rows are taken."""
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def fit(self, X: Any, y: Any, X_val: Any = None, y_val: Any = None) -> Self:
        """Learn the weights of the rows and the model that they make.

        Parameters
        ----------
        X : dense or sparse, (samples, features)
        y : one label per row, some of them wrong
        X_val, y_val : rows with labels to trust; by default `validation_fraction` of the rows of X is held out

        Returns
        -------
        self
        """
        check_common(self)
        check_real(self, "regularization", 0.0)
        X, y = validated(self, X, y)
        X_val, y_val = validated_apart(self, X_val, y_val, y_numeric=False)
        seed = drawn_seed(self.random_state)
        y, y_val = numbered(self, y, y_val)
        rows = split(X, y, X_val, y_val, self.validation_fraction, seed, stratified=True)
        scaling = Scaling.of(rows.X, centered=self.fit_intercept, divided=self.standardize)
        rows = rows.changed(lambda features: self._columns(scaling.done(features)))
        problem = data_cleaning(*rows.levels, regularization=self.regularization, dtype="float32", seed=seed)
        outcome = solve(self, started(problem, [problem.start.outer_var]), seed, stochastic(problem))
        self._keep_weights(rows, outcome.outer_var)
        assert problem.exact_solver is not None
        self._keep(*self._parted(problem.exact_solver(outcome.outer_var, None).inner_var), scaling)
        announce(self, outcome.status)
        return self

    def _columns(self, X: np.ndarray) -> np.ndarray:
        return np.column_stack([X, np.full(len(X), _CONSTANT)]) if self.fit_intercept else X

    def _parted(self, inner_var: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return weights and intercept, of one score per row where there are two classes."""
        if inner_var.shape[1] == 2:
            inner_var = inner_var[:, 1:] - inner_var[:, :1]
        if self.fit_intercept:
            return inner_var[:-1], _CONSTANT * inner_var[-1]
        return inner_var, np.zeros(inner_var.shape[1])

    def _keep_weights(self, rows: Rows, logits: np.ndarray) -> None:
        weights = np.ones(len(rows.fitted_on) + len(rows.held_out))
        weights[rows.fitted_on] = expit(logits)
        self.sample_weights_ = weights
        self.suspicious_ = rows.fitted_on[np.argsort(logits, kind="stable")]
        self.held_out_ = rows.held_out

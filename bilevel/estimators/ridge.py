"""Ridge regression with learned penalties."""

from collections.abc import Callable
from typing import Any

import numpy as np
from sklearn.base import RegressorMixin
from sklearn.utils.extmath import safe_sparse_dot
from sklearn.utils.validation import check_is_fitted, validate_data

from bilevel.estimators.rows import Scaling
from bilevel.estimators.selection import PenaltySelector
from bilevel.problems import BilevelProblem, ridge_selection


class BilevelRidge(RegressorMixin, PenaltySelector):
    """Ridge regression with a penalty for each feature, group of features, or for all, learned on validation rows.

    The penalties minimize the squared error on validation rows of the model that minimizes, on training rows,
    mean ½ error² + ½ sum penalty_k coef_k², with targets of deviation 1.

    Parameters
    ----------
    penalty : "per_feature", "per_group" or "single"
    groups : the group of each feature, any labels, for penalty="per_group"
    fit_intercept : whether to fit an intercept, which is not penalized (but by 1e-6, once targets are centered)
    standardize : whether penalties act on features of deviation 1; coefficients are given in the units of X
    validation_fraction : of the rows of X, held out at random, where `fit` gets no `X_val`
    shrink : whether several penalties, which may fit the validation rows too well, are drawn back towards the best
        single one, as far as is best when training and validation rows change places
    refit : whether the final model is fitted on training and validation rows together; otherwise on training rows
    solver : a solver of `bilevel`; None means one that needs no tuning: Exact() for few rows and features,
        SRBA(step_size="auto") for many
    max_iter : most steps of the solver
    tol : stop where the error on validation rows changes by less than this part of it, per unit of the logarithms of
        the penalties
    random_state : of the split and of the solver's batches
    verbose : 1 shows a bar

    Attributes
    ----------
    coef_ : (features,)
    intercept_ : float
    penalty_ : (features,), the penalty of each feature (divided by its deviation, where standardized)
    shrinkage_ : from 0, the penalties as learned, to 1, the best single one
    history_ : columns of the run, one entry per evaluation: "step", "seconds", "calls", "value" on validation rows, …
    n_calls_ : derivatives of one row's loss that were computed
    n_iter_ : steps of the solver
    status_ : "converged", "out_of_budget" or "diverged"
    n_features_in_, feature_names_in_ : of X

    Examples
    --------
    >>> from sklearn.datasets import load_diabetes
    >>> from bilevel.estimators import BilevelRidge
    >>> X, y = load_diabetes(return_X_y=True)
    >>> model = BilevelRidge(random_state=0).fit(X, y)
    >>> model.coef_.shape
    (10,)
    """

    _stratified = False
    _y_numeric = True

    def _encoded(self, y: np.ndarray, y_val: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        self._target = Scaling.of(y[:, None], centered=self.fit_intercept, divided=True)
        return self._scaled(y), None if y_val is None else self._scaled(y_val)

    def _scaled(self, y: np.ndarray) -> np.ndarray:
        return self._target.done(y[:, None])[:, 0]

    def _builder(self) -> Callable[..., BilevelProblem]:
        return ridge_selection

    def _keep(self, weights: np.ndarray, intercept: np.ndarray, scaling: Scaling) -> None:
        coef, intercept = scaling.undone(weights, intercept)
        self.coef_ = coef * self._target.scale
        self.intercept_ = float(intercept * self._target.scale[0] + self._target.mean[0])

    def predict(self, X: Any) -> np.ndarray:
        """Return the prediction of each row."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, accept_sparse="csr")
        return safe_sparse_dot(X, self.coef_, dense_output=True) + self.intercept_

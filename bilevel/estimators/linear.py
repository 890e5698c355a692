"""Logistic and ridge regression with learned penalties."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.base import RegressorMixin
from sklearn.utils.class_weight import compute_class_weight

from bilevel.estimators.base import LinearClassifier
from bilevel.estimators.folds import Scaling
from bilevel.estimators.losses import Logistic, Loss, Softmax, Squared
from bilevel.estimators.penalties import PenaltySelector


@dataclass(eq=False, repr=False, kw_only=True)
class BilevelLogisticRegression(LinearClassifier, PenaltySelector):
    """Logistic regression with one penalty, one for each group of features or one for each feature, all learned.

    Fits minimize sum log-loss + ½ sum penalty_k coef_k², two classes with one row of coefficients, more with one each
    (softmax). With l = log penalties and w_f(l) the fit without fold f, l minimizes

        sum over rows of the log-loss of w_fold(row)(l) + sum over penalties (l_k - mean l)² / 2 prior_scale²

    by exact gradients. How many penalties there are and `prior_scale` are chosen by nested folds.

    Parameters
    ----------
    structure : "auto", or "single", "per_group", "per_feature"; "auto" takes many penalties only where they are ahead
        of a single one by half a standard error and 2 nats, on rows that did not choose them
    groups : of features: a label for each; a dict from names of columns to labels; "prefix", the names of columns up to
        the last separator, where one-hot columns of one source are one group; None for none
    unpenalized : names or numbers of features without penalty
    prior_scale : how far log penalties spread around their mean, or "auto" for the best of 0.5, 1 and 2
    cv : number of folds (shuffled, stratified), a splitter of scikit-learn, or pairs of numbers of rows
    class_weight : None, "balanced" or a dict, as in scikit-learn
    fit_intercept : whether to fit an intercept, without penalty
    standardize : whether penalties act on features of deviation 1; coefficients are given in the units of X
    max_iter : most iterations of L-BFGS-B, for each set of penalties that is learned
    tol : stop where an iteration gains less than so many nats in all
    random_state : of the folds

    Attributes
    ----------
    coef_ : (1, features), or (classes, features)
    intercept_ : (1,), or (classes,)
    penalties_ : (features,), of standardized features, beside the summed loss as Ridge's `alpha` or 1 / `C`
    penalty_structure_ : "single", "per_group" or "per_feature"
    prior_scale_ : the one that was taken; inf for a single penalty
    candidates_ : DataFrame of what was compared
    penalty_table_ : DataFrame of features, groups, penalties and coefficients
    classes_ : labels, sorted
    history_ : "value", the objective at each evaluation
    n_iter_, n_features_in_, feature_names_in_ : as in scikit-learn

    Examples
    --------
    >>> from sklearn.datasets import load_breast_cancer
    >>> from bilevel.estimators import BilevelLogisticRegression
    >>> X, y = load_breast_cancer(return_X_y=True, as_frame=True)
    >>> model = BilevelLogisticRegression(groups="prefix", random_state=0).fit(X, y)
    >>> model.penalties_.shape
    (30,)
    """

    class_weight: Any = None

    def _encode(self, y: np.ndarray, y_val: np.ndarray | None, weights: np.ndarray) -> tuple[np.ndarray, Any]:
        numbers, numbers_val = self._encode_classes(y, y_val)
        totals = np.bincount(numbers, weights, len(self.classes_))
        if np.count_nonzero(totals) < 2:
            raise ValueError("`sample_weight` leaves rows of one class only; at least two classes need weight.")
        self._class_factors = self._weigh_classes(y, totals)
        columns = np.eye(len(self.classes_)) if len(self.classes_) > 2 else np.array([[0.0], [1.0]])
        return columns[numbers], None if numbers_val is None else columns[numbers_val]

    def _weigh_classes(self, y: np.ndarray, totals: np.ndarray) -> np.ndarray:
        """Return the factor of the weights of each class; `totals` are the sums of these weights."""
        if self.class_weight == "balanced":
            return totals.sum() / (np.count_nonzero(totals) * np.maximum(totals, np.finfo(float).tiny))
        return compute_class_weight(self.class_weight, classes=self.classes_, y=y)

    def _weigh(self, targets: np.ndarray) -> np.ndarray:
        return self._class_factors[targets.argmax(axis=1) if targets.shape[1] > 1 else targets[:, 0].astype(int)]

    def _make_loss(self) -> Loss:
        return Softmax() if len(self.classes_) > 2 else Logistic()

    def _set_model(self, coef: np.ndarray, intercept: np.ndarray) -> None:
        self.coef_, self.intercept_ = coef, intercept


@dataclass(eq=False, repr=False, kw_only=True)
class BilevelRidge(RegressorMixin, PenaltySelector):
    """Ridge regression with one penalty, one for each group of features or one for each feature, all learned.

    Fits minimize sum ½ error² + ½ sum penalty_k coef_k², as `Ridge` does with one alpha. Penalties minimize n/2 log of
    the mean squared error of held-out rows, and their prior, as in `BilevelLogisticRegression`. Several targets share
    the penalties, and count alike.

    Parameters
    ----------
    structure, groups, unpenalized, prior_scale, fit_intercept, standardize : as in `BilevelLogisticRegression`
    cv : number of folds (shuffled), a splitter of scikit-learn, or pairs of numbers of rows
    max_iter, tol, random_state : as in `BilevelLogisticRegression`

    Attributes
    ----------
    coef_ : (features,), or (targets, features)
    intercept_ : float, or (targets,)
    penalties_, penalty_structure_, prior_scale_, candidates_, penalty_table_, history_ : as there
    n_iter_, n_features_in_, feature_names_in_ : as in scikit-learn

    Examples
    --------
    >>> from sklearn.datasets import load_diabetes
    >>> from bilevel.estimators import BilevelRidge
    >>> X, y = load_diabetes(return_X_y=True)
    >>> model = BilevelRidge(random_state=0).fit(X, y)
    >>> model.coef_.shape
    (10,)
    """

    _many_outputs = True

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _encode(self, y: np.ndarray, y_val: np.ndarray | None, weights: np.ndarray) -> tuple[np.ndarray, Any]:
        self._flat = y.ndim == 1
        y = y.reshape(len(y), -1)
        self._target = Scaling.fit(y, weights, center=self.fit_intercept, divide=True)
        return self._target.transform(y), None if y_val is None else self._target.transform(
            y_val.reshape(len(y_val), -1)
        )

    def _make_loss(self) -> Loss:
        return Squared()

    def _set_model(self, coef: np.ndarray, intercept: np.ndarray) -> None:
        coef, intercept = coef * self._target.scale[:, None], intercept * self._target.scale + self._target.mean
        self.coef_, self.intercept_ = (coef[0], float(intercept[0])) if self._flat else (coef, intercept)

    def predict(self, X: Any) -> np.ndarray:
        """Return the prediction of each row."""
        return self._score(X)

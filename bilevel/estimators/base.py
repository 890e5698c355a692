"""What all estimators share: parameters refused in scikit-learn's words, scores of a linear model, classes."""

import copy
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

import numpy as np
import scipy.sparse as sp
from scipy.special import expit, log_expit, log_softmax, softmax
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_array
from sklearn.utils.extmath import safe_sparse_dot
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    _check_sample_weight,
    check_consistent_length,
    check_is_fitted,
    column_or_1d,
    validate_data,
)

from bilevel import _html

P = ParamSpec("P")
Fitted = TypeVar("Fitted")

_LARGEST = 1e150
_MOST_WEIGHT = 1e9  # rows
_INTERVALS: dict[str, tuple[type, str, float, float]] = {  # "(" where the lower end is left out
    "epsilon": (Real, "(", 0.0, np.inf),
    "tol": (Real, "[", 0.0, np.inf),
    "max_iter": (Integral, "[", 1, np.inf),
    "verbose": (Integral, "[", 0, np.inf),
}


def refuse(estimator: Any, name: str, wanted: str) -> None:
    """Raise the error that scikit-learn raises for a parameter out of place."""
    value = getattr(estimator, name)
    raise ValueError(f"The {name!r} parameter of {type(estimator).__name__} must be {wanted}. Got {value!r} instead.")


def check_parameters(estimator: Any, **tables: Any) -> None:
    """Refuse numbers out of their range, what should be a bool and is none, and masked entries of tables."""
    for name, table in tables.items():
        if np.ma.is_masked(table):  # scikit-learn would use what is below the mask
            raise ValueError(f"`{name}` has masked values; remove or impute those rows.")
    for parameter in fields(estimator):
        name = parameter.name
        value: Any = getattr(estimator, name, None)
        if parameter.type is bool and not isinstance(value, bool):
            refuse(estimator, name, "an instance of 'bool'")
        if name in _INTERVALS:
            kind, left, low, high = _INTERVALS[name]
            is_number = isinstance(value, kind) and (name == "verbose" or not isinstance(value, bool))
            too_large = kind is Real and is_number and value > sys.float_info.max
            if not is_number or too_large or not low <= value < high or (left == "(" and value == low):
                refuse(estimator, name, f"{'a float' if kind is Real else 'an int'} in the range {left}{low}, {high})")


def all_or_nothing(fit: Callable[Concatenate[Fitted, P], Any]) -> Callable[Concatenate[Fitted, P], Fitted]:
    """Make `fit` change the estimator only when it ends; after an exception or Ctrl-C all attributes are as before."""

    @functools.wraps(fit)
    def fit_copy(self: Fitted, *args: P.args, **kwargs: P.kwargs) -> Fitted:
        fitted = copy.copy(self)
        fit(fitted, *args, **kwargs)
        self.__dict__ = fitted.__dict__
        return self

    return fit_copy


def check_weights(X: Any, sample_weight: Any) -> np.ndarray:
    """Return the weights of rows as floats, ones for None."""
    weights: np.ndarray = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
    if weights.max() > _MOST_WEIGHT:
        found = f"`sample_weight` holds {weights.max():.3g}, but 2 means a row twice"
        raise ValueError(f"{found}; divide the weights by their mean, at most {_MOST_WEIGHT:g} is taken.")
    if not weights.any():
        raise ValueError("`sample_weight` is zero for every row; give a positive weight to some.")
    return weights


def check_range(**tables: Any) -> None:
    """Refuse numbers whose squares overflow: means and variances would be no numbers."""
    for name, table in tables.items():
        numbers = np.asarray(table.data if sp.issparse(table) else table)
        if numbers.dtype.kind == "f" and numbers.size and (most := np.abs(numbers).max()) > _LARGEST:
            raise ValueError(f"{name} holds {most:.3g}, whose square overflows; scale it.")


def check_validation_rows(
    estimator: Any, X_val: Any, y_val: Any, *, y_numeric: bool, many_outputs: bool = False
) -> tuple[Any, np.ndarray | None]:
    """Return the validation rows that the user gives, or None twice."""
    if X_val is None and y_val is None:
        return None, None
    if X_val is None or y_val is None:
        missing = "X_val" if X_val is None else "y_val"
        raise ValueError(f"`X_val` and `y_val` must be given together; `{missing}` is missing.")
    check_parameters(estimator, X_val=X_val, y_val=y_val)
    X_val = validate_data(estimator, X_val, reset=False, accept_sparse="csr", dtype=np.float64)
    y_val = check_array(y_val, ensure_2d=False, dtype=np.float64 if y_numeric else None, input_name="y_val")
    y_val = y_val if many_outputs and y_val.ndim == 2 else column_or_1d(y_val, warn=True)
    check_consistent_length(X_val, y_val)
    check_range(X_val=X_val, y_val=y_val)
    return X_val, y_val


@dataclass(eq=False, repr=False, kw_only=True)
class LinearEstimator(BaseEstimator):
    """A linear model of columns that may be sparse."""

    fit_intercept: bool = True
    standardize: bool = True
    random_state: Any = None
    verbose: int = 0

    coef_: np.ndarray = field(init=False)
    intercept_: Any = field(init=False)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _learned(self) -> tuple[dict[str, str], np.ndarray]:
        """Return what was learned, by name, and the objective from first to last."""
        return {}, np.zeros(0)

    def _html_repr(self) -> str:  # what scikit-learn shows in a notebook, and below it what was learned
        plain: str = super()._html_repr()
        if not hasattr(self, "coef_"):
            return plain
        rows, values = self._learned()
        return plain + _html.table(f"{type(self).__name__}, fitted", rows, ("loss of held-out rows", values.tolist()))

    def _say(self, text: str) -> None:
        if self.verbose:
            print(f"{type(self).__name__}: {text}", flush=True)

    def _score(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        check_parameters(self, X=X)
        X = validate_data(self, X, reset=False, accept_sparse="csr")
        return safe_sparse_dot(X, self.coef_.T, dense_output=True) + self.intercept_


class LinearClassifier(ClassifierMixin, LinearEstimator):
    """Scores, classes and probabilities; one score for two classes, one per class for more."""

    _classifies: ClassVar[bool] = True
    classes_: np.ndarray

    def _encode_classes(
        self, y: np.ndarray, y_val: np.ndarray | None, weights: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return numbers of classes, and note the labels."""
        check_classification_targets(y)
        self.classes_, y = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            name, found = type(self).__name__, self.classes_[0]
            raise ValueError(f"{name} needs at least 2 classes in y, but there is only one class: {found!r}.")
        if np.count_nonzero(np.bincount(y, weights)) < 2:
            raise ValueError("`sample_weight` leaves rows of one class only; at least two classes need weight.")
        if y_val is None:
            return y, None
        if (unknown := np.setdiff1d(y_val, self.classes_)).size:
            raise ValueError(f"y_val contains labels that y does not: {unknown[:5].tolist()}.")
        return y, np.searchsorted(self.classes_, y_val)

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

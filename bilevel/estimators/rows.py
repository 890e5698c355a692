"""Rows to fit on and rows to judge by: validated, dense, split.

Classes of any kind, numbered.

Columns of mean 0 and deviation 1, which penalties and steps are alike for, and the way back to the user's units.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from sklearn.utils import check_array
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_consistent_length, column_or_1d, validate_data

_DENSE_BYTES = 4 * 2**30


class Rows(NamedTuple):
    """Features and encoded targets of both levels; which rows of X they are, none for rows given apart."""

    X: np.ndarray
    y: np.ndarray
    X_val: np.ndarray
    y_val: np.ndarray
    fitted_on: np.ndarray
    held_out: np.ndarray

    @property
    def levels(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The arguments that problems begin with."""
        return self[:4]

    @property
    def exchanged(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The levels in each other's place."""
        return self.X_val, self.y_val, self.X, self.y

    @property
    def can_be_exchanged(self) -> bool:
        """Whether a model can be fitted to the validation rows: all classes are there, or targets are numbers."""
        return self.y.dtype.kind == "f" or bool(np.isin(self.y, self.y_val).all())

    @property
    def together(self) -> tuple[np.ndarray, np.ndarray]:
        """All rows of both levels."""
        return np.concatenate([self.X, self.X_val]), np.concatenate([self.y, self.y_val])

    def changed(self, change: Callable[[np.ndarray], np.ndarray]) -> "Rows":
        """Return the same rows with other columns."""
        return self._replace(X=change(self.X), X_val=change(self.X_val))


def validated(estimator: Any, X: Any, y: Any, **checks: Any) -> tuple[Any, np.ndarray]:
    """Return X, dense or CSR, and y, with scikit-learn's checks; notes features on the estimator."""
    return validate_data(estimator, X, y, accept_sparse="csr", dtype=np.float64, ensure_min_samples=2, **checks)


def validated_apart(estimator: Any, X_val: Any, y_val: Any, *, y_numeric: bool) -> tuple[Any, np.ndarray | None]:
    """Return the validation rows that the user gives, or None twice."""
    if X_val is None and y_val is None:
        return None, None
    if X_val is None or y_val is None:
        missing = "X_val" if X_val is None else "y_val"
        raise ValueError(f"`X_val` and `y_val` must be given together; `{missing}` is missing.")
    X_val = validate_data(estimator, X_val, reset=False, accept_sparse="csr", dtype=np.float64)
    kind = np.float64 if y_numeric else None
    y_val = column_or_1d(check_array(y_val, ensure_2d=False, dtype=kind, input_name="y_val"), warn=True)
    check_consistent_length(X_val, y_val)
    return X_val, y_val


def split(
    X: Any, y: np.ndarray, X_val: Any, y_val: np.ndarray | None, fraction: float, seed: int, *, stratified: bool
) -> Rows:
    """Return dense rows, with the validation rows given apart or held out of X."""
    numbers = np.arange(len(y))
    X = dense("X", X)
    if y_val is not None:
        return Rows(X, y, dense("X_val", X_val), y_val, numbers, numbers[:0])
    train, held_out = _held_out(y, fraction, seed, stratified)
    return Rows(X[train], y[train], X[held_out], y[held_out], train, held_out)


def _held_out(y: np.ndarray, fraction: float, seed: int, stratified: bool) -> tuple[np.ndarray, np.ndarray]:
    """Split the numbers of the rows; each class has a row on both sides."""
    try:
        train, held_out = train_test_split(
            np.arange(len(y)), test_size=fraction, random_state=seed, stratify=y if stratified else None
        )
    except ValueError as error:
        raise ValueError(
            f"{len(y)} rows cannot be split with validation_fraction={fraction} ({error}). "
            "Give more rows, another fraction, or `X_val` and `y_val`."
        ) from None
    return np.sort(train), np.sort(held_out)


def dense(name: str, X: Any) -> np.ndarray:
    """Return X as an array; steps read whole rows, and centered columns have no zeros left."""
    if not sp.issparse(X):
        return X
    size = 8 * X.shape[0] * X.shape[1]
    if size > _DENSE_BYTES:
        raise ValueError(
            f"`{name}` is sparse and would take {size / 2**30:.3g} GiB as the dense array that fitting needs; "
            "select fewer features (SelectKBest) or project them (TruncatedSVD) first."
        )
    return X.toarray()


def numbered(estimator: Any, y: np.ndarray, y_val: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
    """Return labels as places in `classes_`, which is noted on the estimator."""
    check_classification_targets(y)
    estimator.classes_, y = np.unique(y, return_inverse=True)
    if len(estimator.classes_) < 2:
        raise ValueError(
            f"{type(estimator).__name__} needs samples of at least 2 classes in y, "
            f"but there is only one class: {estimator.classes_[0]!r}."
        )
    if y_val is None:
        return y, None
    unknown = np.setdiff1d(y_val, estimator.classes_)
    if unknown.size:
        raise ValueError(f"y_val contains labels that y does not: {unknown[:5].tolist()}.")
    return y, np.searchsorted(estimator.classes_, y_val)


class Scaling(NamedTuple):
    """What was taken from each column, and what it was divided by."""

    mean: np.ndarray
    scale: np.ndarray

    @classmethod
    def of(cls, X: np.ndarray, *, centered: bool, divided: bool) -> "Scaling":
        """Take means and deviations of these rows; constant columns are not divided."""
        scaler = StandardScaler(with_mean=centered, with_std=divided).fit(X)
        mean = scaler.mean_ if centered else np.zeros(X.shape[1])
        return cls(mean, scaler.scale_ if divided else np.ones(X.shape[1]))

    def done(self, X: np.ndarray) -> np.ndarray:
        """Return the columns centered and divided."""
        return (X - self.mean) / self.scale

    def undone(self, coef: np.ndarray, intercept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return coefficients, last axis = features, and intercept for the columns as the user has them."""
        coef = coef / self.scale
        return coef, intercept - coef @ self.mean

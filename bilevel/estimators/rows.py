"""Training and validation rows: checked as scikit-learn does, made dense, split and standardized."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from sklearn.utils import check_array
from sklearn.utils.validation import check_consistent_length, column_or_1d, validate_data

_DENSE_BYTES = 4 * 2**30


class Split(NamedTuple):
    """Features and encoded targets of both levels, which problems begin with; the numbers of the rows of X in each."""

    X: np.ndarray
    y: np.ndarray
    X_val: np.ndarray
    y_val: np.ndarray
    fitted_on: np.ndarray
    held_out: np.ndarray

    def map_columns(self, change: Callable[[np.ndarray], np.ndarray]) -> "Split":
        return self._replace(X=change(self.X), X_val=change(self.X_val))


def check_validation_rows(estimator: Any, X_val: Any, y_val: Any, *, y_numeric: bool) -> tuple[Any, np.ndarray | None]:
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
) -> Split:
    """Return dense rows, with the validation rows given apart or held out of X."""
    numbers, X = np.arange(len(y)), _densify("X", X)
    if y_val is not None:
        return Split(X, y, _densify("X_val", X_val), y_val, numbers, numbers[:0])
    try:
        parts = train_test_split(numbers, test_size=fraction, random_state=seed, stratify=y if stratified else None)
    except ValueError as error:
        message = f"{len(y)} rows cannot be split with validation_fraction={fraction} ({error})."
        raise ValueError(f"{message} Give more rows, another fraction, or `X_val` and `y_val`.") from None
    train, held_out = map(np.sort, parts)
    return Split(X[train], y[train], X[held_out], y[held_out], train, held_out)


def _densify(name: str, X: Any) -> np.ndarray:
    """Return X as an array; steps read whole rows, and centered columns have no zeros left."""
    if not sp.issparse(X):
        return X
    if (size := 8 * X.shape[0] * X.shape[1]) > _DENSE_BYTES:
        message = f"`{name}` is sparse and would take {size / 2**30:.3g} GiB as the dense array that fitting needs; "
        raise ValueError(message + "select fewer features (SelectKBest) or project them (TruncatedSVD) first.")
    return X.toarray()


class Scaling(NamedTuple):
    """What is subtracted from each column, and what it is divided by."""

    mean: np.ndarray
    scale: np.ndarray

    @classmethod
    def fit(cls, X: np.ndarray, *, center: bool, divide: bool) -> "Scaling":
        """Take means and deviations of these rows; constant columns are not divided."""
        scaler = StandardScaler(with_mean=center, with_std=divide).fit(X)
        mean = scaler.mean_ if center else np.zeros(X.shape[1])
        return cls(mean, scaler.scale_ if divide else np.ones(X.shape[1]))

    def transform(self, X: np.ndarray) -> np.ndarray:
        return (X - self.mean) / self.scale

    def unscale(self, coef: np.ndarray, intercept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return coefficients, last axis = features, and intercept for the columns as the user has them."""
        coef = coef / self.scale
        return coef, intercept - coef @ self.mean

"""Training and validation rows of the stochastic solvers: made dense and split."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from sklearn.model_selection import train_test_split

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


def split(X: Any, y: np.ndarray, X_val: Any, y_val: np.ndarray | None, fraction: float, seed: int) -> Split:
    """Return dense rows, with the validation rows given apart or held out of X."""
    numbers, X = np.arange(len(y)), _densify("X", X)
    if y_val is not None:
        return Split(X, y, _densify("X_val", X_val), y_val, numbers, numbers[:0])
    try:
        parts = train_test_split(numbers, test_size=fraction, random_state=seed, stratify=y)
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

"""Rows for a fit: weighted, standardized without being made dense, and divided into folds."""

import warnings
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from sklearn.model_selection import KFold, StratifiedKFold, check_cv
from sklearn.utils import check_random_state
from sklearn.utils.sparsefuncs import mean_variance_axis

from bilevel.estimators.selection import Folds

_PARTS = 5  # of the rows of a single split
_MANY_ROWS, _MOST_SHUFFLES = 1000, 5


class Scaling(NamedTuple):
    """What is subtracted from each column, and what it is divided by."""

    mean: np.ndarray
    scale: np.ndarray

    @classmethod
    def fit(cls, X: Any, weights: np.ndarray, *, center: bool, divide: bool) -> "Scaling":
        """Take weighted means and deviations; constant columns are not divided, sparse ones not centered."""
        if sp.issparse(X):
            mean, variance = mean_variance_axis(X, axis=0, weights=weights)
        else:
            mean = np.average(X, axis=0, weights=weights)
            variance = np.average((X - mean) ** 2, axis=0, weights=weights)
        constant = variance <= (10 * np.finfo(float).eps * np.abs(mean)) ** 2
        scale = np.where(constant | (not divide), 1.0, np.sqrt(np.where(constant, 1.0, variance)))
        return cls(mean if center and not sp.issparse(X) else np.zeros_like(mean), scale)

    def transform(self, X: Any) -> Any:
        return X @ sp.diags_array(1 / self.scale) if sp.issparse(X) else (X - self.mean) / self.scale

    def unscale(self, coef: np.ndarray, intercept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return coefficients, (outputs, features), and intercepts for the columns as the user has them."""
        coef = coef / self.scale
        return coef, intercept - coef @ self.mean


def split(
    cv: Any, X: Any, y: np.ndarray, groups: Any, random_state: Any, *, classes: bool, shuffles: int = 1
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return numbers of rows to fit on and to hold out, for an int, a splitter of scikit-learn, or such pairs.

    Rows are shuffled into a number of folds so many times.
    """
    if isinstance(cv, int | np.integer) and not isinstance(cv, bool):
        if cv < 2:
            raise ValueError(f"`cv={cv}`: must be at least 2, a splitter of scikit-learn, or an iterable of splits.")
        most = np.unique(y, return_counts=True)[1].max() if classes else len(y)
        if most < 2:
            raise ValueError("y has one row of each class, and folds need two of some; give more rows.")
        kind, rng = StratifiedKFold if classes else KFold, check_random_state(random_state)
        cv = kind(min(int(cv), int(most)), shuffle=True, random_state=rng)
        return _split_rows(cv, y, shuffles)
    try:
        pairs = list(check_cv(cv).split(X, y, groups))
    except (TypeError, ValueError) as error:
        if groups is not None or "group" not in f"{type(cv).__name__} {error}".lower():
            raise
        message = f"`cv={cv!r}` needs the group of each row; give it to `fit` as `cv_groups`"
        raise ValueError(f"{message}. (`groups` are those of the columns.)") from error
    return [(_rows(train), _rows(test)) for train, test in pairs]


def _rows(numbers: Any) -> np.ndarray:
    rows = np.asarray(numbers, int)
    if rows.ndim != 1:
        raise ValueError(f"`cv` has {numbers!r} where the numbers of a fold's rows are due; give pairs of arrays.")
    return rows


def _split_rows(cv: Any, y: np.ndarray, shuffles: int) -> list[tuple[np.ndarray, np.ndarray]]:
    pairs: list[tuple[np.ndarray, np.ndarray]] = []
    with warnings.catch_warnings():
        for _ in range(shuffles):
            pairs += cv.split(np.zeros(len(y)), y)
            warnings.filterwarnings("ignore", "The least populated class", UserWarning)  # one such warning is enough
    return pairs


def count_shuffles(n_rows: int) -> int:
    """Return how often rows are shuffled into folds: where they are few, which rows meet in a fold decides much."""
    return int(np.clip(np.ceil(_MANY_ROWS / max(1, n_rows)), 1, _MOST_SHUFFLES))


def make_folds(splits: list[tuple[np.ndarray, np.ndarray]], weights: np.ndarray) -> Folds:
    """Return the weights of rows in each fold; a row that several folds hold out counts once.

    Rows of a single split are held out in parts.
    """
    if len(splits) == 1:
        train, test = splits[0]
        splits = [(train, test[k::_PARTS]) for k in range(min(_PARTS, len(test)))] or splits
    fitted, held_out = np.zeros((2, len(splits), len(weights)))
    for k, (train, test) in enumerate(splits):
        fitted[k, train], held_out[k, test] = weights[train], weights[test]
    used = fitted.any(axis=1) & held_out.any(axis=1)
    if not used.any():
        raise ValueError("`cv` leaves no fold with rows to fit on and rows to hold out; give more rows or other folds.")
    fitted, held_out = fitted[used], held_out[used]
    times = np.count_nonzero(held_out, axis=0)
    return Folds.of_rows(fitted, held_out / np.maximum(1, times), find_shuffles(held_out > 0))


def find_shuffles(held_out: np.ndarray) -> np.ndarray:
    """Return the number of the shuffle of each fold: every one holds out the same rows, and each row once; else 0."""
    numbers, seen = np.zeros(len(held_out), int), [np.zeros_like(held_out[0])]
    for k, rows in enumerate(held_out):
        if (seen[-1] & rows).any():
            seen.append(np.zeros_like(rows))
        seen[-1] = seen[-1] | rows
        numbers[k] = len(seen) - 1
    return numbers if (np.array(seen) == seen[0]).all() else np.zeros_like(numbers)

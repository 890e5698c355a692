"""Problems of the literature on real data, ready to run."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jax.tree_util import Partial
from numpy.typing import DTypeLike

from bilevel._core import trees
from bilevel._core.compilation import arithmetic, resolve_dtype
from bilevel.datasets import Dataset, load
from bilevel.problems.base import BilevelProblem, documented
from bilevel.problems.checks import check_reals, check_sizes, make_rng
from bilevel.problems.data_cleaning import data_cleaning, error_rate, weight_auc
from bilevel.problems.selection import cross_validation, penalty_selection

_PIXEL_FLOOR = 0.1  # of the full range; the smallest standard deviation that a pixel is divided by
_CHUNK = 4096


@documented
def ijcnn1(*, dtype: DTypeLike | None = None, seed: int = 0) -> BilevelProblem:
    """Build logistic penalty selection on IJCNN1: 49 990 training and 91 701 validation rows, 22 features.

    Parameters
    ----------
    %(dtype)s
    seed : seed of the start and of the shuffle of the rows
    """
    data = load("ijcnn1")
    return penalty_selection(data.X_train, data.y_train, data.X_test, data.y_test, dtype=dtype, seed=seed)


@documented
def breast_cancer(*, dtype: DTypeLike | None = None, seed: int = 0) -> BilevelProblem:
    """Build logistic penalty selection on the breast-cancer set of scikit-learn: 341 training, 228 validation rows.

    Parameters
    ----------
    %(dtype)s
    seed : seed of the split into levels and of the shuffle of the rows
    """
    data = load("breast_cancer")
    train, val = _split(len(data.X_train), (0.6, 0.4), seed)
    X_train, X_val = _standardize(dtype, data.X_train[train], data.X_train[val])
    signs = np.where(data.y_train == 1, 1, -1)
    return penalty_selection(X_train, signs[train], X_val, signs[val], dtype=dtype, seed=seed)


@documented
def breast_cancer_folds(*, folds: int = 5, dtype: DTypeLike | None = None, seed: int = 0) -> BilevelProblem:
    """Build logistic penalty selection by cross-validation on the breast-cancer set of scikit-learn: 569 rows.

    The prior of the penalties has the scale 0.5.

    Parameters
    ----------
    folds : number of folds
    %(dtype)s
    seed : seed of the folds and of the shuffle of the rows
    """
    data = load("breast_cancer")
    (X,), signs = _standardize(dtype, data.X_train), np.where(data.y_train == 1, 1, -1)
    return cross_validation(X, signs, folds, prior_scale=0.5, dtype=dtype, seed=seed)


@documented
def covtype(*, per: str = "class", dtype: DTypeLike | None = None, seed: int = 0) -> BilevelProblem:
    """Build softmax penalty selection on Covertype: 348 607 training and 116 203 validation rows, 54 features.

    The other rows are left for tests. Columns are standardized on the training rows.

    Parameters
    ----------
    per : "class" or "feature": the axis of z along which penalties differ
    %(dtype)s
    seed : seed of the split into levels and of the shuffle of the rows
    """
    data = load("covtype")
    train, val, _ = _split(len(data.X_train), (0.6, 0.2, 0.2), seed)
    X_train, X_val = _standardize(dtype, data.X_train[train], data.X_train[val])
    labels = data.y_train.astype(np.int32) - 1
    return penalty_selection(
        X_train, labels[train], X_val, labels[val], loss="softmax", per=per, dtype=dtype, seed=seed
    )


@documented
def mnist_cleaning(
    *, corruption: float = 0.5, n_train: int = 20_000, n_val: int = 5_000, dtype: DTypeLike | None = None, seed: int = 0
) -> BilevelProblem:
    """Build data cleaning on MNIST, with the metrics ``test_error``, on the test file, and ``weight_auc``.

    ``weight_auc`` is the probability that a clean row has a larger weight than a row with a corrupted label.

    Parameters
    ----------
    corruption : probability with which a training label is replaced by a random one; 0 leaves all labels clean
    n_train, n_val : number of rows of the training file on each level
    %(dtype)s
    seed : seed of the corrupted labels, of the choice of rows and of the shuffle
    """
    return _cleaning(load("mnist"), 255, corruption, (n_train, n_val), dtype, seed)


@documented
def digits_cleaning(
    *, corruption: float = 0.5, n_train: int = 1_000, n_val: int = 300, dtype: DTypeLike | None = None, seed: int = 0
) -> BilevelProblem:
    """Build data cleaning on the 1797 digits of scikit-learn, with the metrics ``test_error`` and ``weight_auc``.

    The test rows are on neither level. ``weight_auc`` is the probability that a clean row has a larger weight than a
    row with a corrupted label.

    Parameters
    ----------
    corruption : probability with which a training label is replaced by a random one; 0 leaves all labels clean
    n_train, n_val : number of rows on each level
    %(dtype)s
    seed : seed of the corrupted labels, of the choice of rows and of the shuffle
    """
    data = load("digits")
    used, test = _split(len(data.X_train), (0.8, 0.2), seed)
    X, y = data.X_train, data.y_train
    data = replace(data, X_train=X[used], y_train=y[used], X_test=X[test], y_test=y[test])
    return _cleaning(data, 16, corruption, (n_train, n_val), dtype, seed)


def corrupted_labels(labels: np.ndarray, n_classes: int, probability: float, rng: np.random.Generator) -> np.ndarray:
    """Return the labels, each replaced with a given probability by a random label, which may be the same one."""
    redrawn = rng.integers(0, n_classes, len(labels)).astype(labels.dtype)
    return np.where(rng.random(len(labels)) < probability, redrawn, labels)


def _cleaning(
    data: Dataset, full_range: float, corruption: float, sizes: Sequence[int], dtype: DTypeLike | None, seed: int
) -> BilevelProblem:
    assert data.X_test is not None and data.y_test is not None
    if not 0 <= check_reals(corruption=corruption)[0] < 1:
        raise ValueError(f"`corruption={corruption!r}`: must be at least 0 and below 1.")
    n, sizes = len(data.X_train), check_sizes(n_train=sizes[0], n_val=sizes[1])
    if sum(sizes) > n:
        raise ValueError(f"`n_train` and `n_val` together exceed the {n} rows of this data set.")
    rng = make_rng(seed)
    train, val, _ = np.split(rng.permutation(n), np.cumsum(sizes))
    labels = data.y_train.astype(np.int32)
    noisy = corrupted_labels(labels[train], 10, corruption, rng)
    if noisy.max() < labels[val].max():
        raise ValueError(f"`n_train={len(train)}`: these rows do not contain all classes; take more.")
    flat = [part.reshape(len(part), -1) for part in (data.X_train[train], data.X_train[val], data.X_test)]
    X_train, X_val, X_test = _standardize(dtype, *flat, floor=_PIXEL_FLOOR * full_range)
    problem, wrong = data_cleaning(X_train, noisy, X_val, labels[val], dtype=dtype, seed=seed), noisy != labels[train]
    metrics = dict(problem.metrics)
    with arithmetic(problem.dtype):
        metrics["test_error"] = Partial(error_rate, trees.put(X_test), trees.put(data.y_test.astype(np.int32)))
    if wrong.any():
        clean, corrupted = (trees.put(np.flatnonzero(mask).astype(np.int32)) for mask in (~wrong, wrong))
        metrics["weight_auc"] = Partial(weight_auc, clean, corrupted)
    return replace(problem, metrics=metrics)


def _split(n: int, shares: tuple[float, ...], seed: int) -> list[np.ndarray]:
    """Return a random partition of n rows into parts with the given shares."""
    ends = np.rint(np.cumsum(shares) * n).astype(int)[:-1]
    return np.split(make_rng(seed).permutation(n), ends)


def _standardize(dtype: DTypeLike | None, *tables: np.ndarray, floor: float = 0.0) -> list[np.ndarray]:
    """Center and scale columns by the first table, without a float64 copy of a table; constant columns become 0."""
    train, dtype = tables[0], resolve_dtype(dtype, X=tables[0])
    mean = train.mean(0, dtype=np.float64)
    squares = sum(np.square(train[i : i + _CHUNK] - mean).sum(0) for i in range(0, len(train), _CHUNK))
    deviation = np.maximum(np.sqrt(squares / len(train)), floor)
    scale = np.where(deviation > 0, deviation, 1.0)
    scaled = [np.empty(rows.shape, dtype) for rows in tables]
    for table, rows in zip(scaled, tables, strict=True):
        for i in range(0, len(rows), _CHUNK):
            table[i : i + _CHUNK] = (rows[i : i + _CHUNK] - mean) / scale
    return scaled

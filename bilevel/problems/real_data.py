"""The problems of the literature on real data, ready to run."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import DTypeLike

from bilevel import datasets
from bilevel._precision import resolve_dtype
from bilevel.problems.base import BilevelProblem
from bilevel.problems.data_cleaning import data_cleaning
from bilevel.problems.logistic import logistic_selection
from bilevel.problems.softmax_selection import softmax_selection

_PIXEL_FLOOR = 0.1  # of the full range; below it a pixel is nearly constant and would be blown up
_CHUNK = 4096


def ijcnn1(*, dtype: DTypeLike | None = None, seed: int = 0) -> BilevelProblem:
    """Build logistic penalty selection on IJCNN1: 49 990 training and 91 701 validation rows, 22 features.

    Parameters
    ----------
    dtype : "float32" or "float64"; by default what JAX makes of the data
    seed : of the start and the shuffle
    """
    data = datasets.load("ijcnn1")
    return logistic_selection(data.X_train, data.y_train, data.X_test, data.y_test, dtype=dtype, seed=seed)


def breast_cancer(*, dtype: DTypeLike | None = None, seed: int = 0) -> BilevelProblem:
    """Build logistic penalty selection on the breast-cancer set of scikit-learn: 341 training, 228 validation rows.

    Parameters
    ----------
    dtype : "float32" or "float64"; by default what JAX makes of the data
    seed : of the split, the start and the shuffle
    """
    data = datasets.load("breast_cancer")
    train, val = _split(len(data.X_train), (0.6, 0.4), seed)
    X_train, X_val = _standardize(dtype, data.X_train[train], data.X_train[val])
    signs = np.where(data.y_train == 1, 1, -1)
    return logistic_selection(X_train, signs[train], X_val, signs[val], dtype=dtype, seed=seed)


def covtype(*, per: str = "class", dtype: DTypeLike | None = None, seed: int = 0) -> BilevelProblem:
    """Build softmax penalty selection on Covertype: 348 607 training and 116 203 validation rows, 54 features.

    The other rows are left for tests. Columns are standardized on the training rows.

    Parameters
    ----------
    per : "class" or "feature"; what shares a penalty
    dtype : "float32" or "float64"; by default what JAX makes of the data
    seed : of the split and the shuffle
    """
    data = datasets.load("covtype")
    train, val, _ = _split(len(data.X_train), (0.6, 0.2, 0.2), seed)
    X_train, X_val = _standardize(dtype, data.X_train[train], data.X_train[val])
    labels = data.y_train.astype(np.int32) - 1
    return softmax_selection(X_train, labels[train], X_val, labels[val], per=per, dtype=dtype, seed=seed)


def mnist_cleaning(
    *, corruption: float = 0.5, n_train: int = 20_000, n_val: int = 5_000, dtype: DTypeLike | None = None, seed: int = 0
) -> BilevelProblem:
    """Build data cleaning on MNIST, with the test file for the metric ``test_error``.

    Parameters
    ----------
    corruption : the probability that a training label is redrawn, uniformly among the ten; 0 leaves them clean
    n_train, n_val : rows of the training file on each level
    dtype : "float32" or "float64"; by default what JAX makes of the data
    seed : of the choice of rows, the corruption and the shuffle
    """
    data = datasets.load("mnist")
    assert data.X_test is not None and data.y_test is not None
    return _cleaning(
        (data.X_train, data.y_train), (data.X_test, data.y_test), 255, corruption, n_train, n_val, dtype, seed
    )


def digits_cleaning(
    *, corruption: float = 0.5, n_train: int = 1_000, n_val: int = 300, dtype: DTypeLike | None = None, seed: int = 0
) -> BilevelProblem:
    """Build data cleaning on the digits of scikit-learn; the rows of neither level are the test rows.

    Parameters
    ----------
    corruption : the probability that a training label is redrawn, uniformly among the ten; 0 leaves them clean
    n_train, n_val : rows on each level, of 1797
    dtype : "float32" or "float64"; by default what JAX makes of the data
    seed : of the choice of rows, the corruption and the shuffle
    """
    data = datasets.load("digits")
    used, test = _split(len(data.X_train), (0.8, 0.2), seed)
    source = data.X_train[used], data.y_train[used]
    held_out = data.X_train[test], data.y_train[test]
    return _cleaning(source, held_out, 16, corruption, n_train, n_val, dtype, seed)


def corrupted_labels(labels: np.ndarray, n_classes: int, probability: float, rng: np.random.Generator) -> np.ndarray:
    """Return the labels, each redrawn uniformly with this probability; some redrawn ones stay as they were."""
    redrawn = rng.integers(0, n_classes, len(labels)).astype(labels.dtype)
    return np.where(rng.random(len(labels)) < probability, redrawn, labels)


def _cleaning(
    source: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    full_range: float,
    corruption: float,
    n_train: int,
    n_val: int,
    dtype: DTypeLike | None,
    seed: int,
) -> BilevelProblem:
    if not 0 <= corruption < 1:
        raise ValueError(f"`corruption={corruption!r}`: must be at least 0 and below 1.")
    images, labels = source
    for name, rows in (("n_train", n_train), ("n_val", n_val)):
        if not isinstance(rows, int | np.integer) or not 1 <= rows < len(images):
            raise ValueError(f"`{name}={rows!r}`: must be an integer of at least 1 and below {len(images)}.")
    if n_train + n_val > len(images):
        raise ValueError(f"`n_train` and `n_val` together exceed the {len(images)} rows of this data set.")
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(images))
    train, val = order[:n_train], order[n_train : n_train + n_val]
    truth = labels[train].astype(np.int32)
    noisy = corrupted_labels(truth, 10, corruption, rng)
    flat = [part.reshape(len(part), -1) for part in (images[train], images[val], test[0])]
    X_train, X_val, X_test = _standardize(dtype, *flat, floor=_PIXEL_FLOOR * full_range)
    return data_cleaning(
        X_train,
        noisy,
        X_val,
        labels[val].astype(np.int32),
        X_test=X_test,
        y_test=test[1].astype(np.int32),
        corrupted=noisy != truth if corruption > 0 else None,
        dtype=dtype,
        seed=seed,
    )


def _split(n: int, shares: tuple[float, ...], seed: int) -> list[np.ndarray]:
    """Return a random partition of n rows, in these shares."""
    ends = np.rint(np.cumsum(shares) * n).astype(int)[:-1]
    return np.split(np.random.default_rng(seed).permutation(n), ends)


def _standardize(
    dtype: DTypeLike | None, train: np.ndarray, *others: np.ndarray, floor: float = 0.0
) -> list[np.ndarray]:
    """Center and scale columns by mean and deviation of the training rows; a constant column becomes 0."""
    mean = train.mean(0, dtype=np.float64)
    deviation = np.maximum(_deviation(train, mean), floor)
    scale = np.where(deviation > 0, deviation, 1.0)
    return [_scale(rows, mean, scale, resolve_dtype(dtype, train)) for rows in (train, *others)]


def _chunks(n: int) -> Iterator[slice]:
    """Cut n rows in pieces, so that no wide copy of a whole table is made."""
    return (slice(begin, begin + _CHUNK) for begin in range(0, n, _CHUNK))


def _deviation(rows: np.ndarray, mean: np.ndarray) -> np.ndarray:
    return np.sqrt(sum(np.square(rows[part] - mean).sum(0) for part in _chunks(len(rows))) / len(rows))


def _scale(rows: np.ndarray, mean: np.ndarray, scale: np.ndarray, dtype: np.dtype) -> np.ndarray:
    out = np.empty(rows.shape, dtype)
    for part in _chunks(len(rows)):
        out[part] = (rows[part] - mean) / scale
    return out

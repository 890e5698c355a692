"""Rows with classes, as softmax problems take them: checked and laid out."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from bilevel.oracles import Labelled, Samples
from bilevel.problems.checks import check_same_features, checked_classes, checked_table

_ROWS_FIRST = 0  # a width that no row is narrower than


class Levels(NamedTuple):
    """The samples of both levels, and what fixes the shape of z."""

    inner: Samples
    outer: Samples
    n_features: int
    n_classes: int


def labelled_levels(
    X_train: Any, y_train: Any, X_val: Any, y_val: Any, dtype: DTypeLike, rng: np.random.Generator
) -> Levels:
    """Check the rows of both levels and lay them out in a random order."""
    rows, labels = checked_table("X_train", X_train, "y_train", y_train)
    labels = checked_classes("y_train", labels)
    n_classes = int(labels.max()) + 1
    if n_classes < 2:
        raise ValueError("`y_train` holds the class 0 alone; a softmax problem needs at least two.")
    outer_rows, outer_labels = checked_table("X_val", X_val, "y_val", y_val)
    outer_labels = checked_classes("y_val", outer_labels, n_classes)
    check_same_features(("X_train", "X_val"), (rows, outer_rows))
    inner, outer = _samples(rows, labels, dtype, rng), _samples(outer_rows, outer_labels, dtype, rng)
    return Levels(inner, outer, rows.shape[1], n_classes)


def _samples(rows: np.ndarray, labels: np.ndarray, dtype: DTypeLike, rng: np.random.Generator) -> Samples:
    data = Labelled(rows.astype(dtype, copy=False), labels, np.arange(len(rows), dtype=np.int32))
    return Samples.shuffled(data, dtype, rng, _ROWS_FIRST)

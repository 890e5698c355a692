"""The two sets that come with scikit-learn: no file, no network."""

import numpy as np

from bilevel.datasets.dataset import Dataset
from bilevel.extras import require


def breast_cancer() -> Dataset:
    """Return 569 samples with 30 features; 0 is malignant, 1 benign."""
    source = require("sklearn.datasets", "data").load_breast_cancer()
    return Dataset(
        "breast_cancer",
        source.data,
        source.target.astype(np.int8),
        None,
        None,
        (0, 1),
        "Breast Cancer Wisconsin (Diagnostic), W. H. Wolberg, W. N. Street and O. L. Mangasarian, "
        "UCI Machine Learning Repository, 1995; the copy in scikit-learn.",
    )


def digits() -> Dataset:
    """Return 1797 images of 8 x 8 pixels, from 0 to 16."""
    source = require("sklearn.datasets", "data").load_digits()
    return Dataset(
        "digits",
        source.images.astype(np.uint8),
        source.target.astype(np.uint8),
        None,
        None,
        tuple(range(10)),
        "Optical Recognition of Handwritten Digits (its test part), E. Alpaydin and C. Kaynak, "
        "UCI Machine Learning Repository, 1998; the copy in scikit-learn.",
    )

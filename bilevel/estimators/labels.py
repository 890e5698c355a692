"""Classes of any kind, numbered."""

from typing import Any

import numpy as np
from sklearn.utils.multiclass import check_classification_targets


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

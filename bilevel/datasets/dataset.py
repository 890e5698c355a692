"""What `load` returns."""

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, eq=False)
class Dataset:
    """One data set as its source has it: neither scaled, nor shuffled, nor cast to floats.

    Attributes
    ----------
    X_train, X_test : the samples along the first axis; images keep their two axes
    y_train, y_test : one label per sample, in a small integer type: cast before arithmetic
    X_test, y_test : None where the source has no split
    classes : the labels that occur, in order
    citation : whom to cite
    """

    name: str
    X_train: np.ndarray = field(repr=False)
    y_train: np.ndarray = field(repr=False)
    X_test: np.ndarray | None = field(repr=False)
    y_test: np.ndarray | None = field(repr=False)
    classes: tuple[int, ...]
    citation: str = field(repr=False)

    @property
    def n_classes(self) -> int:
        """Number of classes."""
        return len(self.classes)

"""What `load` returns.

How a data set is described: its arrays, and the files they come from.

The two sets that come with scikit-learn: no file, no network.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np

from bilevel._optional import require


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


@dataclass(frozen=True)
class ArraySpec:
    """Name, type and shape of one array."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} {np.dtype(self.dtype).name} {self.shape}"


Parser = Callable[[BinaryIO, tuple[ArraySpec, ...]], tuple[np.ndarray, ...]]


@dataclass(frozen=True)
class RemoteFile:
    """One compressed file at its source.

    Attributes
    ----------
    urls : the same file at several hosts, tried in order; the name ends in .gz or .bz2
    parse : reads `arrays` from the unpacked file
    max_bytes : limit of the download, and of what it unpacks to
    timeout : seconds without an answer after which a host is given up
    """

    urls: tuple[str, ...]
    parse: Parser
    arrays: tuple[ArraySpec, ...]
    max_bytes: int
    timeout: float = 30.0


@dataclass(frozen=True)
class FileSet:
    """A data set kept in one file.

    Attributes
    ----------
    files : in the order of their arrays: X_train, y_train, then X_test, y_test where there is a split
    checksum : of the arrays; see :func:`bilevel.datasets.loading.checksum`
    classes, citation : as in `Dataset`
    """

    name: str
    files: tuple[RemoteFile, ...]
    checksum: str
    classes: tuple[int, ...]
    citation: str

    @property
    def arrays(self) -> tuple[ArraySpec, ...]:
        """All arrays, in the order of `files`."""
        return tuple(spec for file in self.files for spec in file.arrays)

    @property
    def file_name(self) -> str:
        """The name of the file in a folder or in the cache."""
        return f"{self.name}.npz"

    @property
    def contents(self) -> str:
        """The arrays in words."""
        return ", ".join(map(str, self.arrays))


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

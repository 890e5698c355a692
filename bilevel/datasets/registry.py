"""The data sets, and parsers for the formats of their sources. To add a data set, add an entry to `_ENTRIES`."""

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import BinaryIO, NamedTuple

import numpy as np

from bilevel._core.extras import require


@dataclass(frozen=True, eq=False)
class Dataset:
    """One data set as its source publishes it: not scaled, not shuffled, and not converted to floats.

    Attributes
    ----------
    X_train, X_test : the samples along the first axis; images have two more axes
    y_train, y_test : one label per sample, in a small integer type: cast before arithmetic
    X_test, y_test : None if the source has no test set
    classes : the labels, in increasing order
    citation : what to cite
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
        return len(self.classes)


class ArraySpec(NamedTuple):
    """Name, type and shape of one array."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class RemoteFile:
    """One compressed file of a source."""

    url: str  # ends in .gz or .bz2
    parse: Callable[[BinaryIO, tuple[ArraySpec, ...]], tuple[np.ndarray, ...]]  # reads `arrays` from the unpacked file
    arrays: tuple[ArraySpec, ...]
    max_bytes: int  # limit for the download, and for the unpacked file
    timeout: float = 30.0  # seconds without an answer
    max_seconds: float = 900.0  # for the whole file


@dataclass(frozen=True)
class FileSet:
    """A data set that is downloaded and kept in one file."""

    name: str
    files: tuple[RemoteFile, ...]  # in the order X_train, y_train, X_test, y_test, as far as the source has them
    checksum: str  # of the arrays, see `bilevel.datasets.loading.checksum`
    classes: tuple[int, ...]
    citation: str

    @property
    def arrays(self) -> tuple[ArraySpec, ...]:
        return tuple(spec for file in self.files for spec in file.arrays)

    @property
    def contents(self) -> str:
        return ", ".join(f"{name} {np.dtype(dtype).name} {shape}" for name, dtype, shape in self.arrays)


@dataclass(frozen=True)
class EmbeddedSet:
    """A data set that is part of scikit-learn."""

    name: str
    arrays: dict[str, str]  # the dtypes of the samples and labels of scikit-learn
    classes: tuple[int, ...]
    citation: str


def libsvm(file: BinaryIO, arrays: tuple[ArraySpec, ...]) -> tuple[np.ndarray, ...]:
    """Parse features and labels from lines `label index:value ...`, with indices from 1."""
    X, y = arrays
    load = require("sklearn.datasets", "data").load_svmlight_file
    features, labels = load(file, n_features=X.shape[1], dtype=np.dtype(X.dtype), zero_based=False)
    return features.toarray(), labels.astype(y.dtype)


def idx(file: BinaryIO, arrays: tuple[ArraySpec, ...]) -> tuple[np.ndarray, ...]:
    """Parse one array of unsigned bytes with exactly the expected shape."""
    (spec,) = arrays
    header = struct.pack(f">HBB{len(spec.shape)}I", 0, 8, len(spec.shape), *spec.shape)  # 8 is the code of the dtype
    found = file.read(len(header))
    if found != header:
        raise ValueError(f"the IDX header is {found.hex()}, not {header.hex()}")
    body = bytearray(file.read())
    if len(body) != prod(spec.shape):
        raise ValueError(f"the IDX file does not hold {prod(spec.shape)} bytes after its header")
    return (np.frombuffer(body, np.uint8).reshape(spec.shape),)


def csv(file: BinaryIO, arrays: tuple[ArraySpec, ...]) -> tuple[np.ndarray, ...]:
    """Parse features and, in the last column, labels from lines of integers."""
    X, y = arrays
    table = np.loadtxt(file, dtype=X.dtype, delimiter=",", comments=None, ndmin=2)
    # One-hot features compress much better in Fortran order.
    return np.asfortranarray(table[:, :-1]), table[:, -1].astype(y.dtype)


def _ijcnn1(file_name: str, part: str, n: int, max_bytes: int) -> RemoteFile:
    url = f"https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary/{file_name}"
    arrays = ArraySpec(f"X_{part}", "<f8", (n, 22)), ArraySpec(f"y_{part}", "|i1", (n,))
    return RemoteFile(url, libsvm, arrays, max_bytes)


def _mnist(file_name: str, array: str, shape: tuple[int, ...], max_bytes: int) -> RemoteFile:
    url = f"https://ossci-datasets.s3.amazonaws.com/mnist/{file_name}-idx{len(shape)}-ubyte.gz"
    return RemoteFile(url, idx, (ArraySpec(array, "|u1", shape),), max_bytes)


_UCI = "UCI Machine Learning Repository"
_BREAST_CANCER = (
    f"Breast Cancer Wisconsin (Diagnostic), W. H. Wolberg, W. N. Street and O. L. Mangasarian, {_UCI}, 1995"
)
_DIGITS = f"Optical Recognition of Handwritten Digits (its test part), E. Alpaydin and C. Kaynak, {_UCI}, 1998"
_COVTYPE_URL = "https://archive.ics.uci.edu/ml/machine-learning-databases/covtype/covtype.data.gz"
_COVTYPE_ARRAYS = ArraySpec("X", "<i2", (581012, 54)), ArraySpec("y", "|u1", (581012,))
_ENTRIES = (
    FileSet(
        "ijcnn1",
        (_ijcnn1("ijcnn1.bz2", "train", 49990, 20_000_000), _ijcnn1("ijcnn1.t.bz2", "test", 91701, 40_000_000)),
        checksum="557c32d2d6ecfcdea08036d530cd24f818257e7ec688a071473adc1f732c89d4",
        classes=(-1, 1),
        citation="D. Prokhorov, IJCNN 2001 neural network competition, Ford Research Laboratory; features by "
        "C.-C. Chang and C.-J. Lin, IJCNN 2001 challenge: generalization ability and text decoding, IJCNN 2001; "
        "LIBSVM Data collection, National Taiwan University.",
    ),
    FileSet(
        "mnist",
        (
            _mnist("train-images", "x_train", (60000, 28, 28), 50_000_000),
            _mnist("train-labels", "y_train", (60000,), 100_000),
            _mnist("t10k-images", "x_test", (10000, 28, 28), 10_000_000),
            _mnist("t10k-labels", "y_test", (10000,), 100_000),
        ),
        checksum="8fc8fc4f0343f34ece1fcfdfb65f0801fac48030ce7c70e62bbb62f64ee2e65b",
        classes=tuple(range(10)),
        citation="The MNIST database of handwritten digits, Y. LeCun, C. Cortes and C. J. C. Burges, derived from NIST "
        "Special Databases 1 and 3. Copyright Y. LeCun and C. Cortes.",
    ),
    FileSet(
        "covtype",
        (RemoteFile(_COVTYPE_URL, csv, _COVTYPE_ARRAYS, 80_000_000),),
        checksum="af5059cfe519b39a250cdffd848fe2ec56143ebe42e1349bd3dcd28343fd37cb",
        classes=tuple(range(1, 8)),
        citation=f"Covertype, J. A. Blackard, {_UCI}, 1998. Copyright Jock A. Blackard and Colorado State University.",
    ),
    EmbeddedSet("breast_cancer", {"data": "<f8", "target": "|i1"}, (0, 1), _BREAST_CANCER),  # 0 is malignant
    EmbeddedSet("digits", {"images": "|u1", "target": "|u1"}, tuple(range(10)), _DIGITS),  # 8 x 8 pixels, from 0 to 16
)
SETS: dict[str, FileSet | EmbeddedSet] = {known.name: known for known in _ENTRIES}

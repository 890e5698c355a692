"""The data sets kept in files: where they come from, and what they hold."""

from bilevel.datasets.parsers import csv, idx, libsvm
from bilevel.datasets.records import ArraySpec, FileSet, RemoteFile

_LIBSVM = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary"
_MNIST = ("http://yann.lecun.com/exdb/mnist", "https://ossci-datasets.s3.amazonaws.com/mnist")
_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/covtype"


def _ijcnn1_file(url: str, part: str, n: int, max_bytes: int) -> RemoteFile:
    arrays = ArraySpec(f"X_{part}", "<f8", (n, 22)), ArraySpec(f"y_{part}", "|i1", (n,))
    return RemoteFile((url,), libsvm, arrays, max_bytes)


def _mnist_file(file_name: str, array: str, shape: tuple[int, ...], max_bytes: int) -> RemoteFile:
    urls = tuple(f"{host}/{file_name}" for host in _MNIST)
    return RemoteFile(urls, idx, (ArraySpec(array, "|u1", shape),), max_bytes)


IJCNN1 = FileSet(
    "ijcnn1",
    (
        _ijcnn1_file(f"{_LIBSVM}/ijcnn1.bz2", "train", 49990, 20_000_000),
        _ijcnn1_file(f"{_LIBSVM}/ijcnn1.t.bz2", "test", 91701, 40_000_000),
    ),
    checksum="557c32d2d6ecfcdea08036d530cd24f818257e7ec688a071473adc1f732c89d4",
    classes=(-1, 1),
    citation="D. Prokhorov, IJCNN 2001 neural network competition, Ford Research Laboratory; features by C.-C. Chang "
    "and C.-J. Lin, IJCNN 2001 challenge: generalization ability and text decoding, IJCNN 2001; "
    "LIBSVM Data collection, National Taiwan University.",
)

MNIST = FileSet(
    "mnist",
    (
        _mnist_file("train-images-idx3-ubyte.gz", "x_train", (60000, 28, 28), 50_000_000),
        _mnist_file("train-labels-idx1-ubyte.gz", "y_train", (60000,), 100_000),
        _mnist_file("t10k-images-idx3-ubyte.gz", "x_test", (10000, 28, 28), 10_000_000),
        _mnist_file("t10k-labels-idx1-ubyte.gz", "y_test", (10000,), 100_000),
    ),
    checksum="8fc8fc4f0343f34ece1fcfdfb65f0801fac48030ce7c70e62bbb62f64ee2e65b",
    classes=tuple(range(10)),
    citation="The MNIST database of handwritten digits, Y. LeCun, C. Cortes and C. J. C. Burges, derived from NIST "
    "Special Databases 1 and 3. Copyright Y. LeCun and C. Cortes.",
)

COVTYPE = FileSet(
    "covtype",
    (
        RemoteFile(
            (f"{_UCI}/covtype.data.gz",),
            csv,
            (ArraySpec("X", "<i2", (581012, 54)), ArraySpec("y", "|u1", (581012,))),
            80_000_000,
        ),
    ),
    checksum="af5059cfe519b39a250cdffd848fe2ec56143ebe42e1349bd3dcd28343fd37cb",
    classes=tuple(range(1, 8)),
    citation="Covertype, J. A. Blackard, UCI Machine Learning Repository, 1998. "
    "Copyright Jock A. Blackard and Colorado State University.",
)

SOURCES = {known.name: known for known in (IJCNN1, MNIST, COVTYPE)}

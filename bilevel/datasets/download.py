"""The data sets kept in files: where they come from, and what they hold.

A data set from its source, with limits on time and size.
"""

import bz2
import gzip
import urllib.request
import zlib
from collections.abc import Callable
from http.client import HTTPException
from tempfile import TemporaryFile
from typing import IO, Any, BinaryIO, cast

import numpy as np

from bilevel._optional import Reporter, progress_bar
from bilevel.datasets import files
from bilevel.datasets.parsers import csv, idx, libsvm
from bilevel.datasets.registry import ArraySpec, FileSet, RemoteFile

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


_CHUNK = 2**16
_UNPACK: dict[str, Callable[..., Any]] = {"gz": gzip.open, "bz2": bz2.open}
# What a host, a connection or a decompressor may raise.
_FAILURES = (OSError, HTTPException, EOFError, zlib.error)


class DownloadError(OSError):
    """A data set that is in no folder and could not be had from its source."""


def download(known: FileSet, progress: bool) -> dict[str, np.ndarray]:
    """Return the verified arrays of a set, from its source."""
    arrays: dict[str, np.ndarray] = {}
    for remote in known.files:
        with TemporaryFile() as plain:
            url = _fetch(remote, plain, progress)
            try:
                values = remote.parse(cast(BinaryIO, plain), remote.arrays)
            except ValueError as error:
                raise DownloadError(f"{url} is not in the expected form: {error}") from error
        arrays |= {spec.name: array for spec, array in zip(remote.arrays, values, strict=True)}
    try:
        files.verify(arrays, known)
    except ValueError as error:
        raise DownloadError(f"the source of '{known.name}' has changed: {error}") from error
    return arrays


def _fetch(remote: RemoteFile, plain: IO[bytes], progress: bool) -> str:
    """Write the unpacked file to ``plain`` from the first host that serves it, and return its address."""
    failures = []
    for url in remote.urls:
        plain.seek(0)
        plain.truncate()
        try:
            with TemporaryFile() as packed:
                with progress_bar(url.rpartition("/")[2], progress) as report:
                    _receive(url, remote, packed, report)
                _unpack(url, remote, packed, plain)
            return url
        except _FAILURES as error:
            failures.append(f"{url}: {str(error) or type(error).__name__}")
    raise DownloadError("; ".join(failures))


def _receive(url: str, remote: RemoteFile, packed: IO[bytes], report: Reporter) -> None:
    report(0.0, "connecting")
    with _opener().open(url, timeout=remote.timeout) as answer:
        length = answer.headers.get("Content-Length")
        total = int(length) if length and length.isdecimal() else None
        _check_size(total or 0, remote)
        while chunk := answer.read1(_CHUNK):
            packed.write(chunk)
            _check_size(packed.tell(), remote)
            report(packed.tell() / (total or remote.max_bytes), f"{packed.tell() / 1e6:.1f} MB")
    if total is not None and packed.tell() < total:
        raise EOFError(f"the answer ended after {packed.tell()} of {total} bytes")
    packed.seek(0)


def _unpack(url: str, remote: RemoteFile, packed: IO[bytes], plain: IO[bytes]) -> None:
    with _UNPACK[url.rpartition(".")[2]](packed) as stream:
        while chunk := stream.read(_CHUNK):
            plain.write(chunk)
            _check_size(plain.tell(), remote)
    plain.seek(0)


def _check_size(size: int, remote: RemoteFile) -> None:
    if size > remote.max_bytes:
        raise OSError(f"more than {remote.max_bytes} bytes, the limit for this file")


def _opener() -> urllib.request.OpenerDirector:
    """Return an opener without the file, data and FTP handlers of `urlopen`, to which a redirect might lead."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.UnknownHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPErrorProcessor,
    ):
        opener.add_handler(handler())
    opener.addheaders = [("User-Agent", "bilevel")]
    return opener

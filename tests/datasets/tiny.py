"""Synthetic sets in the formats of the sources, written without the library."""

import bz2
import gzip
import hashlib
import struct

import numpy as np

from bilevel.datasets import registry
from bilevel.datasets.registry import ArraySpec, FileSet, RemoteFile

RNG = np.random.default_rng(0)
SPLIT = {
    "X_train": np.round(RNG.standard_normal((7, 3)), 6),
    "y_train": np.array([1, -1, -1, 1, -1, 1, 1], np.int8),
    "X_test": np.round(RNG.standard_normal((4, 3)), 6),
    "y_test": np.array([-1, 1, 1, -1], np.int8),
}
SPLIT["X_train"][2, 1] = 0.0
IMAGES = {"x_train": RNG.integers(0, 256, (5, 4, 2)).astype(np.uint8), "y_train": np.arange(5, dtype=np.uint8)}
TABLE = {"X": RNG.integers(-300, 7000, (6, 4)).astype(np.int16), "y": np.array([1, 2, 3, 1, 2, 7], np.uint8)}


def digest(arrays):
    """Return the checksum as its docstring defines it."""
    parts = [
        f"{name} {array.dtype.str} {array.shape}\n".encode() + array.tobytes("C")
        for name, array in sorted(arrays.items())
    ]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def libsvm_text(X, y):
    """Return lines `label index:value ...` without zeros."""
    rows = (" ".join(f"{k}:{value:.6f}" for k, value in enumerate(row, 1) if value) for row in X.tolist())
    return "".join(f"{label} {row} \n" for label, row in zip(y.tolist(), rows, strict=True)).encode()


def idx_bytes(array):
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def csv_text(X, y):
    rows = np.column_stack([X, y.astype(X.dtype)]).tolist()
    return "".join(",".join(map(str, row)) + "\n" for row in rows).encode()


def packed_libsvm():
    return {
        "tiny.bz2": bz2.compress(libsvm_text(SPLIT["X_train"], SPLIT["y_train"])),
        "tiny.t.bz2": bz2.compress(libsvm_text(SPLIT["X_test"], SPLIT["y_test"])),
    }


def packed_images():
    return {f"{name}.gz": gzip.compress(idx_bytes(array)) for name, array in IMAGES.items()}


def packed_table():
    return {"table.gz": gzip.compress(csv_text(**TABLE))}


def specs(arrays):
    return tuple(ArraySpec(name, array.dtype.str, array.shape) for name, array in arrays.items())


def remote(url, parse, arrays, **limits):
    return RemoteFile(url, parse, arrays, **({"max_bytes": 10_000, "timeout": 5.0} | limits))


def libsvm_set(host, **limits):
    files = (
        remote(f"{host}/tiny.bz2", registry.libsvm, specs(SPLIT)[:2], **limits),
        remote(f"{host}/tiny.t.bz2", registry.libsvm, specs(SPLIT)[2:], **limits),
    )
    return FileSet("tiny", files, digest(SPLIT), (-1, 1), "no source")


def image_set(host):
    files = tuple(remote(f"{host}/{spec.name}.gz", registry.idx, (spec,)) for spec in specs(IMAGES))
    return FileSet("tiny", files, digest(IMAGES), tuple(range(5)), "no source")


def table_set(host):
    return FileSet(
        "tiny",
        (remote(f"{host}/table.gz", registry.csv, specs(TABLE)),),
        digest(TABLE),
        (1, 2, 3, 7),
        "no source",
    )

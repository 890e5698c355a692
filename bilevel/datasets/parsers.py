"""Readers of the formats in which the sources publish."""

import struct
from math import prod
from typing import BinaryIO, NamedTuple

import numpy as np

from bilevel._optional import require

_UNSIGNED_BYTE = 8


class ArraySpec(NamedTuple):
    """Name, type and shape of one array."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} {np.dtype(self.dtype).name} {self.shape}"


def libsvm(file: BinaryIO, arrays: tuple[ArraySpec, ...]) -> tuple[np.ndarray, ...]:
    """Read features and labels from lines `label index:value ...`, indices from 1."""
    X, y = arrays
    load = require("sklearn.datasets", "data").load_svmlight_file
    features, labels = load(file, n_features=X.shape[1], dtype=np.dtype(X.dtype), zero_based=False)
    return features.toarray(), labels.astype(y.dtype)


def idx(file: BinaryIO, arrays: tuple[ArraySpec, ...]) -> tuple[np.ndarray, ...]:
    """Read one array of unsigned bytes, which has exactly the shape asked for."""
    (spec,) = arrays
    header = struct.pack(f">HBB{len(spec.shape)}I", 0, _UNSIGNED_BYTE, len(spec.shape), *spec.shape)
    found = file.read(len(header))
    if found != header:
        raise ValueError(f"the IDX header is {found.hex()}, not {header.hex()}")
    flat = np.empty(prod(spec.shape), np.uint8)
    if file.readinto(flat.data) != flat.size or file.read(1):  # type: ignore[attr-defined]
        raise ValueError(f"the IDX file does not hold {flat.size} bytes after its header")
    return (flat.reshape(spec.shape),)


def csv(file: BinaryIO, arrays: tuple[ArraySpec, ...]) -> tuple[np.ndarray, ...]:
    """Read features and, in the last column, labels from lines of integers."""
    X, y = arrays
    table = np.loadtxt(file, dtype=X.dtype, delimiter=",", comments=None, ndmin=2)
    # Column by column, one-hot features compress to a fraction of their size row by row.
    return np.asfortranarray(table[:, :-1]), table[:, -1].astype(y.dtype)

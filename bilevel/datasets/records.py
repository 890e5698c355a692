"""How a data set is described: its arrays, and the files they come from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np


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
    checksum : of the arrays; see :func:`bilevel.datasets.files.checksum`
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

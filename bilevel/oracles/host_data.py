"""Rows that stay on the host: of arrays in memory, of memory-mapped files, or of a function of their numbers."""

import copy
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from io import FileIO
from math import prod
from numbers import Integral
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bilevel._types import INT32_MAX, PyTree, is_number

_PAGE_BYTES = 4096  # a disk reads pages: rows of a file with less between them are read at once
_KINDS = "fiub"  # of dtypes


class HostData:
    """Rows that stay on the host, and are read as steps and passes need them.

    It is given in the place of data to `BilevelProblem.from_losses`, `problems.logistic_selection` and
    `problems.ridge_selection`. Runs are those of the same rows on the device; passes add up their rows in pieces.

    Parameters
    ----------
    data : a pytree of arrays, first axis = samples, such as ``np.load(path, mmap_mode="r")``; or a function of an array
        of row numbers that returns a pytree of as many rows, which is called from threads
    length : how many rows a function has
    shuffle : take the rows in a random order, as those of other data are; say False for a file whose rows lie in a
        random order: a block is then one stretch of it
    window : draw batches from so many consecutive rows, which move on when as many were drawn; None draws from all
    prefetch : how many pieces are read ahead, each by a thread; 0 reads when a piece is needed

    Examples
    --------
    >>> import bilevel, numpy as np
    >>> bilevel.HostData((np.zeros((6, 2)), np.ones(6)))
    <HostData: 6 rows of 3 numbers>
    """

    def __init__(
        self,
        data: PyTree | Callable[[np.ndarray], PyTree],
        length: int | None = None,
        *,
        shuffle: bool = True,
        window: int | None = None,
        prefetch: int = 2,
    ) -> None:
        self._change: Callable[[PyTree], PyTree] | None = None
        self._function = data if callable(data) else None
        if not isinstance(shuffle, bool):
            raise ValueError(f"`HostData(shuffle={shuffle!r})`: must be True or False.")
        _check_size("prefetch", prefetch, 0)
        for name, value in (("length", length), ("window", window)):
            if value is not None:
                _check_size(name, value, 1)
        self.shuffle, self.window, self.prefetch = shuffle, window, prefetch
        if window is not None and shuffle:
            raise ValueError("`HostData(window=…)`: a window is a stretch of rows as they lie; say `shuffle=False`.")
        if self._function is None:
            self._tables, self._structure = _tables(data)
            self.n = self._tables[0].shape[0]
            if length is not None and length != self.n:
                raise ValueError(f"`HostData(length={length})`: the arrays have {self.n} rows; leave it out.")
        elif length is None:
            raise ValueError("`HostData(function)`: say how many rows there are by `length=…`.")
        else:
            self.n = int(length)
        self._like: list[np.ndarray] | None = None
        self.head = self.read(np.arange(1))  # the first row: structure, shapes and dtypes of all

    def read(self, numbers: np.ndarray) -> PyTree:
        """Return the rows of these numbers, in their order."""
        if self._function is None:
            where = _as_slice(numbers)
            found = jax.tree.unflatten(self._structure, [table[where] for table in self._tables])
        else:
            found = self._answer(np.asarray(numbers, np.int64))
        return found if self._change is None else self._change(found)

    def beside(self, column: Any) -> "HostData":
        """Return the same rows, each in a pair with an entry of a column."""
        [table], _ = _tables(column)

        def read(numbers: np.ndarray) -> PyTree:
            return self.read(numbers), table[_as_slice(numbers)]

        return HostData(read, self.n, shuffle=self.shuffle, window=self.window, prefetch=self.prefetch)

    def map(self, change: Callable[[PyTree], PyTree]) -> "HostData":
        """Return the rows as a function of many at once makes them."""
        assert self._change is None, "one change of rows is enough"
        changed = copy.copy(self)
        changed._change = change
        changed.head = changed.read(np.arange(1))
        return changed

    def _answer(self, numbers: np.ndarray) -> PyTree:
        """Return what the function does, looked at."""
        assert self._function is not None, "asked only of functions"
        found = self._function(numbers)
        leaves, structure = jax.tree.flatten(found)
        arrays = _as_arrays(leaves)
        counts = sorted({array.shape[:1] for array in arrays})
        if counts != [(len(numbers),)]:
            got = [count[0] if count else None for count in counts]
            raise ValueError(f"`HostData`: the function returned {got} rows for {len(numbers)} numbers.")
        if self._like is None:
            self._like, self._structure = [array[:0] for array in arrays], structure
        looks = [[(array.dtype.name, array.shape[1:]) for array in given] for given in (self._like, arrays)]
        if structure != self._structure or looks[0] != looks[1]:
            raise ValueError(f"`HostData`: the function returned rows of {looks[1]}, and of {looks[0]} before.")
        return jax.tree.unflatten(structure, arrays)

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        numbers = sum(prod(leaf.shape[1:]) for leaf in jax.tree.leaves(self.head))
        return f"<HostData: {self.n:,} rows of {numbers:,} numbers>"


def _check_size(name: str, value: Any, least: int) -> None:
    if not is_number(value, Integral) or not least <= value <= INT32_MAX:
        raise ValueError(f"`HostData({name}={value!r})`: must be an integer of at least {least}, below 2**31.")


def head(data: PyTree) -> PyTree:
    """Return data, or the first row of those on the host."""
    return data.head if isinstance(data, HostData) else data


def _tables(data: PyTree) -> tuple[list[Any], Any]:
    leaves, structure = jax.tree.flatten(data)
    if not leaves or any(isinstance(leaf, HostData) or np.ndim(leaf) == 0 for leaf in leaves):
        raise ValueError("`HostData(data)`: give an array or a pytree of arrays, first axis = samples, or a function.")
    arrays = _as_arrays(leaves)
    lengths = sorted({len(array) for array in arrays})
    if len(lengths) > 1 or not 0 < lengths[0] <= INT32_MAX:
        raise ValueError(f"`HostData`: leaves have {lengths} rows; give as many in each, at least 1, below 2**31.")
    return [array if (mapping := _mapping(array)) is None else _table(array, mapping) for array in arrays], structure


def _as_arrays(leaves: list[Any]) -> list[np.ndarray]:
    """Return the leaves as NumPy arrays; masked entries and dtypes that are not numbers are refused."""
    if any(np.ma.is_masked(leaf) for leaf in leaves):
        raise ValueError("`HostData` has masked values; remove or impute those rows.")
    arrays = [np.asarray(leaf) for leaf in leaves]
    for array in arrays:
        if array.dtype.kind not in _KINDS or not array.dtype.isnative:
            raise ValueError(f"`HostData` has a leaf of dtype {array.dtype}; encode it as numbers of this machine.")
    return arrays


def _as_slice(numbers: np.ndarray) -> Any:
    """Return consecutive numbers as a slice, others as they are."""
    first, last = int(numbers[0]), int(numbers[-1])
    in_turn = last - first + 1 == len(numbers) and bool(np.all(np.diff(numbers) == 1))
    return slice(first, last + 1) if in_turn else numbers


def _mapping(array: Any) -> mmap.mmap | None:
    """Return the memory map that an array is a view of, or None."""
    while isinstance(array, np.ndarray):
        array = array.base
    return array if isinstance(array, mmap.mmap) else None


def _table(array: np.ndarray, mapping: mmap.mmap) -> "_MappedTable":
    """Return the rows of a memory-mapped array, to be read from its file where that has the same bytes for sure."""
    found = _find_file(array) if array.flags.c_contiguous else None
    return _MappedTable(array, mapping) if found is None else _FileTable(array, mapping, *found)


def _find_file(array: np.ndarray) -> tuple[FileIO, int] | None:
    """Return the file that an array maps, opened again, and the position of the array in it; None if that is unsure.

    The kernel's list of mappings tells the file's present path. It is None for a private mapping (``mmap_mode="c"``),
    whose changes are not in the file, for a file that was deleted or replaced, and where there is no such list.
    """
    begin = array.ctypes.data
    try:
        listed = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_bytes().splitlines()]
        for span, mode, offset, _, inode, *path in listed:
            first, last = (int(address, 16) for address in span.split(b"-"))
            if first <= begin and begin + array.nbytes <= last and mode.endswith(b"s") and path:
                file = FileIO(os.fsdecode(path[0]))
                if os.fstat(file.fileno()).st_ino == int(inode):
                    return file, int(offset, 16) + begin - first
                file.close()
    except (OSError, ValueError):
        pass
    return None


class _MappedTable:
    """The rows of a memory-mapped array."""

    def __init__(self, array: np.ndarray, mapping: mmap.mmap) -> None:
        self.shape, self.dtype, self._array = array.shape, array.dtype, array
        self._mapping, self._size = mapping, mapping.size()

    def __getitem__(self, numbers: Any) -> np.ndarray:
        # The system kills a process that reads a mapping beyond the end of its file.
        if self._mapping.size() < self._size:
            raise ValueError("`HostData`: a memory-mapped file is shorter than when it was opened.")
        return self._array[numbers]


class _FileTable(_MappedTable):
    """A memory-mapped array, read from its file into buffers: the pages of a mapping count as memory of the process."""

    def __init__(self, array: np.ndarray, mapping: mmap.mmap, file: FileIO, offset: int) -> None:
        super().__init__(array, mapping)
        self._row_bytes = array.dtype.itemsize * prod(array.shape[1:])
        self._file, self._offset, self._lock = file, offset, threading.Lock()
        weakref.finalize(self, file.close)

    def __getitem__(self, numbers: Any) -> np.ndarray:
        if isinstance(numbers, slice):
            return self._stretch(numbers.start, numbers.stop)
        wanted, places = np.unique(numbers, return_inverse=True)
        gaps = np.flatnonzero(np.diff(wanted) * self._row_bytes > _PAGE_BYTES + self._row_bytes) + 1
        groups = np.split(wanted, gaps)
        parts = [self._stretch(int(group[0]), int(group[-1]) + 1)[group - group[0]] for group in groups]
        return np.concatenate(parts)[places]

    def _stretch(self, start: int, stop: int) -> np.ndarray:
        rows = np.empty((stop - start, *self.shape[1:]), self.dtype)
        view = rows.reshape(-1).view(np.uint8).data
        with self._lock:
            self._file.seek(self._offset + start * self._row_bytes)
            while len(view) and (count := self._file.readinto(view)):
                view = view[count:]
        if len(view):
            raise ValueError(f"`{self._file.name!s}` ends before its row {stop - 1}: it was longer when it was opened.")
        return rows

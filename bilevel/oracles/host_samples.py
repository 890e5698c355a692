"""Rows that stay on the host: arrays in memory, memory-mapped files, or a function of row numbers.

A batch is read by a callback from the compiled program that takes it. If the draws of many steps are known beforehand,
their rows are *held*: they are read in a thread, put on the device, and looked up there by their numbers, so that a
step needs no callback. A full-batch pass calls for one piece after the other, and a thread reads pieces ahead.
"""

import itertools
import mmap
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from io import FileIO
from math import prod
from numbers import Integral
from pathlib import Path
from threading import Lock, Semaphore, Thread
from traceback import format_exception_only
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from bilevel._core import trees
from bilevel._core.types import INT32_MAX, Array, PyTree, is_number
from bilevel.oracles.samples import NARROW, PIECE, STATIC, Samples

_PIECE_BYTES = 2**23  # of narrow rows that a full-batch pass reads at a time
_PROBED = 1000  # number of rows in the fingerprint of data on the host
_PAGE_BYTES = 4096  # a disk reads pages, so rows of a file with smaller gaps between them are read at once
_DTYPE_KINDS = "fiub"


class HostData:
    """Rows that stay on the host and are read when steps and full-batch passes need them.

    Pass it instead of arrays to `BilevelProblem.from_losses`, `problems.logistic_selection` and
    `problems.ridge_selection`. Runs have the same draws and iterates as with the same rows on the device. Full-batch
    passes read the rows in pieces.

    Parameters
    ----------
    data : a pytree of arrays, first axis = samples, such as ``np.load(path, mmap_mode="r")``; or a function that takes
        an array of row numbers and returns a pytree of these rows. The function is called from threads
    length : the number of rows, if `data` is a function
    shuffle : take the rows in a random order. Set it to False for a file whose rows are in random order already: each
        block is then one contiguous part of the file
    window : draw batches from this many consecutive rows, which move on after as many draws; None draws from all rows.
        Set it if reads from far apart in the file are slow
    prefetch : number of pieces that are read ahead, each by a thread; 0 reads a piece when it is needed

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
        self._function = data if callable(data) else None
        if not isinstance(shuffle, bool):
            raise ValueError(f"`HostData(shuffle={shuffle!r})`: must be True or False.")
        _check_size("prefetch", prefetch, 0)
        for name, value in (("length", length), ("window", window)):
            if value is not None:
                _check_size(name, value, 1)
        self.shuffle, self.window, self.prefetch = shuffle, window, prefetch
        if window is not None and shuffle:
            raise ValueError("`HostData(window=…)`: a window is a range of rows in their order; say `shuffle=False`.")
        if self._function is None:
            self._tables, self._structure = _tables(data)
            self.n = self._tables[0].shape[0]
            if length is not None and length != self.n:
                raise ValueError(f"`HostData(length={length})`: the arrays have {self.n} rows; leave it out.")
        elif length is None:
            raise ValueError("`HostData(function)`: give the number of rows as `length=…`.")
        else:
            self.n = int(length)
        self.columns = list(getattr(data, "columns", ()))  # of a data frame
        self._like: list[np.ndarray] | None = None
        self.head = self.read(np.arange(1))  # the first row: structure, shapes and dtypes of all

    def read(self, numbers: np.ndarray) -> PyTree:
        """Return the rows with these numbers, in their order."""
        if self._function is not None:
            return self._call(self._function, np.asarray(numbers, np.int64))
        where = _as_slice(numbers)
        return jax.tree.unflatten(self._structure, [table[where] for table in self._tables])

    def with_column(self, column: Any, change: Callable[[PyTree, np.ndarray], PyTree]) -> "HostData":
        """Return the rows that a function makes from several rows and their entries of a column."""
        [table], _ = _tables(column)

        def read(numbers: np.ndarray) -> PyTree:
            return change(self.read(numbers), table[_as_slice(numbers)])

        return HostData(read, self.n, shuffle=self.shuffle, window=self.window, prefetch=self.prefetch)

    def _call(self, function: Callable[[np.ndarray], PyTree], numbers: np.ndarray) -> PyTree:
        """Return the rows that a function returns, after a check of their number, shapes and dtypes."""
        found = function(numbers)
        leaves, structure = jax.tree.flatten(found)
        arrays = _as_arrays(leaves)
        counts = sorted({array.shape[:1] for array in arrays})
        if counts != [(len(numbers),)]:
            got = [count[0] if count else None for count in counts]
            raise ValueError(f"`HostData`: the function returned {got} rows for {len(numbers)} numbers.")
        if self._like is None:
            self._like, self._structure = [array[:0] for array in arrays], structure
        kinds = [[(array.dtype.name, array.shape[1:]) for array in given] for given in (self._like, arrays)]
        if structure != self._structure or kinds[0] != kinds[1]:
            raise ValueError(f"`HostData`: the function returned rows of {kinds[1]}, and of {kinds[0]} before.")
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
    """Return the first row of data on the host, and other data as they are."""
    return data.head if isinstance(data, HostData) else data


def _tables(data: PyTree) -> tuple[list[Any], Any]:
    leaves, structure = jax.tree.flatten(data)
    if not leaves or any(isinstance(leaf, HostData) or np.ndim(leaf) == 0 for leaf in leaves):
        raise ValueError("`HostData(data)`: give an array or a pytree of arrays, first axis = samples, or a function.")
    arrays = _as_arrays(leaves)
    lengths = sorted({len(array) for array in arrays})
    if len(lengths) > 1 or not 0 < lengths[0] <= INT32_MAX:
        raise ValueError(f"`HostData`: leaves have {lengths} rows; give each the same number, at least 1, below 2**31.")
    return [array if (mapping := _mapping(array)) is None else _table(array, mapping) for array in arrays], structure


def _as_arrays(leaves: list[Any]) -> list[np.ndarray]:
    """Return the leaves as NumPy arrays, without masked entries and with dtypes of numbers."""
    if any(np.ma.is_masked(leaf) for leaf in leaves):
        raise ValueError("`HostData` has masked values; remove or impute those rows.")
    arrays = [np.asarray(leaf) for leaf in leaves]
    for array in arrays:
        if array.dtype.kind not in _DTYPE_KINDS or not array.dtype.isnative:
            raise ValueError(f"`HostData` has a leaf of dtype {array.dtype}; encode it as numbers of this machine.")
    return arrays


def _as_slice(numbers: np.ndarray) -> Any:
    """Return consecutive numbers as a slice, and other numbers as they are."""
    first, last = int(numbers[0]), int(numbers[-1])
    in_turn = last - first + 1 == len(numbers) and bool(np.all(np.diff(numbers) == 1))
    return slice(first, last + 1) if in_turn else numbers


def _mapping(array: Any) -> mmap.mmap | None:
    """Return the memory map that an array is a view of, or None."""
    while isinstance(array, np.ndarray):
        array = array.base
    return array if isinstance(array, mmap.mmap) else None


def _table(array: np.ndarray, mapping: mmap.mmap) -> "_MappedTable":
    """Return the rows of a memory-mapped array, read from its file if that certainly has the same bytes."""
    found = _find_file(array) if array.flags.c_contiguous else None
    return _MappedTable(array, mapping) if found is None else _FileTable(array, mapping, *found)


def _find_file(array: np.ndarray) -> tuple[FileIO, int] | None:
    """Return the file that an array maps, opened again, and the position of the array in it; None if it is uncertain.

    The kernel's list of mappings contains the present path of the file. The result is None for a private mapping
    (``mmap_mode="c"``), whose changes are not in the file, for a deleted or replaced file, and without such a list.
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
        # The operating system ends a process that reads a mapping beyond the end of its file.
        if self._mapping.size() < self._size:
            raise ValueError("`HostData`: a memory-mapped file is shorter than when it was opened.")
        return self._array[numbers]


class _FileTable(_MappedTable):
    """A memory-mapped array that is read from its file, since pages of a mapping count as memory of the process."""

    def __init__(self, array: np.ndarray, mapping: mmap.mmap, file: FileIO, offset: int) -> None:
        super().__init__(array, mapping)
        self._row_bytes = array.dtype.itemsize * prod(array.shape[1:])
        self._file, self._offset, self._lock = file, offset, Lock()
        weakref.finalize(self, file.close)

    def __getitem__(self, numbers: Any) -> np.ndarray:
        if isinstance(numbers, slice):
            return self._range(numbers.start, numbers.stop)
        wanted, places = np.unique(numbers, return_inverse=True)
        gaps = np.flatnonzero(np.diff(wanted) * self._row_bytes > _PAGE_BYTES + self._row_bytes) + 1
        groups = np.split(wanted, gaps)
        parts = [self._range(int(group[0]), int(group[-1]) + 1)[group - group[0]] for group in groups]
        return np.concatenate(parts)[places]

    def _range(self, start: int, stop: int) -> np.ndarray:
        rows = np.empty((stop - start, *self.shape[1:]), self.dtype)
        view = rows.reshape(-1).view(np.uint8).data
        with self._lock:
            self._file.seek(self._offset + start * self._row_bytes)
            while len(view) and (count := self._file.readinto(view)):
                view = view[count:]
        if len(view):
            raise ValueError(f"`{self._file.name!s}` ends before its row {stop - 1}: it was longer when it was opened.")
        return rows


_readers: dict[int, "Reader"] = {}
_numbers = itertools.count()


class Reader:
    """Reads rows in the order, layout and dtype of a problem, and the next pieces of a pass ahead in threads.

    Attributes
    ----------
    failure : the type and text of the last error of a read, or None
    held_back : an error that `raise_held_back` raises after the program in which it occurred has ended
    """

    failure: str | None = None
    held_back: Exception | None = None

    def __init__(self, data: HostData, order: np.ndarray | None, dtypes: list[np.dtype], axes: tuple[int, ...]) -> None:
        self.data, self._order, self._dtypes, self._axes = data, order, dtypes, axes
        self._pieces: OrderedDict[tuple[int, int], Future] = OrderedDict()
        self._lock, self._gate, self._awaited = Lock(), Semaphore(max(1, data.prefetch)), list[Future]()

    def rows(self, numbers: np.ndarray) -> list[np.ndarray]:
        """Return the leaves of these rows, rows first, in the dtypes of the samples."""
        try:
            found = self.data.read(numbers if self._order is None else self._order[numbers])
        except Exception as error:
            self.failure = "".join(format_exception_only(error)).strip()
            raise
        leaves = zip(jax.tree.leaves(found), self._dtypes, strict=True)
        return [leaf.astype(dtype, copy=False) for leaf, dtype in leaves]

    def batch(self, numbers: np.ndarray) -> list[np.ndarray]:
        """Return the leaves of these rows with the sample axes of the layout, as views."""
        pairs = zip(self.rows(numbers), self._axes, strict=True)
        return [np.moveaxis(leaf, 0, axis) for leaf, axis in pairs]

    def wait_for_batch(self, numbers: np.ndarray) -> list[np.ndarray]:
        """Return a batch, read in another thread so that `give_up` can end the wait."""
        return self._wait(in_thread(self.batch, numbers))

    def batch_or_none(self, numbers: np.ndarray) -> list[np.ndarray] | None:
        """Return a batch, or None if it cannot be read; the error is held back."""
        try:
            return None if self.held_back else self.wait_for_batch(numbers)
        except Exception as error:
            self.held_back = error
            return None

    def raise_held_back(self) -> None:
        """Raise the error that was held back, if there is one."""
        error, self.held_back = self.held_back, None
        if error is not None:
            raise error

    def wait_for_piece(self, index: int, size: int) -> list[np.ndarray]:
        """Return the rows of a piece, and start to read the next pieces."""
        n, ahead = self.data.n, self.data.prefetch
        with self._lock:
            for coming in range(index, min(index + ahead + 1, -(-n // size))):
                if (coming, size) not in self._pieces:
                    self._pieces[coming, size] = in_thread(self.batch, piece_rows(coming, size, n), gate=self._gate)
            found = self._pieces.pop((index, size))
            while len(self._pieces) > 2 * ahead:  # pieces of a pass that ended early
                self._pieces.popitem(last=False)
        return self._wait(found)

    def _wait(self, read: Future) -> list[np.ndarray]:
        self._awaited.append(read)
        try:
            return read.result()
        finally:
            self._awaited.remove(read)

    def give_up(self) -> None:
        """Make compiled programs that wait for rows fail; the reading threads end when their reads return."""
        self._pieces.clear()
        self._gate = Semaphore(max(1, self.data.prefetch))  # blocked threads keep the old one
        for read in self._awaited[:]:
            with suppress(InvalidStateError):
                read.set_exception(InterruptedError("reading was interrupted from the keyboard"))

    def probe(self) -> PyTree:
        """Return some rows, spread evenly over all, for the fingerprint of the data."""
        return self.rows(np.unique(np.linspace(0, self.data.n - 1, _PROBED).astype(np.int64)))


def in_thread(function: Callable[..., Any], *arguments: Any, gate: Semaphore | None = None) -> Future:
    """Call a function in a daemon thread as soon as the gate allows.

    The threads of an executor would keep the process from ending while a read is blocked.
    """
    future: Future = Future()

    def work() -> None:
        with gate or nullcontext(), suppress(InvalidStateError):  # cancelled or given up
            try:
                if not future.done():
                    future.set_result(function(*arguments))
            except BaseException as error:
                future.set_exception(error)

    Thread(target=work, daemon=True).start()
    return future


def piece_rows(index: int, size: int, n: int) -> np.ndarray:
    """Return the numbers of the rows of a piece; a short last piece starts earlier instead."""
    return np.arange(size) + min(index * size, n - size)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HostSamples(Samples):
    """Rows of one level that stay on the host; ``leaves`` and ``blocks`` hold the rows of coming steps, or no row.

    Attributes
    ----------
    token : the number of the reader of the rows
    held : sorted numbers of the held blocks, or of the held rows for the sampling "iid"; None if no rows are held
    in_order : whether blocks are taken one after the other, so that a thread can read ahead
    drawn : the list to which draws are appended, or None
    """

    stays_on_host = True

    token: Any = None
    held: Array | None = None
    in_order: bool = field(default=False, metadata=STATIC)
    drawn: list[Array] | None = field(default=None, metadata=STATIC)

    @classmethod
    def from_data(
        cls, data: HostData, dtype: DTypeLike, rng: np.random.Generator, narrow: int = NARROW
    ) -> "HostSamples":
        """Lay out rows as `Samples.from_rows` does, without reading them."""
        none = trees.to_numpy(jax.tree.map(lambda leaf: leaf[:0], data.head))
        like = Samples.from_rows(none, dtype, None, narrow)
        leaves = trees.to_numpy(like.leaves)
        dtypes = [leaf.dtype for leaf in jax.tree.leaves(leaves)]
        order = rng.permutation(data.n).astype(np.int32) if data.shuffle else None
        token = np.array(next(_numbers), np.uint32)
        _readers[int(token)] = Reader(data, order, dtypes, like.axes)
        weakref.finalize(token, _readers.pop, int(token))
        row_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(data.head))
        # If rows on a device are read in pieces, these have the same size, so that sums have the same bits.
        piece = max(PIECE, _PIECE_BYTES // max(1, row_bytes)) if any(like.axes) else PIECE
        return cls(leaves, data.n, like.axes, np.dtype(dtype), piece=piece, token=token, window=data.window)

    @property
    def reader(self) -> Reader:
        return reader_of(self.token)

    @property
    def is_read_in_pieces(self) -> bool:
        return True

    def one(self) -> PyTree:
        leaves = [trees.put(leaf[0]) for leaf in self.reader.rows(np.arange(1))]
        row = jax.tree.unflatten(jax.tree.structure(self.leaves), leaves)
        return row if self.key_words is None else (row, self.key_words)

    def with_batches(self, batch_size: int, sampling: str) -> "HostSamples":
        check_batches(batch_size, sampling, self.window)
        return replace(self, batch_size=batch_size, sampling=sampling)

    def with_slices(self, batch_size: int, sampling: str) -> "HostSamples":
        return replace(self, batch_size=batch_size, sampling=sampling, held=None, in_order=True)

    def astype(self, dtype: DTypeLike) -> "HostSamples":
        return replace(self, dtype=np.dtype(dtype))  # rows are cast when they are taken

    def recording(self) -> "HostSamples":
        return replace(self, drawn=[])

    def recorded(self) -> Array | None:
        return jnp.concatenate([rows.ravel() for rows in self.drawn]) if self.drawn else None

    def draw(self, key: Array, index: Array, count: int | None = None) -> Any:
        rows = super().draw(key, index, count)
        if self.drawn is not None:
            self.drawn.append(rows)
        return rows

    def _take(self, rows: Any) -> tuple[PyTree, Array]:
        if rows is None:
            raise ValueError("rows that stay on the host cannot be taken all at once; draw batches of them.")
        if self.held is None:
            return self._call(rows)
        slots = jnp.searchsorted(self.held, rows, method="scan_unrolled").astype(jnp.int32)
        data, weights = Samples._take(self, slots)
        # If a row is not held, the result is NaN instead of that of another row.
        return data, jnp.where(jnp.all(self.held[slots] == rows), weights, jnp.asarray(jnp.nan, weights.dtype))

    def _call(self, rows: Array) -> tuple[PyTree, Array]:
        """Return the rows of a batch by a callback that reads them."""

        def shape(leaf: Array, axis: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((*leaf.shape[:axis], self.batch_size, *leaf.shape[axis + 1 :]), leaf.dtype)

        shapes = [*jax.tree.leaves(self._map(shape)), jax.ShapeDtypeStruct((self.batch_size,), self.dtype)]
        sizes = HostSamples(
            None, *(self.n, self.axes, self.dtype, self.batch_size, self.sampling), in_order=self.in_order
        )
        read = partial(_read, sizes)  # without its arrays, which are traced here
        *leaves, weights = call_host(read, shapes, self.token, rows)
        return trees.cast(jax.tree.unflatten(jax.tree.structure(self.leaves), leaves), self.dtype), weights

    def numbers(self, blocks: np.ndarray) -> np.ndarray:
        """Return the numbers of the rows of blocks; a short last block is filled with rows of weight 0."""
        size = self.batch_size
        first = blocks[:, None].astype(np.int64) * size
        if not self._fills_last:
            return np.minimum(first, self.n - size) + np.arange(size)
        numbers = first + np.arange(size)
        return np.where(numbers < self.n, numbers, 0)

    @property
    def _fills_last(self) -> bool:
        """Whether a short block is filled with row 0 at its end, as in `Samples`, or starts earlier instead."""
        return any(self.axes) and not self.in_order

    def weights(self, blocks: np.ndarray) -> np.ndarray:
        """Return the weights of the rows of blocks."""
        size, missing = self.batch_size, -self.n % self.batch_size
        if not missing:
            return np.full((len(blocks), size), 1 / size, self.dtype)
        usual, last = 1 / size, 1 / (size - missing)
        if self.sampling == "reshuffle":  # a pass visits each block once, whatever its size is
            usual = last = self.n_blocks / self.n
        weights = np.full((len(blocks), size), usual, self.dtype)
        real = np.arange(size) < size - missing if self._fills_last else np.arange(size) >= missing
        weights[blocks == self.n_blocks - 1] = np.where(real, last, 0)
        return weights

    def hold(self, numbers: np.ndarray, capacity: int) -> "HostSamples":
        """Return the samples with these blocks, or rows for the sampling "iid", on the device.

        Arrays are filled up to ``capacity`` blocks or rows, for which programs are compiled.
        """
        held = _fill(numbers.astype(np.int32), 0, capacity, INT32_MAX)
        if self.sampling == "iid":
            parts = {"leaves": self._place(self.reader.batch(numbers), self.axes, capacity)}
            return replace(self, held=jax.device_put(held), **parts)
        rows, size = self.reader.rows(self.numbers(numbers).ravel()), self.batch_size
        if any(self.axes):
            pairs = zip(rows, self.axes, strict=True)
            blocks = [np.moveaxis(leaf.reshape(-1, size, *leaf.shape[1:]), 1, axis + 1) for leaf, axis in pairs]
            parts = {"blocks": self._place(blocks, (0,) * len(blocks), capacity)}
        else:
            parts = {"leaves": self._place(rows, self.axes, capacity * size)}
        if self.n % size:
            parts["row_weights"] = jax.device_put(_fill(self.weights(numbers).ravel(), 0, capacity * size))
        return replace(self, held=jax.device_put(held), **parts)

    def _place(self, arrays: list[np.ndarray], axes: tuple[int, ...], length: int) -> PyTree:
        """Return arrays on the device as a tree like the leaves, each filled up to a length along its axis."""
        filled = [_fill(array, axis, length) for array, axis in zip(arrays, axes, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(self.leaves), jax.device_put(filled))


def check_batches(batch_size: int, sampling: str, window: int | None) -> None:
    """Raise ValueError for batches that cannot be drawn from rows on the host."""
    if sampling == "full":
        raise ValueError("`sampling='full'` takes all rows at once, but these stay on the host: draw batches.")
    if window is not None and (sampling == "reshuffle" or window < batch_size):
        given = f"`sampling={sampling!r}`, `batch_size={batch_size}`, `HostData(window={window})`"
        raise ValueError(f"{given}: take 'blocks' or 'iid', and a window of at least a batch.")


def call_host(
    read: Callable[..., list[np.ndarray]], shapes: list[jax.ShapeDtypeStruct], *arguments: Any
) -> list[Array]:
    """Return the arrays that a pure function on the host returns.

    Arrays of 64-bit numbers are sent as pairs of words, since JAX casts the results of callbacks to its default types.
    """

    def on_wire(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        wide = shape.dtype.itemsize == 8
        return jax.ShapeDtypeStruct((*shape.shape, 2), np.uint32) if wide else shape

    def send(*arguments: Any) -> list[np.ndarray]:
        found = zip(read(*arguments), map(on_wire, shapes), strict=True)
        return [array if array.dtype == wire.dtype else _words(array) for array, wire in found]

    found = jax.pure_callback(send, [on_wire(shape) for shape in shapes], *arguments, vmap_method="sequential")
    return [
        jax.lax.bitcast_convert_type(array, shape.dtype) if array.dtype != shape.dtype else array
        for array, shape in zip(found, shapes, strict=True)
    ]


def _words(array: np.ndarray) -> np.ndarray:
    """Return 64-bit numbers as pairs of words."""
    return np.ascontiguousarray(array).view(np.uint32).reshape(*array.shape, 2)


def reader_of(token: Any) -> Reader:
    """Return the reader with this number."""
    return _readers[int(token)]


def _fill(array: np.ndarray, axis: int, length: int, filler: int = 0) -> np.ndarray:
    """Return an array filled up to a length along an axis."""
    room = np.full((*array.shape[:axis], length, *array.shape[axis + 1 :]), filler, array.dtype)
    room[(slice(None),) * axis + (slice(array.shape[axis]),)] = array
    return room


def _read(samples: HostSamples, token: Any, rows: Any) -> list[np.ndarray]:
    """Return the leaves and weights of a batch."""
    reader, numbers = reader_of(token), np.asarray(rows)
    if samples.sampling == "iid":
        return [*reader.wait_for_batch(numbers), np.full(samples.batch_size, 1 / samples.batch_size, samples.dtype)]
    weights = samples.weights(numbers[None])[0]
    if samples.in_order:
        return [*reader.wait_for_piece(int(numbers), samples.batch_size), weights]
    return [*reader.wait_for_batch(samples.numbers(numbers[None])[0]), weights]

"""Rows that stay on the host: arrays in memory, memory-mapped files, or a function of row numbers.

A batch is read by a callback from the compiled program that takes it. If the draws of many steps are known beforehand,
their rows are *held*: they are read in a thread, put on the device, and looked up there by their numbers, so that a
step needs no callback. A full-batch pass calls for one piece after the other, and a thread reads pieces ahead.
"""

import itertools
import mmap
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from numbers import Integral
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

AHEAD = 2  # parts that are read while another one is used
_PIECE_BYTES = 2**23  # of narrow rows that a full-batch pass reads at a time
_PROBED = 1000  # number of rows in the fingerprint of data on the host


class HostData:
    """Rows that stay on the host and are read when steps and full-batch passes need them.

    Pass it instead of arrays to `BilevelProblem.from_losses` and `problems.penalty_selection`. Runs have the same draws
    as with the same rows on the device, and the same iterates up to rounding errors. Full-batch passes read the rows in
    pieces.

    Parameters
    ----------
    data : a pytree of arrays, first axis = samples, such as ``np.load(path, mmap_mode="r")``; a data set with
        ``len(data)`` and ``data[number]``, which returns a row, as those of PyTorch; or a function that takes an array
        of row numbers and returns a pytree of these rows. Data sets and functions are called from threads
    length : the number of rows, if `data` is a function
    shuffle : take the rows in a random order. Set it to False for a file whose rows are in random order already: each
        block is then one contiguous part of the file

    Examples
    --------
    >>> import bilevel, numpy as np
    >>> bilevel.HostData((np.zeros((6, 2)), np.ones(6)))
    <HostData: 6 rows of 3 numbers>
    """

    def __init__(self, data: Any, length: int | None = None, *, shuffle: bool = True) -> None:
        if not isinstance(shuffle, bool):
            raise ValueError(f"`HostData(shuffle={shuffle!r})`: must be True or False.")
        if length is not None and (not is_number(length, Integral) or not 1 <= length <= INT32_MAX):
            raise ValueError(f"`HostData(length={length!r})`: must be an integer of at least 1, below 2**31.")
        self._function: Callable[[np.ndarray], PyTree]
        if is_dataset(data):
            self._function, self.n = partial(_rows_of_dataset, data), len(data)
            if length not in (None, self.n):
                raise ValueError(f"`HostData(length={length})`: the data set has {self.n} rows; leave it out.")
        elif callable(data):
            if length is None:
                raise ValueError("`HostData(function)`: give the number of rows as `length=…`.")
            self._function, self.n = data, int(length)
        else:
            tables = _tables(data)
            self._function, self.n = partial(_rows_of, tables), jax.tree.leaves(tables)[0].shape[0]
            if length not in (None, self.n):
                raise ValueError(f"`HostData(length={length})`: the arrays have {self.n} rows; leave it out.")
        self.shuffle = shuffle
        self.columns = list(getattr(data, "columns", ()))  # of a data frame
        self._kinds: Any = None  # structure, dtypes and shapes of rows
        self.head = self.read(np.arange(1))  # the first row

    def read(self, numbers: np.ndarray) -> PyTree:
        """Return the rows with these numbers, in their order, after a check of their number, shapes and dtypes."""
        leaves, structure = jax.tree.flatten(self._function(np.asarray(numbers, np.int64)))
        arrays = _as_arrays(leaves)
        counts = sorted({array.shape[:1] for array in arrays})
        if counts != [(len(numbers),)]:
            got = [count[0] if count else None for count in counts]
            raise ValueError(f"`HostData`: the function returned {got} rows for {len(numbers)} numbers.")
        kinds = structure, [(array.dtype.name, array.shape[1:]) for array in arrays]
        if self._kinds not in (None, kinds):
            raise ValueError(f"`HostData`: the function returned rows of {kinds[1]}, and of {self._kinds[1]} before.")
        self._kinds = kinds
        return jax.tree.unflatten(structure, arrays)

    def with_column(self, column: Any, change: Callable[[PyTree, np.ndarray], PyTree]) -> "HostData":
        """Return the rows that a function makes from several rows and their entries of a column."""
        table = _tables(column)

        def read(numbers: np.ndarray) -> PyTree:
            return change(self.read(numbers), _rows_of(table, numbers))

        return HostData(read, self.n, shuffle=self.shuffle)

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        numbers = sum(prod(leaf.shape[1:]) for leaf in jax.tree.leaves(self.head))
        return f"<HostData: {self.n:,} rows of {numbers:,} numbers>"


def head(data: PyTree) -> PyTree:
    """Return the first row of data on the host, and other data as they are."""
    return data.head if isinstance(data, HostData) else data


def _tables(data: PyTree) -> PyTree:
    """Return the arrays of a pytree after a check; those of memory-mapped files are read with care."""
    leaves, structure = jax.tree.flatten(data)
    if not leaves or any(isinstance(leaf, HostData) or np.ndim(leaf) == 0 for leaf in leaves):
        raise ValueError("`HostData(data)`: give an array or a pytree of arrays, first axis = samples, or a function.")
    arrays = _as_arrays(leaves)
    lengths = sorted({len(array) for array in arrays})
    if len(lengths) > 1 or not 0 < lengths[0] <= INT32_MAX:
        raise ValueError(f"`HostData`: leaves have {lengths} rows; give each the same number, at least 1, below 2**31.")
    are_mapped = [isinstance(_owner(array).base, mmap.mmap) for array in arrays]
    tables = [_MappedTable(array) if mapped else array for array, mapped in zip(arrays, are_mapped, strict=True)]
    return jax.tree.unflatten(structure, tables)


def _rows_of(tables: PyTree, numbers: np.ndarray) -> PyTree:
    """Return rows of a pytree of arrays; consecutive rows are taken as a slice."""
    first, last = int(numbers[0]), int(numbers[-1])
    in_turn = last - first + 1 == len(numbers) and bool(np.all(np.diff(numbers) == 1))
    where = slice(first, last + 1) if in_turn else numbers
    return jax.tree.map(lambda table: table[where], tables)


def is_dataset(data: Any) -> bool:
    """Return True for an object that returns its rows one by one, and is neither an array, a table nor a pytree."""
    is_sized = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    return is_sized and jax.tree_util.all_leaves([data]) and not (hasattr(data, "dtype") or hasattr(data, "columns"))


def _rows_of_dataset(data: Any, numbers: np.ndarray) -> PyTree:
    """Return rows of a data set, which may be able to return several at once, stacked."""
    places = numbers.tolist()
    rows = data.__getitems__(places) if hasattr(data, "__getitems__") else [data[place] for place in places]
    return jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *rows)


def _as_arrays(leaves: list[Any]) -> list[np.ndarray]:
    """Return the leaves as NumPy arrays, without masked entries and with dtypes of numbers."""
    if any(np.ma.is_masked(leaf) for leaf in leaves):
        raise ValueError("`HostData` has masked values; remove or impute those rows.")
    arrays = [np.asarray(leaf) for leaf in leaves]
    for array in arrays:
        if array.dtype.kind not in "fiub" or not array.dtype.isnative:
            raise ValueError(f"`HostData` has a leaf of dtype {array.dtype}; encode it as numbers of this machine.")
    return arrays


def _owner(array: np.ndarray) -> np.ndarray:
    """Return the array that a view shows a part of."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


class _MappedTable:
    """The rows of a memory-mapped array. They are copied, so that no page of a file stays in memory."""

    def __init__(self, array: np.ndarray) -> None:
        owner: Any = _owner(array)
        self.shape, self._array, self._mapping, self._size = array.shape, array, owner.base, owner.base.size()
        self._name = getattr(owner, "filename", None) or "a memory-mapped file"
        with memoryview(owner.base) as view:
            self._is_only_read = view.readonly  # otherwise there may be changes that are not in the file

    def __getitem__(self, numbers: Any) -> np.ndarray:
        # The operating system ends a process that reads a mapping beyond the end of its file.
        if self._mapping.size() < self._size:
            raise ValueError(f"`HostData`: {self._name} is shorter than when it was opened.")
        rows = np.array(self._array[numbers])
        if self._is_only_read:
            self._mapping.madvise(mmap.MADV_DONTNEED)  # pages in use count as memory of the process
        return rows


_readers: dict[int, "Reader"] = {}
_numbers = itertools.count()


class Reader:
    """Reads rows in the order, layout and dtype of a problem, and the next pieces of a pass ahead in threads."""

    failure: str | None = None  # the type and text of the last error of a read

    def __init__(self, data: HostData, order: np.ndarray | None, dtypes: list[np.dtype], axes: tuple[int, ...]) -> None:
        self.data, self._order, self._dtypes, self._axes = data, order, dtypes, axes
        self._pieces: OrderedDict[tuple[int, int], Future] = OrderedDict()
        self._lock, self._gate, self._awaited = Lock(), Semaphore(AHEAD), list[Future]()

    def rows(self, numbers: np.ndarray) -> list[np.ndarray]:
        """Return the leaves of these rows, rows first, in the dtypes of the samples."""
        try:
            found = self.data.read(numbers if self._order is None else self._order[numbers])
        except Exception as error:
            self.failure = "".join(format_exception_only(error)).strip()
            raise
        leaves = zip(jax.tree.leaves(found), self._dtypes, strict=True)
        return [leaf.astype(dtype, copy=False) for leaf, dtype in leaves]

    def _batch(self, numbers: np.ndarray) -> list[np.ndarray]:
        """Return the leaves of these rows with the sample axes of the layout, as views."""
        pairs = zip(self.rows(numbers), self._axes, strict=True)
        return [np.moveaxis(leaf, 0, axis) for leaf, axis in pairs]

    def batch(self, numbers: np.ndarray) -> list[np.ndarray]:
        """Return the leaves of a batch, read in another thread so that `give_up` can end the wait."""
        return self._wait(in_thread(self._batch, numbers))

    def piece(self, index: int, size: int) -> list[np.ndarray]:
        """Return the leaves of a piece, and start to read the next pieces."""
        n = self.data.n
        with self._lock:
            for coming in range(index, min(index + AHEAD + 1, -(-n // size))):
                if (coming, size) not in self._pieces:
                    numbers = rows_of_blocks(np.array(coming), size, n)
                    self._pieces[coming, size] = in_thread(self._batch, numbers, gate=self._gate)
            found = self._pieces.pop((index, size))
            while len(self._pieces) > 2 * AHEAD:  # pieces of a pass that ended early
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
        self._gate = Semaphore(AHEAD)  # blocked threads keep the old one
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


def rows_of_blocks(blocks: np.ndarray, size: int, n: int) -> np.ndarray:
    """Return the numbers of the rows of blocks; a short last block begins with rows of the block before it."""
    first = np.minimum(blocks.astype(np.int64) * size, n - size)
    return (first[..., None] + np.arange(size)).ravel()


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

    is_read_in_pieces = True

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
        order = rng.permutation(data.n).astype(np.int32) if data.shuffle else None
        token = np.array(next(_numbers), np.uint32)
        _readers[int(token)] = Reader(data, order, [leaf.dtype for leaf in jax.tree.leaves(leaves)], like.axes)
        weakref.finalize(token, _readers.pop, int(token))
        row_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(data.head))
        piece = max(PIECE, _PIECE_BYTES // max(1, row_bytes)) if any(like.axes) else PIECE
        return cls(leaves, data.n, like.axes, np.dtype(dtype), piece=piece, token=token)

    @property
    def reader(self) -> Reader:
        """The reader of the rows."""
        return _readers[int(self.token)]

    def with_batches(self, batch_size: int, sampling: str) -> "HostSamples":
        if sampling == "full":
            raise ValueError("`sampling='full'` takes all rows at once, but these stay on the host: draw batches.")
        return replace(self, batch_size=batch_size, sampling=sampling)

    def with_slices(self, batch_size: int, sampling: str) -> "HostSamples":
        return replace(self, batch_size=batch_size, sampling=sampling, held=None, in_order=True)

    def astype(self, dtype: DTypeLike) -> "HostSamples":
        return replace(self, dtype=np.dtype(dtype))  # rows are cast when they are taken

    def recording(self) -> "HostSamples":
        """Return the same rows, which record draws from now on."""
        return replace(self, drawn=[])

    def recorded(self) -> Array | None:
        """Return the recorded draws along one axis, or None without draws."""
        return jnp.concatenate([rows.ravel() for rows in self.drawn]) if self.drawn else None

    def draw(self, key: Array, index: Array, count: int | None = None) -> Any:
        rows = super().draw(key, index, count)
        if self.drawn is not None:
            self.drawn.append(rows)
        return rows

    def _take(self, rows: Any) -> tuple[PyTree, Array]:
        if rows is None:
            raise ValueError("rows that stay on the host cannot be taken all at once; draw batches of them.")
        if self.sampling == "iid":
            weights = jnp.full(self.batch_size, 1 / self.batch_size, self.dtype)
        else:
            usual, last = self.weights(np.array([0, self.n_blocks - 1]))
            weights = jnp.where(rows == self.n_blocks - 1, last, usual)
        if self.held is None:
            return trees.cast(self._read(rows), self.dtype), weights
        slots = jnp.searchsorted(self.held, rows, method="scan_unrolled").astype(jnp.int32)
        # If a row is not held, the result is NaN instead of that of another row.
        are_held = jnp.all(self.held[slots] == rows)
        return Samples._take(self, slots)[0], jnp.where(are_held, weights, jnp.asarray(jnp.nan, self.dtype))

    def _read(self, rows: Array) -> PyTree:
        """Return the rows of a batch by a callback."""
        n, size, is_iid, in_order = self.n, self.batch_size, self.sampling == "iid", self.in_order

        def like(leaf: Array, axis: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((*leaf.shape[:axis], size, *leaf.shape[axis + 1 :]), leaf.dtype)

        def read(token: Any, rows: Any) -> list[np.ndarray]:
            reader, numbers = _readers[int(token)], np.asarray(rows)
            if in_order:
                found = reader.piece(int(numbers), size)
            else:
                found = reader.batch(numbers if is_iid else rows_of_blocks(numbers, size, n))
            return [_as_words(leaf) if leaf.dtype.itemsize == 8 else leaf for leaf in found]

        shapes, structure = jax.tree.flatten(self._map(like))
        # JAX casts the results of callbacks to its default types, so 64-bit numbers are sent as pairs of words.
        sent = [
            jax.ShapeDtypeStruct((*shape.shape, 2), np.uint32) if shape.dtype.itemsize == 8 else shape
            for shape in shapes
        ]
        found = jax.pure_callback(read, sent, self.token, rows, vmap_method="sequential")
        leaves = [
            array if array.dtype == shape.dtype else jax.lax.bitcast_convert_type(array, shape.dtype)
            for array, shape in zip(found, shapes, strict=True)
        ]
        return jax.tree.unflatten(structure, leaves)

    def hold(self, numbers: np.ndarray, capacity: int) -> "HostSamples":
        """Return the samples with these blocks, or rows for the sampling "iid", on the device.

        Arrays are filled up to ``capacity`` blocks or rows, for which programs are compiled.
        """
        held = _fill(numbers.astype(np.int32), capacity, INT32_MAX)
        if self.sampling == "iid":
            pairs = zip(self.reader.rows(numbers), self.axes, strict=True)
            name, leaves = "leaves", [np.moveaxis(_fill(leaf, capacity), 0, axis) for leaf, axis in pairs]
        else:
            rows = self.reader.rows(rows_of_blocks(numbers, self.batch_size, self.n))
            blocks = [_fill(leaf.reshape(-1, self.batch_size, *leaf.shape[1:]), capacity) for leaf in rows]
            pairs = zip(blocks, self.axes, strict=True)
            name, leaves = "blocks", [np.moveaxis(block, 1, axis + 1) for block, axis in pairs]
        tree = jax.tree.unflatten(jax.tree.structure(self.leaves), leaves)
        return replace(self, **jax.device_put({"held": held, name: tree}))


def _as_words(array: np.ndarray) -> np.ndarray:
    """Return 64-bit numbers as pairs of words."""
    return np.ascontiguousarray(array).view(np.uint32).reshape(*array.shape, 2)


def _fill(array: np.ndarray, length: int, filler: int = 0) -> np.ndarray:
    """Return an array filled up to a length."""
    more = np.full((length - len(array), *array.shape[1:]), filler, array.dtype)
    return np.concatenate([array, more])

"""Samples whose rows stay on the host.

A batch is read by a callback from the compiled program, wherever it is asked for. Where the draws of many steps are
known before they are taken, their rows are *held*: read in a thread, put on the device, and looked up there by their
numbers; a step then calls nobody. A pass over all rows calls for one piece after the other, which a thread reads ahead.
"""

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock, Semaphore, Thread
from traceback import format_exception_only
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from bilevel import _threefry
from bilevel import _tree as trees
from bilevel._types import INT32_MAX, Array, PyTree
from bilevel.oracles.host_data import HostData
from bilevel.oracles.samples import NARROW, PIECE, STATIC, Samples

_PIECE_BYTES = 2**23  # of narrow rows, read at a time in a pass
_PROBED = 1000  # rows that tell data on the host from others
_WINDOW_STREAM = 0x77696E64  # apart from the numbers of steps

_readers: dict[int, "Reader"] = {}
_numbers = itertools.count()


class Reader:
    """Reads rows in the order, layout and dtype of a problem; the next pieces of a pass ahead, each in a thread.

    Attributes
    ----------
    failure : the type and text of the last error of a read, or None
    held_back : an error that `raise_held_back` raises when the program in which it occurred has ended
    """

    failure: str | None = None
    held_back: Exception | None = None

    def __init__(self, data: HostData, order: np.ndarray | None, dtypes: list[np.dtype], axes: tuple[int, ...]) -> None:
        self.data, self._order, self._dtypes, self._axes = data, order, dtypes, axes
        self._pieces: OrderedDict[tuple[int, int], Future] = OrderedDict()
        self._lock, self._gate, self._awaited = Lock(), Semaphore(max(1, data.prefetch)), list[Future]()

    def rows(self, numbers: np.ndarray) -> list[np.ndarray]:
        """Return the leaves of these rows, rows first, in the dtype that they are held in."""
        try:
            found = self.data.read(numbers if self._order is None else self._order[numbers])
        except Exception as error:
            self.failure = "".join(format_exception_only(error)).strip()
            raise
        leaves = zip(jax.tree.leaves(found), self._dtypes, strict=True)
        return [leaf.astype(dtype, copy=False) for leaf, dtype in leaves]

    def batch(self, numbers: np.ndarray) -> list[np.ndarray]:
        """Return the leaves of these rows, laid out, as views: XLA moves axes several times as fast as NumPy."""
        pairs = zip(self.rows(numbers), self._axes, strict=True)
        return [np.moveaxis(leaf, 0, axis) for leaf, axis in pairs]

    def wait_for_batch(self, numbers: np.ndarray) -> list[np.ndarray]:
        """Return a batch that another thread reads, so that `give_up` can end the wait."""
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
        """Return the rows of a piece, and begin to read those after it."""
        n, ahead = self.data.n, self.data.prefetch
        with self._lock:
            for coming in range(index, min(index + ahead + 1, -(-n // size))):
                if (coming, size) not in self._pieces:
                    self._pieces[coming, size] = in_thread(self.batch, piece_rows(coming, size, n), gate=self._gate)
            found = self._pieces.pop((index, size))
            while len(self._pieces) > 2 * ahead:  # what a pass read that ended early
                self._pieces.popitem(last=False)
        return self._wait(found)

    def _wait(self, read: Future) -> list[np.ndarray]:
        self._awaited.append(read)
        try:
            return read.result()
        finally:
            self._awaited.remove(read)

    def give_up(self) -> None:
        """Make compiled programs fail that are waiting for rows; the threads that read end when the reads return."""
        self._pieces.clear()
        self._gate = Semaphore(max(1, self.data.prefetch))  # threads that are blocked do not leave the old one
        for read in self._awaited[:]:
            with suppress(InvalidStateError):
                read.set_exception(InterruptedError("reading was interrupted from the keyboard"))

    def probe(self) -> PyTree:
        """Return what tells these rows from others: some of them, spread over all."""
        return self.rows(np.unique(np.linspace(0, self.data.n - 1, _PROBED).astype(np.int64)))


def in_thread(function: Callable[..., Any], *arguments: Any, gate: Semaphore | None = None) -> Future:
    """Call a function in a thread, as soon as the gate allows.

    It is a daemon thread: the threads of an executor would keep the process from ending while a read is blocked.
    """
    future: Future = Future()

    def work() -> None:
        with gate or nullcontext(), suppress(InvalidStateError):  # it was cancelled or given up
            try:
                if not future.done():
                    future.set_result(function(*arguments))
            except BaseException as error:
                future.set_exception(error)

    Thread(target=work, daemon=True).start()
    return future


def piece_rows(index: int, size: int, n: int) -> np.ndarray:
    """Return the numbers of the rows of a piece; a short last one is moved back."""
    return np.arange(size) + min(index * size, n - size)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HostSamples(Samples):
    """Rows of one level that stay on the host; ``leaves`` and ``blocks`` hold those of coming steps, or none.

    Attributes
    ----------
    token : the number of the reader of the rows
    held : the numbers, in order, of the held blocks, or of the held rows where rows are drawn; None where none are held
    window : rows that batches are drawn from, until it moves on; None for all
    in_order : whether blocks are taken one after the other, so that a thread can read ahead
    drawn : gets all that is drawn, while somebody wants to know
    """

    stays_on_host = True

    token: Any = None
    held: Array | None = None
    window: int | None = field(default=None, metadata=STATIC)
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
        # As many as rows on a device are read at a time, where those are: sums then have the same bits.
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
        return replace(self, dtype=np.dtype(dtype))  # rows are cast as they are taken

    def in_float64(self) -> "HostSamples":
        return self.astype(np.float64)

    def draw(self, key: Array, index: Array, count: int | None = None) -> Any:
        if self.window is None:
            rows = Samples.draw(self, key, index, count)
        else:
            rows = draw_in_window(self, self.window, key, index, count)
        if self.drawn is not None:
            self.drawn.append(rows)
        return rows

    def _take(self, rows: Any) -> tuple[PyTree, Array]:
        if rows is None:
            raise ValueError("rows that stay on the host are not taken all at once; draw batches of them.")
        if self.held is None:
            return self._call(rows)
        slots = jnp.searchsorted(self.held, rows, method="scan_unrolled").astype(jnp.int32)
        data, weights = Samples._take(self, slots)
        # A row that nobody has foreseen must not be taken for another.
        return data, jnp.where(jnp.all(self.held[slots] == rows), weights, jnp.asarray(jnp.nan, weights.dtype))

    def _call(self, rows: Array) -> tuple[PyTree, Array]:
        """Return the rows of a batch as the host reads them."""

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
        """Return the numbers of the rows of blocks; where the last one is short, of others that weigh nothing too."""
        size = self.batch_size
        first = blocks[:, None].astype(np.int64) * size
        if not self._fills_last:
            return np.minimum(first, self.n - size) + np.arange(size)
        numbers = first + np.arange(size)
        return np.where(numbers < self.n, numbers, 0)

    @property
    def _fills_last(self) -> bool:
        """Whether a short block is filled with row 0 at its end, as in `Samples`, or moved back."""
        return any(self.axes) and not self.in_order

    def weights(self, blocks: np.ndarray) -> np.ndarray:
        """Return the weights of the rows of blocks."""
        size, missing = self.batch_size, -self.n % self.batch_size
        if not missing:
            return np.full((len(blocks), size), 1 / size, self.dtype)
        usual, last = 1 / size, 1 / (size - missing)
        if self.sampling == "reshuffle":  # a pass visits each block once, whatever its size
            usual = last = self.n_blocks / self.n
        weights = np.full((len(blocks), size), usual, self.dtype)
        real = np.arange(size) < size - missing if self._fills_last else np.arange(size) >= missing
        weights[blocks == self.n_blocks - 1] = np.where(real, last, 0)
        return weights

    def hold(self, numbers: np.ndarray, capacity: int) -> "HostSamples":
        """Return the samples with these blocks, or rows where rows are drawn, on the device, and room for so many."""
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
        """Return a tree of arrays on the device, each filled up to a length along its axis."""
        filled = [_fill(array, axis, length) for array, axis in zip(arrays, axes, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(self.leaves), jax.device_put(filled))


def draw_in_window(samples: Samples, window: int, key: Array, index: Array, count: int | None) -> Array:
    """Draw rows of a window, or blocks with a row in it: in any step with the probabilities of draws from all rows.

    Windows follow each other around all rows, from a place that is drawn anew each time around.
    """
    n, size, batch = samples.n, min(window, samples.n), samples.batch_size
    turns, number = -(-n // size), index // max(1, size // (batch * (count or 1)))
    place_key = _threefry.fold_in(_threefry.fold_in(key, _WINDOW_STREAM), number // turns)
    # In 32 bits without a sign, as the sum of two numbers of rows needs.
    first = _threefry.integers(place_key, (), n).astype(jnp.uint32)
    first += jnp.uint32(size) * (number % turns).astype(jnp.uint32)
    shape = (() if count is None else (count,)) + ((batch,) if samples.sampling == "iid" else ())
    inside = _threefry.integers(_threefry.fold_in(key, index), shape, size).astype(jnp.uint32)
    row = ((first % jnp.uint32(n) + inside) % jnp.uint32(n)).astype(jnp.int32)
    return row if samples.sampling == "iid" else row // batch


def check_batches(batch_size: int, sampling: str, window: int | None) -> None:
    """Refuse batches that rows on the host are not drawn in."""
    if sampling == "full":
        raise ValueError("`sampling='full'` takes all rows at once, and these stay on the host: draw batches.")
    if window is not None and (sampling == "reshuffle" or window < batch_size):
        told = f"`sampling={sampling!r}`, `batch_size={batch_size}`, `HostData(window={window})`"
        raise ValueError(f"{told}: take 'blocks' or 'iid', and a window of at least a batch.")


def call_host(
    read: Callable[..., list[np.ndarray]], shapes: list[jax.ShapeDtypeStruct], *arguments: Any
) -> list[Array]:
    """Return the arrays that a function on the host returns; for the same arguments it returns the same.

    Arrays of 64-bit numbers come as pairs of words: JAX would cast them, in the threads of callbacks, by its defaults.
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
    """Return an array filled up to a length along an axis: programs are compiled for one."""
    room = np.full((*array.shape[:axis], length, *array.shape[axis + 1 :]), filler, array.dtype)
    room[(slice(None),) * axis + (slice(array.shape[axis]),)] = array
    return room


def recorded(samples: Samples) -> Array | None:
    """Return all that was drawn while it was remembered, along one axis; None of rows on the device."""
    if not isinstance(samples, HostSamples) or not samples.drawn:
        return None
    return jnp.concatenate([rows.ravel() for rows in samples.drawn])


def _read(samples: HostSamples, token: Any, rows: Any) -> list[np.ndarray]:
    """Return the leaves and weights of a batch."""
    reader, numbers = reader_of(token), np.asarray(rows)
    if samples.sampling == "iid":
        return [*reader.wait_for_batch(numbers), np.full(samples.batch_size, 1 / samples.batch_size, samples.dtype)]
    weights = samples.weights(numbers[None])[0]
    if samples.in_order:
        return [*reader.wait_for_piece(int(numbers), samples.batch_size), weights]
    return [*reader.wait_for_batch(samples.numbers(numbers[None])[0]), weights]

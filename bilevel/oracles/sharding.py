"""Oracles whose rows lie on several devices, of one process or of many.

Device d of k holds the rows d, d + k, d + 2k, …, whatever the batch: of a block of consecutive rows each device then
holds a k-th, one after the other, so that the blocks, the draws and the oracle calls are those of one device. Variables
are on every device. Each computes an estimate from its rows alone, with weights k times as large; the mean of the k is
the estimate, in which terms that are no sum over rows count once. A process touches the rows of its own devices only.
"""

import hashlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import DTypeLike

from bilevel import _tree as trees
from bilevel._precision import arithmetic
from bilevel._programs import Compiled
from bilevel._types import Array, Point, PyTree
from bilevel.oracles.base import Oracles
from bilevel.oracles.host_samples import HostSamples, Reader, call_host, check_batches, draw_in_window, reader_of
from bilevel.oracles.samples import STATIC, Samples

AXIS = "rows"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Shard(Samples):
    """Rows of one level on several devices, taken only there; draws and counts are those of all rows together."""

    n_devices: int = field(default=1, metadata=STATIC)

    def with_batches(self, batch_size: int, sampling: str) -> "Shard":
        return replace(self, batch_size=batch_size, sampling=sampling)

    with_slices = with_batches  # a block is always cut out of the leaves

    def take(self, rows: Any) -> tuple[PyTree, Array]:
        """Return this device's part of the rows, and weights whose mean over devices makes the estimate."""
        if rows is None:
            row = jnp.arange(-(-self.n // self.n_devices), dtype=jnp.int32) * self.n_devices + jax.lax.axis_index(AXIS)
            scale: Any = 1 / self.n
            taken, failed, wanted = self.leaves, 0, row < self.n
        elif self.sampling == "iid":
            taken, failed = self._at(rows // self.n_devices)
            scale, wanted = 1 / self.batch_size, rows % self.n_devices == jax.lax.axis_index(AXIS)
        else:
            taken, failed, row = self._window(rows)
            begin = rows * self.batch_size
            # A pass of "reshuffle" visits each block once, whatever its size.
            in_pass = self.sampling == "reshuffle"
            scale = self.n_blocks / self.n if in_pass else 1 / jnp.asarray(self.count(rows), self.dtype)
            wanted = (row >= begin) & (row < jnp.minimum(begin + self.batch_size, self.n))
        weights = jnp.where(wanted, jnp.asarray(scale * self.n_devices + failed, self.dtype), 0)
        return trees.cast(taken, self.dtype), weights

    def _window(self, block: Array) -> tuple[PyTree, Any, Array]:
        """Return as many rows as a device can hold of a block, its own of this block among them, and their numbers.

        Between them is NaN if the rows could not be read, else 0.
        """
        size = -(-self.batch_size // self.n_devices)
        before = block * self.batch_size - jax.lax.axis_index(AXIS)
        first = (before + self.n_devices - 1) // self.n_devices
        begin = jnp.minimum(first, -(-self.n // self.n_devices) - size)
        places = begin + jnp.arange(size, dtype=jnp.int32)
        return *self._stretch(begin, size), places * self.n_devices + jax.lax.axis_index(AXIS)

    def _at(self, places: Array) -> tuple[PyTree, Any]:
        """Return this device's rows at these places, and NaN if they could not be read, else 0."""
        return self._map(lambda leaf, axis: jnp.take(leaf, places, axis=axis)), 0

    def _stretch(self, begin: Array, size: int) -> tuple[PyTree, Any]:
        """Return this device's rows from a place on, and 0."""
        cut = partial(jax.lax.dynamic_slice_in_dim, start_index=begin, slice_size=size)
        return self._map(lambda leaf, axis: cut(leaf, axis=axis)), 0

    def specs(self) -> "Shard":
        """Return the same tree, of how each array lies on the devices."""
        return replace(self, leaves=self._map(lambda _, axis: _split_along(axis)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HostShard(Shard):
    """Rows of one level on several hosts; each reads those of its own devices, as they are taken.

    Attributes
    ----------
    tokens : of the reader of each device's host, one on each device
    n_owners : processes that hold a part of the rows each; 1 where every one can read all
    window : rows that batches are drawn from, until it moves on; None for all
    in_one_process : whether all devices are of this process
    """

    stays_on_host = True

    tokens: Any = None
    n_owners: int = field(default=1, metadata=STATIC)
    window: int | None = field(default=None, metadata=STATIC)
    in_one_process: bool = field(default=True, metadata=STATIC)

    @property
    def is_read_in_pieces(self) -> bool:
        return True

    def with_batches(self, batch_size: int, sampling: str) -> "HostShard":
        check_batches(batch_size, sampling, self.window)
        return replace(self, batch_size=batch_size, sampling=sampling)

    def with_slices(self, batch_size: int, sampling: str) -> "HostShard":
        return replace(self, batch_size=batch_size, sampling=sampling)

    def draw(self, key: Array, index: Array, count: int | None = None) -> Any:
        if self.window is None:
            return Samples.draw(self, key, index, count)
        return draw_in_window(self, self.window, key, index, count)

    def astype(self, dtype: DTypeLike) -> "HostShard":
        return replace(self, dtype=np.dtype(dtype))

    def in_float64(self) -> "HostShard":
        return self.astype(np.float64)

    def _at(self, places: Array) -> tuple[PyTree, Any]:
        def shape(leaf: Array, axis: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((*leaf.shape[:axis], *places.shape, *leaf.shape[axis + 1 :]), leaf.dtype)

        owners, stride = self.n_owners, self.n_devices // self.n_owners
        shapes = [*jax.tree.leaves(self._map(shape)), jax.ShapeDtypeStruct((), np.float32)]

        def read(tokens: Any, device: Any, places: Any) -> list[np.ndarray]:
            reader = reader_of(np.asarray(tokens)[0])
            numbers = int(device) // owners + np.asarray(places, np.int64) * stride
            # Where a device has one row less than others, a real row fills up, and weighs nothing.
            numbers = np.where(numbers < reader.data.n, numbers, 0)
            # A device that failed would leave the others waiting for its part of a sum, which ends the process.
            found = reader.batch_or_none(numbers) if self.in_one_process else reader.wait_for_batch(numbers)
            if found is None:
                return [*(np.zeros(shape.shape, shape.dtype) for shape in shapes[:-1]), np.array(np.nan, np.float32)]
            return [*found, np.zeros((), np.float32)]

        here = self.tokens, jax.lax.axis_index(AXIS), places
        *leaves, failed = call_host(read, shapes, *here)
        return jax.tree.unflatten(jax.tree.structure(self.leaves), leaves), failed

    def _stretch(self, begin: Array, size: int) -> tuple[PyTree, Any]:
        return self._at(begin + jnp.arange(size, dtype=jnp.int32))

    def specs(self) -> "HostShard":
        return replace(self, leaves=self._map(lambda *_: PartitionSpec()), tokens=PartitionSpec(AXIS))

    @property
    def reader(self) -> Reader:
        """The reader of this process."""
        return reader_of(np.asarray(self.tokens.addressable_shards[0].data)[0])


def _split_along(axis: int) -> PartitionSpec:
    return PartitionSpec(*[None] * axis, AXIS)


def _on_devices(kind: str) -> Callable[..., Any]:
    """Return the method of sharded oracles that averages over devices what the oracles of each give from its rows."""

    def mean(oracles: "ShardedOracles", *arguments: Any) -> Any:
        def on_device(here: "ShardedOracles", *arguments: Any) -> Any:
            local = replace(here.rule, inner_samples=here.inner_samples, outer_samples=here.outer_samples)
            return jax.lax.pmean(getattr(local, kind)(*arguments), AXIS)

        def spec(samples: Samples) -> Samples:
            return samples.specs() if isinstance(samples, Shard) else samples  # the rule's hold nothing

        everywhere = PartitionSpec()
        specs = oracles._map(spec, lambda _: everywhere), *[everywhere] * len(arguments)
        # The check would have JAX sum over devices inside the gradients of a loss, and refuse loops in it.
        run = jax.shard_map(on_device, mesh=oracles.mesh, in_specs=specs, out_specs=everywhere, check_vma=False)
        return run(oracles, *arguments)

    program = Compiled(mean)  # compiled by itself if one estimate is requested outside a compiled program
    return lambda oracles, *arguments: program(oracles, *arguments)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ShardedOracles(Oracles):
    """Oracles on every device of a mesh at once; one all-reduce of the result's size per call.

    Attributes
    ----------
    rule : the oracles of one device, their rows left out
    mesh : the devices, along one axis
    """

    rule: Oracles
    mesh: Mesh = field(metadata=STATIC)

    is_sharded = True

    inner = _on_devices("inner")
    inner_grad_outer = _on_devices("inner_grad_outer")
    outer = _on_devices("outer")
    inner_value = _on_devices("inner_value")
    outer_value = _on_devices("outer_value")
    difference = _on_devices("difference")
    inner_diagonal = _on_devices("inner_diagonal")
    diagonal_majorizer = _on_devices("diagonal_majorizer")
    majorized_hvp = _on_devices("majorized_hvp")
    squared_diagonals = _on_devices("squared_diagonals")

    @property
    def diagonal_passes(self) -> int:  # type: ignore[override]
        return self.rule.diagonal_passes

    @property
    def shares_rows(self) -> bool:  # type: ignore[override]
        return self.rule.shares_rows

    @property
    def wide_bounds(self) -> tuple[float, float] | None:  # type: ignore[override]
        return self.rule.wide_bounds

    @property
    def largest_curvature(self) -> float | None:
        return self.rule.largest_curvature

    @property
    def n_processes(self) -> int:
        return len({device.process_index for device in self.mesh.devices.flat})

    def _on_rows(self, point: Point, data: PyTree, weights: Array) -> Any:
        raise NotImplementedError("Rows that lie on several devices are not taken outside of them.")

    _inner = _inner_grad_outer = _outer = _inner_value = _outer_value = _on_rows


def shard(oracles: Oracles, start: Point, devices: Sequence[jax.Device]) -> ShardedOracles:
    """Split the rows of oracles that every process holds whole."""
    mesh, n_processes = _interleave(devices)
    if n_processes > 1 and not _is_same_everywhere((oracles, start)):
        raise ValueError(
            "`sharded`: the processes have built different problems. Give each the same data, start and `seed`; where "
            "each has only its own rows, say `own_rows=True`."
        )
    return _split(oracles, mesh, 1, (oracles.n_inner, oracles.n_outer))


def shard_own(oracles: Oracles, start: Point, devices: Sequence[jax.Device]) -> ShardedOracles:
    """Join the rows of all processes, each of which holds every P-th: the p-th process p, p + P, …."""
    if not oracles.holds_only_rows:
        raise ValueError(
            f"`own_rows=True`: {type(oracles).__name__} cannot be built from a part of the rows. Build the whole "
            "problem in every process and leave `own_rows` out: each places only its part on its devices."
        )
    mesh, n_processes = _interleave(devices)
    return _split(oracles, mesh, n_processes, _joint_sizes(oracles, start, n_processes))


def digest(tree: PyTree, prefix: str = "") -> bytes:
    """Return a digest of types, shapes and contents of the leaves; all processes that hold parts of them must ask."""
    found = hashlib.sha256(prefix.encode())
    for leaf in jax.tree.leaves(tree, is_leaf=_is_on_host):
        array = leaf
        if isinstance(leaf, HostSamples | HostShard):
            rows = np.frombuffer(digest(leaf.reader.probe(), f"{leaf.n} {leaf.window}"), np.uint8)
            array = rows if isinstance(leaf, HostSamples) else _gather(rows)
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            own = [hashlib.sha256(np.ascontiguousarray(part.data).data).digest() for part in leaf.addressable_shards]
            array = _gather(np.frombuffer(b"".join(own), np.uint8))
        array = np.ascontiguousarray(array)
        found.update(f"{array.dtype}{array.shape}".encode())
        found.update(array.data)
    return found.digest()


def _is_same_everywhere(tree: PyTree) -> bool:
    """Return True if all processes have equal leaves."""
    return len(np.unique(_gather(np.frombuffer(digest(tree), np.uint8)), axis=0)) == 1


def gather_texts(text: str) -> list[str]:
    """Return the texts of all processes, each of which must call this."""
    own = np.frombuffer(text.encode(), np.uint8)
    sizes = _gather(np.array(own.size, np.int32))
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: own.size] = own
    return [row[:size].tobytes().decode() for row, size in zip(_gather(padded), sizes, strict=True)]


def _is_on_host(part: Any) -> bool:
    return isinstance(part, Samples) and part.stays_on_host


def _gather(array: np.ndarray) -> np.ndarray:
    from jax.experimental.multihost_utils import process_allgather

    return process_allgather(array)


def _interleave(devices: Sequence[jax.Device]) -> tuple[Mesh, int]:
    """Return the devices, one of each process in turn, and the number of processes."""
    processes = sorted({device.process_index for device in devices})
    groups = [[device for device in devices if device.process_index == process] for process in processes]
    if len({len(group) for group in groups}) != 1:
        counts = {process: len(group) for process, group in zip(processes, groups, strict=True)}
        raise ValueError(f"`devices` must hold as many of each process, and at least one; got {counts} by process.")
    return Mesh(np.array(groups).T.ravel(), (AXIS,)), len(processes)


def _joint_sizes(oracles: Oracles, start: Point, n_processes: int) -> tuple[int, int]:
    """Return the numbers of rows of all processes together, where their problems fit."""
    own = oracles.n_inner, oracles.n_outer
    if n_processes == 1:
        return own
    if not _is_same_everywhere(start):
        raise ValueError("`own_rows=True`: the problems of the processes differ in start or in sizes; give the same.")
    by_process = _gather(np.array(own, np.int32))
    totals = by_process.sum(axis=0)
    dealt = -(-(totals - np.arange(n_processes)[:, None]) // n_processes)
    if not np.array_equal(by_process, dealt):
        raise ValueError(
            f"`own_rows=True`: the processes hold {by_process.tolist()} inner and outer rows; deal them out in turn, "
            f"rows[process::{n_processes}], or give each as many."
        )
    return int(totals[0]), int(totals[1])


def _split(oracles: Oracles, mesh: Mesh, n_owners: int, sizes: tuple[int, int]) -> ShardedOracles:
    """Place each row on its device; the rows at hand are every ``n_owners``-th of all."""
    levels = oracles.inner_samples, oracles.outer_samples
    inner, outer = (Samples(leaves=None, n=level.n, axes=(), dtype=level.dtype) for level in levels)
    # In NumPy: an array of one process's device could not meet those of all processes.
    rule = trees.to_numpy(replace(oracles, inner_samples=inner, outer_samples=outer))
    with arithmetic(inner.dtype):
        inner = _place(levels[0], mesh, n_owners, sizes[0])
        outer = inner if oracles.shares_rows else _place(levels[1], mesh, n_owners, sizes[1])
        return ShardedOracles(inner, outer, rule.outer_bounds, rule=rule, mesh=mesh)


def _place_readers(samples: HostSamples, mesh: Mesh, n_owners: int, n: int) -> HostShard:
    """Tell each device the reader of its host; no row is read."""
    along = NamedSharding(mesh, PartitionSpec(AXIS))
    tokens = jax.make_array_from_callback((mesh.size,), along, lambda _: samples.token[None])
    weakref.finalize(tokens, id, samples.token)  # keeps the reader, whose life is that of its token
    return HostShard(
        *(samples.leaves, n, samples.axes, samples.dtype),
        piece=samples.piece,
        n_devices=mesh.size,
        tokens=tokens,
        n_owners=n_owners,
        window=samples.window,
        in_one_process=len({device.process_index for device in mesh.devices.flat}) == 1,
    )


def _place(samples: Samples, mesh: Mesh, n_owners: int, n: int) -> Shard:
    if isinstance(samples, HostSamples):
        return _place_readers(samples, mesh, n_owners, n)
    n_held = -(-n // mesh.size)

    def spread(leaf: Array, axis: int) -> Array:
        rows = np.moveaxis(np.asarray(leaf), axis, 0)[: samples.n]
        shape = (*leaf.shape[:axis], n_held * mesh.size, *leaf.shape[axis + 1 :])

        def of_device(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None, "JAX asks for the rows of a device, or not at all"
            device = (index[axis].start or 0) // n_held
            own = rows[device // n_owners :: mesh.size // n_owners]
            # Copies of a real row fill up: weights leave them out, and a user's loss is finite on them.
            filler = np.repeat(rows[:1], n_held - len(own), axis=0)
            return np.ascontiguousarray(np.moveaxis(np.concatenate([own, filler]), 0, axis))

        return jax.make_array_from_callback(shape, NamedSharding(mesh, _split_along(axis)), of_device)

    return Shard(samples._map(spread), n, samples.axes, samples.dtype, n_devices=mesh.size)

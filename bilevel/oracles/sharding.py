"""Oracles whose rows lie on several devices, of one process or of many.

Device d of k holds the rows d, d + k, d + 2k, …, whatever the batch size is. Each device then holds 1/k of a block of
consecutive rows, contiguously, so that blocks, draws and oracle calls are those of one device. Variables are on every
device. Each device computes an estimate from its own rows with weights k times as large. The mean of these k estimates
is the estimate, in which terms that are not sums over rows count once.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bilevel._core import trees
from bilevel._core.compilation import arithmetic, compiled
from bilevel._core.types import Array, Point, PyTree
from bilevel.oracles.base import Oracles
from bilevel.oracles.host_samples import HostSamples
from bilevel.oracles.samples import STATIC, Samples

AXIS = "rows"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Shard(Samples):
    """Rows of one level on several devices. They are taken on each device; draws and counts refer to all rows."""

    n_devices: int = field(default=1, metadata=STATIC)

    def with_batches(self, batch_size: int, sampling: str) -> "Shard":
        return replace(self, batch_size=batch_size, sampling=sampling)

    with_slices = with_batches  # a block is always a slice of the leaves

    def take(self, rows: Any) -> tuple[PyTree, Array]:
        """Return this device's part of the rows, and weights with which the mean over devices is the estimate."""
        device, n_held = jax.lax.axis_index(AXIS), -(-self.n // self.n_devices)
        if rows is None:
            row = jnp.arange(n_held, dtype=jnp.int32) * self.n_devices + device
            taken, wanted = self.leaves, row < self.n
            scale: Any = 1 / self.n
        elif self.sampling == "iid":
            taken = self._map(lambda leaf, axis: jnp.take(leaf, rows // self.n_devices, axis=axis))
            wanted = rows % self.n_devices == device
            scale = 1 / self.batch_size
        else:
            # A range of rows that contains this device's part of the block.
            begin, size = rows * self.batch_size, -(-self.batch_size // self.n_devices)
            first = jnp.minimum((begin - device + self.n_devices - 1) // self.n_devices, n_held - size)
            cut = partial(jax.lax.dynamic_slice_in_dim, start_index=first, slice_size=size)
            taken = self._map(lambda leaf, axis: cut(leaf, axis=axis))
            row = (first + jnp.arange(size, dtype=jnp.int32)) * self.n_devices + device
            wanted = (row >= begin) & (row < jnp.minimum(begin + self.batch_size, self.n))
            # A pass of "reshuffle" visits each block once, whatever its size is.
            in_pass = self.sampling == "reshuffle"
            scale = self.n_blocks / self.n if in_pass else 1 / jnp.asarray(self.count(rows), self.dtype)
        weights = jnp.where(wanted, jnp.asarray(scale * self.n_devices, self.dtype), 0)
        return trees.cast(taken, self.dtype), weights


def _split_along(axis: int) -> PartitionSpec:
    return PartitionSpec(*[None] * axis, AXIS)


@compiled("function")  # compiled by itself if one estimate is requested outside a compiled program
def _average(function: Callable[..., PyTree], oracles: "ShardedOracles", *arguments: Any) -> PyTree:
    """Return the mean over devices of a function of the oracles of one device, which have the rows there."""

    def on_device(here: "ShardedOracles", *arguments: Any) -> PyTree:
        local = replace(here.rule, inner_samples=here.inner_samples, outer_samples=here.outer_samples)
        return jax.lax.pmean(function(local, *arguments), AXIS)

    def spec(samples: Samples) -> Samples:
        return replace(samples, leaves=samples._map(lambda _, axis: _split_along(axis)))

    everywhere = PartitionSpec()
    specs = oracles._map(spec, lambda _: everywhere), *[everywhere] * len(arguments)
    # With the check, JAX would sum over devices inside the gradients of a loss, and would reject loops in it.
    run = jax.shard_map(on_device, mesh=oracles.mesh, in_specs=specs, out_specs=everywhere, check_vma=False)
    return run(oracles, *arguments)


def _averaged(name: str) -> Callable[..., Any]:
    """Return the method of sharded oracles that averages a method of the oracles of each device."""

    def local(oracles: Oracles, *arguments: Any) -> Any:
        return getattr(oracles, name)(*arguments)

    return lambda oracles, *arguments: oracles.average(local, *arguments)


def _of_rule(name: str) -> Any:
    """Return a property of sharded oracles with the value of the oracles of each device."""
    return property(lambda oracles: getattr(oracles.rule, name))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ShardedOracles(Oracles):
    """Oracles on all devices of a mesh; each call needs one all-reduce of the size of its result.

    Attributes
    ----------
    rule : the oracles of one device, without their rows
    mesh : the devices, along one axis
    """

    rule: Oracles
    mesh: Mesh = field(metadata=STATIC)

    is_sharded = True
    has_row_diagonals, shares_rows = _of_rule("has_row_diagonals"), _of_rule("shares_rows")
    wide_bounds, largest_curvature = _of_rule("wide_bounds"), _of_rule("largest_curvature")

    inner = _averaged("inner")
    inner_grad_outer, inner_tangents = _averaged("inner_grad_outer"), _averaged("inner_tangents")
    outer = _averaged("outer")
    inner_value = _averaged("inner_value")
    outer_value = _averaged("outer_value")
    difference = _averaged("difference")

    def average(self, function: Callable[..., PyTree], *arguments: Any) -> PyTree:
        return _average(function, self, *arguments)

    @property
    def n_processes(self) -> int:
        return len({device.process_index for device in self.mesh.devices.flat})

    def _on_rows(self, point: Point, data: PyTree, weights: Array) -> Any:
        raise NotImplementedError("Rows on several devices can be taken only on these devices.")

    _inner = _inner_grad_outer = _outer = _inner_value = _outer_value = _on_rows


def shard(oracles: Oracles, start: Point, devices: Sequence[jax.Device], own_rows: bool) -> ShardedOracles:
    """Split the rows of oracles over devices.

    Each process must have built them from all rows; or, with ``own_rows``, process p of P from the rows p, p + P, ….
    """
    mesh, n_processes = _interleave(devices)
    if own_rows:
        if not oracles.holds_only_rows:
            raise ValueError(
                f"`own_rows=True`: {type(oracles).__name__} cannot be built from a part of the rows. Build the whole "
                "problem in each process and leave `own_rows` out: each places only its part on its devices."
            )
        return _split(oracles, mesh, n_processes, _joint_sizes(oracles, start, n_processes))
    if n_processes > 1 and not _is_same_everywhere((oracles, start)):
        raise ValueError(
            "`sharded`: the processes have built different problems. Give each the same data, start and `seed`; if "
            "each has only its own rows, say `own_rows=True`."
        )
    return _split(oracles, mesh, 1, (oracles.n_inner, oracles.n_outer))


def digest(tree: PyTree, prefix: str = "") -> bytes:
    """Return a digest of types, shapes and contents of the leaves. All processes with parts of them must call it."""
    found = hashlib.sha256(prefix.encode())
    for leaf in jax.tree.leaves(tree, is_leaf=lambda part: isinstance(part, HostSamples)):
        array = leaf
        if isinstance(leaf, HostSamples):
            array = np.frombuffer(digest(leaf.reader.probe(), str(leaf.n)), np.uint8)
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


def _gather(array: np.ndarray) -> np.ndarray:
    from jax.experimental.multihost_utils import process_allgather

    return process_allgather(array)


def _interleave(devices: Sequence[jax.Device]) -> tuple[Mesh, int]:
    """Return the devices, one of each process in turn, and the number of processes."""
    processes = sorted({device.process_index for device in devices})
    groups = [[device for device in devices if device.process_index == process] for process in processes]
    if len({len(group) for group in groups}) != 1:
        counts = {process: len(group) for process, group in zip(processes, groups, strict=True)}
        raise ValueError(f"`devices` must hold the same number of each process, at least one; got {counts} by process.")
    return Mesh(np.array(groups).T.ravel(), (AXIS,)), len(processes)


def _joint_sizes(oracles: Oracles, start: Point, n_processes: int) -> tuple[int, int]:
    """Return the numbers of rows of all processes together; raise ValueError if their problems do not fit."""
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
            f"rows[process::{n_processes}], or give each the same number."
        )
    return int(totals[0]), int(totals[1])


def _split(oracles: Oracles, mesh: Mesh, n_owners: int, sizes: tuple[int, int]) -> ShardedOracles:
    """Place each row on its device; the given rows are every ``n_owners``-th of all rows."""
    levels = oracles.inner_samples, oracles.outer_samples
    inner, outer = (Samples(leaves=None, n=level.n, axes=(), dtype=level.dtype) for level in levels)
    # In NumPy, since an array on a device of one process cannot be combined with arrays of all processes.
    rule = trees.to_numpy(replace(oracles, inner_samples=inner, outer_samples=outer))
    with arithmetic(inner.dtype):
        inner = _place(levels[0], mesh, n_owners, sizes[0])
        outer = inner if oracles.shares_rows else _place(levels[1], mesh, n_owners, sizes[1])
        given = rule.outer_bounds, rule.outer_term, rule.full_inner
        return ShardedOracles(inner, outer, *given, rule=rule, mesh=mesh)


def _place(samples: Samples, mesh: Mesh, n_owners: int, n: int) -> Shard:
    n_held = -(-n // mesh.size)

    def spread(leaf: Array, axis: int) -> Array:
        rows = np.moveaxis(np.asarray(leaf), axis, 0)[: samples.n]
        shape = (*leaf.shape[:axis], n_held * mesh.size, *leaf.shape[axis + 1 :])

        def of_device(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None, "JAX requests the rows of one device"
            device = (index[axis].start or 0) // n_held
            own = rows[device // n_owners :: mesh.size // n_owners]
            # Filled up with copies of a real row, on which the loss of a user is finite; their weights are 0.
            filler = np.repeat(rows[:1], n_held - len(own), axis=0)
            return np.ascontiguousarray(np.moveaxis(np.concatenate([own, filler]), 0, axis))

        return jax.make_array_from_callback(shape, NamedSharding(mesh, _split_along(axis)), of_device)

    return Shard(samples._map(spread), n, samples.axes, samples.dtype, n_devices=mesh.size)

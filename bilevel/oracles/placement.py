"""Rows on their way to the devices that will hold them; each process touches none but those of its own devices."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from bilevel import trees
from bilevel.oracles.autodiff import AutodiffOracles
from bilevel.oracles.base import Oracles
from bilevel.oracles.linear import LinearOracles
from bilevel.oracles.samples import Samples
from bilevel.oracles.sharded import AXIS, Shard, ShardedOracles, split_along
from bilevel.oracles.softmax_selection import SoftmaxSelectionOracles
from bilevel.precision import arithmetic
from bilevel.types import AnyArray, Array, Point

# What these hold beside their rows does not depend on how many there are.
_BUILT_BY_ROWS = (AutodiffOracles, LinearOracles, SoftmaxSelectionOracles)


@dataclass(frozen=True)
class Layout:
    """Which rows device d takes of those at hand: ``first(d)`` and each ``stride``-th after it."""

    mesh: Mesh
    first: Callable[[int], int]
    stride: int


def shard(oracles: Oracles, devices: Sequence[jax.Device]) -> ShardedOracles:
    """Split the rows of oracles that every process holds whole."""
    mesh, _ = _interleaved(devices)
    layout = Layout(mesh, first=lambda device: device, stride=mesh.size)
    return _sharded(oracles, layout, (oracles.n_inner, oracles.n_outer))


def shard_own(oracles: Oracles, start: Point, devices: Sequence[jax.Device]) -> ShardedOracles:
    """Join the rows of all processes, each of which holds every P-th: the p-th process p, p + P, …."""
    if not isinstance(oracles, _BUILT_BY_ROWS):
        raise ValueError(
            f"`own_rows=True`: {type(oracles).__name__} cannot be built from a part of the rows. Build the whole "
            "problem in every process and leave `own_rows` out: each places only its part on its devices."
        )
    mesh, n_processes = _interleaved(devices)
    sizes = _agreed_sizes(oracles, start, n_processes)
    layout = Layout(mesh, first=lambda device: device // n_processes, stride=mesh.size // n_processes)
    return _sharded(oracles, layout, sizes)


def contents(array: AnyArray) -> np.ndarray:
    """Return an array in NumPy, or digests of its parts where other processes hold some; all must then ask."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable:
        return np.ascontiguousarray(array)
    from jax.experimental.multihost_utils import process_allgather

    own = [hashlib.sha256(np.ascontiguousarray(part.data).data).digest() for part in array.addressable_shards]
    return process_allgather(np.frombuffer(b"".join(own), np.uint8))


def _interleaved(devices: Sequence[jax.Device]) -> tuple[Mesh, int]:
    """Return the devices, one of each process in turn, and the number of processes."""
    by_process: dict[int, list[jax.Device]] = {}
    for device in devices:
        by_process.setdefault(device.process_index, []).append(device)
    if len({len(group) for group in by_process.values()}) != 1:
        counts = {process: len(group) for process, group in by_process.items()}
        raise ValueError(f"`devices` must hold as many of each process, and at least one; got {counts} by process.")
    rounds = zip(*(by_process[process] for process in sorted(by_process)), strict=True)
    return Mesh(np.array([device for one in rounds for device in one]), (AXIS,)), len(by_process)


def _agreed_sizes(oracles: Oracles, start: Point, n_processes: int) -> tuple[int, int]:
    """Return the numbers of rows of all processes together, where their problems fit."""
    own = oracles.n_inner, oracles.n_outer
    if n_processes == 1:
        return own
    from jax.experimental.multihost_utils import process_allgather

    if len(np.unique(process_allgather(_digest(start)), axis=0)) > 1:
        raise ValueError("`own_rows=True`: the problems of the processes differ in start or in sizes; give the same.")
    by_process = process_allgather(np.array(own, np.int32))
    totals = by_process.sum(axis=0)
    dealt = -(-(totals - np.arange(n_processes)[:, None]) // n_processes)
    if not np.array_equal(by_process, dealt):
        raise ValueError(
            f"`own_rows=True`: the processes hold {by_process.tolist()} inner and outer rows; deal them out in turn, "
            f"rows[process::{n_processes}], or give each as many."
        )
    return int(totals[0]), int(totals[1])


def _digest(start: Point) -> np.ndarray:
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(start):
        digest.update(f"{leaf.dtype}{leaf.shape}".encode() + leaf.tobytes())
    return np.frombuffer(digest.digest(), np.uint8)


def _sharded(oracles: Oracles, layout: Layout, sizes: tuple[int, int]) -> ShardedOracles:
    inner, outer = oracles.inner_samples, oracles.outer_samples
    # In NumPy: an array of one process's device could not meet those of all processes.
    rule = trees.to_numpy(replace(oracles, inner_samples=_without_rows(inner), outer_samples=_without_rows(outer)))
    with arithmetic(inner.dtype):
        return ShardedOracles(
            inner_samples=_placed(inner, layout, sizes[0]),
            outer_samples=_placed(outer, layout, sizes[1]),
            outer_bounds=rule.outer_bounds,
            rule=rule,
            mesh=layout.mesh,
        )


def _without_rows(samples: Samples) -> Samples:
    return Samples(leaves=None, n=samples.n, axes=(), dtype=samples.dtype)


def _placed(samples: Samples, layout: Layout, n: int) -> Shard:
    n_devices = layout.mesh.size
    n_held = -(-n // n_devices)

    def spread(leaf: Array, axis: int) -> Array:
        rows = np.moveaxis(np.asarray(leaf), axis, 0)[: samples.n]
        shape = list(leaf.shape)
        shape[axis] = n_held * n_devices

        def of_device(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None, "JAX asks for the rows of a device, or not at all"
            device = (index[axis].start or 0) // n_held
            own = rows[layout.first(device) :: layout.stride]
            # Copies of a real row fill up: weights leave them out, and a user's loss is finite on them.
            filler = np.repeat(rows[:1], n_held - len(own), axis=0)
            return np.ascontiguousarray(np.moveaxis(np.concatenate([own, filler]), 0, axis))

        return jax.make_array_from_callback(tuple(shape), NamedSharding(layout.mesh, split_along(axis)), of_device)

    leaves, structure = jax.tree.flatten(samples.leaves)
    arrays = [spread(leaf, axis) for leaf, axis in zip(leaves, samples.axes, strict=True)]
    return Shard(jax.tree.unflatten(structure, arrays), n, samples.axes, samples.dtype, n_devices=n_devices)

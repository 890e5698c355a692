"""Oracles whose rows lie on several devices, of one process or of many.

Device d of k holds the rows d, d + k, d + 2k, …, whatever the batch: of a block of consecutive rows each device then
holds a k-th, one after the other, so that the blocks, the draws and the ledger are those of one device. Variables are
on every device. Each computes an estimate from its rows alone, with weights k times as large; the mean of the k is
the estimate, in which terms that are no sum over rows count once. No row ever leaves its device.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from bilevel import trees
from bilevel.oracles.base import Oracles
from bilevel.oracles.samples import Samples
from bilevel.types import Array, Count, InnerPass, OuterPass, Point, PyTree, Rows

AXIS = "rows"


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["leaves", "blocks", "row_weights"],
    meta_fields=["n", "axes", "dtype", "batch_size", "sampling", "n_devices"],
)
@dataclass(frozen=True)
class Shard(Samples):
    """Rows of one level on several devices; draws and counts are those of all rows together.

    Only on a device, where the leaves are its part of them, can rows be taken.
    """

    n_devices: int = 1

    def batched(self, batch_size: int, sampling: str) -> "Shard":
        """Return the same rows, drawn in batches of this size; none is moved."""
        return replace(self, batch_size=batch_size, sampling=sampling)

    def sliced(self, batch_size: int, sampling: str = "blocks") -> "Shard":
        """Return the same as `batched`: a block is always cut out of the leaves."""
        return self.batched(batch_size, sampling)

    def take(self, rows: Any) -> tuple[PyTree, Array]:
        """Return this device's part of the rows, and weights whose mean over devices makes the estimate."""
        if rows is None:
            taken, row = self.leaves, self._row_at(jnp.arange(self._n_held, dtype=jnp.int32))
            scale, wanted = 1 / self.n, row < self.n
        elif self.sampling == "iid":
            taken = self._map(lambda leaf, axis: jnp.take(leaf, rows // self.n_devices, axis=axis))
            scale, wanted = 1 / self.batch_size, rows % self.n_devices == jax.lax.axis_index(AXIS)
        else:
            taken, row = self._window(rows)
            begin = rows * self.batch_size
            scale = self._block_weight(rows)
            wanted = (row >= begin) & (row < jnp.minimum(begin + self.batch_size, self.n))
        weights = jnp.where(wanted, jnp.asarray(scale * self.n_devices, self.dtype), 0)
        return trees.cast(taken, self.dtype), weights

    def _window(self, block: Array) -> tuple[PyTree, Array]:
        """Return as many rows as a device can hold of a block, its own of this block among them, and their numbers."""
        size = -(-self.batch_size // self.n_devices)
        before = block * self.batch_size - jax.lax.axis_index(AXIS)
        first = (before + self.n_devices - 1) // self.n_devices
        begin = jnp.minimum(first, self._n_held - size)
        cut = partial(jax.lax.dynamic_slice_in_dim, start_index=begin, slice_size=size)
        taken = self._map(lambda leaf, axis: cut(leaf, axis=axis))
        return taken, self._row_at(begin + jnp.arange(size, dtype=jnp.int32))

    def _block_weight(self, block: Array) -> Any:
        if self.sampling == "reshuffle":
            # A pass visits each block once, whatever its size.
            return self.n_blocks / self.n
        return 1 / jnp.asarray(self.count(block), self.dtype)

    def _row_at(self, place: Array) -> Array:
        return place * self.n_devices + jax.lax.axis_index(AXIS)

    @property
    def _n_held(self) -> int:
        return int(jax.tree.leaves(self.leaves)[0].shape[self.axes[0]])

    def specs(self) -> "Shard":
        """Return how the leaves are split."""
        return replace(self, leaves=self._map(lambda _, axis: split_along(axis)))


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["inner_samples", "outer_samples", "outer_bounds", "rule"],
    meta_fields=["mesh"],
)
@dataclass(frozen=True, kw_only=True)
class ShardedOracles(Oracles):
    """Oracles on every device of a mesh at once; one all-reduce of the result's size per call.

    Attributes
    ----------
    rule : the oracles of one device, their rows left out
    mesh : the devices, along one axis
    """

    rule: Oracles
    mesh: Mesh

    def inner(self, point: Point, rows: Any = None) -> InnerPass:
        """Return ∇z G, (∇²zz G) v and (∇²xz G) v together."""
        return _mean(self, "inner", point, rows)

    def inner_grad_outer(self, point: Point, rows: Any = None) -> PyTree:
        """Return ∇x G."""
        return _mean(self, "inner_grad_outer", point, rows)

    def outer(self, point: Point, rows: Any = None) -> OuterPass:
        """Return ∇z F and ∇x F together."""
        return _mean(self, "outer", point, rows)

    def inner_value(self, point: Point, rows: Any = None) -> Array:
        """Return G."""
        return _mean(self, "inner_value", point, rows)

    def outer_value(self, point: Point, rows: Any = None) -> Array:
        """Return F."""
        return _mean(self, "outer_value", point, rows)

    def difference(self, point: Point, previous: Point, rows: Rows) -> Point:
        """Return D(point) - D(previous) on the same rows."""
        return _mean(self, "difference", point, previous, rows)

    def inner_diagonal(self, point: Point, index: Count = 0) -> PyTree:
        """Return the diagonal of ∇²zz G on all rows."""
        return _mean(self, "inner_diagonal", point, index)

    def cautious_diagonal(self, point: Point, index: Count = 0) -> PyTree:
        """Return a diagonal to divide moves by."""
        return _mean(self, "cautious_diagonal", point, index)

    def squared_diagonals(self, point: Point) -> PyTree:
        """Return the mean over all rows of their squared diagonals."""
        return _mean(self, "squared_diagonals", point)

    @property
    def diagonal_passes(self) -> int:  # type: ignore[override]
        """Products per inner row that `inner_diagonal` takes."""
        return self.rule.diagonal_passes

    @property
    def wide_bounds(self) -> tuple[float, float] | None:
        """Bounds of the outer variable beyond which the model hardly changes, where they are known."""
        return self.rule.wide_bounds

    def specs(self) -> "ShardedOracles":
        """Return how the leaves are split."""

        def spec(leaf: Any) -> Any:
            return leaf.specs() if isinstance(leaf, Shard) else PartitionSpec()

        return jax.tree.map(spec, self, is_leaf=lambda leaf: isinstance(leaf, Shard))

    @property
    def largest_curvature(self) -> float | None:
        """The largest eigenvalue of ∇²zz G where it is known."""
        return self.rule.largest_curvature

    @property
    def n_processes(self) -> int:
        """Number of processes whose devices hold rows."""
        return len({device.process_index for device in self.mesh.devices.flat})

    def _inner(self, point: Point, data: PyTree, weights: Array) -> InnerPass:
        return self.rule._inner(point, data, weights)

    def _inner_grad_outer(self, point: Point, data: PyTree, weights: Array) -> PyTree:
        return self.rule._inner_grad_outer(point, data, weights)

    def _outer(self, point: Point, data: PyTree, weights: Array) -> OuterPass:
        return self.rule._outer(point, data, weights)

    def _inner_value(self, point: Point, data: PyTree, weights: Array) -> Array:
        return self.rule._inner_value(point, data, weights)

    def _outer_value(self, point: Point, data: PyTree, weights: Array) -> Array:
        return self.rule._outer_value(point, data, weights)


def split_along(axis: int) -> PartitionSpec:
    """Return how a leaf is split whose samples are along ``axis``."""
    return PartitionSpec(*[None] * axis, AXIS)


# Compiled here too for those who ask for one estimate outside a compiled program.
@partial(jax.jit, static_argnums=1)
def _mean(oracles: ShardedOracles, kind: str, *arguments: Any) -> Any:
    """Return the mean over devices of what the oracles of each give from its rows."""

    def on_device(here: ShardedOracles, *arguments: Any) -> Any:
        local = replace(here.rule, inner_samples=here.inner_samples, outer_samples=here.outer_samples)
        return jax.lax.pmean(getattr(local, kind)(*arguments), AXIS)

    specs = oracles.specs(), *[PartitionSpec()] * len(arguments)
    # The check would have JAX sum over devices inside the gradients of a loss, and refuse loops in it.
    together = jax.shard_map(on_device, mesh=oracles.mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
    return together(oracles, *arguments)

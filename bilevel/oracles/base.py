"""What a solver may ask of a problem: derivatives on drawn rows or on all of them."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from bilevel import _threefry
from bilevel import _tree as trees
from bilevel._types import Array, Count, InnerPass, OuterPass, Point, PyTree, Rows
from bilevel.oracles.diagonal import N_PROBES, probe_diagonal
from bilevel.oracles.host_samples import HostSamples, Reader, recorded
from bilevel.oracles.samples import Samples

_INNER_STREAM, _OUTER_STREAM = 0, 1
_LOSS_STREAM = 3  # solvers draw lengths and coins from 2


@dataclass(frozen=True)
class Oracles(ABC):
    """Derivatives of F and G at a point; ``rows=None`` means every row.

    A single derivative is selected from its bundle: under ``jit`` what is not used is not computed.

    Attributes
    ----------
    inner_samples, outer_samples : the data of each level
    outer_bounds : (lower, upper) pytrees like the outer variable, or None
    """

    inner_samples: Samples
    outer_samples: Samples
    outer_bounds: tuple[PyTree, PyTree] | None = None

    diagonal_passes: ClassVar[int] = N_PROBES  # products per inner row that `inner_diagonal` takes; 1 in closed form
    wide_bounds: ClassVar[tuple[float, float] | None] = None  # of x, beyond which the model hardly changes
    is_sharded: ClassVar[bool] = False  # do the rows lie on several devices?
    holds_only_rows: ClassVar[bool] = False  # is nothing that they hold beside their rows of a size with the rows?
    shares_rows: ClassVar[bool] = False  # are the rows of both levels the same, so that one batch serves both?

    @abstractmethod
    def _inner(self, point: Point, data: PyTree, weights: Array) -> InnerPass:
        """Return ∇z G, (∇²zz G) v and (∇²xz G) v for G = sum(weights * G_i)."""

    @abstractmethod
    def _inner_grad_outer(self, point: Point, data: PyTree, weights: Array) -> PyTree:
        """Return ∇x G."""

    @abstractmethod
    def _outer(self, point: Point, data: PyTree, weights: Array) -> OuterPass:
        """Return ∇z F and ∇x F for F = sum(weights * F_j)."""

    @abstractmethod
    def _inner_value(self, point: Point, data: PyTree, weights: Array) -> Array:
        """Return G."""

    @abstractmethod
    def _outer_value(self, point: Point, data: PyTree, weights: Array) -> Array:
        """Return F."""

    def inner(self, point: Point, rows: Any = None) -> InnerPass:
        """Return ∇z G, (∇²zz G) v and (∇²xz G) v together."""
        return estimate(self._inner, point, self.inner_samples, rows)

    def inner_grad(self, point: Point, rows: Any = None) -> PyTree:
        """Return ∇z G."""
        return self.inner(point, rows).grad

    def hvp(self, point: Point, rows: Any = None) -> PyTree:
        """Return (∇²zz G) v."""
        return self.inner(point, rows).hvp

    def cross(self, point: Point, rows: Any = None) -> PyTree:
        """Return (∇²xz G) v."""
        return self.inner(point, rows).cross

    def inner_grad_outer(self, point: Point, rows: Any = None) -> PyTree:
        """Return ∇x G."""
        return estimate(self._inner_grad_outer, point, self.inner_samples, rows)

    def outer(self, point: Point, rows: Any = None) -> OuterPass:
        """Return ∇z F and ∇x F together."""
        return estimate(self._outer, point, self.outer_samples, rows)

    def outer_grad(self, point: Point, rows: Any = None) -> PyTree:
        """Return ∇z F."""
        return self.outer(point, rows).grad

    def outer_grad_outer(self, point: Point, rows: Any = None) -> PyTree:
        """Return ∇x F."""
        return self.outer(point, rows).grad_outer

    def inner_diagonal(self, point: Point, index: Count = 0) -> PyTree:
        """Return the diagonal of ∇²zz G on all rows; where it is estimated, another index gives another estimate."""
        return self._diagonal(point, index, majorize=False)

    def diagonal_majorizer(self, point: Point, index: Count = 0) -> PyTree:
        """Return a diagonal to divide moves by: ∇²zz G's, with what curvature badly fitted rows meet on their way."""
        return self._diagonal(point, index, majorize=True)

    def squared_diagonals(self, point: Point) -> PyTree:
        """Return the mean over all rows of their squared diagonal majorizers; 0 where no single row's is known."""
        if self.diagonal_passes > 1:
            return trees.zeros_like(point.inner_var)
        return estimate(partial(self._row_diagonals, power=2, majorize=True), point, self.inner_samples, None)

    def majorized_hvp(self, point: Point) -> PyTree:
        """Return the product with v of a matrix whose diagonal is the majorizer; ∇²zz G where none is known."""
        if self.diagonal_passes > 1:
            return self.hvp(point)
        return estimate(self._majorized_product, point, self.inner_samples, None)

    def _majorized_product(self, point: Point, data: PyTree, weights: Array) -> PyTree:
        """Return the same on weighted rows; asked only in closed form."""
        return self._inner(point, data, weights).hvp

    def _diagonal(self, point: Point, index: Count, majorize: bool) -> PyTree:
        if self.diagonal_passes > 1:
            return probe_diagonal(lambda v: self.hvp(point._replace(v=v)), point.inner_var, index)
        of_rows = partial(self._row_diagonals, power=1, majorize=majorize)
        return trees.add(estimate(of_rows, point, self.inner_samples, None), self._diagonal_regularization(point))

    def _row_diagonals(self, point: Point, data: PyTree, weights: Array, *, power: int, majorize: bool) -> PyTree:
        """Return sum(weights * h_i**power) with h_i the diagonal of row i; asked only in closed form."""
        raise NotImplementedError

    def _diagonal_regularization(self, point: Point) -> PyTree:
        """Return the part of the diagonal that is no sum over rows; asked only in closed form."""
        return trees.zeros_like(point.inner_var)

    def inner_value(self, point: Point, rows: Any = None) -> Array:
        """Return G."""
        return estimate(self._inner_value, point, self.inner_samples, rows)

    def outer_value(self, point: Point, rows: Any = None) -> Array:
        """Return F."""
        return estimate(self._outer_value, point, self.outer_samples, rows)

    def direction(self, point: Point, rows: Rows = Rows()) -> Point:  # noqa: B008
        """Return D: ∇z G, (∇²xz G) v + ∇x F and (∇²zz G) v + ∇z F."""
        return join(self.inner(point, rows.inner), self.outer(point, rows.outer))

    def difference(self, point: Point, previous: Point, rows: Rows) -> Point:
        """Return D(point) - D(previous) on the same rows."""
        return trees.subtract(self.direction(point, rows), self.direction(previous, rows))

    @property
    def largest_curvature(self) -> float | None:
        """The largest eigenvalue of ∇²zz G where it is known and the same everywhere, else None."""
        return None

    @property
    def n_processes(self) -> int:
        """Number of processes whose devices hold rows."""
        return 1

    @property
    def n_inner(self) -> int:
        """Number of inner samples."""
        return self.inner_samples.n

    @property
    def n_outer(self) -> int:
        """Number of outer samples."""
        return self.outer_samples.n

    def count_inner(self, rows: Any, batches: int | None = None, first: Count | None = None) -> Count:
        """Return how many inner rows a batch holds, or several together, or the ``first`` of them."""
        return self.inner_samples.count(rows, batches, first)

    def count_outer(self, rows: Any, batches: int | None = None) -> Count:
        """Return how many outer rows a batch holds, or several together."""
        return self.outer_samples.count(rows, batches)

    def draw_inner(self, key: Array, index: Array, count: int | None = None) -> Any:
        """Draw inner rows for step ``index``: one batch, or ``count`` along a leading axis."""
        return self.inner_samples.draw(_threefry.fold_in(key, _INNER_STREAM), index, count)

    def draw_outer(self, key: Array, index: Array, count: int | None = None) -> Any:
        """Draw outer rows for step ``index``, independently of the inner ones."""
        return self.outer_samples.draw(_threefry.fold_in(key, _OUTER_STREAM), index, count)

    def draw(self, key: Array, index: Array) -> Rows:
        """Draw one batch on each level, or one for both where they share their rows."""
        inner = self.draw_inner(key, index)
        return Rows(inner, inner if self.shares_rows else self.draw_outer(key, index))

    @property
    def is_on_host(self) -> bool:
        """Whether rows of a level stay on the host, and are read as they are needed."""
        return self.inner_samples.stays_on_host or self.outer_samples.stays_on_host

    @property
    def readers(self) -> list[Reader]:
        """The readers of this process for the levels whose rows stay on the host."""
        levels: Any = self.inner_samples, self.outer_samples
        return [level.reader for level in levels if level.stays_on_host]

    def recording(self) -> Self:
        """Return the same oracles, which remember what is drawn of rows on the host."""

        def change(samples: Samples) -> Samples:
            return replace(samples, drawn=[]) if isinstance(samples, HostSamples) else samples

        levels = change(self.inner_samples), change(self.outer_samples)
        return replace(self, inner_samples=levels[0], outer_samples=levels[1])

    def recorded(self) -> Rows:
        """Return what was drawn of each level since `recording`, along one axis; None of rows on the device."""
        return Rows(recorded(self.inner_samples), recorded(self.outer_samples))

    @property
    def takes_keys(self) -> bool:
        """Whether a loss is random, and asks for a key."""
        return self.inner_samples.key_words is not None or self.outer_samples.key_words is not None

    def step_key(self, key: Array, index: Array) -> Array | None:
        """Return the words of the key that losses get in step ``index``; None where they take none."""
        if not self.takes_keys:
            return None
        return jax.random.key_data(_threefry.fold_in(_threefry.fold_in(key, _LOSS_STREAM), index))

    def with_key(self, words: Array | None) -> Self:
        """Return the same oracles, whose losses get their keys from these words."""
        if words is None:
            return self

        def change(samples: Samples, level: int) -> Samples:
            # Levels whose rows have the same numbers must not have the same keys.
            own = words ^ jnp.array([0, level], jnp.uint32)
            return samples if samples.key_words is None else replace(samples, key_words=own)

        return replace(self, inner_samples=change(self.inner_samples, 0), outer_samples=change(self.outer_samples, 1))

    def project(self, outer_var: PyTree) -> PyTree:
        """Return the outer variable clipped to its bounds."""
        return outer_var if self.outer_bounds is None else jax.tree.map(jnp.clip, outer_var, *self.outer_bounds)

    def with_batches(self, batch_size: int, sampling: str, outer_batch_size: int | None = None) -> Self:
        """Return the same oracles, drawing batches of this size in this way; on the outer level of its own size."""
        outer_size = batch_size if outer_batch_size is None else outer_batch_size
        inner = self.inner_samples.with_batches(batch_size, sampling)
        outer = inner if self.shares_rows else self.outer_samples.with_batches(outer_size, sampling)
        return replace(self, inner_samples=inner, outer_samples=outer)

    def for_one_run(self) -> Self:
        """Return the same oracles, computing as is fastest on a CPU in steps that no ``vmap`` batches."""
        return self

    def astype(self, dtype: DTypeLike) -> Self:
        """Return the same oracles in another floating type."""
        return self._map(lambda samples: samples.astype(dtype), partial(trees.cast, dtype=dtype))

    def in_float64(self) -> Self:
        """Return the same oracles computing in float64, the rows held as they are."""
        return self._map(Samples.in_float64, partial(trees.cast, dtype=np.float64))

    def _map(self, of_samples: Callable[[Any], Any], of_leaf: Callable[[Any], Any]) -> Self:
        def change(part: Any) -> Any:
            return of_samples(part) if isinstance(part, Samples) else of_leaf(part)

        return jax.tree.map(change, self, is_leaf=lambda part: isinstance(part, Samples))


def estimate(function: Callable[..., Any], point: Point, samples: Samples, rows: Any) -> Any:
    """Return the function at a point on drawn rows, or on all of them."""
    if rows is None and samples.is_read_in_pieces:
        return samples.mean(partial(function, point))
    return function(point, *samples.take(rows))


def join(inner: InnerPass, outer: OuterPass) -> Point:
    """Return the direction that derivatives of G and of F make together."""
    return Point(inner.grad, trees.add(inner.cross, outer.grad_outer), trees.add(inner.hvp, outer.grad))

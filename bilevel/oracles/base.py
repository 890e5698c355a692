"""Derivatives of a bilevel problem at a point, on drawn rows or on all rows: what a solver may ask of a problem."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from bilevel._core import threefry, trees
from bilevel._core.types import Array, Count, InnerPass, OuterPass, Point, PyTree, Rows
from bilevel.oracles.host_samples import HostSamples, Reader
from bilevel.oracles.outer_terms import OuterTerm
from bilevel.oracles.samples import STATIC, Samples

_INNER_STREAM, _OUTER_STREAM = 0, 1
_LOSS_STREAM = 3  # solvers draw lengths and coins from stream 2


@dataclass(frozen=True)
class Oracles(ABC):
    """Derivatives of F and G at a point; ``rows=None`` means all rows.

    A subclass implements the five abstract methods, each a sum over given rows with given weights. Select a single
    derivative from its bundle: under ``jit``, derivatives that are not used are not computed.

    Attributes
    ----------
    inner_samples, outer_samples : the data of each level, which also draw, take and count rows
    outer_bounds : (lower, upper) pytrees like the outer variable, or None
    outer_term : R, which is added to the objective and is not part of F and its derivatives; or None
    full_inner : whether each batch of a run has all inner rows, so that batch sizes are those of the outer level
    """

    inner_samples: Samples
    outer_samples: Samples
    outer_bounds: tuple[PyTree, PyTree] | None = None
    outer_term: OuterTerm | None = None
    full_inner: bool = field(default=False, metadata=STATIC)

    has_row_diagonals: ClassVar[bool] = False  # True if `_row_diagonals` and the two methods after it are implemented
    wide_bounds: ClassVar[tuple[float, float] | None] = None  # of x, beyond which the model barely changes
    is_sharded: ClassVar[bool] = False  # True if the rows lie on several devices
    holds_only_rows: ClassVar[bool] = False  # True if no other field has a size that depends on the number of rows
    shares_rows: ClassVar[bool] = False  # True if both levels have the same rows, so that one batch serves both

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

    _jvp: ClassVar[Callable[..., Any]] = staticmethod(jax.jvp)  # the derivative of a function along tangents

    def _inner_tangents(
        self, v: PyTree, u: PyTree, point: Point, data: PyTree, weights: Array
    ) -> tuple[PyTree, PyTree]:
        """Return ∇z G and its derivatives along pairs of directions of z and x."""

        def gradient(z: PyTree, x: PyTree) -> PyTree:
            return self._inner(point._replace(inner_var=z, outer_var=x), data, weights).grad

        return jax.vmap(lambda *pair: self._jvp(gradient, point[:2], pair), out_axes=(None, 0))(v, u)

    def _row_diagonals(self, point: Point, data: PyTree, weights: Array, *, power: int, majorize: bool) -> PyTree:
        """Return sum(weights * h_i**power), with h_i the diagonal of the Hessian of row i, or a majorizer of it."""
        raise NotImplementedError

    def _diagonal_regularization(self, point: Point) -> PyTree:
        """Return the part of the diagonal that is not a sum over rows."""
        return trees.zeros_like(point.inner_var)

    def _majorized_product(self, point: Point, data: PyTree, weights: Array) -> PyTree:
        """Return the product with v of a matrix whose diagonal is the majorizer."""
        return self._inner(point, data, weights).hvp

    # Derivatives

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

    def inner_tangents(self, point: Point, v: PyTree, u: PyTree, rows: Any = None) -> tuple[PyTree, PyTree]:
        """Return ∇z G, and (∇²zz G) v + (∇²zx G) u for pairs of directions that are stacked along a leading axis.

        Each pair counts as one `hvp` and one `cross`: (∇²zx G) u is a product with the transpose of the same matrix.
        """
        return estimate(partial(self._inner_tangents, v, u), point, self.inner_samples, rows)

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

    def average(self, function: Callable[..., PyTree], *arguments: Any) -> PyTree:
        """Return ``function(oracles, *arguments)``, averaged over the devices on which the rows lie."""
        return function(self, *arguments)

    def average_outer(self, outer_var: PyTree) -> PyTree:
        """Return a derivative by x that a solver computed on its own, averaged over the tasks of a batch."""
        return outer_var

    def objective(self, outer_value: Any, outer_var: PyTree) -> Any:
        """Return a value of F or of h plus the outer term."""
        return outer_value if self.outer_term is None else outer_value + self.outer_term.value(outer_var)

    def project(self, outer_var: PyTree) -> PyTree:
        """Return the outer variable clipped to its bounds."""
        return outer_var if self.outer_bounds is None else jax.tree.map(jnp.clip, outer_var, *self.outer_bounds)

    @property
    def largest_curvature(self) -> float | None:
        """The largest eigenvalue of ∇²zz G if it is known and the same everywhere, else None."""
        return None

    # Rows, which are the concern of the samples of each level

    @property
    def n_inner(self) -> int:
        """Number of inner samples."""
        return self.inner_samples.n

    @property
    def n_outer(self) -> int:
        """Number of outer samples."""
        return self.outer_samples.n

    @property
    def n_processes(self) -> int:
        """Number of processes whose devices hold rows."""
        return 1

    def count_inner(self, rows: Any, batches: int | None = None, first: Count | None = None) -> Count:
        """Return the number of inner rows in a batch, in several batches together, or in the ``first`` of them."""
        return self.inner_samples.count(rows, batches, first)

    def count_outer(self, rows: Any, batches: int | None = None) -> Count:
        """Return the number of outer rows in a batch, or in several batches together."""
        return self.outer_samples.count(rows, batches)

    def draw_inner(self, key: Array, index: Array, count: int | None = None) -> Any:
        """Draw inner rows for step ``index``: one batch, or ``count`` batches along a leading axis."""
        return self.inner_samples.draw(threefry.fold_in(key, _INNER_STREAM), index, count)

    def draw_outer(self, key: Array, index: Array, count: int | None = None) -> Any:
        """Draw outer rows for step ``index``, independently of the inner ones."""
        return self.outer_samples.draw(threefry.fold_in(key, _OUTER_STREAM), index, count)

    def draw(self, key: Array, index: Array) -> Rows:
        """Draw one batch on each level, or one batch for both levels if they share their rows."""
        inner = self.draw_inner(key, index)
        return Rows(inner, inner if self.shares_rows else self.draw_outer(key, index))

    @property
    def readers(self) -> list[Reader]:
        """The readers of the levels whose rows stay on the host."""
        return [level.reader for level in self._levels if isinstance(level, HostSamples)]

    @property
    def is_on_host(self) -> bool:
        """Whether the rows of a level stay on the host and are read when they are needed."""
        return any(isinstance(level, HostSamples) for level in self._levels)

    def recording(self) -> Self:
        """Return the same oracles, which record draws of rows that stay on the host."""
        return self._on(*(level.recording() if isinstance(level, HostSamples) else level for level in self._levels))

    def recorded(self) -> Rows:
        """Return the draws of each level since `recording` along one axis; None for rows on the device."""
        return Rows(*(level.recorded() if isinstance(level, HostSamples) else None for level in self._levels))

    @property
    def takes_keys(self) -> bool:
        """Whether a loss is random and takes a key."""
        return any(level.key_words is not None for level in self._levels)

    def step_key(self, key: Array, index: Array) -> Array | None:
        """Return the words of the key for the losses in step ``index``, or None if no loss takes a key."""
        if not self.takes_keys:
            return None
        return jax.random.key_data(threefry.fold_in(threefry.fold_in(key, _LOSS_STREAM), index))

    def with_key(self, words: Array | None) -> Self:
        """Return the same oracles, whose losses derive their keys from these words."""
        if words is None:
            return self
        return self._on(self.inner_samples.with_key(words, level=0), self.outer_samples.with_key(words, level=1))

    def with_batches(self, batch_size: int, sampling: str, outer_batch_size: int | None = None) -> Self:
        """Return the same oracles, which draw batches of these sizes; both levels have the same size by default."""
        outer_size = batch_size if outer_batch_size is None else outer_batch_size
        inner = self.inner_samples.with_batches(batch_size, sampling)
        return self._on(inner, inner if self.shares_rows else self.outer_samples.with_batches(outer_size, sampling))

    def for_one_run(self) -> Self:
        """Return the same oracles in the form that is fastest on a CPU if ``vmap`` does not batch the steps."""
        return self

    def astype(self, dtype: DTypeLike) -> Self:
        """Return the same oracles in another floating type."""
        return self._map(lambda samples: samples.astype(dtype), partial(trees.cast, dtype=dtype))

    def in_float64(self) -> Self:
        """Return the same oracles, which compute in float64 while the rows stay in their type."""
        return self._map(Samples.in_float64, partial(trees.cast, dtype=np.float64))

    @property
    def _levels(self) -> tuple[Samples, Samples]:
        return self.inner_samples, self.outer_samples

    def _on(self, inner: Samples, outer: Samples) -> Self:
        return replace(self, inner_samples=inner, outer_samples=outer)

    def _map(self, of_samples: Callable[[Any], Any], of_leaf: Callable[[Any], Any]) -> Self:
        def change(part: Any) -> Any:
            return of_samples(part) if isinstance(part, Samples) else of_leaf(part)

        return jax.tree.map(change, self, is_leaf=lambda part: isinstance(part, Samples))


def estimate(function: Callable[..., Any], point: Point, samples: Samples, rows: Any) -> Any:
    """Return the function at a point on drawn rows, or on all rows."""
    if rows is None and samples.is_read_in_pieces:
        return samples.mean(partial(function, point))
    return function(point, *samples.take(rows))


def join(inner: InnerPass, outer: OuterPass) -> Point:
    """Return the direction D from the derivatives of G and of F."""
    return Point(inner.grad, trees.add(inner.cross, outer.grad_outer), trees.add(inner.hvp, outer.grad))

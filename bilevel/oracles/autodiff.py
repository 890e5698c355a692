"""Oracles of per-sample losses, by automatic differentiation."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from bilevel import _tree as trees
from bilevel._types import Array, InnerPass, OuterPass, Point, PyTree
from bilevel.oracles.base import Oracles
from bilevel.oracles.convolutions import channels_last
from bilevel.oracles.samples import PIECE, STATIC, Samples

FEW_ROWS = 512  # keep a processor busy in a pass
Loss = Callable[..., Array]  # of inner_var, outer_var, a sample or a batch, and perhaps a key


def takes_key(loss: Loss) -> bool:
    """Tell whether a loss has an argument `key`, and so is random."""
    try:
        return "key" in inspect.signature(loss).parameters
    except (TypeError, ValueError):  # some callables have no signature
        return False


def checked(name: str, loss: Loss, rows: int | None = None) -> Callable[[PyTree, PyTree, PyTree], Array]:
    """Return the loss, looked at each time that JAX traces it: a user's may answer differently from time to time.

    It is of one sample, or of so many ``rows``; a loss that takes a key finds the words of its keys beside the data.
    """
    of = "one sample" if rows is None else "a batch"

    def answer(inner_var: PyTree, outer_var: PyTree, data: PyTree) -> Array:
        more = {}
        if takes_key(loss):
            data, words = data
            more = {"key": jax.random.wrap_key_data(words if rows is None else words[0], impl="threefry2x32")}
        try:
            found = loss(inner_var, outer_var, data, **more)
            array = None if isinstance(found, tuple | list | dict | None) else jnp.asarray(found)
        except Exception as error:
            shapes = jax.tree.map(np.shape, (inner_var, outer_var, data))
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise ValueError(f"`{name}` failed on {of}; its arguments have shapes {shapes}: {reason}") from error
        due = "one real scalar for one sample" if rows is None else f"a real number for each of its {rows} rows"
        if array is None:
            way = "return the loss alone, without auxiliary outputs; other numbers can be `metrics` of the problem"
            raise ValueError(f"`{name}` must return {due}, got a {type(found).__name__}; {way}.")
        if array.shape != (() if rows is None else (rows,)) or not jnp.issubdtype(array.dtype, jnp.floating):
            got = f"{array.dtype}{list(array.shape)}"
            way = "sum or average it" if rows is None else "it is averaged for you, with the weights of the rows"
            raise ValueError(f"`{name}` must return {due}, got {got}; {way}.")
        return found

    return answer


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class AutodiffOracles(Oracles):
    """Derivatives of ``loss(inner_var, outer_var, sample) -> scalar`` on any pytrees.

    A loss of a whole batch is marked as such; its rows are along the first axis, and it returns a number for each.

    Attributes
    ----------
    accumulate : into how many parts a batch is cut, which are read one after the other and added up
    compute_dtype : what losses compute in, where runs do so in float32; None for float32 too
    convolves : whether a loss has convolutions, which are rearranged on a CPU
    """

    inner_loss: Loss = field(metadata=STATIC)
    outer_loss: Loss = field(metadata=STATIC)
    inner_of_batch: bool = field(default=False, metadata=STATIC)
    outer_of_batch: bool = field(default=False, metadata=STATIC)
    accumulate: int = field(default=1, metadata=STATIC)
    compute_dtype: str | None = field(default=None, metadata=STATIC)
    convolves: bool = field(default=False, metadata=STATIC)

    holds_only_rows = True

    def _inner(self, point: Point, data: PyTree, weights: Array) -> InnerPass:
        return self._in_parts(self._inner_rows, "inner", point, data, weights)

    def _inner_rows(self, point: Point, data: PyTree, weights: Array) -> InnerPass:
        gradients = jax.grad(self._mean("inner", data, weights), argnums=(0, 1))
        # Moving z along v gives the Hessian-vector and the cross product with the gradient.
        (grad, _), (hvp, cross) = jax.jvp(gradients, point[:2], (point.v, trees.zeros_like(point.outer_var)))
        return InnerPass(grad, hvp, cross)

    def _inner_grad_outer(self, point: Point, data: PyTree, weights: Array) -> PyTree:
        def rows(point: Point, data: PyTree, weights: Array) -> PyTree:
            return jax.grad(self._mean("inner", data, weights), argnums=1)(*point[:2])

        return self._in_parts(rows, "inner", point, data, weights)

    def _outer(self, point: Point, data: PyTree, weights: Array) -> OuterPass:
        def rows(point: Point, data: PyTree, weights: Array) -> OuterPass:
            return OuterPass(*jax.grad(self._mean("outer", data, weights), argnums=(0, 1))(*point[:2]))

        return self._in_parts(rows, "outer", point, data, weights)

    def _inner_value(self, point: Point, data: PyTree, weights: Array) -> Array:
        return self._arrange(self._mean("inner", data, weights))(*point[:2])

    def _outer_value(self, point: Point, data: PyTree, weights: Array) -> Array:
        return self._arrange(self._mean("outer", data, weights))(*point[:2])

    def with_batches(self, batch_size: int, sampling: str, outer_batch_size: int | None = None) -> Self:
        drawn = Oracles.with_batches(self, batch_size, sampling, outer_batch_size)
        for name, samples in (("batch_size", drawn.inner_samples), ("outer_batch_size", drawn.outer_samples)):
            if samples.batch_size % self.accumulate:
                told = f"`accumulate={self.accumulate}` does not divide `{name}={samples.batch_size}`"
                raise ValueError(f"{told}; take a multiple of it.")
        levels = self._in_pieces(drawn.inner_samples), self._in_pieces(drawn.outer_samples)
        return replace(drawn, inner_samples=levels[0], outer_samples=levels[1])

    def _in_pieces(self, samples: Samples) -> Samples:
        """Return the samples, of which a pass takes no more memory than a step, or a few rows do."""
        if self.accumulate > 1:
            return replace(samples, piece=samples.batch_size // self.accumulate)
        piece = min(PIECE, max(samples.batch_size, FEW_ROWS))
        return samples if samples.piece is not None or samples.n <= piece else replace(samples, piece=piece)

    def _arrange(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return channels_last(function) if self.convolves and jax.default_backend() == "cpu" else function

    def _in_parts(self, function: Callable[..., Any], level: str, point: Point, data: PyTree, weights: Array) -> Any:
        """Return a sum over weighted rows, of the parts of a batch one after the other."""
        parts, function = self.accumulate, self._arrange(function)
        if parts == 1 or weights.size % parts:  # a pass over all rows is read in pieces already
            return function(point, data, weights)
        axes = (self.inner_samples if level == "inner" else self.outer_samples).row_axes

        def cut(axis: int, leaf: Array) -> Array:
            shape = (*leaf.shape[:axis], parts, leaf.shape[axis] // parts, *leaf.shape[axis + 1 :])
            return jnp.moveaxis(leaf.reshape(shape), axis, 0)

        def add(total: PyTree, part: tuple[PyTree, Array]) -> tuple[PyTree, None]:
            return trees.add(total, function(point, *part)), None

        cuts = jax.tree.map(cut, axes, data), weights.reshape(parts, -1)
        first = jax.tree.map(lambda leaf: leaf[0], cuts)
        nothing = trees.zeros_like(jax.eval_shape(lambda: function(point, *first)))
        return jax.lax.scan(add, nothing, cuts)[0]

    def _mean(self, level: str, data: PyTree, weights: Array) -> Callable[[PyTree, PyTree], Array]:
        is_inner = level == "inner"
        loss, samples = (self.inner_loss, self.inner_samples) if is_inner else (self.outer_loss, self.outer_samples)
        if self.inner_of_batch if is_inner else self.outer_of_batch:
            losses = checked(f"{level}_batch_loss", loss, weights.size)
        else:
            losses = jax.vmap(checked(f"{level}_loss", loss), in_axes=(None, None, samples.row_axes))
        if self.compute_dtype is None or self.inner_samples.dtype != np.float32:
            return lambda inner_var, outer_var: jnp.sum(weights * losses(inner_var, outer_var, data))
        narrow = partial(trees.cast, dtype=self.compute_dtype)

        def mean(inner_var: PyTree, outer_var: PyTree) -> Array:
            # Variables, sums and derivatives stay in float32; JAX casts the derivatives back.
            found = losses(narrow(inner_var), narrow(outer_var), narrow(data))
            return jnp.sum(weights * found.astype(weights.dtype))

        return mean


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DifferenceOracles(AutodiffOracles):
    """First derivatives of losses, and products with second ones as central differences of gradients.

        (∇²zz G) v ≈ (∇z G(z + δ v, x) - ∇z G(z - δ v, x)) / 2δ,   δ ||v|| = ε^⅓ (1 + ||z||),   ε the unit of rounding

    and (∇²xz G) v likewise. The relative error is of the order of ε^⅔: 1e-10 in float64, 1e-5 in float32. A product
    takes two gradients and counts as the product that it stands for.
    """

    def _inner_rows(self, point: Point, data: PyTree, weights: Array) -> InnerPass:
        z, x, v = point
        gradients = jax.grad(self._mean("inner", data, weights), argnums=(0, 1))
        length, reach = jnp.sqrt(trees.norm_sq(v)), 1 + jnp.sqrt(trees.norm_sq(z))
        # Along v = 0 any step will do.
        step = jnp.finfo(length.dtype).eps ** (1 / 3) * reach / jnp.where(length > 0, length, 1)
        shift = trees.scale(step, v)
        change = trees.subtract(gradients(trees.add(z, shift), x), gradients(trees.subtract(z, shift), x))
        return InnerPass(gradients(z, x)[0], *trees.scale(1 / (2 * step), change))

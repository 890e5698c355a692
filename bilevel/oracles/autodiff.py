"""Oracles of losses of one sample or of a batch, by automatic differentiation."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun

from bilevel._core import trees
from bilevel._core.types import Array, InnerPass, OuterPass, Point, PyTree
from bilevel.oracles.base import Oracles
from bilevel.oracles.samples import PIECE, STATIC, Samples

_CONVOLUTION = inspect.signature(lax.conv_general_dilated).parameters.keys()
_BUSY_ROWS = 512  # number of rows that keeps a processor busy in a full-batch pass
Loss = Callable[..., Array]  # of inner_var, outer_var, a sample or a batch, and optionally a key


@dataclass(frozen=True)
class BatchLoss:
    """A loss of a batch, which replaces a loss of one sample in :meth:`bilevel.BilevelProblem.from_losses`.

    Use it for vectorized code, or if the rows of a batch depend on each other.

    Parameters
    ----------
    loss : ``loss(inner_var, outer_var, batch) -> one number per row``, in jax.numpy; the first axis of each leaf of the
        batch is the rows
    """

    loss: Loss


def takes_key(loss: Loss | BatchLoss) -> bool:
    """Return True if a loss has an argument `key`, which makes it random."""
    try:
        return "key" in inspect.signature(loss.loss if isinstance(loss, BatchLoss) else loss).parameters
    except (TypeError, ValueError):  # some callables have no signature
        return False


def checked(name: str, loss: Loss, rows: int | None = None) -> Callable[[PyTree, PyTree, PyTree], Array]:
    """Return the loss with a check of its result each time that JAX traces it, since its result may change.

    It is a loss of one sample if ``rows`` is None, and otherwise of a batch of ``rows`` rows. The data of a loss that
    takes a key are paired with the words of the key.
    """
    of = "one sample" if rows is None else "a batch"

    def checked_loss(inner_var: PyTree, outer_var: PyTree, data: PyTree) -> Array:
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
            way = "return only the loss, without auxiliary outputs; other numbers can be `metrics` of the problem"
            raise ValueError(f"`{name}` must return {due}, got a {type(found).__name__}; {way}.")
        if array.shape != (() if rows is None else (rows,)) or not jnp.issubdtype(array.dtype, jnp.floating):
            got = f"{array.dtype}{list(array.shape)}"
            way = "sum or average it" if rows is None else "it is averaged for you, with the weights of the rows"
            raise ValueError(f"`{name}` must return {due}, got {got}; {way}.")
        return found

    return checked_loss


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class AutodiffOracles(Oracles):
    """Derivatives of ``loss(inner_var, outer_var, sample) -> scalar`` on any pytrees.

    Attributes
    ----------
    inner_loss, outer_loss : the losses
    accumulate : number of parts of a batch that are read one after the other and added up
    compute_dtype : dtype in which losses compute if runs are in float32; None means float32
    convolves : whether a loss has convolutions, whose axes are then reordered on a CPU
    """

    inner_loss: Loss | BatchLoss = field(metadata=STATIC)
    outer_loss: Loss | BatchLoss = field(metadata=STATIC)
    accumulate: int = field(default=1, metadata=STATIC)
    compute_dtype: str | None = field(default=None, metadata=STATIC)
    convolves: bool = field(default=False, metadata=STATIC)

    holds_only_rows = True

    def level(self, name: str) -> tuple[Loss, Samples, bool]:
        """Return the loss and the samples of the "inner" or "outer" level, and whether the loss takes a batch."""
        is_inner = name == "inner"
        loss, samples = (self.inner_loss, self.inner_samples) if is_inner else (self.outer_loss, self.outer_samples)
        return (loss.loss, samples, True) if isinstance(loss, BatchLoss) else (loss, samples, False)

    def _inner(self, point: Point, data: PyTree, weights: Array) -> InnerPass:
        return self._in_parts(self._inner_rows, "inner", point, data, weights)

    def _inner_rows(self, point: Point, data: PyTree, weights: Array) -> InnerPass:
        gradients = jax.grad(self._mean("inner", data, weights), argnums=(0, 1))
        # Moving z along v gives the Hessian-vector and the cross product with the gradient.
        (grad, _), (hvp, cross) = self._jvp(gradients, point[:2], (point.v, trees.zeros_like(point.outer_var)))
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
        drawn = super().with_batches(batch_size, sampling, outer_batch_size)
        for name, samples in (("batch_size", drawn.inner_samples), ("outer_batch_size", drawn.outer_samples)):
            if samples.batch_size % self.accumulate:
                wrong = f"`accumulate={self.accumulate}` does not divide `{name}={samples.batch_size}`"
                raise ValueError(f"{wrong}; take a multiple of it.")
        return drawn._on(self._in_pieces(drawn.inner_samples), self._in_pieces(drawn.outer_samples))

    def _in_pieces(self, samples: Samples) -> Samples:
        """Return the samples, whose full-batch passes need at most the memory of a step, or that of few rows."""
        if self.accumulate > 1:
            return replace(samples, piece=samples.batch_size // self.accumulate)
        piece = min(PIECE, max(samples.batch_size, _BUSY_ROWS))
        return samples if samples.piece is not None or samples.n <= piece else replace(samples, piece=piece)

    def _arrange(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return channels_last(function) if self.convolves and jax.default_backend() == "cpu" else function

    def _in_parts(self, function: Callable[..., Any], level: str, point: Point, data: PyTree, weights: Array) -> Any:
        """Return a weighted sum over rows, computed for one part of the batch after the other."""
        parts, function = self.accumulate, self._arrange(function)
        if parts == 1 or weights.size % parts:  # a full-batch pass is read in pieces already
            return function(point, data, weights)
        axes = self.level(level)[1].row_axes

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
        loss, samples, of_batch = self.level(level)
        if of_batch:
            losses = checked(f"{level}_loss", loss, weights.size)
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
    """First derivatives of losses; products with second derivatives are central differences of gradients.

        (∇²zz G) v ≈ (∇z G(z + δ v, x) - ∇z G(z - δ v, x)) / 2δ,   δ ||v|| = ε^⅓ (1 + ||z||),   ε the unit of rounding

    and (∇²xz G) v and derivatives along x likewise. The relative error is of the order of ε^⅔: 1e-10 in float64, 1e-5
    in float32. A product computed from two gradients is counted as one product.
    """

    @staticmethod
    def _jvp(function: Callable[..., PyTree], primals: tuple[PyTree, PyTree], tangents: PyTree) -> tuple[Any, Any]:
        length, reach = jnp.sqrt(trees.norm_sq(tangents)), 1 + jnp.sqrt(trees.norm_sq(primals[0]))
        # If all tangents are 0, the difference is 0 for any step.
        step = jnp.finfo(length.dtype).eps ** (1 / 3) * reach / jnp.where(length > 0, length, 1)
        shift = trees.scale(step, tangents)
        change = trees.subtract(function(*trees.add(primals, shift)), function(*trees.subtract(primals, shift)))
        return function(*primals), trees.scale(1 / (2 * step), change)


def has_convolutions(traced: Any) -> bool:
    """Return True if a traced function has convolutions, directly or in functions that it calls."""
    return any(
        equation.primitive is lax.conv_general_dilated_p or any(map(has_convolutions, _called_by(equation)))
        for equation in traced.eqns
    )


def channels_last(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function, whose convolutions have their axes in the order that is fastest on a CPU.

    That order is the only one for which XLA calls its library: batch first, channels last, kernels in between. Outside
    of loops XLA reorders the axes by itself. Inside a loop it does not, and the derivatives of a convolution, which
    have another order, are then computed by plain loops that take ten times as long.
    """

    def reordered(*arguments: Any) -> Any:
        traced, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        found = jaxpr_as_fun(_with_changes(traced, _rearrange))(*jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(shapes), found)

    return reordered


def _rearrange(equation: JaxprEqn) -> JaxprEqn:
    if equation.primitive is not lax.conv_general_dilated_p or not equation.params.keys() <= _CONVOLUTION:
        return equation  # a slow one, if a later JAX has parameters that its function does not take
    inputs = (variable.aval for variable in equation.invars)
    # A call with the same variables replaces the convolution.
    (call,) = jax.make_jaxpr(jax.jit(lambda images, kernel: _convolve(images, kernel, equation.params)))(*inputs).eqns
    return call.replace(invars=equation.invars, outvars=equation.outvars)


def _convolve(images: Array, kernel: Array, params: dict[str, Any]) -> Array:
    given, last = params["dimension_numbers"], images.ndim - 1
    between = tuple(range(1, last))
    (batch, channels, *space), (outputs, inputs, *window) = given.lhs_spec, given.rhs_spec
    images = lax.transpose(images, (batch, *space, channels))
    kernel = lax.transpose(kernel, (*window, inputs, outputs))
    order = lax.ConvDimensionNumbers((0, last, *between), (last, last - 1, *range(last - 1)), (0, last, *between))
    found = lax.conv_general_dilated(images, kernel, **params | {"dimension_numbers": order})
    places = dict(zip(given.out_spec, order.out_spec, strict=True))
    return lax.transpose(found, [places[axis] for axis in range(images.ndim)])


def _with_changes(traced: Any, change: Callable[[JaxprEqn], JaxprEqn]) -> Any:
    """Return a traced function with each equation changed, after those of the functions that it calls."""
    if not isinstance(traced, Jaxpr):
        return traced.replace(jaxpr=_with_changes(traced.jaxpr, change))

    def within(leaf: Any) -> Any:
        return _with_changes(leaf, change) if _is_traced(leaf) else leaf

    def once(equation: JaxprEqn) -> JaxprEqn:
        if _called_by(equation):
            equation = equation.replace(params=jax.tree.map(within, equation.params, is_leaf=_is_traced))
        return change(equation)

    return traced.replace(eqns=[once(equation) for equation in traced.eqns])


def _called_by(equation: JaxprEqn) -> list[Any]:
    """Return the traced functions that an equation calls."""
    return [leaf for leaf in jax.tree.leaves(equation.params, is_leaf=_is_traced) if _is_traced(leaf)]


def _is_traced(value: Any) -> bool:
    return isinstance(value, Jaxpr | ClosedJaxpr)

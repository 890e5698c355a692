"""Convolutions in the one form that XLA hands to its library on a CPU: batch first, channels last, kernels in between.

Outside of loops XLA brings every convolution into that form. Inside a loop it does not, and the derivatives of a
convolution, which have their axes in another order, are computed by plain loops that take ten times as long.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun

from bilevel._types import Array


def has_convolutions(traced: Any) -> bool:
    """Tell whether a traced function has convolutions, in itself or in what it calls."""
    return any(
        equation.primitive is lax.conv_general_dilated_p or any(map(has_convolutions, _called_by(equation)))
        for equation in traced.eqns
    )


def channels_last(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function, whose convolutions have their axes in the order that a CPU computes fastest."""
    return _changed(function, _rearrange)


def _rearrange(equation: JaxprEqn) -> JaxprEqn:
    if equation.primitive is not lax.conv_general_dilated_p:
        return equation
    inputs = (variable.aval for variable in equation.invars)
    # A call stands where the convolution stood, between the same variables.
    (call,) = jax.make_jaxpr(jax.jit(lambda images, kernel: _convolve(images, kernel, equation.params)))(*inputs).eqns
    return call.replace(invars=equation.invars, outvars=equation.outvars)


def _convolve(images: Array, kernel: Array, params: dict[str, Any]) -> Array:
    given, last = params["dimension_numbers"], images.ndim - 1
    between = tuple(range(1, last))
    (batch, channels, *space), (outputs, inputs, *window) = given.lhs_spec, given.rhs_spec
    images = lax.transpose(images, (batch, *space, channels))
    kernel = lax.transpose(kernel, (*window, inputs, outputs))
    order = lax.ConvDimensionNumbers((0, last, *between), (last, last - 1, *range(last - 1)), (0, last, *between))
    found = lax.conv_general_dilated_p.bind(images, kernel, **params | {"dimension_numbers": order})
    places = dict(zip(given.out_spec, order.out_spec, strict=True))
    return lax.transpose(found, [places[axis] for axis in range(images.ndim)])


def _changed(function: Callable[..., Any], change: Callable[[JaxprEqn], JaxprEqn]) -> Callable[..., Any]:
    """Return the same function, with each of its equations as ``change`` returns it."""

    def traced_and_changed(*arguments: Any) -> Any:
        traced, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        found = jaxpr_as_fun(_with_changes(traced, change))(*jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(shapes), found)

    return traced_and_changed


def _with_changes(traced: Any, change: Callable[[JaxprEqn], JaxprEqn]) -> Any:
    """Return a traced function with each equation changed, those of what it calls first."""
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

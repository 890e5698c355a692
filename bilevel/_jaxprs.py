"""Traced functions, looked into and changed equation by equation."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun


def changed(function: Callable[..., Any], change: Callable[[JaxprEqn], JaxprEqn]) -> Callable[..., Any]:
    """Return the same function, with each of its equations as ``change`` returns it."""

    def traced_and_changed(*arguments: Any) -> Any:
        traced, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        found = jaxpr_as_fun(with_changes(traced, change))(*jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(shapes), found)

    return traced_and_changed


def with_changes(traced: Any, change: Callable[[JaxprEqn], JaxprEqn]) -> Any:
    """Return a traced function with each equation changed, those of what it calls first."""
    if not isinstance(traced, Jaxpr):
        return traced.replace(jaxpr=with_changes(traced.jaxpr, change))

    def within(leaf: Any) -> Any:
        return with_changes(leaf, change) if _is_traced(leaf) else leaf

    def once(equation: JaxprEqn) -> JaxprEqn:
        if called_by(equation):
            equation = equation.replace(params=jax.tree.map(within, equation.params, is_leaf=_is_traced))
        return change(equation)

    return traced.replace(eqns=[once(equation) for equation in traced.eqns])


def called_by(equation: JaxprEqn) -> list[Any]:
    """Return the traced functions that an equation calls."""
    return [leaf for leaf in jax.tree.leaves(equation.params, is_leaf=_is_traced) if _is_traced(leaf)]


def _is_traced(value: Any) -> bool:
    return isinstance(value, Jaxpr | ClosedJaxpr)

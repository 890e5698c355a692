"""Losses of one score: how large their second and third derivatives are near a score."""

from collections.abc import Callable
from math import log, sqrt
from typing import NamedTuple

import jax.numpy as jnp

from bilevel.losses import sigmoid
from bilevel.types import Array

_STEEPEST = log(2 + sqrt(3))  # where |l'''| of the logistic loss is largest


class Curve(NamedTuple):
    """A loss l of one score: infimum and supremum of l'', supremum of |l'''| over scores within a reach of it."""

    least_second: Callable[[Array, Array], Array]
    largest_second: Callable[[Array, Array], Array]
    largest_third: Callable[[Array, Array], Array]


def _logistic_second(sizes: Array) -> Array:
    """Return l'' of scores with these absolute values: it is even, and falls with them."""
    missed = sigmoid(-sizes)
    return missed * (1 - missed)


def _logistic_least_second(scores: Array, reach: Array) -> Array:
    return _logistic_second(jnp.abs(scores) + reach)


def _logistic_largest_second(scores: Array, reach: Array) -> Array:
    return _logistic_second(jnp.maximum(jnp.abs(scores) - reach, 0))


def _logistic_largest_third(scores: Array, reach: Array) -> Array:
    sizes = jnp.abs(scores)
    # |l'''| is even, rises up to its peak and falls beyond it.
    nearest = jnp.clip(_STEEPEST, jnp.maximum(sizes - reach, 0), sizes + reach)
    return _logistic_second(nearest) * (1 - 2 * sigmoid(-nearest))


def _one(scores: Array, reach: Array) -> Array:
    return jnp.ones_like(scores)


def _zero(scores: Array, reach: Array) -> Array:
    return jnp.zeros_like(scores)


LOGISTIC = Curve(_logistic_least_second, _logistic_largest_second, _logistic_largest_third)
SQUARED = Curve(_one, _one, _zero)

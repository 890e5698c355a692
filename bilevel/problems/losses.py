"""Losses of one score, with derivatives that XLA turns into short loops, and bounds of their curvature near a score."""

from collections.abc import Callable
from math import log, sqrt
from typing import NamedTuple

import jax
import jax.numpy as jnp

from bilevel._types import Array


@jax.custom_jvp
def softplus(margin: Array) -> Array:
    """Return log(1 + exp(margin)) without overflow."""
    # jax.nn.softplus carries guards for infinite input through both derivatives: a quarter of a step of SRBA.
    return jnp.maximum(margin, 0) + jnp.log1p(jnp.exp(-jnp.abs(margin)))


@jax.custom_jvp
def sigmoid(margin: Array) -> Array:
    """Return 1 / (1 + exp(-margin))."""
    return 1 / (1 + jnp.exp(-margin))


softplus.defjvps(lambda tangent, _, margin: sigmoid(margin) * tangent)
sigmoid.defjvps(lambda tangent, value, _: value * (1 - value) * tangent)


def logistic(margin: Array) -> Array:
    """Return log(1 + exp(-margin)), the loss of a label ±1 times its score."""
    return softplus(-margin)


# Suprema of |σ|, |σ'|, …: of the derivatives of log(1 + exp(s)) from the first on.
_ROOT = sqrt(0.5 - sqrt(105) / 30)
SIGMOID = (1.0, 1 / 4, 1 / (6 * sqrt(3)), 1 / 8, _ROOT * (1 - _ROOT**2) * (2 - 3 * _ROOT**2) / 4)
STEEPEST = log(2 + sqrt(3))  # the score where |l'''| of the logistic loss is largest


class Curve(NamedTuple):
    """A loss l of one score: infimum and supremum of l'', supremum of |l'''| over scores within a reach of it."""

    least_second: Callable[[Array, Array], Array]
    largest_second: Callable[[Array, Array], Array]
    largest_third: Callable[[Array, Array], Array]


def _logistic_second(sizes: Array) -> Array:
    """Return l'' of scores with these absolute values: it is even, and falls with them."""
    slope = sigmoid(-sizes)
    return slope * (1 - slope)


def _logistic_largest_third(scores: Array, reach: Array) -> Array:
    sizes = jnp.abs(scores)
    # |l'''| is even, rises up to its peak and falls beyond it.
    nearest = jnp.clip(STEEPEST, jnp.maximum(sizes - reach, 0), sizes + reach)
    return _logistic_second(nearest) * (1 - 2 * sigmoid(-nearest))


LOGISTIC = Curve(
    least_second=lambda scores, reach: _logistic_second(jnp.abs(scores) + reach),
    largest_second=lambda scores, reach: _logistic_second(jnp.maximum(jnp.abs(scores) - reach, 0)),
    largest_third=_logistic_largest_third,
)
SQUARED = Curve(
    least_second=lambda scores, reach: jnp.ones_like(scores),
    largest_second=lambda scores, reach: jnp.ones_like(scores),
    largest_third=lambda scores, reach: jnp.zeros_like(scores),
)

"""Losses of one sample, with derivatives that XLA turns into short loops."""

import jax
import jax.numpy as jnp

from bilevel._types import Array


@jax.custom_jvp
def softplus(margin: Array) -> Array:
    """Return log(1 + exp(margin)) without overflow.

    ``jax.nn.softplus`` carries guards for infinite input through both derivatives, which costs a
    quarter of a step of SRBA; here the derivative is the plain sigmoid.
    """
    return jnp.maximum(margin, 0) + jnp.log1p(jnp.exp(-jnp.abs(margin)))


@jax.custom_jvp
def sigmoid(margin: Array) -> Array:
    """Return 1 / (1 + exp(-margin))."""
    return 1 / (1 + jnp.exp(-margin))


@softplus.defjvp
def _softplus_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (margin,), (tangent,) = primals, tangents
    return softplus(margin), sigmoid(margin) * tangent


@sigmoid.defjvp
def _sigmoid_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (margin,), (tangent,) = primals, tangents
    value = sigmoid(margin)
    return value, value * (1 - value) * tangent


def logistic(margin: Array) -> Array:
    """Return log(1 + exp(-margin)), the loss of a label ±1 times its score."""
    return softplus(-margin)

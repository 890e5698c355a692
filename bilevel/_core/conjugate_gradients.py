"""Conjugate gradients on pytrees."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from bilevel._core import trees
from bilevel._core.types import Array, Count, PyTree, Scalar


class Conjugate(NamedTuple):
    """The state of conjugate gradients, with the smallest and the largest curvature along all directions."""

    solution: PyTree
    residual: PyTree
    direction: PyTree
    residual_sq: Array
    products: Array
    least_curvature: Array
    largest_curvature: Array


def conjugate_gradients(
    multiply: Callable[[PyTree], PyTree], right: PyTree, residual_sq: Scalar, limit: Count
) -> Conjugate:
    """Solve a symmetric system from 0 until the squared residual is small or negative curvature is found.

    Parameters
    ----------
    multiply : the product with the matrix
    right : the right-hand side
    residual_sq : squared norm of the residual at which the solve ends
    limit : largest number of products
    """

    def unfinished(state: Conjugate) -> Array:
        return (state.residual_sq > residual_sq) & (state.products < limit) & (state.least_curvature > 0)

    def step(state: Conjugate) -> Conjugate:
        product = multiply(state.direction)
        curved = trees.dot(state.direction, product)
        length = jnp.where(curved > 0, state.residual_sq / jnp.where(curved > 0, curved, 1), 0)
        residual = trees.subtract(state.residual, trees.scale(length, product))
        solution, new_sq = trees.add(state.solution, trees.scale(length, state.direction)), trees.norm_sq(residual)
        direction = trees.add(residual, trees.scale(new_sq / state.residual_sq, state.direction))
        curvature = curved / trees.norm_sq(state.direction)
        least, largest = state.least_curvature, state.largest_curvature
        extremes = jnp.minimum(least, curvature), jnp.maximum(largest, jnp.abs(curvature))
        return Conjugate(solution, residual, direction, new_sq, state.products + 1, *extremes)

    first_sq = trees.norm_sq(right)
    extremes = jnp.full_like(first_sq, jnp.inf), jnp.zeros_like(first_sq)
    start = Conjugate(trees.zeros_like(right), right, right, first_sq, jnp.int32(0), *extremes)
    return jax.lax.while_loop(unfinished, step, start)

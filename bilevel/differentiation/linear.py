"""Solutions of linear systems given by products, on pytrees: conjugate gradients, GMRES, BiCGStab, series, a matrix."""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.scipy.sparse import linalg

from bilevel._core import trees
from bilevel._core.linear import conjugate_gradients
from bilevel._core.types import Array, PyTree, Scalar

Multiply: TypeAlias = Callable[[PyTree], PyTree]  # a linear function of a tree, which returns a tree like it
SPARE = 100.0  # solutions are computed to the tolerance divided by this
LARGEST_MATRIX = 256  # unknowns up to which systems are solved by a matrix unless another method is chosen


def by_matrix(multiply: Multiply, right: PyTree, accuracy: Scalar, limit: int) -> PyTree:
    """Solve a system of any form by its matrix, at the cost of one product per unknown."""
    flat, tree_of = ravel_pytree(right)
    columns = jax.vmap(lambda unit: ravel_pytree(multiply(tree_of(unit)))[0])(jnp.eye(flat.size, dtype=flat.dtype))
    return tree_of(jnp.linalg.solve(columns.T, flat))


def by_conjugate_gradients(multiply: Multiply, right: PyTree, accuracy: Scalar, limit: int) -> PyTree:
    """Solve a system whose matrix is symmetric and positive or negative definite, as is a Hessian at an extremum."""
    # Products with a negative definite matrix, such as that of a maximum, are taken with the other sign.
    sign = jnp.where(trees.dot(right, multiply(right)) < 0, -1, 1).astype(jnp.result_type(*jax.tree.leaves(right)))
    goal = accuracy**2 * trees.norm_sq(right)
    found = conjugate_gradients(lambda v: trees.scale(sign, multiply(v)), right, goal, limit)
    return trees.scale(sign, found.solution)


def by_gmres(multiply: Multiply, right: PyTree, accuracy: Scalar, limit: int) -> PyTree:
    """Solve a system of any form by GMRES, restarted after 20 products."""
    return linalg.gmres(multiply, right, tol=accuracy, maxiter=max(1, limit // 20), restart=20)[0]


def by_bicgstab(multiply: Multiply, right: PyTree, accuracy: Scalar, limit: int) -> PyTree:
    """Solve a system of any form by BiCGStab, with two products per iteration."""
    return linalg.bicgstab(multiply, right, tol=accuracy, maxiter=max(1, limit // 2))[0]


def by_series(multiply: Multiply, right: PyTree, accuracy: Scalar, limit: int) -> PyTree:
    """Solve (I - A) w = right by the series right + A right + A² right + …, which requires that the powers vanish."""
    goal = accuracy**2 * trees.norm_sq(right)

    def unfinished(state: tuple[PyTree, PyTree, Array]) -> Array:
        return (trees.norm_sq(state[1]) > goal) & (state[2] < limit)

    def step(state: tuple[PyTree, PyTree, Array]) -> tuple[PyTree, PyTree, Array]:
        solution, residual, products = state
        return trees.add(solution, residual), trees.subtract(residual, multiply(residual)), products + 1

    start = trees.zeros_like(right), right, jnp.int32(0)
    return jax.lax.while_loop(unfinished, step, start)[0]


def by_conjugate_gradients_or_gmres(multiply: Multiply, right: PyTree, accuracy: Scalar, limit: int) -> PyTree:
    """Solve a system by conjugate gradients and, if that fails because it is not symmetric or definite, by GMRES."""
    found = by_conjugate_gradients(multiply, right, accuracy, limit)
    is_solved = is_solution(multiply, found, right, SPARE * accuracy)
    return jax.lax.cond(is_solved, lambda: found, lambda: by_gmres(multiply, right, accuracy, limit))


def is_solution(multiply: Multiply, found: PyTree, right: PyTree, tolerance: Scalar) -> Array:
    """Return whether the relative residual is at most the tolerance."""
    return trees.norm_sq(trees.subtract(multiply(found), right)) <= tolerance**2 * trees.norm_sq(right)


METHODS = {
    "dense": by_matrix,
    "cg": by_conjugate_gradients,
    "cg or gmres": by_conjugate_gradients_or_gmres,
    "gmres": by_gmres,
    "bicgstab": by_bicgstab,
    "neumann": by_series,
}

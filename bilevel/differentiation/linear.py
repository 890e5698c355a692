"""Solutions of linear systems given by products: conjugate gradients, GMRES, BiCGStab, series, a matrix.

Every method takes the product with the matrix, the right-hand side, the norm of the residual at which it may end, and
the largest number of products.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.scipy.sparse import linalg

from bilevel._core.conjugate_gradients import conjugate_gradients
from bilevel._core.types import Array, Count, Scalar

Multiply: TypeAlias = Callable[[Array], Array]  # the product of a matrix with a vector
LARGEST_MATRIX = 256  # unknowns up to which systems are solved by a matrix unless another method is chosen
_MOST_ROUNDS = 3  # of a method; each round after the first solves for the residual of the one before
_RESTART = 20  # directions of GMRES


def solve_dense(multiply: Multiply, right: Array, goal: Scalar, limit: Count) -> Array:
    """Solve a system of any form by its matrix, at the cost of one product per unknown."""
    columns = jax.vmap(multiply)(jnp.eye(right.size, dtype=right.dtype))
    return jnp.linalg.solve(columns.T, right)


def solve_cg(multiply: Multiply, right: Array, goal: Scalar, limit: Count) -> Array:
    """Solve a system whose matrix is symmetric and positive or negative definite, as is a Hessian at an extremum."""
    # Products with a negative definite matrix, such as that of a maximum, are taken with the other sign.
    sign = jnp.where(right @ multiply(right) < 0, -1, 1).astype(right.dtype)
    return sign * conjugate_gradients(lambda v: sign * multiply(v), right, goal**2, limit).solution


def solve_gmres(multiply: Multiply, right: Array, goal: Scalar, limit: Count) -> Array:
    """Solve a system of any form by GMRES."""
    rounds = -(-limit // _RESTART)
    return linalg.gmres(multiply, right, tol=0.0, atol=goal, maxiter=rounds, restart=_RESTART)[0]


def solve_bicgstab(multiply: Multiply, right: Array, goal: Scalar, limit: Count) -> Array:
    """Solve a system of any form by BiCGStab, with two products per iteration."""
    return linalg.bicgstab(multiply, right, tol=0.0, atol=goal, maxiter=-(-limit // 2))[0]


def solve_neumann(multiply: Multiply, right: Array, goal: Scalar, limit: Count) -> Array:
    """Solve (I - A) w = right by the series right + A right + A² right + …, which requires that the powers vanish."""

    def unfinished(state: tuple[Array, Array, Array]) -> Array:
        return (jnp.linalg.norm(state[1]) > goal) & (state[2] < limit)

    def step(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        solution, residual, products = state
        return solution + residual, residual - multiply(residual), products + 1

    return jax.lax.while_loop(unfinished, step, (jnp.zeros_like(right), right, jnp.int32(0)))[0]


def solve_cg_or_gmres(multiply: Multiply, right: Array, goal: Scalar, limit: Count) -> Array:
    """Solve a system by conjugate gradients if it seems to be symmetric; if that fails, or otherwise, by GMRES."""
    # A limit of 0 products, unlike a branch, also saves the work under `vmap`.
    found = solve_cg(multiply, right, goal, jnp.where(_seems_symmetric(multiply, right), limit, 0))
    residual = right - multiply(found)
    return found + solve_gmres(multiply, residual, goal, jnp.where(jnp.linalg.norm(residual) <= goal, 0, limit))


def _seems_symmetric(multiply: Multiply, vector: Array) -> Array:
    """Return whether (A r)'(A r) = r'A(A r) up to rounding, for one vector r."""
    once = multiply(vector)
    twice = multiply(once)
    scale = jnp.linalg.norm(vector) * jnp.linalg.norm(twice)
    return jnp.abs(once @ once - vector @ twice) <= jnp.finfo(scale.dtype).eps ** 0.5 * scale


METHODS = {
    "dense": solve_dense,
    "cg": solve_cg,
    "cg or gmres": solve_cg_or_gmres,
    "gmres": solve_gmres,
    "bicgstab": solve_bicgstab,
    "neumann": solve_neumann,
}


class _Refined(NamedTuple):
    """A solution after some rounds, and its residuals."""

    solution: Array
    residual: Array
    size: Array
    last_size: Array
    rounds: Array


def solve_linear(name: str, multiply: Multiply, right: Array, tolerance: float, limit: int) -> Array:
    """Return the solution of a linear system by a method of `METHODS`, NaN if it is not solved.

    Parameters
    ----------
    name : of the method
    multiply : the product with the matrix
    right : the right-hand side
    tolerance : relative residual above which the system counts as not solved; the method aims at a smaller one
    limit : largest number of products in a round
    """
    dtype = right.dtype
    goal = jnp.asarray(tolerance * float(jnp.finfo(dtype).eps) ** 0.25, dtype)
    scale = safe_norm(right)
    unit = right / jnp.where(scale > 0, scale, 1)  # the squares of its numbers do not underflow
    if name == "dense":
        solution = solve_dense(multiply, unit, goal, limit)
        return jnp.where(safe_norm(unit - multiply(solution)) <= tolerance, scale * solution, jnp.nan)

    def unfinished(state: _Refined) -> Array:
        improves = state.size < state.last_size / 2
        return (state.size > goal) & improves & (state.rounds < _MOST_ROUNDS)

    def refine(state: _Refined) -> _Refined:
        solution = state.solution + METHODS[name](multiply, state.residual, goal, limit)
        residual = unit - multiply(solution)
        return _Refined(solution, residual, safe_norm(residual), state.size, state.rounds + 1)

    start = _Refined(jnp.zeros_like(unit), unit, safe_norm(unit), jnp.asarray(jnp.inf, dtype), jnp.int32(0))
    found = jax.lax.while_loop(unfinished, refine, start)
    return jnp.where(found.size <= tolerance, scale * found.solution, jnp.nan)


def safe_norm(vectors: Array) -> Array:
    """Return norms along the last axis without overflow or underflow of squares; infinite if a number is NaN."""
    largest = jnp.max(jnp.abs(vectors), axis=-1, keepdims=True)
    unit = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1)
    norms = unit[..., 0] * jnp.sqrt(jnp.sum((vectors / unit) ** 2, axis=-1))
    return jnp.where(jnp.isfinite(norms), norms, jnp.inf)

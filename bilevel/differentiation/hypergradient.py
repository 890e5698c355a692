"""The hypergradient at a point, by implicit differentiation.

At a point (z0, x0) with g = ∇z G(z0, x0) and a damping λ, z0 is stationary for the perturbed inner level

    Ĝ(z, x) = G(z, x) - gᵀz + λ/2 ||z - z0||²

Its stationary points form a branch ẑ(x) through z0, however far z0 is from a minimizer of G, and λ makes ∇²zz Ĝ
positive where ∇²zz G is not. The hypergradient is the gradient of F(ẑ(x), x) at x0:

    (∇²zz G + λ) v = -∇z F,      ∇x F + (∇²xz G) v

If z0 = z*(x0) and λ = 0, this is ∇h(x0).
"""

import warnings
from functools import partial
from math import inf
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from bilevel._core import trees
from bilevel._core.compilation import Compiled, arithmetic
from bilevel._core.conjugate_gradients import Conjugate, conjugate_gradients
from bilevel._core.types import Array, Point, PyTree, Scalar, is_number
from bilevel.differentiation.linear import solve_linear
from bilevel.oracles import Oracles
from bilevel.problems import BilevelProblem
from bilevel.problems.checks import check_positive, check_sizes, check_variable
from bilevel.problems.exact import DIRECT_SIZE, cholesky, derivative, hessian, unflatten

_LEAST_DAMPING = 1e-8  # after directions without any curvature


class Hypergradient(NamedTuple):
    """A hypergradient and its residuals.

    Attributes
    ----------
    gradient : like the outer variable
    v : the solution of the linear system, like the inner variable
    residual : ||(∇²zz G + λ) v + ∇z F|| / ||∇z F||
    inner_residual : ||∇z G|| at the point, which is 0 if z solves the inner level
    products : number of Hessian-vector products on all rows in the solves; None if it was traced by JAX
    damping : λ
    """

    gradient: PyTree
    v: PyTree
    residual: Scalar
    inner_residual: Scalar
    products: int | None
    damping: float


def hypergradient(
    problem: BilevelProblem,
    point: Point | None = None,
    *,
    tolerance: float = 1e-10,
    max_products: int = 1000,
    damping: float | None = None,
) -> Hypergradient:
    """Return the gradient of F(z*(x), x) with respect to x, by implicit differentiation at a point.

    The result is ∇h(x) if z = z*(x). It is computed in float64 and on all rows, by conjugate gradients, or by a matrix
    if z is small and the inner level is known to be strongly convex.

    Under ``jit``, ``vmap`` or ``grad``, where JAX traces the point, it is computed by conjugate gradients in the dtype
    of the problem, and the gradient is NaN if they fail.

    Parameters
    ----------
    problem : a problem of any size and structure, with a convex inner level or not
    point : z and x, such as ``result.point``; v is not used. By default the start of the problem
    tolerance : relative residual of the linear system at which conjugate gradients stop
    max_products : largest number of Hessian-vector products in each solve
    damping : λ, added to the diagonal of ∇²zz G like a proximal term around z. By default 0 if the problem is known to
        be strongly convex, or if JAX traces the point. For other problems the default is the damping with which
        conjugate gradients find no negative curvature

    Examples
    --------
    >>> import bilevel
    >>> problem = bilevel.problems.quadratic(100, 50, 5, 3)
    >>> found = bilevel.hypergradient(problem)
    >>> found.gradient.shape, found.residual < 1e-10
    ((3,), True)
    """
    check_positive(tolerance=tolerance)
    [limit] = check_sizes(max_products=max_products)
    if damping is not None and not (is_number(damping) and 0 <= damping < inf):
        raise ValueError(f"`damping={damping!r}`: must be a finite number of at least 0, or None.")
    point = problem.start if point is None else point
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(point)):
        return _trace(problem, point, tolerance, limit, float(damping or 0.0))
    point = _check_point(problem, point)
    is_convex, added = problem.exact_solver is not None, float(damping or 0.0)
    with arithmetic(np.float64, problem):
        oracles = problem.oracles.in_float64()
        if is_convex and trees.flat(point.inner_var).size <= min(DIRECT_SIZE, limit):
            v, products = _solve_directly(oracles, point, added)
        else:
            raises = damping is None and not is_convex
            v, products, added = _solve(oracles, point, added, raises, tolerance, limit)
        gradient, residual, inner_residual = _assemble(oracles, point._replace(v=v), np.float64(added))
        gradient, v, residual, inner_residual = trees.to_numpy((gradient, v, residual, inner_residual))
    if not residual <= tolerance:
        reached = f"the residual is {residual:.1e}, above `tolerance={tolerance!r}`"
        way = "`gradient` may be inaccurate: raise `max_products` or `damping`, or scale the columns of the data"
        message = f"`hypergradient`: {reached}, after {products} products; {way}."
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    return Hypergradient(gradient, v, float(residual), float(inner_residual), products, added)


def _check_point(problem: BilevelProblem, point: Any) -> Point:
    if not isinstance(point, Point):
        raise ValueError(f"`point={point!r}`: must be a bilevel.Point, such as `result.point`, or None for the start.")
    z, x = (check_variable(name, getattr(point, name), np.float64) for name in ("inner_var", "outer_var"))
    if jax.tree.map(np.shape, (z, x)) != jax.tree.map(np.shape, problem.start[:2]):
        raise ValueError("`point`: z and x must have the structure and shapes of the problem's start.")
    return Point(z, x, jax.tree.map(np.zeros_like, z))


def _trace(problem: BilevelProblem, point: Point, tolerance: float, limit: int, damping: float) -> Hypergradient:
    """Return the hypergradient in a program that JAX traces."""
    dtype = problem.dtype
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        way = "set `jax_enable_x64`, or build the problem with dtype='float32'"
        raise ValueError(
            f"`hypergradient`: under `jit` the problem computes in {dtype}, and 64-bit types are off; {way}."
        )
    oracles = problem.oracles
    point = jax.tree.map(lambda leaf, like: jnp.asarray(leaf, like.dtype), point, problem.start)
    right, tree_of = ravel_pytree(oracles.outer_grad(point))

    def multiply(vector: Array) -> Array:
        return ravel_pytree(oracles.hvp(point._replace(v=tree_of(vector))))[0] + damping * vector

    accuracy = max(tolerance, float(jnp.finfo(dtype).eps) ** 0.5)
    solve = partial(solve_linear, "cg", tolerance=accuracy, limit=limit)
    v = tree_of(jax.lax.custom_linear_solve(multiply, -right, solve, symmetric=True))
    gradient, residual, inner_residual = _assemble(oracles, point._replace(v=v), jnp.asarray(damping, dtype))
    return Hypergradient(gradient, v, residual, inner_residual, None, damping)


def _solve_directly(oracles: Oracles, point: Point, damping: float) -> tuple[PyTree, int]:
    """Return v and the number of products of a solve by a matrix, which is accurate for badly scaled data."""
    right = trees.flat(derivative(oracles, "outer_grad", point))
    matrix = np.asarray(hessian(oracles, point)) + damping * np.eye(right.size)
    solve = cholesky(matrix)
    v = -solve(right)
    v = v - solve(matrix @ v + right)
    return unflatten(v, point.inner_var), right.size


def _solve(
    oracles: Oracles, point: Point, damping: float, raises: bool, tolerance: float, limit: int
) -> tuple[PyTree, int, float]:
    """Return v, the number of products and the damping, raised until no negative curvature is found if ``raises``."""
    right, products = trees.scale(-1.0, derivative(oracles, "outer_grad", point)), 0
    while True:
        settings = np.float64(damping), np.float64(tolerance), np.int32(limit)
        found = _conjugate_gradients(oracles, point, right, *settings)
        products, least = products + int(found.products), float(found.least_curvature)
        if not (raises and least <= 0):
            return found.solution, products, damping
        damping = max(2 * damping, damping - 2 * least, 1e-3 * float(found.largest_curvature), _LEAST_DAMPING)


@Compiled
def _conjugate_gradients(
    oracles: Oracles, point: Point, right: PyTree, damping: Scalar, accuracy: Scalar, limit: Scalar
) -> Conjugate:
    """Solve (∇²zz G + λ) w = right, until the residual is small or negative curvature is found."""

    def multiply(direction: PyTree) -> PyTree:
        return trees.add(oracles.hvp(point._replace(v=direction)), trees.scale(damping, direction))

    return conjugate_gradients(multiply, right, accuracy**2 * trees.norm_sq(right), limit)


@Compiled
def _assemble(oracles: Oracles, point: Point, damping: Scalar) -> tuple[PyTree, Array, Array]:
    """Return the gradient for a solution v, the relative residual of v, and ||∇z G||."""
    inner, outer = oracles.inner(point), oracles.outer(point)
    residual = trees.add(trees.add(inner.hvp, trees.scale(damping, point.v)), outer.grad)
    absolute, size, inner_residual = (jnp.sqrt(trees.norm_sq(tree)) for tree in (residual, outer.grad, inner.grad))
    relative = absolute / jnp.maximum(size, jnp.finfo(size.dtype).tiny)
    return trees.add(inner.cross, outer.grad_outer), relative, inner_residual

"""The hypergradient at a point by implicit differentiation; and checks of derivatives against finite differences.

At a point (z0, x0) with g = ∇z G(z0, x0) and a damping λ, z0 is stationary for the perturbed inner level

    Ĝ(z, x) = G(z, x) - gᵀz + λ/2 ||z - z0||²

Its stationary points form a branch ẑ(x) through z0, however far z0 is from a minimizer of G, and λ makes ∇²zz Ĝ
positive where ∇²zz G is not. The hypergradient is the gradient of F(ẑ(x), x) at x0:

    (∇²zz G + λ) v = -∇z F,      ∇x F + (∇²xz G) v

If z0 = z*(x0) and λ = 0, this is ∇h(x0).
"""

import warnings
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bilevel._core import trees
from bilevel._core.compilation import Compiled, arithmetic
from bilevel._core.conjugate_gradients import Conjugate, conjugate_gradients
from bilevel._core.types import Array, Point, PyTree, Scalar, is_number
from bilevel.oracles import Oracles, TaskOracles
from bilevel.problems.checks import check_positive, check_sizes, check_variable, make_rng
from bilevel.problems.exact import DIRECT_SIZE, cholesky, derivative, hessian, unflatten

if TYPE_CHECKING:
    from bilevel.problems.base import BilevelProblem

_LEAST_DAMPING = 1e-8  # after directions without any curvature


class Hypergradient(NamedTuple):
    """A hypergradient and its residuals.

    Attributes
    ----------
    gradient : like the outer variable
    v : the solution of the linear system, like the inner variable
    residual : ||(∇²zz G + λ) v + ∇z F|| / ||∇z F||
    inner_residual : ||∇z G|| at the point, which is 0 if z solves the inner level
    products : number of Hessian-vector products on all rows in the solves
    damping : λ
    """

    gradient: PyTree
    v: PyTree
    residual: float
    inner_residual: float
    products: int
    damping: float


def hypergradient(
    problem: "BilevelProblem",
    point: Point | None = None,
    *,
    tolerance: float = 1e-10,
    max_products: int = 1000,
    damping: float | None = None,
) -> Hypergradient:
    """Return the gradient of F(z*(x), x) with respect to x, by implicit differentiation at a point.

    The result is ∇h(x) if z = z*(x). It is computed in float64 and on all rows, by conjugate gradients, or by a matrix
    if z is small and the inner level is known to be strongly convex.

    Parameters
    ----------
    problem : a problem of any size and structure, with a convex inner level or not
    point : z and x, such as ``result.point``; v is not used. By default the start of the problem
    tolerance : relative residual of the linear system at which conjugate gradients stop
    max_products : largest number of Hessian-vector products in each solve
    damping : λ, added to the diagonal of ∇²zz G like a proximal term around z. By default 0 if the problem is known to
        be strongly convex. For other problems the default is the damping with which conjugate gradients find no
        negative curvature

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
    point = _check_point(problem, problem.start if point is None else point)
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


def _check_point(problem: "BilevelProblem", point: Any) -> Point:
    if not isinstance(point, Point):
        raise ValueError(f"`point={point!r}`: must be a bilevel.Point, such as `result.point`, or None for the start.")
    z, x = (check_variable(name, getattr(point, name), np.float64) for name in ("inner_var", "outer_var"))
    if jax.tree.map(np.shape, (z, x)) != jax.tree.map(np.shape, problem.start[:2]):
        raise ValueError("`point`: z and x must have the structure and shapes of the problem's start.")
    return Point(z, x, jax.tree.map(np.zeros_like, z))


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


# Checks of derivatives. A difference quotient has rounding errors if its step is short, and curvature errors if it is
# long. In a loss with kinks, such as a network with ReLUs, each row that crosses a kink adds a jump of the gradient. So
# several steps are tried and the smallest error counts, as a wrong derivative is wrong at all of them. If at every
# step some rows cross a kink, products are compared row by row, and the median counts.


_STEPS = (1e-5, 1e-7, 1e-3)
_TOLERANCE, _FLOAT32_TOLERANCE = 1e-5, 1e-2
_NEGLIGIBLE = 1e-5  # rounding errors of a difference quotient are about 1e-11, for derivatives of any size
_N_ROWS = 15  # that are compared one by one

# For each derivative, the function that it is the derivative of, and the part of a move along which it is taken.
_PRIMITIVES = {
    "inner_grad": ("inner_value", "inner_var"),
    "inner_grad_outer": ("inner_value", "outer_var"),
    "outer_grad": ("outer_value", "inner_var"),
    "outer_grad_outer": ("outer_value", "outer_var"),
    "hvp": ("inner_grad", "v"),
    "cross": ("inner_grad_outer", "v"),
}


def check_derivatives(problem: "BilevelProblem", seed: int, tolerance: float | None) -> dict[str, float]:
    """Return the relative errors of derivatives; raise ValueError if one is too large."""
    oracles, start = problem.oracles, problem.start
    if isinstance(oracles, TaskOracles):  # whose derivatives are not those of one sum
        first = jax.tree.map(lambda leaf: leaf[0], start._replace(outer_var=()))
        oracles, start = oracles.first(), first._replace(outer_var=start.outer_var)
    [largest] = check_positive(tolerance=_default_tolerance(oracles, start) if tolerance is None else tolerance)
    rng = make_rng(seed)
    with arithmetic(np.float64, problem):
        exact = oracles.astype(np.float64)
        point = jax.tree.map(lambda leaf: leaf + 0.1 * rng.standard_normal(np.shape(leaf)), start)
        point = point._replace(outer_var=exact.project(point.outer_var))
        move = jax.tree.map(lambda leaf: rng.standard_normal(np.shape(leaf)), point)
        errors = {name: _derivative_error(exact, name, point, move, largest) for name in _PRIMITIVES}
    for name, error in errors.items():
        if not error <= largest:
            cause = "the loss is not smooth or finite there, uses `stop_gradient`, or has a wrong custom derivative"
            way = "`check(tolerance=…)` accepts larger errors"
            raise ValueError(f"`{name}` differs from finite differences by {error:.1e} of its size: {cause}; {way}.")
    return errors


def _default_tolerance(oracles: Oracles, start: Point) -> float:
    """Return a tolerance for float64, or a larger one if a loss computes in float32 although its input is float64."""
    with arithmetic(np.float64):
        exact, point = oracles.astype(np.float64), trees.cast(start, np.float64)
        traced = str(jax.make_jaxpr(lambda point: (exact.inner_value(point), exact.outer_value(point)))(point))
    return _FLOAT32_TOLERANCE if any(narrow in traced for narrow in ("f32[", "bf16[", "f16[")) else _TOLERANCE


def _derivative_error(oracles: Oracles, name: str, point: Point, move: Point, tolerance: float) -> float:
    error = np.nan
    for step in _STEPS:
        error = np.fmin(error, _error(oracles, name, point, move, step))
        if error <= tolerance:
            return float(error)
    if name not in ("hvp", "cross") or oracles.is_sharded or not np.isfinite(error):
        return float(error)
    drawn = oracles.with_batches(1, "iid")
    rows = [np.array([row], np.int32) for row in range(min(_N_ROWS, oracles.n_inner))]
    of_rows = [min(_error(drawn, name, point, move, step, row) for step in _STEPS) for row in rows]
    return min(float(error), float(np.median(of_rows)))


def _error(oracles: Oracles, name: str, point: Point, move: Point, step: float, rows: Any = None) -> float:
    """Return the error of a derivative relative to its size, by a central difference."""
    primitive, part = _PRIMITIVES[name]
    claimed = derivative(oracles, name, point, rows)
    if part == "v":
        changes = {"inner_var": point.v}
    else:
        changes = {part: getattr(move, part)}
        claimed = trees.dot(claimed, changes[part])
    along = trees.scale(step, trees.zeros_like(point)._replace(**changes))
    ends = trees.add(point, along), trees.subtract(point, along)
    ahead, behind = (derivative(oracles, primitive, end, rows) for end in ends)
    measured = trees.scale(1 / (2 * step), trees.subtract(ahead, behind))
    gap, *sizes = (np.sqrt(trees.norm_sq(tree)) for tree in (trees.subtract(claimed, measured), claimed, measured))
    return float(gap / (sum(sizes) + _NEGLIGIBLE))

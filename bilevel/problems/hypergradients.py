"""The hypergradient at a point, by four methods with one meaning.

At a point (z0, x0) with g = ∇z G(z0, x0) and a damping λ, z0 is stationary for the inner level

    Ĝ(z, x) = G(z, x) - gᵀz + λ/2 ||z - z0||²

and the hypergradient is that of F(ẑ(x), x) at x0, with ẑ(x) the branch of stationary points of Ĝ through z0:

    (∇²zz G + λ) v = -∇z F,      ∇x F + (∇²xz G) v

Where z0 = z*(x0) and λ = 0, it is ∇h(x0). All methods compute this same gradient, in float64 and on all rows:

================  ======================================================================================
``exact``         conjugate gradients, or a matrix where z is small and the level is strongly convex
``neumann``       v = -η sum over k of (I - η(∇²zz G + λ))^k ∇z F
``unrolled``      F after gradient steps of Ĝ from z0, differentiated through the steps in reverse
``differences``   F at ẑ(x0 ± δe), a Newton solve for each sign and coordinate
================  ======================================================================================
"""

import warnings
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bilevel import _tree as trees
from bilevel._precision import arithmetic
from bilevel._programs import Compiled, compiled
from bilevel._types import Array, Point, PyTree, Scalar, is_number
from bilevel.oracles import DifferenceOracles, Oracles
from bilevel.problems.checks import check_choice, check_positive, check_sizes, check_variable
from bilevel.problems.exact import DIRECT_SIZE, cholesky, hessian, lbfgs, unflatten
from bilevel.problems.tilted import TiltedLevel, conjugate_gradients, follow, largest_curvature, norm

if TYPE_CHECKING:
    from bilevel.problems.base import BilevelProblem

_MOST_PRODUCTS = {"exact": 1000, "neumann": 1000, "unrolled": 100, "differences": 1000}
_DIFFERENCE = 1e-4  # of a coordinate of x
_MOST_RESTARTS = 60  # doublings of a damping


class Hypergradient(NamedTuple):
    """A hypergradient, and how far it can be relied upon.

    Attributes
    ----------
    gradient : like the outer variable
    v : the solution of the linear system; None for differences, which have none
    residual : ||(∇²zz G + λ) v + ∇z F|| / ||∇z F||; of differences the largest residual of a Newton solve
    inner_residual : ||∇z G|| at the point: 0 where z solves the inner level
    products : Hessian-vector products on all rows that its solves took, or steps; power iterations are not counted
    damping : λ
    method : by which it was computed
    """

    gradient: PyTree
    v: PyTree | None
    residual: float
    inner_residual: float
    products: int
    damping: float
    method: str


def hypergradient(
    problem: "BilevelProblem",
    point: Point | None = None,
    *,
    method: str = "exact",
    tolerance: float = 1e-10,
    max_products: int | None = None,
    damping: float | None = None,
    step_size: float | None = None,
    solve_inner: bool = False,
) -> Hypergradient:
    """Return the gradient of F(z*(x), x) with respect to x, by implicit differentiation at a point.

    z is taken as it is unless ``solve_inner`` is true: the result is ∇h(x) where z = z*(x). Computed in float64, on all
    rows.

    Parameters
    ----------
    problem : whose hypergradient; of any size and structure, with a convex inner level or not
    point : z and x, such as ``result.point``; v is not read. By default the start of the problem
    method : "exact" (conjugate gradients), "neumann", "unrolled" (gradient steps, differentiated in reverse; one z is
        kept for each) or "differences" (two inner solves for each coordinate of x)
    tolerance : residual at which "exact" and "neumann" stop
    max_products : Hessian-vector products at most, of each solve; for "unrolled" the number of steps. 1000 by default,
        and 100 steps
    damping : λ, added to the diagonal of ∇²zz G: of a proximal term around z. By default 0, and where the problem does
        not say that it is strongly convex as much as conjugate gradients need to meet no negative curvature
    step_size : η of "neumann" and "unrolled"; by default 1/L, with L estimated by power iterations
    solve_inner : go to a stationary point of the inner level first, from the z of the point

    Examples
    --------
    >>> import bilevel
    >>> problem = bilevel.problems.quadratic(100, 50, 5, 3)
    >>> found = bilevel.hypergradient(problem, solve_inner=True)
    >>> found.gradient.shape, found.residual < 1e-10
    ((3,), True)
    """
    method, limit = _check_method(problem, method, max_products)
    check_positive(tolerance=tolerance, **({} if step_size is None else {"step_size": step_size}))
    if damping is not None and not (is_number(damping) and 0 <= damping < inf):
        raise ValueError(f"`damping={damping!r}`: must be a finite number of at least 0, or None.")
    if not isinstance(solve_inner, bool):
        raise ValueError(f"`solve_inner={solve_inner!r}`: must be True or False.")
    point = _check_point(problem, problem.start if point is None else point)
    with arithmetic(np.float64):
        oracles = problem.oracles.in_float64()
        if solve_inner:
            point = _solve_inner(problem, point)
        level, spent = TiltedLevel.at(oracles, point, 0.0 if damping is None else float(damping)), 0
        if damping is None and problem.exact_solver is None:
            level, spent = _damp(level, tolerance, limit)
        small = trees.flat(point.inner_var).size <= min(DIRECT_SIZE, limit)
        if method == "exact" and problem.exact_solver is not None and small:
            found = _direct(level)
        else:
            found = _METHODS[method](level, float(tolerance), limit, step_size)
        size = float(norm(level.tilt))
    if method == "exact" and not found.residual <= tolerance:
        told = f"`hypergradient`: the residual is {found.residual:.1e}, above `tolerance={tolerance!r}`"
        way = "`gradient` may be far off: raise `max_products` or `damping`, or scale the columns of the data"
        warnings.warn(f"{told}, after {found.products} products; {way}.", RuntimeWarning, stacklevel=2)
    return found._replace(inner_residual=size, products=found.products + spent, method=method)


def compare(problem: "BilevelProblem", point: Point, direction: PyTree) -> dict[str, float]:
    """Return how much each method differs from the exact one along a direction of x, relative to its size.

    A damping of twice the largest curvature makes each system easy, so that all methods come to their ends.
    """
    with arithmetic(np.float64):
        undamped = TiltedLevel.at(problem.oracles.in_float64(), point, 0.0)
        level = undamped._replace(damping=np.float64(max(2 * float(largest_curvature(undamped)), 1e-8)))
        exact = _exact(level, 1e-12, 1000, None).gradient
        slopes = {"differences": _slope(level, direction)[0]}
        for method in ("neumann", *(() if _lacks_second_derivatives(problem) else ("unrolled",))):
            slopes[method] = float(trees.dot(_METHODS[method](level, 1e-12, 100, None).gradient, direction))
        here, size = float(trees.dot(exact, direction)), float(norm(exact) * norm(direction))
    # Along a direction that is nearly orthogonal to the gradient, a slope says little about it.
    return {f"hypergradient_{method}": abs(slope - here) / max(size, 1e-300) for method, slope in slopes.items()}


def _damp(level: TiltedLevel, tolerance: float, limit: int) -> tuple[TiltedLevel, int]:
    """Raise the damping until conjugate gradients meet no negative curvature; return the products that took."""
    right, spent = _outer_grad(level.oracles, level.point), 0
    for _ in range(_MOST_RESTARTS):
        found = conjugate_gradients(level, level.point, right, np.float64(tolerance), np.int32(limit))
        spent, curvature = spent + int(found.products), float(found.curvature)
        if not curvature <= 0:
            break
        tiny = 1e-3 * float(largest_curvature(level))
        level = level._replace(damping=np.float64(max(2 * level.damping, level.damping - 2 * curvature, tiny)))
    return level, spent


def _exact(level: TiltedLevel, tolerance: float, limit: int, step: float | None) -> Hypergradient:
    right = trees.scale(-1.0, _outer_grad(level.oracles, level.point))
    found = conjugate_gradients(level, level.point, right, np.float64(tolerance), np.int32(limit))
    return _of_solution(level, found.solution, int(found.products))


def _direct(level: TiltedLevel) -> Hypergradient:
    """Solve the system of a convex level with few variables by a matrix, which badly scaled data do not spoil."""
    right = trees.flat(_outer_grad(level.oracles, level.point))
    matrix = np.asarray(hessian(level.oracles, level.point)) + level.damping * np.eye(right.size)
    solve = cholesky(matrix)
    v = -solve(right)
    v = v - solve(matrix @ v + right)
    return _of_solution(level, unflatten(v, level.point.inner_var), right.size)


def _neumann(level: TiltedLevel, tolerance: float, limit: int, step: float | None) -> Hypergradient:
    found, products = _sum_series(level, _step(level, step), np.float64(tolerance), np.int32(limit))
    return _of_solution(level, found, int(products))


@Compiled
def _sum_series(level: TiltedLevel, step: Array, tolerance: Scalar, limit: Scalar) -> tuple[PyTree, Array]:
    first = level.oracles.outer_grad(level.point)
    goal = tolerance**2 * trees.norm_sq(first)

    def goes_on(carry: tuple[PyTree, PyTree, Array]) -> Array:
        return (trees.norm_sq(carry[0]) > goal) & (carry[2] < limit)

    def add_term(carry: tuple[PyTree, PyTree, Array]) -> tuple[PyTree, PyTree, Array]:
        term, total, count = carry
        next_term = trees.subtract(term, trees.scale(step, level.product(level.point, term)))
        return next_term, trees.add(total, term), count + 1

    _, total, count = jax.lax.while_loop(goes_on, add_term, (first, trees.zeros_like(first), jnp.int32(0)))
    return trees.scale(-step, total), count


def _unrolled(level: TiltedLevel, tolerance: float, limit: int, step: float | None) -> Hypergradient:
    gradient, v = _differentiate_steps(level, _step(level, step), limit)
    return _of_solution(level, v, limit)._replace(gradient=trees.to_numpy(gradient))


@compiled("times")
def _differentiate_steps(level: TiltedLevel, step: Array, times: int) -> tuple[PyTree, PyTree]:
    """Return the gradient with respect to x of F after so many steps, and minus that with respect to the tilt: v."""

    def value(x: PyTree, tilt: PyTree) -> Array:
        # Without the checkpoint the activations of every row and step would be kept.
        @jax.checkpoint
        def once(z: PyTree, _: None) -> tuple[PyTree, None]:
            return trees.subtract(z, trees.scale(step, level.grad(z, x, tilt))), None

        last, _ = jax.lax.scan(once, level.point.inner_var, None, length=times)
        return level.oracles.outer_value(level.point._replace(inner_var=last, outer_var=x))

    gradient, pull = jax.grad(value, argnums=(0, 1))(level.point.outer_var, level.tilt)
    return gradient, trees.scale(-1.0, pull)


def _differences(level: TiltedLevel, tolerance: float, limit: int, step: float | None) -> Hypergradient:
    leaves, structure = jax.tree.flatten(level.point.outer_var)
    slopes, residuals, products = [], [0.0], 0
    for number, leaf in enumerate(leaves):
        slope = np.zeros(np.shape(leaf))
        for where in np.ndindex(slope.shape):
            along = [np.zeros(np.shape(other)) for other in leaves]
            along[number][where] = 1.0
            slope[where], residual, cost = _slope(level, jax.tree.unflatten(structure, along))
            residuals, products = [*residuals, residual], products + cost
        slopes.append(slope)
    return Hypergradient(
        jax.tree.unflatten(structure, slopes), None, max(residuals), 0.0, products, float(level.damping), ""
    )


def _slope(level: TiltedLevel, direction: PyTree) -> tuple[float, float, int]:
    """Return the slope of F(ẑ(x), x) along a direction, the residual of its solves, and their products."""
    values, residuals, products = [], [0.0], 0
    for sign in (1.0, -1.0):
        x = trees.add(level.point.outer_var, trees.scale(sign * _DIFFERENCE, direction))
        point, residual, cost = follow(level, level.point._replace(outer_var=x))
        values.append(float(_outer_value(level.oracles, point)))
        residuals, products = [*residuals, residual], products + cost
    return (values[0] - values[1]) / (2 * _DIFFERENCE), max(residuals), products


def _step(level: TiltedLevel, given: float | None) -> Array:
    if given is not None:
        return jnp.float64(given)
    # Power iterations stay a little below L; a step is stable up to 2/L.
    return 1 / jnp.maximum(1.2 * largest_curvature(level), 1e-300)


def _of_solution(level: TiltedLevel, v: PyTree, products: int) -> Hypergradient:
    gradient, residual = _assemble(level, v)
    return Hypergradient(
        trees.to_numpy(gradient), trees.to_numpy(v), float(residual), 0.0, products, float(level.damping), ""
    )


@Compiled
def _assemble(level: TiltedLevel, v: PyTree) -> tuple[PyTree, Array]:
    point = level.point._replace(v=v)
    outer = level.oracles.outer(point)
    left = trees.add(level.product(point, v), outer.grad)
    gradient = trees.add(level.oracles.cross(point), outer.grad_outer)
    return gradient, norm(left) / jnp.maximum(norm(outer.grad), jnp.finfo(jnp.float64).tiny)


_outer_grad = Compiled(lambda oracles, point: oracles.outer_grad(point))
_outer_value = Compiled(lambda oracles, point: oracles.outer_value(point))


_METHODS: dict[str, Callable[..., Hypergradient]] = {
    "exact": _exact,
    "neumann": _neumann,
    "unrolled": _unrolled,
    "differences": _differences,
}


def _lacks_second_derivatives(problem: "BilevelProblem") -> bool:
    return isinstance(problem.oracles, DifferenceOracles)


def _check_method(problem: "BilevelProblem", method: Any, max_products: Any) -> tuple[str, int]:
    check_choice("method", method, tuple(_METHODS))
    if method == "unrolled" and _lacks_second_derivatives(problem):
        told = "`method='unrolled'` differentiates gradients, which `second_derivatives=False` says cannot be"
        raise ValueError(f"{told}; take 'exact', 'neumann' or 'differences'.")
    limit = _MOST_PRODUCTS[method] if max_products is None else max_products
    return method, check_sizes(max_products=limit)[0]


def _check_point(problem: "BilevelProblem", point: Any) -> Point:
    if not isinstance(point, Point):
        raise ValueError(f"`point={point!r}`: must be a bilevel.Point, such as `result.point`, or None for the start.")
    start = problem.start
    z, x = (check_variable(name, getattr(point, name), np.float64) for name in ("inner_var", "outer_var"))
    if jax.tree.map(np.shape, (z, x)) != jax.tree.map(np.shape, (start.inner_var, start.outer_var)):
        raise ValueError("`point`: z and x must have the structure and shapes of the problem's start.")
    return Point(z, x, jax.tree.map(np.zeros_like, z))


def _solve_inner(problem: "BilevelProblem", point: Point) -> Point:
    if problem.exact_solver is not None:
        z = problem.exact_solver(point.outer_var, None).inner_var
    else:
        z = _approach(problem.oracles.in_float64(), point)
    return point._replace(inner_var=trees.cast(z, np.float64))


def _approach(oracles: Oracles, point: Point) -> PyTree:
    """Return z near a stationary point of the inner level, by L-BFGS from the z of the point."""

    def value_and_grad(z: np.ndarray) -> tuple[float, np.ndarray]:
        at = point._replace(inner_var=unflatten(z, point.inner_var))
        value, grad = _inner_value_and_grad(oracles, at)
        return float(value), trees.flat(grad)

    found = lbfgs(value_and_grad, trees.flat(point.inner_var), maxiter=1000, maxfun=5000, gtol=1e-8)
    return unflatten(found.x, point.inner_var)


_inner_value_and_grad = Compiled(lambda oracles, point: (oracles.inner_value(point), oracles.inner_grad(point)))

"""The hypergradient at a point, by four methods; and checks of derivatives against finite differences.

At a point (z0, x0) with g = ∇z G(z0, x0) and a damping λ, z0 is stationary for the perturbed inner level

    Ĝ(z, x) = G(z, x) - gᵀz + λ/2 ||z - z0||²

Its stationary points form a branch ẑ(x) through z0, however far z0 is from a minimizer of G, and λ makes ∇²zz Ĝ
positive where ∇²zz G is not. The hypergradient is the gradient of F(ẑ(x), x) at x0:

    (∇²zz G + λ) v = -∇z F,      ∇x F + (∇²xz G) v

If z0 = z*(x0) and λ = 0, this is ∇h(x0). All methods compute this gradient, in float64 and on all rows:

================  ======================================================================================
``exact``         conjugate gradients, or a matrix if z is small and the level is strongly convex
``neumann``       v = -η sum over k of (I - η(∇²zz G + λ))^k ∇z F
``unrolled``      F after gradient steps of Ĝ from z0, differentiated through the steps in reverse
``differences``   F at ẑ(x0 ± δe), with a Newton solve for each sign and coordinate
================  ======================================================================================
"""

import warnings
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bilevel._core import trees
from bilevel._core.compilation import Compiled, arithmetic, compiled
from bilevel._core.types import Array, Point, PyTree, Scalar, is_number
from bilevel.oracles import DifferenceOracles, Oracles
from bilevel.problems.checks import check_choice, check_flag, check_positive, check_sizes, check_variable, make_rng
from bilevel.problems.exact import DIRECT_SIZE, cholesky, derivative, hessian, lbfgs, unflatten

if TYPE_CHECKING:
    from bilevel.problems.base import BilevelProblem

_MOST_PRODUCTS = {"exact": 1000, "neumann": 1000, "unrolled": 100, "differences": 1000}
_DIFFERENCE = 1e-4  # of a coordinate of x
_MOST_DAMPINGS = 60
_POWER_STEPS = 30  # to estimate the largest curvature
_NEWTON_STEPS, _NEWTON_PRODUCTS = 20, 1000
_NEWTON_RESIDUAL = 1e-13  # relative to ||∇z G|| + ||(∇²zz G) z||; rounding errors


class Hypergradient(NamedTuple):
    """A hypergradient and its residuals.

    Attributes
    ----------
    gradient : like the outer variable
    v : the solution of the linear system; None for the method "differences", which has none
    residual : ||(∇²zz G + λ) v + ∇z F|| / ||∇z F||; for "differences" the largest residual of a Newton solve
    inner_residual : ||∇z G|| at the point, which is 0 if z solves the inner level
    products : number of Hessian-vector products on all rows, or of steps, in the solves; without power iterations
    damping : λ
    method : name of the method
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

    The inner variable of the point is not changed unless ``solve_inner`` is True. The result is ∇h(x) if z = z*(x). It
    is computed in float64 and on all rows.

    Parameters
    ----------
    problem : a problem of any size and structure, with a convex inner level or not
    point : z and x, such as ``result.point``; v is not used. By default the start of the problem
    method : "exact" (conjugate gradients), "neumann", "unrolled" (gradient steps that are differentiated in reverse,
        which stores one z for each step) or "differences" (two inner solves for each coordinate of x)
    tolerance : residual at which "exact" and "neumann" stop
    max_products : largest number of Hessian-vector products in each solve; for "unrolled" the number of steps. By
        default 1000 products and 100 steps
    damping : λ, added to the diagonal of ∇²zz G like a proximal term around z. By default 0 if the problem is known to
        be strongly convex. For other problems the default is the damping with which conjugate gradients find no
        negative curvature
    step_size : η of "neumann" and "unrolled"; by default 1/L, with L estimated by power iterations
    solve_inner : first move from the z of the point to a stationary point of the inner level

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
    check_flag(solve_inner=solve_inner)
    point = _check_point(problem, problem.start if point is None else point)
    with arithmetic(np.float64):
        oracles = problem.oracles.in_float64()
        if solve_inner:
            point = _solve_inner(problem, oracles, point)
        level, spent = PerturbedLevel.at(oracles, point, 0.0 if damping is None else float(damping)), 0
        if damping is None and problem.exact_solver is None:
            level, spent = _damp(level, tolerance, limit)
        small = trees.flat(point.inner_var).size <= min(DIRECT_SIZE, limit)
        if method == "exact" and problem.exact_solver is not None and small:
            found = _direct(level)
        else:
            found = _METHODS[method](level, float(tolerance), limit, step_size)
        size = float(_norm(level.linear))
    if method == "exact" and not found.residual <= tolerance:
        reached = f"the residual is {found.residual:.1e}, above `tolerance={tolerance!r}`"
        way = "`gradient` may be inaccurate: raise `max_products` or `damping`, or scale the columns of the data"
        message = f"`hypergradient`: {reached}, after {found.products} products; {way}."
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    return found._replace(inner_residual=size, products=found.products + spent, method=method)


def _check_method(problem: "BilevelProblem", method: Any, max_products: Any) -> tuple[str, int]:
    check_choice("method", method, tuple(_METHODS))
    if method == "unrolled" and isinstance(problem.oracles, DifferenceOracles):
        reason = "it differentiates gradients, which the problem excludes by `second_derivatives=False`"
        raise ValueError(f"`method='unrolled'`: {reason}; use 'exact', 'neumann' or 'differences'.")
    limit = _MOST_PRODUCTS[method] if max_products is None else max_products
    return method, check_sizes(max_products=limit)[0]


def _check_point(problem: "BilevelProblem", point: Any) -> Point:
    if not isinstance(point, Point):
        raise ValueError(f"`point={point!r}`: must be a bilevel.Point, such as `result.point`, or None for the start.")
    z, x = (check_variable(name, getattr(point, name), np.float64) for name in ("inner_var", "outer_var"))
    if jax.tree.map(np.shape, (z, x)) != jax.tree.map(np.shape, problem.start[:2]):
        raise ValueError("`point`: z and x must have the structure and shapes of the problem's start.")
    return Point(z, x, jax.tree.map(np.zeros_like, z))


def _solve_inner(problem: "BilevelProblem", oracles: Oracles, point: Point) -> Point:
    """Return the point with the exact z, or with a stationary z found by L-BFGS from that of the point."""
    if problem.exact_solver is not None:
        z = problem.exact_solver(point.outer_var, None).inner_var
        return point._replace(inner_var=trees.cast(z, np.float64))

    def value_and_grad(z: np.ndarray) -> tuple[float, np.ndarray]:
        value, grad = _inner_value_and_grad(oracles, point._replace(inner_var=unflatten(z, point.inner_var)))
        return float(value), trees.flat(grad)

    found = lbfgs(value_and_grad, trees.flat(point.inner_var), maxiter=1000, maxfun=5000, gtol=1e-8)
    return point._replace(inner_var=trees.cast(unflatten(found.x, point.inner_var), np.float64))


_inner_value_and_grad = Compiled(lambda oracles, point: (oracles.inner_value(point), oracles.inner_grad(point)))


# The perturbed inner level


class PerturbedLevel(NamedTuple):
    """Ĝ around a point, with g in ``linear`` and λ in ``damping``."""

    oracles: Oracles
    point: Point
    linear: PyTree
    damping: Scalar

    @classmethod
    def at(cls, oracles: Oracles, point: Point, damping: float) -> "PerturbedLevel":
        return cls(oracles, point, derivative(oracles, "inner_grad", point), np.float64(damping))

    def grad(self, z: PyTree, x: PyTree, linear: PyTree) -> PyTree:
        """Return ∇z Ĝ for another g."""
        proximal = trees.scale(self.damping, trees.subtract(z, self.point.inner_var))
        grad = self.oracles.inner_grad(self.point._replace(inner_var=z, outer_var=x))
        return trees.add(trees.subtract(grad, linear), proximal)

    def product(self, point: Point, w: PyTree) -> PyTree:
        """Return (∇²zz G + λ) w."""
        return trees.add(self.oracles.hvp(point._replace(v=w)), trees.scale(self.damping, w))


class _Conjugate(NamedTuple):
    """The state of conjugate gradients, with the smallest curvature along all directions."""

    solution: PyTree
    residual: PyTree
    direction: PyTree
    residual_sq: Array
    products: Array
    curvature: Array


@Compiled
def _conjugate_gradients(
    level: PerturbedLevel, point: Point, right: PyTree, accuracy: Scalar, limit: Scalar
) -> _Conjugate:
    """Solve (∇²zz G + λ) w = right, until the residual is small or negative curvature is found."""
    goal = accuracy**2 * trees.norm_sq(right)

    def unfinished(state: _Conjugate) -> Array:
        return (state.residual_sq > goal) & (state.products < limit) & (state.curvature > 0)

    def step(state: _Conjugate) -> _Conjugate:
        product = level.product(point, state.direction)
        curved = trees.dot(state.direction, product)
        length = jnp.where(curved > 0, state.residual_sq / jnp.where(curved > 0, curved, 1), 0)
        residual = trees.subtract(state.residual, trees.scale(length, product))
        solution, residual_sq = trees.add(state.solution, trees.scale(length, state.direction)), trees.norm_sq(residual)
        direction = trees.add(residual, trees.scale(residual_sq / state.residual_sq, state.direction))
        curvature = jnp.minimum(state.curvature, curved / trees.norm_sq(state.direction))
        return _Conjugate(solution, residual, direction, residual_sq, state.products + 1, curvature)

    start = _Conjugate(trees.zeros_like(right), right, right, trees.norm_sq(right), jnp.int32(0), jnp.float64(jnp.inf))
    return jax.lax.while_loop(unfinished, step, start)


def _follow_branch(level: PerturbedLevel, point: Point) -> tuple[Point, float, int]:
    """Return ẑ at the x of the point by Newton's method from z0, with its residual and the number of products."""
    residual, size = _perturbed_grad(level, point)
    products, scale = 0, max(float(_norm(level.linear) + _norm(_hessian_times_z(level, point))), 1e-300)
    for _ in range(_NEWTON_STEPS):
        if size <= _NEWTON_RESIDUAL * scale:
            break
        found = _conjugate_gradients(level, point, residual, np.float64(1e-8), np.int32(_NEWTON_PRODUCTS))
        trial = point._replace(inner_var=trees.subtract(point.inner_var, found.solution))
        products, (trial_residual, trial_size) = products + int(found.products), _perturbed_grad(level, trial)
        if not trial_size < size:
            break
        point, residual, size = trial, trial_residual, trial_size
    return point, float(size / scale), products


@Compiled
def _perturbed_grad(level: PerturbedLevel, point: Point) -> tuple[PyTree, Array]:
    grad = level.grad(point.inner_var, point.outer_var, level.linear)
    return grad, _norm(grad)


_hessian_times_z = Compiled(lambda level, point: level.product(point, point.inner_var))


@Compiled
def _largest_curvature(level: PerturbedLevel) -> Array:
    """Return the largest |eigenvalue| of ∇²zz G + λ, by power iterations from a fixed vector."""
    fixed = jax.tree.map(lambda g: jnp.cos(jnp.arange(g.size, dtype=g.dtype)).reshape(g.shape), level.linear)

    def multiply(_: Array, carry: tuple[PyTree, Array]) -> tuple[PyTree, Array]:
        product = level.product(level.point, carry[0])
        size = _norm(product)
        return trees.scale(1 / jnp.maximum(size, jnp.finfo(size.dtype).tiny), product), size

    first = trees.scale(1 / _norm(fixed), fixed)
    return jax.lax.fori_loop(0, _POWER_STEPS, multiply, (first, jnp.zeros_like(_norm(fixed))))[1]


def _norm(tree: PyTree) -> Array:
    return jnp.sqrt(trees.norm_sq(tree))


def _damp(level: PerturbedLevel, tolerance: float, limit: int) -> tuple[PerturbedLevel, int]:
    """Raise the damping until conjugate gradients find no negative curvature; return the number of products too."""
    right, spent = derivative(level.oracles, "outer_grad", level.point), 0
    for _ in range(_MOST_DAMPINGS):
        found = _conjugate_gradients(level, level.point, right, np.float64(tolerance), np.int32(limit))
        spent, curvature = spent + int(found.products), float(found.curvature)
        if not curvature <= 0:
            break
        tiny = 1e-3 * float(_largest_curvature(level))
        level = level._replace(damping=np.float64(max(2 * level.damping, level.damping - 2 * curvature, tiny)))
    return level, spent


# Methods: each takes a level, a tolerance, the largest number of products and a step size


def _exact(level: PerturbedLevel, tolerance: float, limit: int, step: float | None) -> Hypergradient:
    right = trees.scale(-1.0, derivative(level.oracles, "outer_grad", level.point))
    found = _conjugate_gradients(level, level.point, right, np.float64(tolerance), np.int32(limit))
    return _from_solution(level, found.solution, int(found.products))


def _direct(level: PerturbedLevel) -> Hypergradient:
    """Solve the system of a convex level with few variables by a matrix, which is accurate for badly scaled data."""
    right = trees.flat(derivative(level.oracles, "outer_grad", level.point))
    matrix = np.asarray(hessian(level.oracles, level.point)) + level.damping * np.eye(right.size)
    solve = cholesky(matrix)
    v = -solve(right)
    v = v - solve(matrix @ v + right)
    return _from_solution(level, unflatten(v, level.point.inner_var), right.size)


def _neumann(level: PerturbedLevel, tolerance: float, limit: int, step: float | None) -> Hypergradient:
    found, products = _sum_series(level, _step(level, step), np.float64(tolerance), np.int32(limit))
    return _from_solution(level, found, int(products))


@Compiled
def _sum_series(level: PerturbedLevel, step: Array, tolerance: Scalar, limit: Scalar) -> tuple[PyTree, Array]:
    first = level.oracles.outer_grad(level.point)
    goal = tolerance**2 * trees.norm_sq(first)

    def unfinished(carry: tuple[PyTree, PyTree, Array]) -> Array:
        return (trees.norm_sq(carry[0]) > goal) & (carry[2] < limit)

    def add_term(carry: tuple[PyTree, PyTree, Array]) -> tuple[PyTree, PyTree, Array]:
        term, total, count = carry
        next_term = trees.subtract(term, trees.scale(step, level.product(level.point, term)))
        return next_term, trees.add(total, term), count + 1

    _, total, count = jax.lax.while_loop(unfinished, add_term, (first, trees.zeros_like(first), jnp.int32(0)))
    return trees.scale(-step, total), count


def _unrolled(level: PerturbedLevel, tolerance: float, limit: int, step: float | None) -> Hypergradient:
    gradient, v = _differentiate_steps(level, _step(level, step), limit)
    return _from_solution(level, v, limit)._replace(gradient=trees.to_numpy(gradient))


@compiled("times")
def _differentiate_steps(level: PerturbedLevel, step: Array, times: int) -> tuple[PyTree, PyTree]:
    """Return the gradients of F after ``times`` steps: that with respect to x, and minus that with respect to g, v."""

    def value(x: PyTree, linear: PyTree) -> Array:
        # Without the checkpoint, the intermediate results for all rows and steps would be stored.
        @jax.checkpoint
        def once(z: PyTree, _: None) -> tuple[PyTree, None]:
            return trees.subtract(z, trees.scale(step, level.grad(z, x, linear))), None

        last, _ = jax.lax.scan(once, level.point.inner_var, None, length=times)
        return level.oracles.outer_value(level.point._replace(inner_var=last, outer_var=x))

    gradient, of_linear = jax.grad(value, argnums=(0, 1))(level.point.outer_var, level.linear)
    return gradient, trees.scale(-1.0, of_linear)


def _differences(level: PerturbedLevel, tolerance: float, limit: int, step: float | None) -> Hypergradient:
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
    gradient, damping = jax.tree.unflatten(structure, slopes), float(level.damping)
    return Hypergradient(gradient, None, max(residuals), 0.0, products, damping, "")


def _slope(level: PerturbedLevel, direction: PyTree) -> tuple[float, float, int]:
    """Return the slope of F(ẑ(x), x) along a direction, the residual of its solves, and their products."""
    values, residuals, products = [], [0.0], 0
    for sign in (1.0, -1.0):
        x = trees.add(level.point.outer_var, trees.scale(sign * _DIFFERENCE, direction))
        point, residual, cost = _follow_branch(level, level.point._replace(outer_var=x))
        values.append(float(derivative(level.oracles, "outer_value", point)))
        residuals, products = [*residuals, residual], products + cost
    return (values[0] - values[1]) / (2 * _DIFFERENCE), max(residuals), products


def _step(level: PerturbedLevel, given: float | None) -> Array:
    if given is not None:
        return jnp.float64(given)
    # Power iterations underestimate L a little; steps are stable up to 2/L.
    return 1 / jnp.maximum(1.2 * _largest_curvature(level), 1e-300)


def _from_solution(level: PerturbedLevel, v: PyTree, products: int) -> Hypergradient:
    gradient, residual = _assemble(level, v)
    gradient, v = trees.to_numpy((gradient, v))
    return Hypergradient(gradient, v, float(residual), 0.0, products, float(level.damping), "")


@Compiled
def _assemble(level: PerturbedLevel, v: PyTree) -> tuple[PyTree, Array]:
    point = level.point._replace(v=v)
    outer = level.oracles.outer(point)
    residual = trees.add(level.product(point, v), outer.grad)
    gradient = trees.add(level.oracles.cross(point), outer.grad_outer)
    return gradient, _norm(residual) / jnp.maximum(_norm(outer.grad), jnp.finfo(jnp.float64).tiny)


_METHODS: dict[str, Callable[..., Hypergradient]] = {
    "exact": _exact,
    "neumann": _neumann,
    "unrolled": _unrolled,
    "differences": _differences,
}


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


def check_derivatives(
    problem: "BilevelProblem", seed: int, tolerance: float | None, hypergradients: bool
) -> dict[str, float]:
    """Return the relative errors of derivatives, and of `hypergradients`; raise ValueError if one is too large."""
    oracles, start = problem.oracles, problem.start
    [largest] = check_positive(tolerance=_default_tolerance(oracles, start) if tolerance is None else tolerance)
    check_flag(hypergradients=hypergradients)
    rng = make_rng(seed)
    with arithmetic(np.float64):
        exact = oracles.astype(np.float64)
        point = jax.tree.map(lambda leaf: leaf + 0.1 * rng.standard_normal(np.shape(leaf)), start)
        point = point._replace(outer_var=exact.project(point.outer_var))
        move = jax.tree.map(lambda leaf: rng.standard_normal(np.shape(leaf)), point)
        errors = {name: _derivative_error(exact, name, point, move, largest) for name in _PRIMITIVES}
        _refuse_large(errors, largest, "finite differences")
        if hypergradients:
            compared = _compare_methods(oracles.in_float64(), point, move.outer_var)
            _refuse_large(compared, largest, "the exact hypergradient")
            errors |= compared
    return errors


def _compare_methods(oracles: Oracles, point: Point, direction: PyTree) -> dict[str, float]:
    """Return the difference of each method from the exact one along a direction of x, relative to its size.

    A damping of twice the largest curvature makes all systems well conditioned, so that all methods converge.
    """
    level = PerturbedLevel.at(oracles, point, 0.0)
    level = level._replace(damping=np.float64(max(2 * float(_largest_curvature(level)), 1e-8)))
    exact = _exact(level, 1e-12, 1000, None).gradient
    slopes = {"differences": _slope(level, direction)[0]}
    for method in ("neumann",) if isinstance(oracles, DifferenceOracles) else ("neumann", "unrolled"):
        slopes[method] = float(trees.dot(_METHODS[method](level, 1e-12, 100, None).gradient, direction))
    # Relative to the norms, since a slope is small along a direction that is nearly orthogonal to the gradient.
    here, size = float(trees.dot(exact, direction)), float(_norm(exact) * _norm(direction))
    return {f"hypergradient_{method}": abs(slope - here) / max(size, 1e-300) for method, slope in slopes.items()}


def _refuse_large(errors: dict[str, float], tolerance: float, reference: str) -> None:
    for name, error in errors.items():
        if not error <= tolerance:
            cause = "the loss is not smooth or finite there, uses `stop_gradient`, or has a wrong custom derivative"
            way = "`check(tolerance=…)` accepts larger errors"
            raise ValueError(f"`{name}` differs from {reference} by {error:.1e} of its size: {cause}; {way}.")


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

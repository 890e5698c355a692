"""Exact solutions at a given outer variable in float64, and the decision whether they are exact.

Norms are in the metric of H = ∇²zz G, ||w||² = w'Hw, which does not depend on the scale of the columns:

    λ = ||H⁻¹ ∇z G||, the Newton decrement, approximates the distance from z to z*      λ ||v*|| bounds the error of h
    ||H⁻¹ (H v + ∇z F)|| is the distance from v to v*

`newton` and `solve_adjoint` reduce both to rounding errors. `solve_adjoint` raises an error if they remain too large.
"""

from collections.abc import Callable
from functools import partial
from math import inf, sqrt
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.scipy.sparse.linalg import cg

from bilevel._core import trees
from bilevel._core.compilation import Compiled, arithmetic, compiled
from bilevel._core.types import Array, Point, PyTree
from bilevel.oracles import Oracles
from bilevel.oracles.curvature import inner_diagonal
from bilevel.problems.checks import check_outer

TOLERANCE = 1e-7  # largest relative error of an exact solution
ROUNDING = 1e-12  # relative error at which iterations may stop
_NEWTON_STEPS, _TRIALS, _REFINEMENTS = 200, 60, 12
_FORCING = 1e-4  # relative residual of conjugate gradients, which Newton's method and refinements reduce further
DIRECT_SIZE = 64  # up to this size of z, H is computed as a matrix
_DENSE_SIZE = 2000  # the same if conjugate gradients have failed
_MOST_PRODUCTS = 5000  # of one solve by conjugate gradients
_COLUMNS, _COLUMN_ROWS = 64, 2**24  # columns of a Hessian that are computed at a time, and rows times columns
_WAY_OUT = "scale the columns of the data, or bound the outer variable where the inner loss has little curvature"


class ExactSolution(NamedTuple):
    """z*(x), v*(x), h(x) and ∇h(x), with the norms of D_z and D_v there.

    Attributes
    ----------
    inner_var, v : z*(x) and v*(x)
    value, hypergrad : h(x) and ∇h(x)
    inner_residual, v_residual : ||D_z|| and ||D_v||, which are rounding errors
    value_gap : h(x) - inf h, or None if inf h is unknown
    """

    inner_var: PyTree
    v: PyTree
    value: float
    hypergrad: PyTree
    inner_residual: float
    v_residual: float
    value_gap: float | None = None


# A function of an outer variable in float64 and a guess (the previous exact solution, or None).
ExactSolver: TypeAlias = Callable[[PyTree, ExactSolution | None], ExactSolution]


def stationarity(oracles: Oracles, outer_var: PyTree, hypergrad: PyTree) -> float:
    """Return ||∇h||² without components that point out of active bounds; with an outer term ||x - prox(x - ∇h)||²."""
    if oracles.outer_term is not None:
        with arithmetic(np.float64):
            exact, ahead = oracles.in_float64(), trees.cast(trees.subtract(outer_var, hypergrad), np.float64)
            moved = exact.project(exact.outer_term.prox(ahead, 1.0))  # type: ignore[union-attr]
            return norm_sq(trees.subtract(outer_var, trees.to_numpy(moved)))
    if oracles.outer_bounds is None:
        return norm_sq(hypergrad)

    def free(x: np.ndarray, grad: np.ndarray, lower: Array, upper: Array) -> np.ndarray:
        blocked = ((x <= np.asarray(lower)) & (grad > 0)) | ((x >= np.asarray(upper)) & (grad < 0))
        return np.where(blocked, 0.0, grad)

    return norm_sq(jax.tree.map(free, outer_var, hypergrad, *oracles.outer_bounds))


def norm_sq(tree: PyTree) -> float:
    """Return the squared norm, computed by NumPy, since JAX would use float32 if x64 is disabled."""
    return float(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(tree)))


def cholesky(matrix: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Return the function that solves systems with a positive definite matrix."""
    from scipy.linalg import cho_factor, cho_solve

    try:
        factor = cho_factor(matrix)
    except ValueError as error:  # LinAlgError too
        found = "positive definite in float64" if np.all(np.isfinite(matrix)) else "finite"
        raise np.linalg.LinAlgError(f"a Hessian is not {found}; {_WAY_OUT}.") from error
    return lambda right_side: cho_solve(factor, right_side)


class System(NamedTuple):
    """H at a point: a function that solves systems to a relative residual, and its products with vectors."""

    solve: Callable[[np.ndarray, float], np.ndarray]
    product: Callable[[np.ndarray], np.ndarray]

    @classmethod
    def dense(cls, matrix: np.ndarray) -> "System":
        solve = cholesky(matrix)
        return cls(lambda right_side, _: solve(right_side), partial(np.matmul, matrix))


class InnerSolution(NamedTuple):
    """z, with ∇z G, H and the Newton decrement there, and the norm of z in the metric of H."""

    z: np.ndarray
    grad: np.ndarray
    system: System
    decrement: float
    size: float


@np.errstate(all="ignore")  # numbers that are not finite are checked
def newton(
    gradient: Callable[[np.ndarray], np.ndarray],
    system_at: Callable[[np.ndarray], System],
    z: np.ndarray,
    accuracy: float = 1e-15,
) -> InnerSolution:
    """Minimize a strongly convex function by damped Newton steps, until λ <= accuracy ||z|| or λ stops decreasing."""
    grad, last = gradient(z), inf
    if not np.all(np.isfinite(grad)):  # the guess is too far from the solution
        z, grad = 0 * z, gradient(0 * z)
    for _ in range(_NEWTON_STEPS):
        system = system_at(z)
        move = system.solve(grad, _FORCING if last < 0.1 else 0.1)
        found = InnerSolution(z, grad, system, np.sqrt(grad @ move), np.sqrt(z @ system.product(z)))
        relative = found.decrement / found.size
        stalls = last / 2 <= relative <= 1e-4
        if found.decrement <= accuracy * found.size or stalls or not (searched := _search(gradient, z, grad, move)):
            break
        (z, grad), last = searched, relative
    return found


def _search(
    gradient: Callable[[np.ndarray], np.ndarray], z: np.ndarray, grad: np.ndarray, move: np.ndarray
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return z - t move with at most half of the slope at z, and the gradient there, or None if it is not found.

    The slope increases with t, since the function is convex, so t is doubled or bisected. Function values are not used,
    since near the minimizer they differ by less than rounding errors.
    """
    slope, low, high, length = grad @ move, 0.0, inf, 1.0
    for _ in range(_TRIALS if slope > 0 else 0):
        trial = z - length * move
        trial_grad = gradient(trial)
        ahead = trial_grad @ move
        if abs(ahead) <= slope / 2 and np.all(np.isfinite(trial_grad)):
            return trial, trial_grad
        low, high = (length, high) if ahead > 0 and ahead < inf else (low, length)
        length = 2 * length if high == inf else (low + high) / 2
    return None


@np.errstate(all="ignore")
def solve_adjoint(
    found: InnerSolution, value: float, outer_grad: np.ndarray, v: Any = 0.0, tolerance: float = TOLERANCE
) -> tuple[np.ndarray, np.ndarray]:
    """Return v* = -H⁻¹ ∇z F and its residual; raise LinAlgError unless z, v and h are exact to the tolerance."""
    _, _, (solve, product), decrement, size = found
    v, last = v + 0 * outer_grad, inf
    left = product(v) + outer_grad
    for _ in range(_REFINEMENTS):
        move = solve(left, _FORCING)
        v, change = v - move, np.sqrt(left @ move)
        image = product(v)
        left, v_size = image + outer_grad, np.sqrt(v @ image)
        if not ROUNDING * v_size < change < last / 2:
            break
        last = change
    # Errors of z or h below ROUNDING cannot be reduced in float64, even if the other one is 0.
    solved = decrement <= tolerance * size and decrement * v_size <= tolerance * abs(value)
    solved |= decrement <= ROUNDING * size or decrement * v_size <= ROUNDING * abs(value)
    if not (solved and change <= tolerance * v_size and np.isfinite(value)):
        errors = np.array([decrement, change, decrement * v_size]) / [size, v_size, abs(value)]
        problem = "the inner level was not solved exactly in float64 at this outer variable: relative errors are about "
        problem += "{:.1e} of z*(x), {:.1e} of v*(x) and {:.1e} of h(x)".format(*errors)
        raise np.linalg.LinAlgError(f"{problem}; {_WAY_OUT}.")
    return v, left


class IterativeExactSolver:
    """Exact solutions of any strongly convex inner problem from its oracles, by Newton steps from the guess.

    A small Hessian is computed as a matrix. Other systems are solved by conjugate gradients, in the dtype of the
    problem as long as the residuals in float64 are small, then in float64, and finally, up to some size, by a matrix.

    Parameters
    ----------
    oracles, start : those of the problem
    accuracy : relative error of z and of v, in the metric of H, at which iterations may stop
    """

    def __init__(self, oracles: Oracles, start: Point, accuracy: float = ROUNDING) -> None:
        self._oracles, self._start, self.accuracy = oracles, start, accuracy
        self._direct_size = DIRECT_SIZE
        with arithmetic(np.float64):
            self._in_float64 = oracles.in_float64()

    def __call__(self, outer_var: PyTree, guess: ExactSolution | None = None) -> ExactSolution:
        x, near = check_outer(outer_var), self._start if guess is None else guess
        z, v, tolerance = trees.flat(near.inner_var), trees.flat(near.v), max(TOLERANCE, self.accuracy)
        with arithmetic(np.float64, self):  # which the problem refers to
            start = trees.cast(Point(near.inner_var, x, near.v), np.float64)
            found = newton(partial(self._gradient, start), partial(self._system, start), z, self.accuracy)
            point = _with(start, inner_var=found.z)
            value, outer_grad = _outer_value_and_grad(self._in_float64, point)
            v, _ = solve_adjoint(found, float(value), trees.flat(outer_grad), v, tolerance)
            point = _with(point, v=v)
            direction = trees.to_numpy(derivative(self._in_float64, "direction", point))
        residuals = sqrt(norm_sq(direction.inner_var)), sqrt(norm_sq(direction.v))
        z, v = trees.to_numpy((point.inner_var, point.v))
        return ExactSolution(z, v, float(value), direction.outer_var, *residuals)

    def _gradient(self, start: Point, z: np.ndarray) -> np.ndarray:
        return trees.flat(derivative(self._in_float64, "inner_grad", _with(start, inner_var=z)))

    def _system(self, start: Point, z: np.ndarray) -> System:
        point = _with(start, inner_var=z)
        if z.size <= self._direct_size:
            return System.dense(np.asarray(hessian(self._in_float64, point)))

        def product(w: np.ndarray) -> np.ndarray:
            return trees.flat(derivative(self._in_float64, "hvp", _with(point, v=w)))

        return System(partial(self._solve, point, product), product)

    def _solve(self, point: Point, product: Callable, right_side: np.ndarray, accuracy: float) -> np.ndarray:
        """Solve a system by conjugate gradients. If they fail, solve this system and all later ones by a matrix."""
        size = np.linalg.norm(right_side)
        if not size > 0:
            return 0 * right_side
        # Scaled, since a tiny residual may be below the range of float32.
        scaled, limit = unflatten(right_side / size, point.inner_var), min(right_side.size, _MOST_PRODUCTS)
        while True:
            w = size * trees.flat(_solve(self._oracles, point, scaled, np.float64(accuracy), np.int32(limit)))
            if np.linalg.norm(product(w) - right_side) <= 10 * accuracy * size:
                return w
            if self._oracles is self._in_float64:
                break
            self._oracles = self._in_float64
        if right_side.size > _DENSE_SIZE:
            problem = f"conjugate gradients did not solve a system of the inner Hessian in {limit} products"
            raise np.linalg.LinAlgError(f"{problem}; {_WAY_OUT}.")
        self._direct_size = _DENSE_SIZE
        return self._system(point, trees.flat(point.inner_var)).solve(right_side, accuracy)


def _with(point: Point, **vectors: np.ndarray) -> Point:
    """Return the point with z or v replaced by flat vectors."""
    return point._replace(**{name: unflatten(vector, point.inner_var) for name, vector in vectors.items()})


def unflatten(vector: np.ndarray, like: PyTree) -> PyTree:
    """Return a flat vector as a tree with the structure and shapes of another tree."""
    leaves, structure = jax.tree.flatten(like)
    parts = np.split(vector, np.cumsum([np.size(leaf) for leaf in leaves])[:-1])
    return jax.tree.unflatten(structure, [p.reshape(np.shape(leaf)) for p, leaf in zip(parts, leaves, strict=True)])


@compiled("name")
def derivative(oracles: Oracles, name: str, point: Point, rows: Any = None) -> Any:
    """Return the method of oracles with this name at a point, on all rows by default."""
    return getattr(oracles, name)(point, *(() if rows is None else (rows,)))


_outer_value_and_grad = Compiled(lambda oracles, point: (oracles.outer_value(point), oracles.outer_grad(point)))


@Compiled
def hessian(oracles: Oracles, point: Point) -> Array:
    """Return the matrix ∇²zz G, with rows and columns in the order of the flat vector of z."""
    vector, unravel = ravel_pytree(point.inner_var)

    def column(unit: Array) -> Array:
        return ravel_pytree(oracles.hvp(point._replace(v=unravel(unit))))[0]

    units = jnp.eye(vector.size, dtype=vector.dtype)
    # Intermediate arrays are at most a few times as large as the data.
    at_once = max(1, min(_COLUMNS, vector.size, _COLUMN_ROWS // oracles.n_inner))
    return jax.lax.map(column, units, batch_size=at_once)


@Compiled
def _solve(oracles: Oracles, point: Point, right_side: PyTree, accuracy: Array, limit: Array) -> PyTree:
    """Return the solution of (∇²zz G) w = right side by conjugate gradients, in the dtype of the oracles."""
    dtype = oracles.inner_samples.dtype
    z, x, v = trees.cast(point, dtype)
    if oracles.inner_samples.is_cast_when_taken:
        # A linearization would store intermediate results of each piece, which are as large as all rows.
        def product(w: PyTree) -> PyTree:
            return oracles.hvp(Point(z, x, w))
    else:
        product = jax.linearize(lambda z: oracles.inner_grad(Point(z, x, v)), z)[1]
    precondition = None
    if oracles.has_row_diagonals:
        # The diagonal is cheap in closed form, and it helps if penalties have very different sizes.
        precondition = partial(jax.tree.map, lambda d, r: r / d, inner_diagonal(oracles, Point(z, x, v)))
    tolerance = jnp.asarray(accuracy, dtype)
    return cg(product, trees.cast(right_side, dtype), tol=tolerance, maxiter=limit, M=precondition)[0]

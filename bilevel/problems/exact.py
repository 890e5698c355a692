"""Exact solutions at a given outer variable, in float64, and every numerical solve that they take.

`newton_to_rounding` has a dense Hessian, `IterativeExactSolver` needs products only. Their loops stay apart: the one
remembers its damping and goes on to rounding, the other tries a whole step first and stops at a residual.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.scipy.sparse.linalg import cg

from bilevel import _tree as trees
from bilevel._precision import arithmetic
from bilevel._programs import Compiled, compiled
from bilevel._types import Array, Point, PyTree
from bilevel.oracles import Oracles


class ExactSolution(NamedTuple):
    """z*(x), v*(x), h(x) and ∇h(x), with the norms of D_z and D_v there."""

    inner_var: PyTree
    v: PyTree
    value: float
    hypergrad: PyTree
    inner_residual: float
    v_residual: float
    value_gap: float | None = None


# From an outer variable in float64 and a guess (the last exact solution, or None) to the exact solution there.
ExactSolver: TypeAlias = Callable[[PyTree, ExactSolution | None], ExactSolution]


def stationarity(oracles: Oracles, outer_var: PyTree, hypergrad: PyTree) -> float:
    """Return ||∇h||² without what pushes against active bounds: the projection onto a cone of x, so nonexpansive."""
    if oracles.outer_bounds is None:
        return norm_sq(hypergrad)

    def free(x: np.ndarray, grad: np.ndarray, lower: Array, upper: Array) -> np.ndarray:
        blocked = ((x <= np.asarray(lower)) & (grad > 0)) | ((x >= np.asarray(upper)) & (grad < 0))
        return np.where(blocked, 0.0, grad)

    return norm_sq(jax.tree.map(free, outer_var, hypergrad, *oracles.outer_bounds))


def norm_sq(tree: PyTree) -> float:
    """Return the squared norm in NumPy's arithmetic: JAX's would be float32 where the user has x64 off."""
    return float(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(tree)))


def cholesky(matrix: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Return the function that solves systems with a positive definite matrix."""
    from scipy.linalg import cho_factor, cho_solve

    factor = cho_factor(matrix)
    return lambda right_side: cho_solve(factor, right_side)


def lbfgs(value_and_grad: Callable, start: np.ndarray, callback: Callable | None = None, **options: Any) -> Any:
    """Minimize a function of a flat vector by SciPy's L-BFGS, until its gradient is small whatever its values say."""
    from scipy.optimize import minimize

    options = {"ftol": 0.0} | options
    return minimize(value_and_grad, start, jac=True, method="L-BFGS-B", callback=callback, options=options)


def newton_to_rounding(
    derivatives: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]], z: np.ndarray, max_steps: int = 100
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Take Newton steps, halved where the gradient does not fall, to rounding; return z, gradient and Hessian there."""
    (grad, hessian), damping = derivatives(z), 1.0
    for _ in range(max_steps):
        if np.linalg.norm(grad) == 0:
            break
        trial = z - damping * cholesky(hessian)(grad)
        trial_grad, trial_hessian = derivatives(trial)
        fell = np.linalg.norm(trial_grad) / np.linalg.norm(grad)
        if fell < 1:
            z, grad, hessian = trial, trial_grad, trial_hessian
        # Newton's method squares a gradient this small; one that falls no further is at rounding.
        if not fell < 0.5 and np.linalg.norm(grad) < 1e-10:
            break
        damping = min(1.0, 2 * damping) if fell < 1 else damping / 2
    return z, grad, hessian


class IterativeExactSolver:
    """Exact solutions of any strongly convex inner problem, from its oracles.

    Newton steps go from the guess to z*, shortened where a whole one does not halve the gradient; where that fails too,
    L-BFGS comes nearer first. Gradients and residuals are computed in float64; linear systems are solved by conjugate
    gradients in the dtype of the problem as long as that brings the residuals down, then in float64. ``residual`` is
    where to stop: ||D_z|| relative to ||(∇²zz G) z||, and ||D_v|| relative to ||∇z F||.
    """

    def __init__(self, oracles: Oracles, start: Point, residual: float = 1e-12) -> None:
        self._oracles, self._start, self.residual = oracles, start, residual
        with arithmetic(np.float64):
            self._in_float64 = oracles.in_float64()

    def __call__(self, outer_var: PyTree, guess: ExactSolution | None = None) -> ExactSolution:
        near = self._start if guess is None else guess
        with arithmetic(np.float64):
            point = trees.cast(Point(near.inner_var, outer_var, near.v), np.float64)
            point, solved = self._correct(point, "inner_var")
            if not solved:
                point, _ = self._correct(self.approach(point), "inner_var")
            point, _ = self._correct(point, "v")
            value, direction = _value_and_direction(self._in_float64, point)
            z, v, hypergrad = trees.to_numpy((point.inner_var, point.v, direction.outer_var))
            residuals = [float(_norm(part)) for part in (direction.inner_var, direction.v)]
        return ExactSolution(z, v, float(value), hypergrad, *residuals)

    def _correct(self, point: Point, part: str) -> tuple[Point, bool]:
        """Take steps as long as they halve the residual, or shorter ones of z help; return whether it became small."""
        left, size, scale = _residual(self._in_float64, point, part)
        oracles = self._oracles
        for _ in range(100):
            if size <= self.residual * scale:
                return point, True
            # A system is solved no further than this step can use.
            accuracy = max(min(size / scale, 0.1), 1e-4, self.residual * scale / size / 2)
            # A typed number: a Python float, now and then, would be a program of its own.
            moved = _step(oracles, point, getattr(point, part), left, np.float64(accuracy))
            trial = point._replace(**{part: moved})
            found = _residual(self._in_float64, trial, part)
            if found[1] < size / 2:
                point, (left, size, scale) = trial, found
            elif oracles is not self._in_float64:
                oracles = self._in_float64
            else:
                shortened = self._shorten(point, trial, size) if part == "inner_var" else None
                if shortened is None:
                    return point, bool(size <= 1e3 * self.residual * scale)
                point, (left, size, scale) = shortened
        return point, False

    def _shorten(self, point: Point, trial: Point, size: Array) -> tuple[Point, Any] | None:
        """Return a fraction of the way to the trial that lowers the residual by half of it, and the residual."""
        for fraction in (0.5**halvings for halvings in range(1, 7)):
            between = trees.add(trees.scale(1 - fraction, point), trees.scale(fraction, trial))
            found = _residual(self._in_float64, between, "inner_var")
            if found[1] < (1 - fraction / 2) * size:
                return between, found
        return None

    def approach(self, point: Point) -> Point:
        """Return the point with z moved towards z*(x) by L-BFGS, from where Newton's method may arrive."""
        unravel: Callable[[Any], PyTree] = ravel_pytree(point.inner_var)[1]

        def value_and_grad(z: np.ndarray) -> tuple[float, np.ndarray]:
            value, grad = _inner_value_and_grad(self._in_float64, point._replace(inner_var=unravel(z)))
            return float(value), trees.flat(grad)

        found = lbfgs(value_and_grad, trees.flat(point.inner_var), maxiter=1000, maxfun=5000, gtol=1e-8)
        return point._replace(inner_var=unravel(found.x))


_inner_value_and_grad = Compiled(lambda oracles, point: (oracles.inner_value(point), oracles.inner_grad(point)))
_value_and_direction = Compiled(lambda oracles, point: (oracles.outer_value(point), oracles.direction(point)))


@compiled("part")
def _residual(oracles: Oracles, point: Point, part: str) -> tuple[PyTree, Array, Array]:
    """Return ∇z G, its norm and ||(∇²zz G) z||, or D_v, its norm and ||∇z F||."""
    if part == "inner_var":
        inner = oracles.inner(point._replace(v=point.inner_var))
        left, scale = inner.grad, inner.hvp
    else:
        scale = oracles.outer_grad(point)
        left = trees.add(oracles.hvp(point), scale)
    return left, _norm(left), _norm(scale)


@Compiled
def _step(oracles: Oracles, point: Point, variable: PyTree, left: PyTree, accuracy: Array) -> PyTree:
    """Return the variable, z or v, less the solution of (∇²zz G) w = left, in the arithmetic of the oracles."""
    dtype = oracles.inner_samples.dtype
    z, x, v = trees.cast(point, dtype)
    size = _norm(left)
    # Scaled, because a float32 of a tiny residual may be no normal number.
    scaled = trees.cast(trees.scale(1 / size, left), dtype)
    if oracles.inner_samples.is_cast_when_taken:
        # What a linearization would keep of each piece is as large as the rows.
        def product(w: PyTree) -> PyTree:
            return oracles.hvp(Point(z, x, w))
    else:
        product = jax.linearize(lambda z: oracles.inner_grad(Point(z, x, v)), z)[1]
    precondition = None
    if oracles.diagonal_passes == 1:
        # In closed form the diagonal costs little, and penalties may be of many sizes.
        precondition = partial(jax.tree.map, lambda d, r: r / d, oracles.inner_diagonal(Point(z, x, v)))
    solution, _ = cg(product, scaled, tol=jnp.asarray(accuracy, dtype), M=precondition)
    return trees.subtract(variable, trees.scale(size, trees.cast(solution, np.float64)))


def _norm(tree: PyTree) -> Array:
    return jnp.sqrt(trees.norm_sq(tree))

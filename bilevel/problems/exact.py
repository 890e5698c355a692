"""How far an outer variable is from stationary, where it may be at a bound.

Exact solutions at a given outer variable, in float64: what a run is judged by.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.scipy.sparse.linalg import cg

from bilevel import _tree as trees
from bilevel._precision import arithmetic
from bilevel._types import Array, Point, PyTree
from bilevel.oracles import Oracles


def stationarity(oracles: Oracles, outer_var: PyTree, hypergrad: PyTree) -> float:
    """Return ||∇h||², without the components that push against an active bound.

    What is left is the projection of ∇h onto a cone that x alone decides, so that gradients at one x that are ε apart
    have norms that differ by at most ε.
    """
    if oracles.outer_bounds is None:
        return norm_sq(hypergrad)

    def free(x: np.ndarray, grad: np.ndarray, lower: Array, upper: Array) -> np.ndarray:
        blocked = ((x <= np.asarray(lower)) & (grad > 0)) | ((x >= np.asarray(upper)) & (grad < 0))
        return np.where(blocked, 0.0, grad)

    return norm_sq(jax.tree.map(free, outer_var, hypergrad, *oracles.outer_bounds))


def norm_sq(tree: PyTree) -> float:
    """Return the squared norm in NumPy's arithmetic: JAX's would be float32 where the user has x64 off."""
    return float(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(tree)))


class ExactSolution(NamedTuple):
    """z*(x), v*(x), h(x) and ∇h(x), with the norms of what D_z and D_v leave there."""

    inner_var: PyTree
    v: PyTree
    value: float
    hypergrad: PyTree
    inner_residual: float
    v_residual: float
    value_gap: float | None = None


# From an outer variable in float64 and a guess (the last reference, or None) to the reference there.
ExactSolver: TypeAlias = Callable[[PyTree, ExactSolution | None], ExactSolution]


class IterativeExactSolver:
    """References of any strongly convex inner problem, from its oracles.

    Newton steps go from the guess to z*, shortened where a whole one does not halve the gradient; where that fails too,
    L-BFGS comes nearer first.
    v* solves a linear system. Gradients and residuals are computed in float64; the systems are solved by conjugate
    gradients in the dtype of the problem as long as that brings the residuals down, then in float64.

    Parameters
    ----------
    oracles, start : of the problem
    residual : where to stop: ||D_z|| relative to ||(∇²zz G) z||, and ||D_v|| relative to ||∇z F||
    """

    max_corrections = 100
    shortest = 1 / 64

    def __init__(self, oracles: Oracles, start: Point, residual: float = 1e-12) -> None:
        self._narrow = oracles
        with arithmetic(np.float64):
            self._wide = oracles.widened()
        self._start = start
        self.residual = residual

    def __call__(self, outer_var: PyTree, guess: ExactSolution | None = None) -> ExactSolution:
        """Solve the inner problem and the linear system at ``outer_var``."""
        near = self._start if guess is None else guess
        with arithmetic(np.float64):
            return self._solve(trees.cast(Point(near.inner_var, outer_var, near.v), np.float64))

    def _solve(self, point: Point) -> ExactSolution:
        point, solved = self._corrected(point, _inner_defect, _newton_step, self.shortest)
        if not solved:
            point, _ = self._corrected(self._lbfgs(point), _inner_defect, _newton_step, self.shortest)
        point, _ = self._corrected(point, _v_defect, _v_step)
        value, direction = _value_and_direction(self._wide, point)
        return ExactSolution(
            inner_var=trees.to_numpy(point.inner_var),
            v=trees.to_numpy(point.v),
            value=float(value),
            hypergrad=trees.to_numpy(direction.outer_var),
            inner_residual=float(np.sqrt(trees.norm_sq(direction.inner_var))),
            v_residual=float(np.sqrt(trees.norm_sq(direction.v))),
        )

    def _corrected(self, point: Point, defect: Callable, step: Callable, shortest: float = 1.0) -> tuple[Point, bool]:
        """Take steps as long as they halve the defect, or shorter ones help; return whether it became small."""
        left, size, scale = defect(self._wide, point)
        oracles = self._narrow
        for _ in range(self.max_corrections):
            if size <= self.residual * scale:
                return point, True
            # A system is solved no further than this step can use.
            accuracy = max(min(size / scale, 0.1), 1e-4, self.residual * scale / size / 2)
            trial = step(oracles, point, left, accuracy)
            trial_left, trial_size, trial_scale = defect(self._wide, trial)
            if trial_size < size / 2:
                point, left, size, scale = trial, trial_left, trial_size, trial_scale
            elif oracles is not self._wide:
                oracles = self._wide
            else:
                shortened = self._shortened(point, trial, defect, size, shortest)
                if shortened is None:
                    return point, bool(size <= 1e3 * self.residual * scale)
                point, (left, size, scale) = shortened
        return point, False

    def _shortened(
        self, point: Point, trial: Point, defect: Callable, size: Array, shortest: float
    ) -> tuple[Point, Any] | None:
        """Return a part of the way to the trial that lowers the defect by half of that part, and what is left there."""
        part = 0.5
        while part >= shortest:
            between = trees.add(trees.scale(1 - part, point), trees.scale(part, trial))
            found = defect(self._wide, between)
            if found[1] < (1 - part / 2) * size:
                return between, found
            part /= 2
        return None

    def _lbfgs(self, point: Point) -> Point:
        from scipy.optimize import minimize

        unravel: Callable[[Any], PyTree] = ravel_pytree(point.inner_var)[1]

        def value_and_grad(z: np.ndarray) -> tuple[float, np.ndarray]:
            value, grad = _inner_value_and_grad(self._wide, point._replace(inner_var=unravel(z)))
            return float(value), trees.flat(grad)

        options = {"maxiter": 1000, "maxfun": 5000, "ftol": 0.0, "gtol": 1e-8}
        found = minimize(value_and_grad, trees.flat(point.inner_var), jac=True, method="L-BFGS-B", options=options)
        return point._replace(inner_var=unravel(found.x))


@jax.jit
def _inner_value_and_grad(oracles: Oracles, point: Point) -> tuple[Array, PyTree]:
    return oracles.inner_value(point), oracles.inner_grad(point)


@jax.jit
def _inner_defect(oracles: Oracles, point: Point) -> tuple[PyTree, Array, Array]:
    """Return ∇z G, its norm, and ||(∇²zz G) z||."""
    inner = oracles.inner(point._replace(v=point.inner_var))
    return inner.grad, _norm(inner.grad), _norm(inner.hvp)


@jax.jit
def _v_defect(oracles: Oracles, point: Point) -> tuple[PyTree, Array, Array]:
    """Return D_v, its norm, and ||∇z F||."""
    outer_grad = oracles.outer_grad(point)
    left = trees.add(oracles.hvp(point), outer_grad)
    return left, _norm(left), _norm(outer_grad)


@jax.jit
def _newton_step(oracles: Oracles, point: Point, grad: PyTree, accuracy: Array) -> Point:
    move = _solution(oracles, point, grad, accuracy)
    return point._replace(inner_var=trees.subtract(point.inner_var, move))


@jax.jit
def _v_step(oracles: Oracles, point: Point, left: PyTree, accuracy: Array) -> Point:
    return point._replace(v=trees.subtract(point.v, _solution(oracles, point, left, accuracy)))


def _solution(oracles: Oracles, point: Point, right_side: PyTree, accuracy: Array) -> PyTree:
    """Return the solution of (∇²zz G) w = right side in the arithmetic of the oracles, as float64."""
    dtype = oracles.inner_samples.dtype
    z, x, v = trees.cast(point, dtype)
    size = _norm(right_side)
    # Scaled, because a float32 of a tiny residual may be no normal number.
    scaled = trees.cast(trees.scale(1 / size, right_side), dtype)
    if oracles.inner_samples.is_widened:
        # What a linearization would keep of each piece is as large as the rows.
        def product(w: PyTree) -> PyTree:
            return oracles.hvp(Point(z, x, w))
    else:
        product = jax.linearize(lambda z: oracles.inner_grad(Point(z, x, v)), z)[1]
    solution, _ = cg(product, scaled, tol=jnp.asarray(accuracy, dtype), M=_divided_by_diagonal(oracles, Point(z, x, v)))
    return trees.scale(size, trees.cast(solution, np.float64))


def _divided_by_diagonal(oracles: Oracles, point: Point) -> Callable[[PyTree], PyTree] | None:
    """Return the preconditioner of penalties of many sizes, where the diagonal is known in closed form."""
    if oracles.diagonal_passes > 1:
        return None
    diagonal = oracles.inner_diagonal(point)
    return lambda residual: jax.tree.map(jnp.divide, residual, diagonal)


def _norm(tree: PyTree) -> Array:
    return jnp.sqrt(trees.norm_sq(tree))


@jax.jit
def _value_and_direction(oracles: Oracles, point: Point) -> tuple[Array, Point]:
    return oracles.outer_value(point), oracles.direction(point)

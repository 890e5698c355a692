"""Exact solutions at a given outer variable, in float64: what a run is judged by."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.flatten_util import ravel_pytree

from bilevel import trees
from bilevel.oracles import Oracles
from bilevel.precision import arithmetic
from bilevel.types import Array, Point, PyTree


class Reference(NamedTuple):
    """z*(x), v*(x), h(x) and ∇h(x), with the norms of what D_z and D_v leave there."""

    inner_var: PyTree
    v: PyTree
    value: float
    hypergrad: PyTree
    inner_residual: float
    v_residual: float
    value_gap: float | None = None


# From an outer variable in float64 and a guess (the last reference, or None) to the reference there.
Referee: TypeAlias = Callable[[PyTree, Reference | None], Reference]


class GenericReferee:
    """References of any strongly convex inner problem, from its oracles.

    L-BFGS comes near z*, Newton steps whose systems conjugate gradients solve go on to rounding, and
    conjugate gradients give v*. All are SciPy's; derivatives are computed in float64.
    """

    newton_steps = 20

    def __init__(self, oracles: Oracles, start: Point) -> None:
        self._narrow_oracles = oracles
        self._start = start
        self._oracles: Oracles | None = None

    def __call__(self, outer_var: PyTree, guess: Reference | None) -> Reference:
        """Solve the inner problem and the linear system at ``outer_var``."""
        with arithmetic(np.float64):
            return self._solve(outer_var, guess)

    def _solve(self, outer_var: PyTree, guess: Reference | None) -> Reference:
        from scipy.optimize import minimize

        if self._oracles is None:
            self._oracles = self._narrow_oracles.astype(np.float64)
        near = self._start if guess is None else guess
        z, v = trees.flat(near.inner_var), trees.flat(near.v)
        unravel: Callable[[Any], PyTree] = ravel_pytree(trees.cast(near.inner_var, np.float64))[1]

        def at(z: Any, v: Any) -> Point:
            return Point(unravel(z), outer_var, unravel(v))

        def value_and_grad(z: np.ndarray) -> tuple[float, np.ndarray]:
            value, grad = _inner_value_and_grad(self._oracles, at(z, v))
            return float(value), trees.flat(grad)

        options = {"maxiter": 1000, "maxfun": 5000, "ftol": 0.0, "gtol": 1e-8}
        found = minimize(value_and_grad, z, jac=True, method="L-BFGS-B", options=options)
        z = self._polished(found.x, value_and_grad, at)
        outer_value, outer = _outer_value_and_grads(self._oracles, at(z, v))
        right_side = -trees.flat(outer.grad)
        v = self._conjugate_gradients(z, right_side, v, at)
        direction = _direction(self._oracles, at(z, v))
        return Reference(
            inner_var=trees.to_numpy(unravel(z)),
            v=trees.to_numpy(unravel(v)),
            value=float(outer_value),
            hypergrad=trees.to_numpy(direction.outer_var),
            inner_residual=float(np.sqrt(trees.norm_sq(direction.inner_var))),
            v_residual=float(np.sqrt(trees.norm_sq(direction.v))),
        )

    def _polished(self, z: np.ndarray, value_and_grad: Callable, at: Callable) -> np.ndarray:
        """Take Newton steps as long as they halve the gradient."""
        grad = value_and_grad(z)[1]
        for _ in range(self.newton_steps):
            trial = z - self._conjugate_gradients(z, grad, np.zeros_like(z), at)
            trial_grad = value_and_grad(trial)[1]
            if not np.linalg.norm(trial_grad) < 0.5 * np.linalg.norm(grad):
                break
            z, grad = trial, trial_grad
        return z

    def _conjugate_gradients(
        self, z: np.ndarray, right_side: np.ndarray, guess: np.ndarray, at: Callable
    ) -> np.ndarray:
        from scipy.sparse.linalg import LinearOperator, cg

        def product(w: np.ndarray) -> np.ndarray:
            return trees.flat(_hvp(self._oracles, at(z, w)))

        hessian = LinearOperator((z.size, z.size), matvec=product, dtype=np.float64)
        solution, _ = cg(hessian, right_side, x0=guess, rtol=1e-13, maxiter=10 * z.size + 100)
        return solution


@jax.jit
def _inner_value_and_grad(oracles: Oracles, point: Point) -> tuple[Array, PyTree]:
    return oracles.inner_value(point), oracles.inner_grad(point)


@jax.jit
def _outer_value_and_grads(oracles: Oracles, point: Point) -> tuple[Array, PyTree]:
    return oracles.outer_value(point), oracles.outer(point)


@jax.jit
def _hvp(oracles: Oracles, point: Point) -> PyTree:
    return oracles.hvp(point)


@jax.jit
def _direction(oracles: Oracles, point: Point) -> Point:
    return oracles.direction(point)

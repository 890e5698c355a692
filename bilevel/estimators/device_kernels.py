"""Ridge regression through kernels by JAX: each fold is as large as all rows, so that one program serves all folds.

With roots S of the weights, which are zero where a row is held out, A = I + S K S and a = S A⁻¹ S (y - U b).
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import cho_solve, cholesky

from bilevel._programs import Compiled
from bilevel._types import Array
from bilevel.estimators.kernels import FREE_RIDGE, KernelRidge
from bilevel.estimators.selection import Fits


class Factored(NamedTuple):
    """The system of a fit: roots of weights, Cholesky factors, and what they make of the columns without a penalty."""

    roots: Array
    factor: Array
    solved_free: Array
    border: Array

    def solve(self, free: Array, right: Array, border: Array | float) -> tuple[Array, Array]:
        """Solve for the weights of rows, and for the coefficients without a penalty."""
        x = self.solve_rows(right)
        if not free.shape[1]:
            return x, jnp.zeros((0, right.shape[1]), right.dtype)
        b = cho_solve((self.border, True), free.T @ x - border)
        return x - self.solved_free @ b, b

    def solve_rows(self, right: Array) -> Array:
        return self.roots[:, None] * cho_solve((self.factor, True), self.roots[:, None] * right)


class Folded(NamedTuple):
    """The kernel, and of each fold its system and solution."""

    variances: Array
    kernel: Array
    systems: Factored
    a: Array
    b: Array


class DeviceKernelRidge(KernelRidge):
    """`KernelRidge` whose folds are computed together, on the device of its arrays."""

    def fit(self, weights: np.ndarray, log_penalties: np.ndarray, start: Fits | None = None) -> Fits:
        variances = self.arrays.put(np.exp(-log_penalties))
        state, predictor = _fit(self.kernels, self.free, self.y, self.arrays.put(weights), variances)
        empty = np.zeros((len(weights), 0))
        return Fits(empty[..., None], empty, predictor, state)

    def pull_back(self, fits: Fits, cotangent: Any) -> np.ndarray:
        return np.asarray(_pull_back(self.kernels, self.free, fits.state, self.arrays.put(cotangent)), float)

    def push_forward(self, fits: Fits, move: np.ndarray) -> np.ndarray:
        return np.asarray(_push_forward(self.kernels, self.free, fits.state, self.arrays.put(move)), float)


@Compiled
def _fit(kernels: Array, free: Array, y: Array, weights: Array, variances: Array) -> tuple[Folded, Array]:
    kernel = jnp.tensordot(variances, kernels, axes=1)
    systems, a, b = jax.vmap(partial(_fit_one, kernel, free, y))(weights)
    return Folded(variances, kernel, systems, a, b), kernel @ a + free @ b


def _fit_one(kernel: Array, free: Array, y: Array, weights: Array) -> tuple[Factored, Array, Array]:
    roots = jnp.sqrt(weights)
    jitter = 10 * jnp.finfo(kernel.dtype).eps * jnp.trace(kernel) / len(kernel)
    system = roots[:, None] * kernel * roots + jnp.diag(1 + jitter * weights)
    found = Factored(roots, cholesky(system, lower=True), free, free[:0])
    solved = found.solve_rows(free)
    border = free.T @ solved + FREE_RIDGE * jnp.eye(free.shape[1], dtype=free.dtype)
    found = found._replace(solved_free=solved, border=cholesky(border, lower=True) if free.shape[1] else border)
    return found, *found.solve(free, y, 0.0)


@Compiled
def _pull_back(kernels: Array, free: Array, state: Folded, cotangents: Array) -> Array:
    def of_one(system: Factored, a: Array, cotangent: Array) -> Array:
        v, _ = system.solve(free, state.kernel @ cotangent, free.T @ cotangent)
        return -state.variances * jnp.tensordot(kernels, (cotangent - v) @ a.T, axes=2)

    return jax.vmap(of_one)(state.systems, state.a, cotangents)


@Compiled
def _push_forward(kernels: Array, free: Array, state: Folded, move: Array) -> Array:
    rate = jnp.tensordot(-state.variances * move, kernels, axes=1)

    def of_one(system: Factored, a: Array) -> Array:
        change = rate @ a
        step, follow = system.solve(free, -change, 0.0)
        return change + state.kernel @ step + free @ follow

    return jax.vmap(of_one)(state.systems, state.a)

"""Systems with the Hessians of several weightings of the same rows: Cholesky factors, and conjugate gradients.

Coefficients are (coordinates, fits, outputs), predictors (rows, fits, outputs), weights (rows, fits).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from scipy.linalg.lapack import dpotrf, dpotrs

from bilevel.estimators.coordinates import Coordinates, times
from bilevel.estimators.losses import Loss, Softmax, Squared

_MOST_STEPS = 1000  # of conjugate gradients
_FEW_STEPS = 8  # with more, the preconditioner is made anew
_MOST_ENTRIES = 5e7  # of the dense matrices of one preconditioner
_ROWS_PER_COORDINATE = 20  # with more, one matrix serves every fit: leaving a fold out changes it little
_TINY = np.finfo(float).tiny


def conjugate_gradients(
    product: Callable[[np.ndarray], np.ndarray],
    precondition: Callable[[np.ndarray], np.ndarray],
    rhs: np.ndarray,
    tol: float,
) -> tuple[np.ndarray, int]:
    """Solve one system per fit, to a relative norm of the residual; return the number of steps too."""
    x, residual = np.zeros_like(rhs), rhs.copy()
    direction = precondition(residual)
    size = _dot(residual, direction)
    target, step = tol**2 * size, 0
    while step < _MOST_STEPS and np.any(size > target):
        image = product(direction)
        length = size / np.maximum(_dot(direction, image), _TINY)
        x += length[:, None] * direction
        residual -= length[:, None] * image
        z = precondition(residual)
        size, last = _dot(residual, z), size
        direction = z + (size / np.maximum(last, _TINY))[:, None] * direction
        step += 1
    return x, step


def _dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.einsum("pfc,pfc->f", a, b)


class Blocks(NamedTuple):
    """Z' D Z, (fits, outputs, coordinates, coordinates), or its diagonal; one fit or output may stand for all."""

    entries: np.ndarray
    dense: bool

    def solver(self, ridge: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        """Return what solves with these blocks and the ridge."""
        if not self.dense:
            diagonal = np.moveaxis(self.entries, -1, 0) + ridge[:, None, None]
            return lambda rhs: rhs / diagonal
        factors = [[_factor(block, ridge) for block in row] for row in self.entries]
        return lambda rhs: _solve_blocks(factors, rhs)


def _factor(block: np.ndarray, ridge: np.ndarray) -> np.ndarray:
    matrix, diagonal = block.copy(), np.diag_indices(len(block))
    matrix[diagonal] += ridge
    factor, failed = dpotrf(matrix, lower=1)
    while failed:  # rounding has made a singular matrix indefinite
        matrix[diagonal] += 1e-10 * np.trace(matrix) / len(matrix)
        factor, failed = dpotrf(matrix, lower=1)
    return factor


def _solve_blocks(factors: list[list[np.ndarray]], rhs: np.ndarray) -> np.ndarray:
    out = np.empty_like(rhs)
    all_of_them: list[Any] = [slice(None)]
    fits = list(range(rhs.shape[1])) if len(factors) > 1 else all_of_them
    outputs = list(range(rhs.shape[2])) if len(factors[0]) > 1 else all_of_them
    for f, row in zip(fits, factors, strict=True):
        for c, factor in zip(outputs, row, strict=True):
            part = rhs[:, f, c]
            out[:, f, c] = dpotrs(factor, part.reshape(len(rhs), -1), lower=1)[0].reshape(part.shape)
    return out


def _blocks(Z: Any, curvature: np.ndarray) -> Blocks:
    """Return Z' D Z for each fit and output of the curvature, (rows, fits, outputs), or its diagonal if too large."""
    _, fits, outputs = curvature.shape
    size = Z.shape[1]
    if fits * outputs * size**2 > _MOST_ENTRIES:
        return Blocks(np.moveaxis(times((Z.multiply(Z) if sp.issparse(Z) else Z**2).T, curvature), 0, -1), False)
    entries = np.empty((fits, outputs, size, size))
    for f in range(fits):
        for c in range(outputs):
            root = np.sqrt(curvature[:, f, c])
            scaled = sp.diags_array(root) @ Z if sp.issparse(Z) else root[:, None] * Z
            product = scaled.T @ scaled
            entries[f, c] = product.toarray() if sp.issparse(product) else product
    return Blocks(entries, True)


class Hessian:
    """The Hessian at some predictors, solved by blocks that may be older than these."""

    def __init__(
        self, loss: Loss, y: np.ndarray, at: Coordinates, weights: np.ndarray, eta: np.ndarray, blocks: Blocks | None
    ) -> None:
        self.loss, self.y, self.at, self.weights, self.eta = loss, y, at, weights, eta
        rows, size = at.Z.shape
        self.constant, self.outdated = isinstance(loss, Squared), False
        self.pooled = not self.constant and rows > _ROWS_PER_COORDINATE * size
        self.exact = self.constant or (y.shape[-1] == 1 and not self.pooled)
        self.blocks = blocks if blocks is not None and (self.constant or not self.exact) else self._make_blocks()
        self.exact &= self.blocks.dense
        self._precondition = self.blocks.solver(at.ridge)

    def _make_blocks(self) -> Blocks:
        curvature = np.ones((1, 1, 1)) if self.constant else self.loss.curvature(self.y, self.eta)
        curvature = self.weights[:, :, None] * curvature
        return _blocks(self.at.Z, curvature.mean(axis=1, keepdims=True) if self.pooled else curvature)

    def product(self, v: np.ndarray) -> np.ndarray:
        bent = self.loss.bend(self.y, self.eta, times(self.at.Z, v))
        return times(self.at.ZT, self.weights[:, :, None] * bent) + self.at.ridge[:, None, None] * v

    def precondition(self, rhs: np.ndarray) -> np.ndarray:
        if not isinstance(self.loss, Softmax):
            return self._precondition(rhs)
        # What all classes share does not change the loss, so that blocks of one class mistake its curvature.
        return _center(self._precondition(_center(rhs)))

    def solve(self, rhs: np.ndarray, tol: float) -> np.ndarray:
        if self.exact:
            return self._precondition(rhs)
        x, steps = conjugate_gradients(self.product, self.precondition, rhs, tol)
        self.outdated = steps > _FEW_STEPS
        return x


def _center(rhs: np.ndarray) -> np.ndarray:
    return rhs - rhs.mean(axis=-1, keepdims=True)

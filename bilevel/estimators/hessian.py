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
_FEW_STEPS = 2  # for each digit of the solution; with more, the preconditioner is made anew
_MOST_ENTRIES = 5e7  # of the dense matrices of one preconditioner
ROWS_PER_COORDINATE = 20  # with more, fits without a fold have about the same curvature of each row
_SMALL = 150  # coefficients of a softmax regression that one matrix serves
_SMALL_SHARED = 400  # the same, where one matrix serves every fit
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
    """Z' D Z, (fits, outputs, coordinates, coordinates), or its diagonal; one fit or output may stand for all.

    Where outputs are coupled, blocks may be over coordinates times outputs.
    """

    entries: np.ndarray
    dense: bool
    flat: bool = False

    def solver(self, ridge: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        """Return what solves with these blocks and the ridge."""
        if not self.dense:
            diagonal = np.moveaxis(self.entries, -1, 0) + ridge[:, None, None]
            return lambda rhs: rhs / diagonal
        ridge = np.repeat(ridge, self.entries.shape[-1] // len(ridge))
        factors = [[_factor(block, ridge) for block in row] for row in self.entries]
        return lambda rhs: _solve_flat(factors, rhs) if self.flat else _solve_blocks(factors, rhs)


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


def _solve_flat(factors: list[list[np.ndarray]], rhs: np.ndarray) -> np.ndarray:
    size, fits, outputs = rhs.shape
    columns = np.moveaxis(rhs, 1, 2).reshape(-1, fits)
    if len(factors) == 1:
        solved = [dpotrs(factors[0][0], columns, lower=1)[0]]
    else:
        solved = [dpotrs(row[0], columns[:, f : f + 1], lower=1)[0] for f, row in enumerate(factors)]
    return np.moveaxis(np.hstack(solved).reshape(size, outputs, fits), 2, 1)


def scale_rows(Z: Any, factors: np.ndarray) -> Any:
    """Multiply each row by its factor."""
    return sp.diags_array(factors) @ Z if sp.issparse(Z) else factors[:, None] * Z


def gram(Z: Any, curvature: np.ndarray) -> np.ndarray:
    """Return Z' D Z."""
    scaled = scale_rows(Z, np.sqrt(curvature))
    product = scaled.T @ scaled
    return product.toarray() if sp.issparse(product) else product


def flat_gram(Z: Any, weight: np.ndarray, bend: Callable[[np.ndarray], np.ndarray], outputs: int) -> np.ndarray:
    """Return the matrix over coefficients of features and outputs, features first."""
    size = Z.shape[1]
    out = np.empty((size, outputs, size, outputs))
    for d, move in enumerate(np.eye(outputs)):
        curvature = weight[:, None] * bend(np.broadcast_to(move, (len(weight), outputs)))
        for c in range(d + 1):
            block = Z.T @ scale_rows(Z, curvature[:, c])
            out[:, c, :, d] = out[:, d, :, c] = block.toarray() if sp.issparse(block) else block
    return out.reshape(size * outputs, -1)


def _blocks(Z: Any, curvature: np.ndarray) -> Blocks:
    """Return Z' D Z for each fit and output of the curvature, (rows, fits, outputs), or its diagonal if too large."""
    _, fits, outputs = curvature.shape
    if fits * outputs * Z.shape[1] ** 2 > _MOST_ENTRIES:
        return Blocks(np.moveaxis(times((Z.multiply(Z) if sp.issparse(Z) else Z**2).T, curvature), 0, -1), False)
    return Blocks(np.array([[gram(Z, curvature[:, f, c]) for c in range(outputs)] for f in range(fits)]), True)


def find_patterns(*weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return one row for each way in which fits use rows, and the way of each row; weights are (rows, fits)."""
    used = np.hstack(weights) > 0
    _, first, pattern = np.unique(np.packbits(used, axis=1), axis=0, return_index=True, return_inverse=True)
    return first, pattern.ravel()


def _shared_blocks(Z: Any, weights: np.ndarray, curvature: np.ndarray) -> Blocks:
    """Return blocks with the mean curvature over fits: rows of one fold are read once, for all fits that use them."""
    first, pattern = find_patterns(weights)
    shared = (weights.max(axis=1)[:, None] * curvature.mean(axis=1))[:, None, :]
    parts = [_blocks(Z[pattern == k], shared[pattern == k]).entries[0] for k in range(len(first))]
    return Blocks(np.einsum("kf,kc...->fc...", (weights[first] > 0).astype(float), np.array(parts)), True)


class Hessian:
    """The Hessian at some predictors, solved by blocks that may be older than these."""

    def __init__(
        self, loss: Loss, y: np.ndarray, at: Coordinates, weights: np.ndarray, eta: np.ndarray, blocks: Blocks | None
    ) -> None:
        self.loss, self.y, self.at, self.weights = loss, y, at, weights
        self._bend = loss.bender(y, eta)
        rows, size = at.Z.shape
        self.constant, self.outdated = isinstance(loss, Squared), False
        self.tall = rows > ROWS_PER_COORDINATE * size and y.shape[-1] * weights.shape[1] * size**2 <= _MOST_ENTRIES
        self.small = isinstance(loss, Softmax) and size * y.shape[-1] <= _SMALL
        self.exact = self.constant or self.small or (y.shape[-1] == 1 and not self.tall)
        self.blocks = blocks if blocks is not None and (self.constant or not self.exact) else self._make_blocks(eta)
        self.exact &= self.blocks.dense
        self._precondition = self.blocks.solver(at.ridge)

    def _make_blocks(self, eta: np.ndarray) -> Blocks:
        if self.constant:
            return _blocks(self.at.Z, self.weights[:, :, None])
        if self.small:
            flat = [[self._flat(self.weights[:, f], eta[:, f])] for f in range(eta.shape[1])]
            return Blocks(np.array(flat), True, True)
        if self.tall and isinstance(self.loss, Softmax) and self.at.Z.shape[1] * eta.shape[-1] <= _SMALL_SHARED:
            return Blocks(self._flat(self.weights.mean(axis=1), eta.mean(axis=1))[None, None], True, True)
        curvature = self.loss.curvature(self.y, eta)
        if self.tall:
            return _shared_blocks(self.at.Z, self.weights, curvature)
        return _blocks(self.at.Z, self.weights[:, :, None] * curvature)

    def _flat(self, weights: np.ndarray, eta: np.ndarray) -> np.ndarray:
        return flat_gram(self.at.Z, weights, self.loss.bender(self.y[:, 0], eta), eta.shape[-1])

    @property
    def reusable(self) -> bool:
        """Whether the blocks serve at other penalties: those of a few outputs are made anew for less than they cost."""
        return self.constant or not (self.exact or self.outdated or self.y.shape[-1] == 1)

    def move(self, eta: np.ndarray) -> None:
        """Let products be those at other predictors; the blocks stay."""
        self._bend = self.loss.bender(self.y, eta)

    def product(self, v: np.ndarray) -> np.ndarray:
        bent = self._bend(times(self.at.Z, v))
        return times(self.at.ZT, self.weights[:, :, None] * bent) + self.at.ridge[:, None, None] * v

    def precondition(self, rhs: np.ndarray) -> np.ndarray:
        if not isinstance(self.loss, Softmax):
            return self._precondition(rhs)
        # What all classes share does not change the loss, so that blocks of one class mistake its curvature.
        return _center(self._precondition(_center(rhs)))

    def approximate(self, rhs: np.ndarray, tol: float) -> np.ndarray:
        """Solve about, without a product where blocks are about the Hessian."""
        direct = self.exact or (self.y.shape[-1] == 1 and self.blocks.dense)
        return self._precondition(rhs) if direct else self.solve(rhs, tol)

    def solve(self, rhs: np.ndarray, tol: float) -> np.ndarray:
        """Solve one system per fit, to a relative norm of the residual."""
        if self.exact:
            return self._precondition(rhs)
        x, steps = conjugate_gradients(self.product, self.precondition, rhs, tol)
        self.outdated |= steps > _FEW_STEPS * -np.log10(tol)
        return x


def _center(rhs: np.ndarray) -> np.ndarray:
    return rhs - rhs.mean(axis=-1, keepdims=True)

"""Systems with the Hessians of several weightings of the same rows: Cholesky factors, and conjugate gradients.

Coefficients are (coordinates, fits, outputs), predictors (rows, fits, outputs), weights (rows, fits).
"""

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse as sp
from scipy.linalg.lapack import dpotrf, dpotri, dpotrs

from bilevel.estimators.coordinates import Coordinates, times
from bilevel.estimators.cox import Cox
from bilevel.estimators.losses import Bender, Loss, Softmax, Squared

_MOST_STEPS, _MOST_SINGLE_STEPS = 1000, 100  # of conjugate gradients, in double and in single precision
_MOST_ENTRIES = 5e7  # of the dense matrices of one preconditioner
ROWS_PER_COORDINATE = 20  # with more, fits without a fold have about the same curvature of each row
_SMALL = 150  # coefficients of a softmax regression that one matrix serves
_MOST_SQUARES = 1e6  # products of two columns, of all rows
_SMALL_SHARED = 400  # the same, where one matrix serves every fit
_SINGLE_TOL = 1e-4  # the least tolerance at which systems are first solved in single precision
_MILD = 1e4  # the largest condition number of blocks for single precision
_MOST_REPAIRS = 2  # steps in double precision after which single precision is no longer used with these blocks

Linear = Callable[[np.ndarray], np.ndarray]


def conjugate_gradients(
    product: Linear, precondition: Linear, rhs: np.ndarray, tol: float, start: np.ndarray | None = None
) -> tuple[np.ndarray, int]:
    """Solve one system per fit, to a relative norm of the residual; return the number of steps too.

    The iterates of a fit stay as they are once it is solved, or once rounding errors leave no positive curvature.
    """
    x, residual = (np.zeros_like(rhs), rhs) if start is None else (start, rhs - product(start))
    direction = precondition(residual)
    size = _dot(residual, direction)
    target = tol**2 * (size if start is None else _dot(rhs, precondition(rhs)))
    active, step = size > target, 0
    most = _MOST_SINGLE_STEPS if rhs.dtype == np.float32 else _MOST_STEPS
    while step < most and active.any():
        image = product(direction)
        bend = _dot(direction, image)
        active &= (bend > 0) & (bend < np.inf)
        length = _divide(size, bend, active)
        x = x + length * direction
        residual = residual - length * image
        z = precondition(residual)
        size, last = _dot(residual, z), size
        direction = z + _divide(size, last, active) * direction
        active &= size > target
        step += 1
    return x, step


def _divide(a: np.ndarray, b: np.ndarray, where: np.ndarray) -> np.ndarray:
    """Return a / b for each fit, and 0 for the other fits, as a column for products with coefficients."""
    return np.divide(a, b, out=np.zeros_like(a), where=where)[:, None]


def _dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.einsum("pfc,pfc->f", a, b)


class Blocks:
    """Z' D Z, (fits, outputs, coordinates, coordinates), or its diagonal; one fit or output may stand for all.

    Where outputs are coupled, blocks may be over coordinates times outputs. Blocks are outdated once they have cost
    conjugate gradients as many steps, beyond those that they took when they were new, as making them would.
    """

    def __init__(self, entries: np.ndarray, *, dense: bool = True, flat: bool = False) -> None:
        self.entries, self.dense, self.flat = entries, dense, flat
        self.outdated, self._rate, self._excess = False, 0.0, 0.0
        self._solver: tuple[np.ndarray, Linear] | None = None

    def solver(self, ridge: np.ndarray) -> Linear:
        """Return what solves with these blocks and the ridge."""
        if self._solver is None or not np.array_equal(self._solver[0], ridge):
            self._solver = ridge, self._make_solver(ridge)
        return self._solver[1]

    def _make_solver(self, ridge: np.ndarray) -> Linear:
        if not self.dense:
            diagonal = np.moveaxis(self.entries, -1, 0) + ridge[:, None, None]
            return lambda rhs: rhs / diagonal
        ridge = np.repeat(ridge, self.entries.shape[-1] // len(ridge))
        factors = [[_factor(block, ridge) for block in row] for row in self.entries]
        if self.flat:
            return lambda rhs: _solve_flat(factors, rhs)
        if len(factors) == 1 and len(factors[0]) > 1:  # one block serves several fits, at many steps
            return Inverses([_invert(factor) for factor in factors[0]], self.entries[0], ridge)
        return lambda rhs: _solve_blocks(factors, rhs)

    def note(self, steps: int, digits: float, price: float) -> None:
        """Note how many steps a solution took, and how many of them new blocks would cost."""
        self._rate = self._rate or steps / digits
        self._excess += steps - self._rate * digits
        self.outdated = self._excess > price


def _factor(block: np.ndarray, ridge: np.ndarray) -> np.ndarray:
    matrix, diagonal = block.copy(), np.diag_indices(len(block))
    matrix[diagonal] += ridge
    factor, failed = dpotrf(matrix, lower=1)
    while failed:  # rounding has made a singular matrix indefinite
        matrix[diagonal] += 1e-10 * np.trace(matrix) / len(matrix)
        factor, failed = dpotrf(matrix, lower=1)
    return factor


class Inverses:
    """Inverses of the blocks of each output, which solve by products, also in single precision."""

    def __init__(self, inverses: list[np.ndarray], blocks: np.ndarray, ridge: np.ndarray) -> None:
        self.inverses = np.array(inverses)
        sizes = np.diagonal(blocks, axis1=1, axis2=2) + ridge
        self.mild = bool(np.max(sizes * np.diagonal(self.inverses, axis1=1, axis2=2)) <= _MILD)

    @cached_property
    def _single(self) -> np.ndarray:
        return self.inverses.astype(np.float32)

    def __call__(self, rhs: np.ndarray) -> np.ndarray:
        inverses = self._single if rhs.dtype == np.float32 else self.inverses
        return np.matmul(inverses, rhs.transpose(2, 0, 1)).transpose(1, 2, 0)


def _invert(factor: np.ndarray) -> np.ndarray:
    """Return the inverse of the matrix that has this Cholesky factor."""
    lower = np.tril(dpotri(factor, lower=1)[0])
    return lower + np.tril(lower, -1).T


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


def flat_gram(Z: Any, bend: Bender, outputs: int) -> np.ndarray:
    """Return the matrix over coefficients of features and outputs, features first."""
    size = Z.shape[1]
    out = np.empty((size, outputs, size, outputs))
    for d, move in enumerate(np.eye(outputs)):
        curvature = bend(np.broadcast_to(move, (Z.shape[0], outputs)))
        for c in range(d + 1):
            block = Z.T @ scale_rows(Z, curvature[:, c])
            out[:, c, :, d] = out[:, d, :, c] = block.toarray() if sp.issparse(block) else block
    return out.reshape(size * outputs, -1)


def _blocks(Z: Any, curvature: np.ndarray) -> Blocks:
    """Return Z' D Z for each fit and output of the curvature, (rows, fits, outputs), or its diagonal if too large."""
    _, fits, outputs = curvature.shape
    if fits * outputs * Z.shape[1] ** 2 > _MOST_ENTRIES:
        return Blocks(np.moveaxis(times((Z.multiply(Z) if sp.issparse(Z) else Z**2).T, curvature), 0, -1), dense=False)
    return Blocks(np.array([[gram(Z, curvature[:, f, c]) for c in range(outputs)] for f in range(fits)]))


def find_patterns(*weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return one row for each way in which fits use rows, and the way of each row; weights are (rows, fits)."""
    used = np.hstack(weights) > 0
    _, first, pattern = np.unique(np.packbits(used, axis=1), axis=0, return_index=True, return_inverse=True)
    return first, pattern.ravel()


def _shared_blocks(Z: Any, weights: np.ndarray, curvature: np.ndarray) -> Blocks:
    """Return blocks with the mean curvature over fits: rows of one fold are read once, for all fits that use them."""
    first, pattern = find_patterns(weights)
    if len(first) > 2 * weights.shape[1]:  # rows were shuffled into folds more than once
        return _blocks(Z, weights[:, :, None] * curvature)
    shared = (weights.max(axis=1)[:, None] * curvature.mean(axis=1))[:, None, :]
    parts = [_blocks(Z[pattern == k], shared[pattern == k]).entries[0] for k in range(len(first))]
    return Blocks(np.einsum("kf,kc...->fc...", (weights[first] > 0).astype(float), np.array(parts)))


class Hessian:
    """The Hessian at some predictors, solved by blocks that may be older than these."""

    def __init__(
        self,
        loss: Loss | Cox,
        y: np.ndarray,
        at: Coordinates,
        weights: np.ndarray,
        eta: np.ndarray,
        blocks: Blocks | None,
    ) -> None:
        self.loss, self.y, self.at, self.weights = loss, y, at, weights
        self.move(eta)
        rows, size = at.Z.shape
        self.constant = isinstance(loss, Squared)
        cox, few = isinstance(loss, Cox), y.shape[-1] * weights.shape[1] * size**2 <= _MOST_ENTRIES
        self.tall = rows > ROWS_PER_COORDINATE * size and few and not cox
        self.small = isinstance(loss, Softmax) and size * y.shape[-1] <= _SMALL
        self.exact = self.constant or self.small or (y.shape[-1] == 1 and not self.tall and not cox)
        self.blocks = blocks if blocks is not None and (self.constant or not self.exact) else self._make_blocks(eta)
        self.exact &= self.blocks.dense
        self.near = cox and self.blocks.dense  # so that a step is about Newton's while blocks are new
        self._precondition = self.blocks.solver(at.ridge)

    def _make_blocks(self, eta: np.ndarray) -> Blocks:
        if self.constant:
            return _blocks(self.at.Z, self.weights[:, :, None])
        if self.small:
            return Blocks(self._flat_of_each(eta)[:, None], flat=True)
        if self.tall and isinstance(self.loss, Softmax) and self.at.Z.shape[1] * eta.shape[-1] <= _SMALL_SHARED:
            return Blocks(self._flat(self.weights.mean(axis=1), eta.mean(axis=1))[None, None], flat=True)
        if isinstance(self.loss, Cox):
            return self._risk_blocks(self.loss, eta)
        curvature = self.loss.curvature(self.y, eta)
        if isinstance(self.loss, Softmax):  # with blocks that serve every fit, conjugate gradients take few steps more
            return _blocks(self.at.Z, np.mean(self.weights[:, :, None] * curvature, axis=1, keepdims=True))
        if self.tall:
            return _shared_blocks(self.at.Z, self.weights, curvature)
        return _blocks(self.at.Z, self.weights[:, :, None] * curvature)

    def _flat(self, weights: np.ndarray, eta: np.ndarray) -> np.ndarray:
        return flat_gram(self.at.Z, self.loss.total_bender(self.y[:, 0], eta, weights), eta.shape[-1])

    def _risk_blocks(self, loss: Cox, eta: np.ndarray) -> Blocks:
        """Return about the matrix of each fit, or the diagonal where columns are many."""
        diagonal, outer_means = loss.thin_curvature(self.y, eta, self.weights)
        blocks = _blocks(self.at.Z, diagonal)
        if blocks.dense:
            blocks.entries[:, 0] -= outer_means(self.at.Z)
        return blocks

    def _flat_of_each(self, eta: np.ndarray) -> np.ndarray:
        """Return a matrix of each fit: where they are small, all are one product with the squares of rows."""
        (rows, size), (_, fits, outputs) = self.at.Z.shape, eta.shape
        if sp.issparse(self.at.Z) or rows * size**2 > _MOST_SQUARES:
            return np.array([self._flat(self.weights[:, f], eta[:, f]) for f in range(fits)])
        bend, moves = self.loss.total_bender(self.y, eta, self.weights), np.eye(outputs)
        curvature = np.stack([bend(np.broadcast_to(move, eta.shape)) for move in moves], axis=-1)
        squares = (self.at.Z[:, :, None] * self.at.Z[:, None, :]).reshape(rows, -1)
        product = (squares.T @ curvature.reshape(rows, -1)).reshape(size, size, fits, outputs, outputs)
        return product.transpose(2, 0, 3, 1, 4).reshape(fits, size * outputs, size * outputs)

    @property
    def reusable(self) -> bool:
        """Whether the blocks serve at other penalties: those of a few outputs are made anew for less than they cost."""
        return self.constant or not (self.exact or self.blocks.outdated or (self.y.shape[-1] == 1 and not self.near))

    def move(self, eta: np.ndarray) -> None:
        """Let products be those at other predictors; the blocks stay."""
        self._eta = eta
        self._products: dict[Any, Linear] = {}

    def product(self, v: np.ndarray) -> np.ndarray:
        """Multiply, in the precision of v."""
        if v.dtype not in self._products:
            self._products[v.dtype] = self._make_product(v.dtype)
        return self._products[v.dtype](v)

    def _make_product(self, dtype: Any) -> Linear:
        Z, ZT = self.at.single if dtype == np.float32 else (self.at.Z, self.at.ZT)
        eta, weights, ridge = (part.astype(dtype, copy=False) for part in (self._eta, self.weights, self.at.ridge))
        bend = self.loss.total_bender(self.y, eta, weights)
        return lambda v: times(ZT, bend(times(Z, v))) + ridge[:, None, None] * v

    def precondition(self, rhs: np.ndarray) -> np.ndarray:
        if not isinstance(self.loss, Softmax):
            return self._precondition(rhs)
        # What all classes share does not change the loss, so that blocks of one class mistake its curvature.
        return _center(self._precondition(rhs))

    def approximate(self, rhs: np.ndarray, tol: float) -> np.ndarray:
        """Solve about, without a product where blocks are about the Hessian."""
        direct = self.exact or (self.y.shape[-1] == 1 and self.blocks.dense)
        return self._precondition(rhs) if direct else self.solve(rhs, tol)

    def solve(self, rhs: np.ndarray, tol: float) -> np.ndarray:
        """Solve one system per fit, to a relative norm of the residual."""
        if self.exact:
            return self._precondition(rhs)
        if isinstance(self.loss, Softmax):
            rhs = _center(rhs)
        start, before, digits = None, 0, -np.log10(tol)
        fast = self._precondition if tol >= _SINGLE_TOL and isinstance(self._precondition, Inverses) else None
        if fast is not None and fast.mild:
            (start, before), tol = self._solve_in_single(rhs, tol), 2 * tol
        x, steps = conjugate_gradients(self.product, self.precondition, rhs, tol, start)
        if fast is not None:
            fast.mild &= steps <= _MOST_REPAIRS
        self.blocks.note(before + steps, digits, self._price())
        return x

    def _solve_in_single(self, rhs: np.ndarray, tol: float) -> tuple[np.ndarray, int]:
        """Solve in single precision, in which some fits may fail: they start from zero in double precision."""
        scale = np.abs(rhs).max(axis=(0, 2))[:, None]
        scale[scale == 0] = 1
        with np.errstate(over="ignore", invalid="ignore"):  # results that are not finite are discarded
            x, steps = conjugate_gradients(self.product, self.precondition, (rhs / scale).astype(np.float32), tol)
        return np.where(np.isfinite(x).all(axis=(0, 2))[:, None], x * scale, 0.0), steps

    def _price(self) -> float:
        """Return how many steps of conjugate gradients cost about as much as new blocks."""
        Z, entries = self.at.Z, self.blocks.entries
        used, size = Z.nnz if sp.issparse(Z) else Z.size, entries.shape[-1]
        step = self.weights.shape[1] * self.y.shape[-1] * (2 * used + Z.shape[1] ** 2)
        return math.prod(entries.shape[:2]) * (used * size / 2 + size**3 / 3) / step if self.blocks.dense else 0.0


def _center(rhs: np.ndarray) -> np.ndarray:
    return rhs - rhs.mean(axis=-1, keepdims=True)

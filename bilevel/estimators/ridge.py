"""Exact fits of generalized linear models with a squared penalty on each coefficient, and their implicit derivatives.

All weightings of the same rows are fitted together: coefficients are (coordinates, fits, outputs), predictors (rows,
fits, outputs) and weights (rows, fits), so that one matrix product serves every fit. `RidgeGLM` runs Newton's method in
some `Coordinates`. Its linear systems are solved by `Hessian`: by Cholesky factors where one matrix per fit is cheap,
and otherwise by conjugate gradients that `Blocks` precondition.
"""

import math
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from scipy.linalg import cholesky, solve_triangular
from scipy.linalg.lapack import dpotrf, dpotrs

from bilevel.estimators.losses import Array, Loss, Operator, Squared
from bilevel.estimators.selection import Fits, Folds, InnerModel, SelectionProblem

FREE_RIDGE = 1e-9  # of unpenalized coefficients, so that every fit is unique
_JITTER = 1e-12
_MAX_KERNEL_ENTRIES = 2e7
_FEATURES_PER_KERNEL = 8  # from which stored kernels of groups are faster than a new product
_MAX_NEWTON_STEPS, _MAX_HALVINGS = 100, 40
_REFIT_TOL = 1e-14  # of the final fit
_MAX_DUAL_ROWS = 3000
_SOFTMAX_PRODUCTS = 200  # typical number of products with Z per output and evaluation
_NOISE = 1e-9  # gains below this may be rounding errors
_SLOW = 0.1  # ratio of successive gains above which preconditioners alone do not suffice as Newton matrices
_MAX_EXTRAPOLATION = 1.0  # change of a log penalty up to which the previous fit is extrapolated
_NOT_FINITE = "A step of Newton's method is not finite. Scale the columns of X, or set standardize=True."
_MAX_CG_STEPS = 1000
_MAX_ENTRIES = 5e7  # of the dense matrices of one preconditioner
_ROWS_PER_COORDINATE = 20  # with more rows, the curvature of a row is similar in all fits
_SMALL = 150  # coefficients of a softmax regression up to which each fit has a matrix over all of them
_SMALL_SHARED = 400  # the same, if all fits share one matrix
_MAX_SQUARES = 1e6  # products of two columns, over all rows
_MAX_COMPRESSED = 600  # coefficients
_COMPRESSION_JITTER = 1e-10
_MIN_COMPRESSIBLE = 2e4  # entries of X; exact fits of fewer are fast


class Data:
    """The columns of a linear model, some of them unpenalized, with a column of ones if there is an intercept."""

    def __init__(self, X: Any, penalized: Array, *, intercept: bool) -> None:
        self.n_rows: int = X.shape[0]
        self.n_features: int = X.shape[1]
        self.penalized, self.intercept = penalized, intercept
        self.dual = self.n_rows < len(penalized) and self.n_rows <= _MAX_DUAL_ROWS  # whether coordinates are of rows
        self._kernels: dict[bytes, Array] = {}
        ones = np.ones((X.shape[0], int(intercept)))
        self.Z: Any = sp.hstack([X, ones], format="csr") if sp.issparse(X) else np.hstack([X, ones])
        self.free = np.setdiff1d(np.arange(self.Z.shape[1]), penalized)
        self.ZT: Any = sp.csr_array(self.Z.T) if sp.issparse(X) else self.Z.T

    @cached_property
    def X(self) -> Any:
        """The penalized columns."""
        return self.Z[:, self.penalized]

    def kernel(self, log_penalties: Array) -> Array:
        """Return X P^-1 X', where P are the penalties. Kernels of a few groups of equal penalties are stored."""
        values = log_penalties[np.sort(np.unique(log_penalties, return_index=True)[1])]  # in the order of features
        size = len(values) * self.n_rows**2
        if _FEATURES_PER_KERNEL * len(values) > len(log_penalties) or size > _MAX_KERNEL_ENTRIES:
            return _outer(self.X, np.exp(-log_penalties))
        groups = log_penalties == values[:, None]
        if (key := groups.tobytes()) not in self._kernels:
            if size + sum(kept.size for kept in self._kernels.values()) > _MAX_KERNEL_ENTRIES:
                self._kernels = {}
            self._kernels[key] = np.array([_outer(self.X, group.astype(float)) for group in groups])
        return np.tensordot(np.exp(-values), self._kernels[key], axes=1)


def to_dense(matrix: Any) -> Array:
    """Return an array for an array or a sparse array."""
    return matrix.toarray() if sp.issparse(matrix) else matrix


def _outer(X: Any, weights: Array) -> Array:
    used = np.flatnonzero(weights)
    part = X[:, used]
    return to_dense((part @ sp.diags_array(weights[used]) if sp.issparse(X) else part * weights[used]) @ part.T)


def times(matrix: Any, array: Array) -> Array:
    """Multiply along the first axis."""
    columns = array.reshape(len(array), math.prod(array.shape[1:]))
    return (matrix @ columns).reshape(matrix.shape[0], *array.shape[1:])


class Coordinates:
    """The model at some log penalties: predictors are Z w, and the penalty is ½ sum ridge w².

    Here w has one entry per column of the data. `RowCoordinates` need fewer if features are more than rows.
    """

    def __init__(self, data: Data, log_penalties: Array) -> None:
        self.data = data
        self.Z, self.ZT, self.ridge = data.Z, data.ZT, np.full(data.Z.shape[1], FREE_RIDGE)
        self.ridge[data.penalized] = np.exp(log_penalties)

    def restart(self, w: Array, predictor: Array) -> Array:
        """Return a start that predicts approximately this, from coefficients at other penalties."""
        return w

    def lift(self, w: Array) -> Array:
        """Return the coefficients of the columns of the data."""
        return w

    def tangent(self, w: Array, move: Array) -> Array:
        """Return the change of the gradient in w along a change of the log penalties."""
        rate = np.zeros(len(self.ridge))
        rate[self.data.penalized] = move * self.ridge[self.data.penalized]
        return rate[:, None, None] * w

    def cotangent(self, w: Array, u: Array) -> Array:
        """Return the transpose of `tangent`, summed over outputs, (penalties, fits)."""
        return (self.ridge[:, None] * np.sum(w * u, axis=-1))[self.data.penalized]


class RowCoordinates(Coordinates):
    """One coordinate per row, and one per unpenalized column.

    With X P^-1 X' = L L', where P are the penalties, coefficients are P^-1 X' L^-T w, and their penalty is ½ ||w||².
    """

    def __init__(self, data: Data, log_penalties: Array) -> None:
        self.data, self.X, self.variances = data, data.X, np.exp(-log_penalties)
        kernel = data.kernel(log_penalties)
        kernel[np.diag_indices_from(kernel)] += _JITTER * np.trace(kernel)
        self.factor = cholesky(kernel, lower=True)
        free = to_dense(data.Z[:, data.free])
        self.Z = np.hstack([self.factor, free])
        self.ZT = self.Z.T
        self.ridge = np.concatenate([np.ones(data.n_rows), np.full(free.shape[1], FREE_RIDGE)])

    def _solve(self, rows: Array, transposed: int) -> Array:
        columns = rows.reshape(len(rows), -1)
        return solve_triangular(self.factor, columns, lower=True, trans=transposed).reshape(rows.shape)

    def _coefficients(self, w: Array) -> Array:
        """Return the penalized coefficients times their penalties."""
        return times(self.X.T, self._solve(w[: self.data.n_rows], 1))

    def restart(self, w: Array, predictor: Array) -> Array:
        free = w[self.data.n_rows :]
        return np.concatenate([self._solve(predictor - times(self.Z[:, self.data.n_rows :], free), 0), free])

    def lift(self, w: Array) -> Array:
        out = np.empty((self.data.Z.shape[1], *w.shape[1:]))
        out[self.data.free] = w[self.data.n_rows :]
        out[self.data.penalized] = self.variances[:, None, None] * self._coefficients(w)
        return out

    def tangent(self, w: Array, move: Array) -> Array:
        inner = (self.variances * move)[:, None, None] * self._coefficients(w)
        out = np.zeros_like(w)
        out[: self.data.n_rows] = self._solve(times(self.X, inner), 0)
        return out

    def cotangent(self, w: Array, u: Array) -> Array:
        return self.variances[:, None] * np.sum(self._coefficients(w) * self._coefficients(u), axis=-1)


def conjugate_gradients(product: Operator, precondition: Operator, rhs: Array, tol: float) -> tuple[Array, int]:
    """Solve one system per fit to a relative norm of the residual; return the solutions and the number of steps.

    All fits advance together, which SciPy's solver does not offer. A fit is not changed any more once it is solved, or
    once rounding errors leave no positive curvature.
    """
    x, residual, direction, steps = np.zeros_like(rhs), rhs, precondition(rhs), 0
    size = _dot(residual, direction)
    target = tol**2 * size
    active = size > target
    while steps < _MAX_CG_STEPS and active.any():
        image = product(direction)
        curvature = _dot(direction, image)
        active &= (curvature > 0) & (curvature < np.inf)
        length = _divide(size, curvature, active)
        x = x + length * direction
        residual = residual - length * image
        z = precondition(residual)
        size, last = _dot(residual, z), size
        direction = z + _divide(size, last, active) * direction
        active &= size > target
        steps += 1
    return x, steps


def _divide(a: Array, b: Array, where: Array) -> Array:
    """Return a / b for some fits and 0 for the others, as a column for products with coefficients."""
    return np.divide(a, b, out=np.zeros_like(a), where=where)[:, None]


def _dot(a: Array, b: Array) -> Array:
    return np.einsum("pfc,pfc->f", a, b)


class Blocks:
    """Matrices Z' D Z, (fits, outputs, coordinates, coordinates), or their diagonals.

    One fit or output may represent all of them. `flat` blocks are over pairs of a coordinate and an output. Blocks are
    `outdated` once conjugate gradients have taken more additional steps with them than new blocks would cost.
    """

    def __init__(self, entries: Array, *, dense: bool = True, flat: bool = False) -> None:
        self.entries, self.dense, self.flat = entries, dense, flat
        self.outdated, self._rate, self._excess = False, 0.0, 0.0
        self._solver: tuple[Array, Operator] | None = None

    def solver(self, ridge: Array) -> Operator:
        """Return the function that solves systems with these blocks plus the ridge."""
        if self._solver is None or not np.array_equal(self._solver[0], ridge):
            self._solver = ridge, self._make_solver(ridge)
        return self._solver[1]

    def _make_solver(self, ridge: Array) -> Operator:
        if not self.dense:
            diagonal = np.moveaxis(self.entries, -1, 0) + ridge[:, None, None]
            return lambda rhs: rhs / diagonal
        ridge = np.repeat(ridge, self.entries.shape[-1] // len(ridge))
        factors = [[_factor(block, ridge) for block in row] for row in self.entries]
        if self.flat:
            return lambda rhs: _solve_flat(factors, rhs)
        return lambda rhs: _solve_blocks(factors, rhs)

    def record(self, steps: int, digits: float, price: float) -> None:
        """Record the steps of a solution to some digits; `price` is the number of steps that new blocks would cost."""
        self._rate = self._rate or steps / digits
        self._excess += steps - self._rate * digits
        self.outdated = self._excess > price


def _factor(block: Array, ridge: Array) -> Array:
    matrix, diagonal = block.copy(), np.diag_indices(len(block))
    matrix[diagonal] += ridge
    factor, failed = dpotrf(matrix, lower=1)
    while failed:  # rounding errors have made a singular matrix indefinite
        matrix[diagonal] += 1e-10 * np.trace(matrix) / len(matrix)
        factor, failed = dpotrf(matrix, lower=1)
    return factor


def _solve_blocks(factors: list[list[Array]], rhs: Array) -> Array:
    out = np.empty_like(rhs)
    everything: list[Any] = [slice(None)]
    fits = list(range(rhs.shape[1])) if len(factors) > 1 else everything
    outputs = list(range(rhs.shape[2])) if len(factors[0]) > 1 else everything
    for f, row in zip(fits, factors, strict=True):
        for c, factor in zip(outputs, row, strict=True):
            part = rhs[:, f, c]
            out[:, f, c] = dpotrs(factor, part.reshape(len(rhs), -1), lower=1)[0].reshape(part.shape)
    return out


def _solve_flat(factors: list[list[Array]], rhs: Array) -> Array:
    size, fits, outputs = rhs.shape
    columns = np.moveaxis(rhs, 1, 2).reshape(-1, fits, 1)
    return np.moveaxis(_solve_blocks(factors, columns).reshape(size, outputs, fits), 2, 1)


def _scale_rows(Z: Any, factors: Array) -> Any:
    """Multiply each row by its factor."""
    return sp.diags_array(factors) @ Z if sp.issparse(Z) else factors[:, None] * Z


def _gram(Z: Any, curvature: Array) -> Array:
    """Return Z' D Z."""
    scaled = _scale_rows(Z, np.sqrt(curvature))
    return to_dense(scaled.T @ scaled)


def _flat_gram(Z: Any, multiply: Operator, outputs: int) -> Array:
    """Return the second derivative in pairs of a coordinate and an output, ordered by coordinates first."""
    size = Z.shape[1]
    out = np.empty((size, outputs, size, outputs))
    for d, move in enumerate(np.eye(outputs)):
        curvature = multiply(np.broadcast_to(move, (Z.shape[0], outputs)))
        for c in range(d + 1):
            out[:, c, :, d] = out[:, d, :, c] = to_dense(Z.T @ _scale_rows(Z, curvature[:, c]))
    return out.reshape(size * outputs, -1)


def _make_blocks(Z: Any, curvature: Array) -> Blocks:
    """Return Z' D Z for each fit and output of the curvature, (rows, fits, outputs), or its diagonal if too large."""
    _, fits, outputs = curvature.shape
    if fits * outputs * Z.shape[1] ** 2 > _MAX_ENTRIES:
        squares = (Z.multiply(Z) if sp.issparse(Z) else Z**2).T
        return Blocks(np.moveaxis(times(squares, curvature), 0, -1), dense=False)
    return Blocks(np.array([[_gram(Z, curvature[:, f, c]) for c in range(outputs)] for f in range(fits)]))


def _find_patterns(*weights: Array) -> tuple[Array, Array]:
    """Group rows by the set of fits, the columns of `weights`, that use them.

    Return the first row of each pattern, and the number of the pattern of each row.
    """
    used = np.hstack(weights) > 0
    _, first, pattern = np.unique(np.packbits(used, axis=1), axis=0, return_index=True, return_inverse=True)
    return first, pattern.ravel()


def _shared_blocks(Z: Any, weights: Array, curvature: Array) -> Blocks:
    """Return blocks with the mean curvature over fits, so that each row is read once for all fits that use it."""
    first, pattern = _find_patterns(weights)
    if len(first) > 2 * weights.shape[1]:  # rows were shuffled into folds several times
        return _make_blocks(Z, weights[:, :, None] * curvature)
    shared = (weights.max(axis=1)[:, None] * curvature.mean(axis=1))[:, None, :]
    parts = [_make_blocks(Z[pattern == k], shared[pattern == k]).entries[0] for k in range(len(first))]
    return Blocks(np.einsum("kf,kc...->fc...", (weights[first] > 0).astype(float), np.array(parts)))


class Hessian:
    """The second derivative of all fits at some predictors, with blocks that may belong to earlier predictors.

    Attributes
    ----------
    exact : whether the blocks are the Hessian itself, so that no conjugate gradients are needed
    near : whether new blocks are close enough to the Hessian for steps similar to Newton's
    """

    def __init__(
        self, loss: Loss, y: Array, at: Coordinates, weights: Array, eta: Array, blocks: Blocks | None
    ) -> None:
        self.loss, self.y, self.at, self.weights = loss, y, at, weights
        self.move(eta)
        (rows, size), outputs = at.Z.shape, y.shape[-1]
        self._tall = (
            rows > _ROWS_PER_COORDINATE * size
            and outputs * weights.shape[1] * size**2 <= _MAX_ENTRIES
            and not loss.couples_rows
        )
        self._small = loss.couples_outputs and size * outputs <= _SMALL
        self.exact = loss.is_quadratic or self._small or (outputs == 1 and not self._tall and not loss.couples_rows)
        if blocks is None or (self.exact and not loss.is_quadratic):
            blocks = self._new_blocks()
        self.blocks, self._solve_blocks = blocks, blocks.solver(at.ridge)
        self.exact &= blocks.dense
        self.near = loss.couples_rows and blocks.dense

    def _new_blocks(self) -> Blocks:
        loss, Z, weights, eta = self.loss, self.at.Z, self.weights, self.eta
        if loss.is_quadratic:
            return _make_blocks(Z, weights[:, :, None])
        if self._small:
            return Blocks(self._flat_of_each()[:, None], flat=True)
        if self._tall and loss.couples_outputs and Z.shape[1] * eta.shape[-1] <= _SMALL_SHARED:
            return Blocks(self._flat(weights.mean(axis=1), eta.mean(axis=1))[None, None], flat=True)
        if self._tall and not loss.couples_outputs:
            return _shared_blocks(Z, weights, loss.block_curvature(self.y, eta, np.ones_like(weights))[0])
        curvature, correction = loss.block_curvature(self.y, eta, weights)
        if loss.couples_outputs:  # blocks that all fits share cost conjugate gradients few additional steps
            curvature = np.mean(curvature, axis=1, keepdims=True)
        blocks = _make_blocks(Z, curvature)
        if correction is not None and blocks.dense:
            blocks.entries[:, 0] -= correction(Z)
        return blocks

    def _flat(self, weights: Array, eta: Array) -> Array:
        return _flat_gram(self.at.Z, self.loss.hessian_operator(self.y[:, 0], eta, weights), eta.shape[-1])

    def _flat_of_each(self) -> Array:
        """Return the matrix of each fit; small ones are computed by one product with the squares of all rows."""
        eta = self.eta
        (rows, size), (_, fits, outputs) = self.at.Z.shape, eta.shape
        if sp.issparse(self.at.Z) or rows * size**2 > _MAX_SQUARES:
            return np.array([self._flat(self.weights[:, f], eta[:, f]) for f in range(fits)])
        multiply = self.loss.hessian_operator(self.y, eta, self.weights)
        curvature = np.stack([multiply(np.broadcast_to(move, eta.shape)) for move in np.eye(outputs)], axis=-1)
        squares = (self.at.Z[:, :, None] * self.at.Z[:, None, :]).reshape(rows, -1)
        product = (squares.T @ curvature.reshape(rows, -1)).reshape(size, size, fits, outputs, outputs)
        return product.transpose(2, 0, 3, 1, 4).reshape(fits, size * outputs, size * outputs)

    @property
    def reusable(self) -> bool:
        """Whether the blocks are worth keeping at other penalties; exact blocks of few outputs are cheap to renew."""
        cheap = self.exact or (self.y.shape[-1] == 1 and not self.near)
        return self.loss.is_quadratic or not (cheap or self.blocks.outdated)

    def move(self, eta: Array) -> None:
        """Move products to other predictors; the blocks stay the same."""
        self.eta = eta
        self._multiply: Operator | None = None

    def product(self, v: Array) -> Array:
        """Multiply by the Hessian."""
        if self._multiply is None:
            self._multiply = self.loss.hessian_operator(self.y, self.eta, self.weights)
        return times(self.at.ZT, self._multiply(times(self.at.Z, v))) + self.at.ridge[:, None, None] * v

    def _center(self, rhs: Array) -> Array:
        """Remove the part that is equal in all coupled outputs: it does not change the loss, but blocks ignore that."""
        return rhs - rhs.mean(axis=-1, keepdims=True) if self.loss.couples_outputs else rhs

    def approximate(self, rhs: Array, tol: float) -> Array:
        """Solve approximately, by blocks alone if they are close to the Hessian."""
        direct = self.y.shape[-1] == 1 and self.blocks.dense
        return self._solve_blocks(rhs) if direct else self.solve(rhs, tol)

    def solve(self, rhs: Array, tol: float) -> Array:
        """Solve one system per fit to a relative norm of the residual."""
        if self.exact:
            return self._solve_blocks(rhs)
        rhs, precondition = self._center(rhs), lambda rhs: self._center(self._solve_blocks(rhs))
        x, steps = conjugate_gradients(self.product, precondition, rhs, tol)
        self.blocks.record(steps, -np.log10(tol), self._price())
        return x

    def _price(self) -> float:
        """Return the number of steps of conjugate gradients that cost as much as new blocks."""
        Z, entries = self.at.Z, self.blocks.entries
        used, size = Z.nnz if sp.issparse(Z) else Z.size, entries.shape[-1]
        step = self.weights.shape[1] * self.y.shape[-1] * (2 * used + Z.shape[1] ** 2)
        return math.prod(entries.shape[:2]) * (used * size / 2 + size**3 / 3) / step if self.blocks.dense else 0.0


class RidgeFits(NamedTuple):
    """All fits at some log penalties: their coefficients in the coordinates of the Hessian at them."""

    log_penalties: Array
    weights: Array  # as they were passed, to be recognized
    w: Array
    hessian: Hessian


class RidgeGLM(InnerModel):
    """A linear model that minimizes sum weight_i loss_i + ½ sum_j exp(log_penalties_j) coef_j².

    Parameters
    ----------
    X : dense or sparse, (rows, features)
    y : (rows, outputs), targets as the loss takes them
    loss : loss of the linear predictor
    penalized : numbers of the penalized features; None means all
    intercept : whether to fit an intercept, which is not penalized
    tol : stop if a Newton step would gain less than this, in units of the summed loss
    copies : number of successive penalized columns that share a penalty
    """

    def __init__(
        self,
        X: Any,
        y: Array,
        loss: Loss,
        *,
        penalized: Array | None = None,
        intercept: bool = True,
        tol: float = 1e-8,
        copies: int = 1,
    ) -> None:
        penalized = np.arange(X.shape[1]) if penalized is None else penalized
        self.data, self.y, self.loss, self.tol = Data(X, penalized, intercept=intercept), y, loss, tol
        self.copies, self.n_penalties = copies, len(penalized) // copies

    def fit(self, weights: Array, log_penalties: Array, start: Fits | None = None) -> Fits:
        log_penalties = np.repeat(log_penalties, self.copies)
        at = (RowCoordinates if self.data.dual else Coordinates)(self.data, log_penalties)
        w, blocks = self._start(at, weights, log_penalties, None if start is None else start.state)
        with np.errstate(over="ignore", invalid="ignore"):
            w, hessian = self._newton(at, np.ascontiguousarray(weights.T), w, blocks)
        columns = at.lift(w)
        coef, intercept = columns[: self.data.n_features], columns[self.data.n_features :].sum(axis=0)
        state = RidgeFits(log_penalties, weights, w, hessian)
        return Fits(np.moveaxis(coef, 0, 1), intercept, np.moveaxis(hessian.eta, 0, 1), state)

    def refit(self, weights: Array, log_penalties: Array, start: Fits | None = None) -> tuple[Array, Array]:
        self.tol = _REFIT_TOL
        return super().refit(weights, log_penalties)

    def vjp(self, fits: Fits, cotangent: Array) -> Array:
        state: RidgeFits = fits.state
        hessian = state.hessian
        u = hessian.solve(times(hessian.at.ZT, np.moveaxis(cotangent, 0, 1)), 0.1 * self.tol**0.5)
        each = -hessian.at.cotangent(state.w, u).T
        return each.reshape(len(each), -1, self.copies).sum(axis=-1)

    def estimate_flops(self, n_fits: int) -> float:
        (rows, outputs), Z, dual = self.y.shape, self.data.Z, self.data.dual
        size = rows if dual else Z.shape[1]
        entries = Z.nnz if sp.issparse(Z) and not dual else rows * size
        kernel = rows**2 * len(self.data.penalized) if dual else 0
        if self.loss.is_quadratic and not dual:
            return n_fits * (size**3 / 3 + 4 * entries * outputs)
        if outputs == 1 or self.loss.is_quadratic:
            return kernel + 3 * n_fits * (entries * size + size**3 / 3)
        return kernel + _SOFTMAX_PRODUCTS * n_fits * entries * outputs

    def _start(
        self, at: Coordinates, weights: Array, log_penalties: Array, state: RidgeFits | None
    ) -> tuple[Array, Blocks | None]:
        """Return coefficients to start from, and the blocks of an earlier Hessian if they are still useful."""
        if state is None:
            w = np.zeros((at.Z.shape[1], len(weights), self.y.shape[1]))
            if self.data.intercept:
                mean = weights @ self.y / np.maximum(weights.sum(axis=1), 1e-300)[:, None]
                w[-1] = self.loss.link(mean)
            return w, None
        w, hessian = state.w, state.hessian
        if state.weights.shape != weights.shape:
            # Coefficients depend on weights almost linearly: write the weights as mixtures, and mix the fits alike.
            mean = state.weights.mean(axis=0)
            shares = 1 / len(state.weights) + np.linalg.pinv((state.weights - mean).T, rcond=1e-8) @ (weights - mean).T
            return at.restart(*(np.einsum("pfc,fg->pgc", part, shares) for part in (w, hessian.eta))), None
        eta = hessian.eta
        move = log_penalties - state.log_penalties
        if move.any() and np.abs(move).max() <= _MAX_EXTRAPOLATION:
            step = -hessian.approximate(hessian.at.tangent(w, move), 1e-1)
            w, eta = w + step, eta + times(hessian.at.Z, step)
        keeps = hessian.at.Z is at.Z and state.weights is weights and hessian.reusable
        return at.restart(w, eta), hessian.blocks if keeps else None

    def _newton(self, at: Coordinates, weights: Array, w: Array, blocks: Blocks | None) -> tuple[Array, Hessian]:
        y, loss, ridge = self.y[:, None, :], self.loss, at.ridge[:, None, None]
        eta = times(at.Z, w)
        value = self._values(at, weights, w, eta)
        gain, slow, done = np.full(w.shape[1], np.inf), False, np.zeros(w.shape[1], bool)
        for _ in range(_MAX_NEWTON_STEPS):
            gradient = times(at.ZT, loss.gradient(y, eta, weights)) + ridge * w
            gradient[:, done] = 0  # these fits stay as they are
            hessian = Hessian(loss, y, at, weights, eta, blocks)
            solve = hessian.solve if slow else hessian.approximate
            step, last = solve(gradient, min(1e-2, max(1e-10, gain.max()) ** 0.5)), gain
            gain = np.einsum("pfc,pfc->f", gradient, step)
            if not np.isfinite(gain).all():
                raise FloatingPointError(_NOT_FINITE)
            w, eta, value, decreased = self._line_search(at, weights, (w, eta, value), step, gain)
            stalls = gain.max() < _NOISE and gain.max() > last.max() / 2
            rate = min(1.0, gain.max() / last.max()) if hessian.near and last.max() < np.inf else 1.0
            done |= ~decreased | (gain * rate <= self.tol)
            if done.all() or stalls or (loss.is_quadratic and hessian.exact):
                break
            lags = y.shape[-1] == 1 and gain.max() > _SLOW * last.max()
            stale = hessian.near and hessian.blocks is blocks  # otherwise new blocks would not help
            blocks = None if hessian.blocks.outdated or slow or (lags and stale) else hessian.blocks
            slow |= lags and not stale
        if loss.couples_outputs:  # the part that all outputs share is determined by rounding errors only
            w, eta = (part - part.mean(axis=-1, keepdims=True) for part in (w, eta))
        hessian.move(eta)
        return w, hessian

    def _line_search(
        self, at: Coordinates, weights: Array, now: tuple[Array, ...], step: Array, gain: Array
    ) -> tuple[Array, ...]:
        """Halve the step of each fit until its objective decreases enough; return also whether it does."""
        w, eta, value = now
        move, length = times(at.Z, step), np.ones(len(gain))
        for _ in range(_MAX_HALVINGS):
            new = w - length[:, None] * step, eta - length[:, None] * move
            found = self._values(at, weights, *new)
            enough = found <= value - 1e-4 * length * gain + 1e-12 * np.abs(value)
            if enough.all():
                break
            length = np.where(enough, length, length / 2)
        return *new, found, enough

    def _values(self, at: Coordinates, weights: Array, w: Array, eta: Array) -> Array:
        losses = self.loss.total(self.y[:, None, :], eta, weights)
        return losses + np.einsum("p,pfc->f", at.ridge, w**2) / 2

    def can_compress(self, folds: Folds) -> bool:
        loss, rows, size = self.loss, self.data.n_rows, self.data.Z.shape[1]
        size *= self.y.shape[1] if loss.couples_outputs else 1
        if loss.couples_rows or size > _MAX_COMPRESSED:
            return False
        if rows <= 2 * len(_find_patterns(folds.fitted.T, folds.held_out.T)[0]) * size:
            return False
        return loss.is_quadratic or (rows > _ROWS_PER_COORDINATE * size and rows * size > _MIN_COMPRESSIBLE)

    def compress(self, folds: Folds, fits: Fits) -> SelectionProblem:
        """Return the problem with few rows that have the same loss to second order.

        Around coefficients w0, the loss of the rows that the same folds use is g'(w - w0) + ½ (w - w0)' H (w - w0) plus
        a constant. With H = R'R that is ½ ||R w - t||² with t = R w0 - R^-T g, plus a constant: one row per
        coefficient, and one more. For the squared error this is exact. If outputs are coupled, each column has one copy
        per output.
        """
        weights = np.concatenate([folds.fitted, folds.held_out]).T
        first, pattern = _find_patterns(weights)
        weight = weights.max(axis=1)
        shares = weights[first] / weight[first, None]
        w0 = fits.state.w.mean(axis=1)
        parts = [_compress_rows(self, pattern == k, weight, w0) for k in range(len(first))]
        X, targets = (np.concatenate(part) for part in zip(*parts, strict=True))
        shares = np.repeat(shares, len(X) // len(first), axis=0).T
        few = folds._replace(fitted=shares[: len(folds.fitted)], held_out=shares[len(folds.fitted) :])
        return SelectionProblem(self._make_surrogate(X, targets), few, self._predict)

    def _make_surrogate(self, X: Array, targets: Array) -> "RidgeGLM":
        loss, copies = Squared(), X.shape[1] // self.data.Z.shape[1]
        loss.unknown_dispersion, loss.min_dispersion = self.loss.unknown_dispersion, self.loss.min_dispersion
        penalized = (copies * self.data.penalized[:, None] + np.arange(copies)).ravel()
        return RidgeGLM(X, targets, loss, penalized=penalized, intercept=False, tol=self.tol, copies=copies)

    def _predict(self, fits: Fits) -> Array:
        """Return the predictors of all rows, (fits, rows, outputs), for the coefficients of a surrogate."""
        Z = self.data.Z
        columns = np.moveaxis(fits.coef.reshape(len(fits.coef), Z.shape[1], -1), 0, 1)
        return np.moveaxis(times(Z, columns), 0, 1)


def _compress_rows(model: RidgeGLM, rows: Array, weight: Array, w0: Array) -> tuple[Array, Array]:
    """Return R and t of some rows, and the row for the constant."""
    Z, y, weight, loss = model.data.Z[rows], model.y[rows], weight[rows], model.loss
    eta = Z @ w0
    values, slopes = loss.held_out(y, eta, weight, weight)
    gradient = Z.T @ slopes
    if loss.couples_outputs:
        hessian = _flat_gram(Z, loss.hessian_operator(y, eta, weight), w0.shape[1])
        gradient, w0 = gradient.reshape(-1, 1), w0.reshape(-1, 1)
    else:
        hessian = _gram(Z, loss.block_curvature(y[:, None], eta[:, None], weight[:, None])[0][:, 0, 0])
    hessian[np.diag_indices_from(hessian)] += _COMPRESSION_JITTER * np.trace(hessian) / len(hessian)
    hessian[np.diag_indices_from(hessian)] += np.finfo(float).tiny
    root = cholesky(hessian)
    back = solve_triangular(root, gradient, trans=1)
    constant = 2 * weight @ values - np.sum(back**2)
    last = np.sqrt(max(constant, 0.0) / w0.shape[1])
    return np.vstack([root, np.zeros(len(root))]), np.vstack([root @ w0 - back, np.full(w0.shape[1], last)])

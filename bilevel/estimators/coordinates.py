"""Coordinates of a penalized linear model: its features, or as many as rows where features are more.

Arrays of coefficients are (coordinates, fits, outputs), so that one matrix product serves every fit.
"""

import math
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import scipy.sparse as sp
from scipy.linalg import cholesky, solve_triangular

# The ridge of what is not penalized: it keeps a fit unique where rows do not.
_FREE = 1e-9
_JITTER = 1e-12
_MOST_KERNEL_ENTRIES = 2e7
_SPARED = 8  # a sum of kernels reads them once, and is worth while where features are so many times as many


class Data:
    """Rows of features, some of them unpenalized, with a column of ones where there is an intercept."""

    def __init__(self, X: Any, penalized: np.ndarray, *, intercept: bool) -> None:
        self.n_rows: int = X.shape[0]
        self.n_features: int = X.shape[1]
        self.penalized, self.intercept = penalized, intercept
        self._kernels: dict[bytes, np.ndarray] = {}
        ones = np.ones((X.shape[0], int(intercept)))
        self.Z: Any = sp.hstack([X, ones], format="csr") if sp.issparse(X) else np.hstack([X, ones])
        self.free = np.setdiff1d(np.arange(self.Z.shape[1]), penalized)
        self.ZT: Any = sp.csr_array(self.Z.T) if sp.issparse(X) else self.Z.T

    @cached_property
    def single(self) -> tuple[Any, Any]:
        """Z and its transpose in single precision."""
        return to_single(self.Z)

    @cached_property
    def X(self) -> Any:
        """The penalized columns."""
        return self.Z[:, self.penalized]

    @property
    def wide(self) -> bool:
        return self.n_rows < len(self.penalized)

    def kernel(self, log_penalties: np.ndarray) -> np.ndarray:
        """Return X P⁻¹ X', where P are the penalties; kernels of a few groups of equal ones are kept."""
        values, first, groups = np.unique(log_penalties, return_index=True, return_inverse=True)
        size = len(values) * self.n_rows**2
        if _SPARED * len(values) > len(groups) or size > _MOST_KERNEL_ENTRIES:
            return _outer(self.X, np.exp(-log_penalties))
        order = np.argsort(first)  # groups keep their numbers when their penalties change places
        groups = np.argsort(order)[groups]
        if (key := groups.tobytes()) not in self._kernels:
            if size + sum(kept.size for kept in self._kernels.values()) > _MOST_KERNEL_ENTRIES:
                self._kernels = {}
            ones = [(groups == group).astype(float) for group in range(len(values))]
            self._kernels[key] = np.array([_outer(self.X, one) for one in ones])
        return np.tensordot(np.exp(-values[order]), self._kernels[key], axes=1)

    def columns(self, numbers: np.ndarray) -> np.ndarray:
        part = self.Z[:, numbers]
        return part.toarray() if sp.issparse(part) else part


def _outer(X: Any, weights: np.ndarray) -> np.ndarray:
    used = np.flatnonzero(weights)
    part = X[:, used]
    return (
        (part @ sp.diags_array(weights[used]) @ part.T).toarray() if sp.issparse(X) else (part * weights[used]) @ part.T
    )


def to_single(Z: Any) -> tuple[Any, Any]:
    """Return Z and its transpose in single precision."""
    Z = Z.astype(np.float32)
    return Z, sp.csr_array(Z.T) if sp.issparse(Z) else Z.T


def times(matrix: Any, array: np.ndarray) -> np.ndarray:
    """Multiply along the first axis."""
    columns = array.reshape(len(array), math.prod(array.shape[1:]))
    return (matrix @ columns).reshape(matrix.shape[0], *array.shape[1:])


class Coordinates(Protocol):
    """The model at some log penalties: predictors are Z w, and the penalty is ½ sum ridge w²."""

    Z: Any
    ZT: Any
    ridge: np.ndarray

    @property
    def single(self) -> tuple[Any, Any]:
        """Z and its transpose in single precision."""

    def restart(self, w: np.ndarray, predictor: np.ndarray) -> np.ndarray:
        """Return coefficients to start from that predict about so; w were those of other penalties."""

    def lift(self, w: np.ndarray) -> np.ndarray:
        """Return the coefficients of the columns of the data."""

    def tangent(self, w: np.ndarray, move: np.ndarray) -> np.ndarray:
        """Return the change of the gradient in w as the log penalties move by `move`."""

    def cotangent(self, w: np.ndarray, u: np.ndarray) -> np.ndarray:
        """Return the transpose of `tangent`, summed over outputs: (penalties, fits)."""


class Primal:
    """One coordinate for each column."""

    def __init__(self, data: Data, log_penalties: np.ndarray) -> None:
        self.data, self.Z, self.ZT = data, data.Z, data.ZT
        self.ridge = np.full(self.Z.shape[1], _FREE)
        self.ridge[data.penalized] = np.exp(log_penalties)

    @property
    def single(self) -> tuple[Any, Any]:
        return self.data.single

    def restart(self, w: np.ndarray, predictor: np.ndarray) -> np.ndarray:
        return w

    def lift(self, w: np.ndarray) -> np.ndarray:
        return w

    def tangent(self, w: np.ndarray, move: np.ndarray) -> np.ndarray:
        rate = np.zeros(len(self.ridge))
        rate[self.data.penalized] = move * self.ridge[self.data.penalized]
        return rate[:, None, None] * w

    def cotangent(self, w: np.ndarray, u: np.ndarray) -> np.ndarray:
        return (self.ridge[:, None] * np.sum(w * u, axis=-1))[self.data.penalized]


class Dual:
    """One coordinate for each row, and for each column without a penalty.

    With X P⁻¹ X' = L L', where P are the penalties, coefficients are P⁻¹ X' L⁻ᵀ w, and their penalty is ½ ||w||².
    """

    def __init__(self, data: Data, log_penalties: np.ndarray) -> None:
        self.data, self.X, self.variances = data, data.X, np.exp(-log_penalties)
        kernel = data.kernel(log_penalties)
        kernel[np.diag_indices_from(kernel)] += _JITTER * np.trace(kernel)
        self.factor = cholesky(kernel, lower=True)
        free = data.columns(data.free)
        self.Z = np.hstack([self.factor, free])
        self.ZT = self.Z.T
        self.ridge = np.concatenate([np.ones(data.n_rows), np.full(free.shape[1], _FREE)])

    @cached_property
    def single(self) -> tuple[Any, Any]:
        return to_single(self.Z)

    def _represent(self, w: np.ndarray) -> np.ndarray:
        """Return the weights of rows whose combination the penalized coefficients are, times the penalties."""
        head = w[: self.data.n_rows]
        return solve_triangular(self.factor, head.reshape(len(head), -1), lower=True, trans=1).reshape(head.shape)

    def _reduce(self, rows: np.ndarray) -> np.ndarray:
        return solve_triangular(self.factor, rows.reshape(len(rows), -1), lower=True).reshape(rows.shape)

    def restart(self, w: np.ndarray, predictor: np.ndarray) -> np.ndarray:
        free = w[self.data.n_rows :]
        return np.concatenate([self._reduce(predictor - times(self.Z[:, self.data.n_rows :], free)), free])

    def lift(self, w: np.ndarray) -> np.ndarray:
        out = np.empty((self.data.Z.shape[1], *w.shape[1:]))
        out[self.data.free] = w[self.data.n_rows :]
        out[self.data.penalized] = self.variances[:, None, None] * times(self.X.T, self._represent(w))
        return out

    def tangent(self, w: np.ndarray, move: np.ndarray) -> np.ndarray:
        inner = (self.variances * move)[:, None, None] * times(self.X.T, self._represent(w))
        out = np.zeros_like(w)
        out[: self.data.n_rows] = self._reduce(times(self.X, inner))
        return out

    def cotangent(self, w: np.ndarray, u: np.ndarray) -> np.ndarray:
        left, right = (times(self.X.T, self._represent(part)) for part in (w, u))
        return self.variances[:, None] * np.sum(left * right, axis=-1)


def coordinates(data: Data, log_penalties: np.ndarray, most_rows: int) -> Coordinates:
    """Return the smaller of the two, as long as a matrix over the rows is small enough."""
    wide = data.wide and data.n_rows <= most_rows
    return Dual(data, log_penalties) if wide else Primal(data, log_penalties)

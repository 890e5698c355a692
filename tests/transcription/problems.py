"""Two small bilevel problems in dense NumPy, which count the rows of each derivative.

inner level: G(z, x) = mean_i G_i(z, x)        outer level: F(z, x) = mean_j F_j(z, x)

`rows` is an array of row indices (repeats allowed, the mean is over exactly these) or None for all rows.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

Array = np.ndarray
Rows = Array | None

INNER_KINDS = ("gz", "gx", "hv", "cr", "inner_value")
OUTER_KINDS = ("fz", "fx", "outer_value")


class Solution(NamedTuple):
    """Exact inner solution, exact auxiliary vector, value and gradient of h at one x."""

    z: Array
    v: Array
    h: float
    grad_h: Array


class Problem:
    """Counted derivatives; subclasses implement them in methods whose names start with an underscore."""

    def __init__(self, n: int, m: int, p: int, d: int) -> None:
        self.n, self.m, self.p, self.d = n, m, p, d
        self.calls: dict[str, int] = {}
        self.reset()

    def reset(self) -> None:
        """Set all counts to 0."""
        self.calls = dict.fromkeys(INNER_KINDS + OUTER_KINDS, 0)

    def _count(self, kind: str, rows: Rows) -> Array:
        """Count the rows, and return their indices."""
        size = self.n if kind in INNER_KINDS else self.m
        rows = np.arange(size) if rows is None else np.asarray(rows)
        self.calls[kind] += len(rows)
        return rows

    def gz(self, z: Array, x: Array, rows: Rows = None) -> Array:
        """Gradient of G in z."""
        return self._gz(z, x, self._count("gz", rows))

    def gx(self, z: Array, x: Array, rows: Rows = None) -> Array:
        """Gradient of G in x."""
        return self._gx(z, x, self._count("gx", rows))

    def hv(self, z: Array, x: Array, w: Array, rows: Rows = None) -> Array:
        """Hessian of G in z, times w."""
        return self._hessian(z, x, self._count("hv", rows)) @ w

    def cr(self, z: Array, x: Array, w: Array, rows: Rows = None) -> Array:
        """Cross derivative of G (a d by p matrix), times w."""
        return self._cross(z, x, self._count("cr", rows)) @ w

    def jf(self, z: Array, x: Array, u: Array, rows: Rows = None) -> Array:
        """The transpose of the same matrix, times u; counted as the same kind."""
        return self._cross(z, x, self._count("cr", rows)).T @ u

    def fz(self, z: Array, x: Array, rows: Rows = None) -> Array:
        """Gradient of F in z."""
        return self._fz(z, x, self._count("fz", rows))

    def fx(self, z: Array, x: Array, rows: Rows = None) -> Array:
        """Gradient of F in x."""
        return self._fx(z, x, self._count("fx", rows))

    def inner_value(self, z: Array, x: Array, rows: Rows = None) -> float:
        """Value of G."""
        return self._inner_value(z, x, self._count("inner_value", rows))

    def outer_value(self, z: Array, x: Array, rows: Rows = None) -> float:
        """Value of F."""
        return self._outer_value(z, x, self._count("outer_value", rows))

    def solve(self, x: Array) -> Solution:
        """Return z*, v*, h and its gradient at x, to rounding; not counted."""
        every_i, every_j = np.arange(self.n), np.arange(self.m)
        z = self._argmin(x)
        v = -np.linalg.solve(self._hessian(z, x, every_i), self._fz(z, x, every_j))
        grad_h = self._fx(z, x, every_j) + self._cross(z, x, every_i) @ v
        return Solution(z, v, self._outer_value(z, x, every_j), grad_h)


class _Forms(NamedTuple):
    """Dense per-sample quadratic forms of one level: A_z (N,p,p), A_x (N,d,d), B (N,d,p), linear terms."""

    az: Array
    ax: Array
    b: Array
    dz: Array
    dx: Array


def _forms(factors: Mapping[str, Array]) -> _Forms:
    a, c, e, f = (np.asarray(factors[k], dtype=float) for k in ("a", "c", "e", "f"))
    az = np.stack([np.outer(row, row) for row in a])
    ax = np.stack([np.outer(row, row) for row in c])
    b = np.stack([np.outer(ei, fi) for ei, fi in zip(e, f, strict=True)])
    return _Forms(az, ax, b, np.asarray(factors["dz"], dtype=float), np.asarray(factors["dx"], dtype=float))


def _mean(forms: _Forms, rows: Array) -> _Forms:
    return _Forms(*(array[rows].mean(axis=0) for array in forms))


def _value(q: _Forms, z: Array, x: Array) -> float:
    return float(0.5 * z @ q.az @ z + 0.5 * x @ q.ax @ x + x @ q.b @ z + q.dz @ z + q.dx @ x)


class Quadratic(Problem):
    """Sample loss ½(a'z)² + ½(c'x)² + (e'x)(f'z) + dz'z + dx'x at both levels.

    `inner` and `outer` map the names a (N,p), c (N,d), e (N,d), f (N,p), dz (N,p), dx (N,d) to arrays.
    """

    def __init__(self, inner: Mapping[str, Array], outer: Mapping[str, Array]) -> None:
        self.inner, self.outer = _forms(inner), _forms(outer)
        n, d, p = self.inner.b.shape
        super().__init__(n, len(self.outer.b), p, d)

    def _gz(self, z: Array, x: Array, rows: Array) -> Array:
        q = _mean(self.inner, rows)
        return q.az @ z + q.b.T @ x + q.dz

    def _gx(self, z: Array, x: Array, rows: Array) -> Array:
        q = _mean(self.inner, rows)
        return q.ax @ x + q.b @ z + q.dx

    def _hessian(self, z: Array, x: Array, rows: Array) -> Array:
        return _mean(self.inner, rows).az

    def _cross(self, z: Array, x: Array, rows: Array) -> Array:
        return _mean(self.inner, rows).b

    def _fz(self, z: Array, x: Array, rows: Array) -> Array:
        q = _mean(self.outer, rows)
        return q.az @ z + q.b.T @ x + q.dz

    def _fx(self, z: Array, x: Array, rows: Array) -> Array:
        q = _mean(self.outer, rows)
        return q.ax @ x + q.b @ z + q.dx

    def _inner_value(self, z: Array, x: Array, rows: Array) -> float:
        return _value(_mean(self.inner, rows), z, x)

    def _outer_value(self, z: Array, x: Array, rows: Array) -> float:
        return _value(_mean(self.outer, rows), z, x)

    def _argmin(self, x: Array) -> Array:
        q = _mean(self.inner, np.arange(self.n))
        return -np.linalg.solve(q.az, q.b.T @ x + q.dz)


def _sigmoid(t: Array) -> Array:
    return 0.5 * (1.0 + np.tanh(0.5 * t))


def _logistic_value(features: Array, labels: Array, z: Array) -> float:
    return float(np.mean(np.logaddexp(0.0, -labels * (features @ z))))


def _logistic_gradient(features: Array, labels: Array, z: Array) -> Array:
    slopes = -labels * _sigmoid(-labels * (features @ z))
    return features.T @ slopes / len(labels)


class LogisticSelection(Problem):
    """G_i = log(1 + exp(-y d'z)) + ½ sum_k exp(x_k) z_k² on training rows; F_j without the penalty, on validation rows.

    Labels are -1 or 1.
    """

    def __init__(self, X_train: Array, y_train: Array, X_val: Array, y_val: Array) -> None:
        self.X_train, self.y_train = np.asarray(X_train, dtype=float), np.asarray(y_train, dtype=float)
        self.X_val, self.y_val = np.asarray(X_val, dtype=float), np.asarray(y_val, dtype=float)
        p = self.X_train.shape[1]
        super().__init__(len(self.X_train), len(self.X_val), p, p)

    def _gz(self, z: Array, x: Array, rows: Array) -> Array:
        return _logistic_gradient(self.X_train[rows], self.y_train[rows], z) + np.exp(x) * z

    def _gx(self, z: Array, x: Array, rows: Array) -> Array:
        return 0.5 * np.exp(x) * z**2

    def _hessian(self, z: Array, x: Array, rows: Array) -> Array:
        features = self.X_train[rows]
        s = _sigmoid(features @ z)
        return features.T @ np.diag(s * (1.0 - s)) @ features / len(rows) + np.diag(np.exp(x))

    def _cross(self, z: Array, x: Array, rows: Array) -> Array:
        return np.diag(np.exp(x) * z)

    def _fz(self, z: Array, x: Array, rows: Array) -> Array:
        return _logistic_gradient(self.X_val[rows], self.y_val[rows], z)

    def _fx(self, z: Array, x: Array, rows: Array) -> Array:
        return np.zeros(self.d)

    def _inner_value(self, z: Array, x: Array, rows: Array) -> float:
        penalty = 0.5 * float(np.exp(x) @ z**2)
        return _logistic_value(self.X_train[rows], self.y_train[rows], z) + penalty

    def _outer_value(self, z: Array, x: Array, rows: Array) -> float:
        return _logistic_value(self.X_val[rows], self.y_val[rows], z)

    def _argmin(self, x: Array) -> Array:
        """Return z* by Newton's method, with halved steps until the full step decreases G."""
        rows, z = np.arange(self.n), np.zeros(self.p)
        for _ in range(100):
            gradient = self._gz(z, x, rows)
            if np.linalg.norm(gradient) <= 1e-14:
                break
            move = -np.linalg.solve(self._hessian(z, x, rows), gradient)
            size, value = 1.0, self._inner_value(z, x, rows)
            while size > 1e-3 and self._inner_value(z + size * move, x, rows) > value + 1e-14:
                size /= 2.0
            z = z + size * move
        return z


class DoubleWell(Problem):
    """G_i = sum_k (z_k² - 1)² / 4 + (x - a_i)'z, whose curvature is 3 z_k² - 1; F_j = |z - b_j|²/2 + |x|²/2.

    `inner` and `outer` are the a_i and the b_j, one per row.
    """

    def __init__(self, inner: Array, outer: Array) -> None:
        self.inner, self.outer = np.asarray(inner, dtype=float), np.asarray(outer, dtype=float)
        super().__init__(len(self.inner), len(self.outer), self.inner.shape[1], self.inner.shape[1])

    def _gz(self, z: Array, x: Array, rows: Array) -> Array:
        return z**3 - z + x - self.inner[rows].mean(axis=0)

    def _gx(self, z: Array, x: Array, rows: Array) -> Array:
        return z

    def _hessian(self, z: Array, x: Array, rows: Array) -> Array:
        return np.diag(3.0 * z**2 - 1.0)

    def _cross(self, z: Array, x: Array, rows: Array) -> Array:
        return np.eye(self.p)

    def _fz(self, z: Array, x: Array, rows: Array) -> Array:
        return z - self.outer[rows].mean(axis=0)

    def _fx(self, z: Array, x: Array, rows: Array) -> Array:
        return x

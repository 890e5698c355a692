"""Exact solutions in extended precision (NumPy's longdouble), written independently of the library: the truth."""

import numpy as np

LONG = np.longdouble


def cholesky_solve(matrix, right_side):
    """Solve a positive definite system; NumPy's linear algebra has no longdouble."""
    scale = 1 / np.sqrt(np.diag(matrix))
    lower, n = scale[:, None] * matrix * scale, len(matrix)
    for k in range(n):
        lower[k, k] = np.sqrt(lower[k, k] - lower[k, :k] @ lower[k, :k])
        lower[k + 1 :, k] = (lower[k + 1 :, k] - lower[k + 1 :, :k] @ lower[k, :k]) / lower[k, k]
    y = scale * right_side
    for k in range(n):
        y[k] = (y[k] - lower[k, :k] @ y[:k]) / lower[k, k]
    for k in reversed(range(n)):
        y[k] = (y[k] - lower[k + 1 :, k] @ y[k + 1 :]) / lower[k, k]
    return scale * y


def poisson(scores, y):
    mean = np.exp(scores)
    return mean - y * scores, mean - y, mean


def logistic(scores, y):
    small = np.exp(-np.abs(scores))
    right = np.where(y * scores > 0, small, LONG(1)) / (1 + small)
    return np.maximum(-y * scores, 0) + np.log1p(small), -y * right, small / (1 + small) ** 2


def squared(scores, y):
    return (scores - y) ** 2 / 2, scores - y, np.ones_like(scores)


def solve(loss, train, validation, x):
    """Return z*, h and ∇h of a linear model with the penalty exp(x_k) z_k² / 2 for each column."""
    (X, y), (X_val, y_val) = ([np.asarray(part, LONG) for part in level] for level in (train, validation))
    penalties, z = np.exp(np.asarray(x, LONG)), np.zeros(len(x), LONG)

    def slope(z):
        return X.T @ loss(X @ z, y)[1] / len(X) + penalties * z

    def system(z):
        return (X.T * loss(X @ z, y)[2]) @ X / len(X) + np.diag(penalties)

    last = np.inf
    for _ in range(500):
        grad = slope(z)
        move = cholesky_solve(system(z), grad)
        decrement = grad @ move
        if decrement <= 1e-34 * (z @ system(z) @ z) or last * 0.9 <= decrement <= 1e-26 * (z @ system(z) @ z):
            break
        t = LONG(1)
        with np.errstate(over="ignore", invalid="ignore"):
            while not slope(z - t * move) @ move >= -0.5 * decrement:  # too far
                t = t / 2
        z, last = z - t * move, decrement
    else:
        raise AssertionError("the truth was not found")
    values, slopes, _ = loss(X_val @ z, y_val)
    v = -cholesky_solve(system(z), X_val.T @ slopes / len(X_val))
    return z, values.mean(), penalties * z * v

"""MAID with dense certificates: inner solves by SciPy's L-BFGS and Newton steps, systems by its conjugate gradients."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize
from scipy.sparse.linalg import LinearOperator, cg

from .problems import Array, LogisticSelection, Problem, Quadratic

EPS = np.finfo(float).eps


class Bounds(NamedTuple):
    """ω, a function that bounds |F - h| for a given additional residual, and the strong convexity at z*."""

    omega: float
    value_error: Callable[[float], float]
    mu: float


def in_metric(
    m: Array, delta: float, mu: float, a: float, b: float, c: float, e: float, dv: Array, fz: Array
) -> Bounds:
    """Return the bounds of the proof in the metric of M."""
    least = np.linalg.eigvalsh(m)[0]

    def dual(r: Array) -> float:
        return float(np.sqrt(r @ np.linalg.solve(m, r)))

    def value_error(rounding: float) -> float:
        distance = delta + rounding / (mu * np.sqrt(least))
        return dual(fz) * distance + b * distance**2 / 2

    epsilon = (dual(dv) + (a + b) * delta) / mu
    return Bounds(c * delta + e * epsilon, value_error, mu * least)


def factor_of(m: Array) -> Array:
    """Return R with M^-1 = R R'."""
    return np.linalg.inv(np.linalg.cholesky(m)).T


def quadratic_bounds(q: Quadratic, z: Array, x: Array, v: Array, gz: Array, dv: Array, fz: Array) -> Bounds:
    """Return bounds in the metric of the mean Hessian."""
    m, a_f = q.inner.az.mean(0), q.outer.az.mean(0)
    r = factor_of(m)
    b, c, e = (np.linalg.norm(t, 2) for t in (r.T @ a_f @ r, q.outer.b.mean(0) @ r, q.inner.b.mean(0) @ r))
    return in_metric(m, float(np.linalg.norm(r.T @ gz)), 1.0, 0.0, b, c, e, dv, fz)


def curvature(s: Array) -> Array:
    """Return l'' of the logistic loss."""
    return 1 / (np.exp(s / 2) + np.exp(-s / 2)) ** 2


def third(s: Array) -> Array:
    """Return |l'''|."""
    return curvature(s) * np.abs(np.tanh(s / 2))


def ranges(s: Array, reach: Array) -> tuple[Array, Array, Array]:
    """Return inf l'', sup l'' and sup |l'''| over the scores within a reach of s."""
    far, near = np.abs(s) + reach, np.maximum(np.abs(s) - reach, 0)
    peak = np.arccosh(2.0)  # where |l'''| is largest
    return curvature(far), curvature(near), third(np.clip(peak, near, far))


def logistic_bounds(q: LogisticSelection, z: Array, x: Array, v: Array, gz: Array, dv: Array, fz: Array) -> Bounds:
    """Return the better of the bounds in the metrics of the penalties and of the Hessian."""
    rows, validation = q.X_train, q.X_val
    p = np.diag(np.exp(x))

    def bounds(m: Array, delta: float, mu: float) -> Bounds:
        r = factor_of(m)
        white, white_val = rows @ r, validation @ r
        k = ranges(rows @ z, np.linalg.norm(white, axis=1) * delta)[2] * np.abs(rows @ v)
        top = ranges(validation @ z, np.linalg.norm(white_val, axis=1) * delta)[1]
        a = np.linalg.norm(white.T @ (k[:, None] * white) / len(rows), 2)
        b = np.linalg.norm(white_val.T @ (top[:, None] * white_val) / len(validation), 2)
        c, e = (np.linalg.norm(np.diag(np.exp(x) * w) @ r, 2) for w in (v, z))
        return in_metric(m, delta, mu, a, b, c, e + delta, dv, fz)

    def least(r: Array, t: float) -> Array:
        low = ranges(rows @ z, np.linalg.norm(rows @ r, axis=1) * t)[0]
        return rows.T @ (low[:, None] * rows) / len(rows) + p

    plain = bounds(p, float(np.sqrt(gz @ np.linalg.solve(p, gz))), 1.0)
    m = least(np.eye(len(z)), 0.0)
    r, mu = factor_of(m), 1.0
    residual = float(np.linalg.norm(r.T @ gz))
    for _ in range(12):
        radius = 1.02 * residual / mu
        mu = float(np.linalg.eigvalsh(r.T @ least(r, radius) @ r)[0])
        if mu <= 1e-3:
            return plain
        if radius * mu >= residual:
            local = bounds(m, residual / mu, mu)
            return local if local.omega < plain.omega else plain
    return plain


def solve_inner(q: Problem, z: Array, x: Array, mu: float, accuracy: float) -> tuple[Array, Array]:
    """Return z with |gz| <= mu * accuracy, and gz: L-BFGS, then Newton steps if its values are too coarse."""
    last: list[Any] = [None, None]

    def both(z: Array) -> tuple[float, Array]:
        if last[0] is None or not np.array_equal(last[0], z):
            last[:] = z.copy(), (q.inner_value(z, x), q.gz(z, x))
        return last[1]

    def solved(z: Array) -> bool:
        value, grad = both(z)
        size = np.linalg.norm(grad)
        return bool(size <= mu * accuracy or size**2 <= 20 * mu * EPS * abs(value))

    def stop(intermediate_result: Any) -> None:
        if solved(intermediate_result.x):
            raise StopIteration

    grad = both(z)[1]
    if not solved(z):
        options = {"ftol": 0.0, "gtol": 0.0, "maxiter": 10_000, "maxfun": 100_000}
        found = minimize(both, z, jac=True, method="L-BFGS-B", callback=stop, options=options)
        z, grad = found.x, found.jac
    for _ in range(20):
        if np.linalg.norm(grad) <= mu * accuracy:
            break
        new = z - system(q, z, x, grad, np.zeros_like(z), 1e-12, mu * accuracy / 2)
        new_grad = q.gz(new, x)
        if not np.linalg.norm(new_grad) < 0.5 * np.linalg.norm(grad):
            break
        z, grad = new, new_grad
    return z, grad


def system(q: Problem, z: Array, x: Array, right: Array, guess: Array, rtol: float, atol: float) -> Array:
    """Return the solution of H v = right by conjugate gradients."""
    operator = LinearOperator((len(z), len(z)), matvec=lambda w: q.hv(z, x, w), dtype=float)
    return cg(operator, right, x0=guess, rtol=rtol, atol=atol, maxiter=10 * len(z) + 100)[0]


def noise(q: Problem, z: Array, x: Array) -> tuple[float, float]:
    """Return what rounding may add to |gz| and to |F|: 8 u sqrt(terms) times the mean size of the rows."""
    grads = [np.linalg.norm(q._gz(z, x, np.array([i]))) for i in range(q.n)]
    values = [abs(q._outer_value(z, x, np.array([j]))) for j in range(q.m)]
    return 4 * EPS * np.sqrt(q.n + q.p) * np.mean(grads), 4 * EPS * np.sqrt(q.m + q.p) * np.mean(values)


def maid(
    problem: Problem, z: Array, x: Array, draws: Iterable[Any], *, outer_step: float = 0.1, accuracy: float = 0.1
) -> list[dict[str, Any]]:
    """Take one step per element of ``draws``; the elements are not used. The steps must all be accepted."""
    bounds_at: Any = quadratic_bounds if isinstance(problem, Quadratic) else logistic_bounds
    v, mu, history, zero = np.zeros_like(z), 1.0, [], np.zeros_like(z)

    def halves(bounds: Bounds, z: Array, x: Array) -> tuple[float, float]:
        """Return the bounds of |F - h| from the accuracy and from rounding."""
        of_grad, of_value = noise(problem, z, x)
        error = (1 + 1e-6) * bounds.value_error(0.0)
        return error, (1 + 1e-6) * bounds.value_error(of_grad) - error + of_value

    for _ in draws:
        most, accepted = 20, False
        while not accepted:
            z, gz = solve_inner(problem, z, x, mu, accuracy)
            f_z, f_x, value = problem.fz(z, x), problem.fx(z, x), problem.outer_value(z, x)
            v = system(problem, z, x, -f_z, v, 0.0, accuracy)
            residual = problem.hv(z, x, v) + f_z
            q = problem.cr(z, x, v) + f_x
            bounds = bounds_at(problem, z, x, v, gz, residual, f_z)
            mu, size = bounds.mu, float(np.linalg.norm(q))
            error, rounding = halves(bounds, z, x)
            if bounds.omega <= size / 2:
                step = max(outer_step, 4 * rounding / size**2)
                for _ in range(most):
                    if step * size**2 <= rounding:
                        break
                    new_x = x - step * q
                    new_z, new_gz = solve_inner(problem, z, new_x, mu, accuracy)
                    new_fz, new_value = problem.fz(new_z, new_x), problem.outer_value(new_z, new_x)
                    new_bounds = bounds_at(problem, new_z, new_x, zero, new_gz, zero, new_fz)
                    upper = new_value + sum(halves(new_bounds, new_z, new_x))
                    if upper - (value - error - rounding) + 0.1 * step * size**2 <= 0:
                        accepted = True
                        break
                    step /= 2
                most += 1
            if not accepted:
                accuracy /= 2
        z, x, mu = new_z, new_x, new_bounds.mu
        outer_step, accuracy = 1.2 * step, 1.1 * accuracy
        row = {"inner_var": z, "v": v, "outer_var": x, "step": outer_step, "accuracy": accuracy, "upper": upper}
        history.append(row)
    return history

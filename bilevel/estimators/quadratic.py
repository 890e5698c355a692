"""Quadratics beside absolute values or norms of groups: minimize ½ w'Qw − q'w + Σ a_j |w_j|, or + Σ_g a_g ‖w_g‖.

Linear equations on the variables that are not zero (Newton's method for norms) give the minimum to machine precision.
Which variables those are is found by exchanging them; if that goes in circles, coordinate descent comes nearer first.
"""

import warnings

import numpy as np
from scipy.linalg import LinAlgError, cholesky, solve_triangular
from scipy.linalg.lapack import dposv
from sklearn.exceptions import ConvergenceWarning

_SLACK = 1e-10  # by which a bound may be exceeded, relative to it
_ROUNDS, _MOST_WALKS = 12, 30
_SWEEPS = 100, 1000, 10_000  # of coordinate descent, until its support is nearly the right one
_GROUP_SWEEPS = 3, 30, 300
_NEWTON_STEPS = 15


def solve_positive(Q: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Solve Q x = right for Q that is positive definite, or nearly so."""
    if not len(right):
        return right
    found, failed = dposv(Q, right, lower=True)[1:]
    return np.linalg.lstsq(Q, right, rcond=None)[0] if failed else found


def take_both(Q: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Return some rows of the same columns; a quarter of the time that one index of both takes."""
    return Q.take(kept, axis=0).take(kept, axis=1)


def minimize_l1(Q: np.ndarray, q: np.ndarray, strengths: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Minimize ½ w'Qw − q'w + Σ a_j |w_j| from a start; strengths are positive, or all of them zero."""
    if not strengths.any():
        return solve_positive(Q, q)
    w, exact = _exchange(Q, q, strengths, w)
    for sweeps in _SWEEPS:
        if exact:
            break
        w, exact = _exchange(Q, q, strengths, _descend(Q, q, strengths, w, sweeps))
        if not exact:
            w, exact = _walk(Q, q, strengths, w)
    return w


def _exchange(Q: np.ndarray, q: np.ndarray, a: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, bool]:
    """Exchange variables until signs and bounds hold; return the solution and True, or the start and False.

    From a start nearby this takes a few rounds, but it may go in circles.
    """
    signs = np.sign(w)
    for _ in range(_ROUNDS):
        kept, found = np.flatnonzero(signs), np.zeros_like(w)
        found[kept] = solve_positive(take_both(Q, kept), q[kept] - a[kept] * signs[kept])
        flipped = (found * signs <= 0) & (a > 0) & (signs != 0)
        if flipped.any():
            signs[flipped] = 0
            continue
        slope = q - Q @ found
        slope[kept] = 0
        missing = np.abs(slope) > a * (1 + _SLACK)
        if not missing.any():
            return found, True
        signs[missing] = np.sign(slope[missing])
    return w, False


def _walk(Q: np.ndarray, q: np.ndarray, a: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, bool]:
    """Go to the minimum for given signs, or to the best point on the way there; then let variables enter.

    The objective never rises. Return where this ends, and whether that is the minimum.
    """
    signs, most = np.sign(w), len(w)
    for _ in range(_MOST_WALKS):
        kept, slope, step = np.flatnonzero(signs), q - Q @ w, np.zeros_like(w)
        step[kept] = solve_positive(take_both(Q, kept), q[kept] - a[kept] * signs[kept]) - w[kept]
        moved, whole = _best_on_segment(Q @ step, slope, a, w, step, signs)
        if np.array_equal(moved, w) and not whole:
            most = 1  # one variable that enters alone always lets the objective fall
        w, signs = moved, np.sign(moved)
        if whole or most == 1:
            slope = q - Q @ w
            beyond = np.where(w == 0, np.abs(slope) - a * (1 + _SLACK), 0)
            enter = np.argsort(-beyond)[:most]
            enter = enter[beyond[enter] > 0]
            if whole and not len(enter):
                return w, True
            signs[enter] = np.sign(slope[enter])
    return w, False


def _best_on_segment(
    bend: np.ndarray, slope: np.ndarray, a: np.ndarray, w: np.ndarray, step: np.ndarray, signs: np.ndarray
) -> tuple[np.ndarray, bool]:
    """Return the best of the ends and of the places where a variable becomes zero; True for a whole step."""
    turning = np.flatnonzero(((w + step) * signs < 0) & (a > 0))
    if not len(turning):
        return w + step, True
    lengths = np.unique(np.append(-w[turning] / step[turning], [0.0, 1.0]))
    points = w + lengths[:, None] * step
    points[np.abs(points) < 1e-12 * (np.abs(w) + np.abs(step))] = 0
    smooth = lengths**2 * (step @ bend) / 2 - lengths * (slope @ step)
    return points[np.argmin(smooth + np.abs(points) @ a)], False


def _descend(Q: np.ndarray, q: np.ndarray, a: np.ndarray, w: np.ndarray, sweeps: int) -> np.ndarray:
    """Run scikit-learn's coordinate descent on rows that have this Gram matrix; a variable a_j w_j has strength 1."""
    from sklearn.linear_model import enet_path  # a tenth of a second, which most estimators do not need

    a = np.maximum(a, 1e-8 * a.max())
    Q, q = Q / np.outer(a, a), q / a
    factor = _factor(Q)
    X, y = np.asfortranarray(factor.T), solve_triangular(factor, q, lower=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        options = {"precompute": np.ascontiguousarray(Q), "Xy": q, "coef_init": w * a, "check_input": False}
        paths = enet_path(X, y, l1_ratio=1.0, alphas=[1 / len(y)], tol=1e-13, max_iter=sweeps, **options)
    return paths[1][:, 0] / a


def _factor(Q: np.ndarray) -> np.ndarray:
    """Return a lower Cholesky factor of Q, which may be singular by rounding."""
    scale, jitter = np.sqrt(np.diag(Q)) + 1e-300, 0.0
    unit = Q / np.outer(scale, scale)
    while True:
        try:
            return scale[:, None] * cholesky(unit + jitter * np.eye(len(Q)), lower=True, check_finite=False)
        except LinAlgError:
            jitter = max(10 * jitter, 1e-14)


def minimize_groups(
    Q: np.ndarray, q: np.ndarray, strengths: np.ndarray, groups: np.ndarray, w: np.ndarray
) -> np.ndarray:
    """Minimize ½ w'Qw − q'w + Σ_g a_g ‖w_g‖ from a start, for groups numbered from 0."""
    members = [np.flatnonzero(groups == g) for g in range(len(strengths))]
    lipschitz = [np.linalg.eigvalsh(Q[np.ix_(rows, rows)])[-1] for rows in members]
    w = w.copy()
    for sweeps in _GROUP_SWEEPS:
        for _ in range(sweeps):
            for rows, strength, bound in zip(members, strengths, lipschitz, strict=True):
                w[rows] = _minimize_group(Q, q, strength, bound, rows, w)
        w, exact = _newton_on_groups(Q, q, strengths, groups, w)
        if exact:
            break
    return w


def _minimize_group(
    Q: np.ndarray, q: np.ndarray, strength: float, bound: float, rows: np.ndarray, w: np.ndarray
) -> np.ndarray:
    """Return one group set to zero, where that is its minimum, and otherwise after a proximal step."""
    slope = q[rows] - Q[rows] @ w
    if np.linalg.norm(slope + Q[np.ix_(rows, rows)] @ w[rows]) <= strength:
        return np.zeros(len(rows))
    moved = w[rows] + slope / bound
    return moved * max(0.0, 1 - strength / bound / np.linalg.norm(moved))


def group_norms(w: np.ndarray, groups: np.ndarray, n_groups: int) -> np.ndarray:
    """Return the norm of each group."""
    return np.sqrt(np.bincount(groups, w**2, n_groups))


def norm_curvature(w: np.ndarray, strengths: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return the Hessian of Σ_g a_g ‖w_g‖ where no group is zero."""
    norms = group_norms(w, groups, len(strengths))
    unit, scale = w / norms[groups], (strengths / norms)[groups]
    same = groups[:, None] == groups
    return np.diag(scale) - same * np.outer(scale * unit, unit)


def _newton_on_groups(
    Q: np.ndarray, q: np.ndarray, strengths: np.ndarray, groups: np.ndarray, w: np.ndarray
) -> tuple[np.ndarray, bool]:
    """Newton's method on the groups that are not zero, and whether its end is the minimum over all."""
    active = group_norms(w, groups, len(strengths)) > 0
    kept = np.flatnonzero(active[groups])
    numbers = np.cumsum(active) - 1
    part = take_both(Q, kept), q[kept], strengths[active], numbers[groups[kept]]
    found, exact = _newton(*part, w[kept])
    w = np.zeros_like(w)
    w[kept] = found
    slopes = group_norms(q - Q @ w, groups, len(strengths))
    return w, exact and not np.any(slopes[~active] > strengths[~active] * (1 + _SLACK))


def _newton(
    Q: np.ndarray, q: np.ndarray, strengths: np.ndarray, groups: np.ndarray, w: np.ndarray
) -> tuple[np.ndarray, bool]:
    """Damped Newton's method from w without zero groups; False where it does not end at a gradient of zero."""

    def value(w: np.ndarray) -> float:
        return w @ (Q @ w) / 2 - q @ w + strengths @ group_norms(w, groups, len(strengths))

    before, scale = value(w), np.abs(q).max(initial=0) + strengths.max(initial=0)
    for _ in range(_NEWTON_STEPS):
        norms = group_norms(w, groups, len(strengths))
        gradient = Q @ w - q + (strengths / norms)[groups] * w
        if np.abs(gradient).max(initial=0) <= 1e-12 * scale:
            return w, True
        step = -solve_positive(Q + norm_curvature(w, strengths, groups), gradient)
        for length in 0.5 ** np.arange(12):
            after = value(w + length * step)
            if after <= before + 1e-4 * length * (gradient @ step) + 1e-14 * abs(before):
                break
        else:
            return w, False
        w, before = w + length * step, after
    return w, False

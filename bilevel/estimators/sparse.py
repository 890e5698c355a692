"""Linear models with penalties that set coefficients to zero, and their implicit derivatives.

The coefficients minimize  Σ_i weight_i loss_i(x_i'w + b) + Σ_g a_g ‖w_g‖ + ½ Σ_j c_j w_j²; groups of one variable have
absolute values instead of norms. The parts are the same as in other solvers of sparse models: the loss of weighted rows
(`WeightedLoss`), the penalty (`Penalty`), and a solver (`solve`) of proximal Newton steps on a working set, whose
quadratic subproblems `minimize_l1` and `minimize_groups` solve to machine precision. Derivatives in log a and log c
(`Solution`) are those on the nonzero coefficients: their set and their signs do not change for small changes of the
strengths. Variables are entries of the flat array of coefficients, (features, outputs).
"""

from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from scipy.linalg.lapack import dposv

from bilevel.estimators.losses import Array, RowLoss
from bilevel.estimators.ridge import to_dense
from bilevel.estimators.selection import Fits, InnerModel

TOLERANCE = 1e-9  # of the optimality conditions, relative to the gradient of the loss
_MIN_GRADIENT = 1e-6  # lower bound of that gradient, relative to the gradient at zero
_ROUNDING = 1e-6  # below this residual, a step that does not halve it is the last
_MAX_STEPS = 100
_SYSTEMS = 5  # typical number of linear systems per step
_SINGLE, _LARGE = 1e-7, 1e7  # Hessians have single precision above this residual and this number of multiplications
_MAX_EXTRAPOLATION = 1.0  # change of a log strength up to which the previous fit is extrapolated
_NEW_GROUPS = 200  # that enter the working set in one step, or the number that it contains if that is larger
_MAX_GRAM_ENTRIES = 5e7  # of all fits together, up to which products of all columns are stored
_CHUNK = 512  # rows whose products fit into the cache
_SLACK = 1e-10  # relative amount by which a bound may be exceeded
_EXCHANGES, _MAX_SEGMENTS, _JITTER = 12, 1000, 1e-13
_GROUP_SWEEPS = 3, 30, 300
_NEWTON_STEPS = 15


def scale_entries(X: Any, factors: Array) -> Any:
    """Multiply each column by its factor, or with factors (rows, columns), each entry."""
    return X.multiply(factors).tocsr() if sp.issparse(X) else X * factors


class Columns:
    """The columns of all rows, with a constant column if there is an intercept; products of columns are stored."""

    def __init__(self, X: Any, fit_intercept: bool) -> None:
        constant = np.ones((int(fit_intercept), X.shape[0]))
        self.X = X
        self.n_features = X.shape[1]
        self.transposed = sp.vstack([X.T, constant], format="csr") if sp.issparse(X) else np.vstack([X.T, constant])
        self.fit_intercept = fit_intercept
        self._base: tuple[Array, Array] | None = None

    def take(self, columns: Array, rows: Array) -> Any:
        """Return some columns of some rows, transposed."""
        chosen = self.transposed[columns]
        return chosen[:, rows] if sp.issparse(chosen) else chosen.take(rows, axis=1)

    def mean_squares(self, weights: Array) -> float:
        """Return the mean over the features of Σ_i weight_i x_ij², of centered features if there is an intercept."""
        squares = (self.X.multiply(self.X) if sp.issparse(self.X) else self.X**2).T @ weights
        if self.fit_intercept:
            squares = squares - (self.X.T @ weights) ** 2 / max(weights.sum(), np.finfo(float).tiny)
        return max(float(np.mean(squares)), 0.0)

    def gram(self, weights: Array) -> Array:
        """Return X' diag(weights) X, computed from an earlier product by the rows whose weights differ."""
        if self._base is None or np.count_nonzero(weights != self._base[0]) > len(weights) / 2:
            self._base = weights, self._product(weights)
        base, product = self._base
        return product if np.array_equal(base, weights) else product + self._product(weights - base)

    def _product(self, weights: Array) -> Array:
        rows = np.flatnonzero(weights)
        A = self.take(np.arange(self.transposed.shape[0]), rows)
        return to_dense(A @ scale_entries(A, weights[rows]).T)


class WeightedLoss:
    """The sum of weight_i loss_i over the rows, with its gradient and its second derivative in chosen variables."""

    def __init__(self, columns: Columns, y: Array, loss: RowLoss, weights: Array, n_fits: int) -> None:
        self.columns, self.y, self.loss, self.weights = columns, y, loss, weights
        self.used = np.flatnonzero(weights > 0)
        keep = loss.is_quadratic and y.shape[1] == 1 and n_fits * columns.n_features**2 <= _MAX_GRAM_ENTRIES
        self._gram = columns.gram(weights) if keep else None
        by_coef, by_intercept = self.gradient(np.zeros(y.shape))
        self.scale = max(np.abs(by_coef).max(initial=0), np.abs(by_intercept).max(initial=0))

    def predict(self, coef: Array, intercept: Array) -> Array:
        """Return the predictor of every row, (rows, outputs)."""
        return self.columns.X @ coef + intercept

    def value(self, eta: Array) -> float:
        return float(self.weights @ self.loss.value(self.y, eta))

    def gradient(self, eta: Array) -> tuple[Array, Array]:
        """Return the gradient in the coefficients, (features, outputs), and in the intercepts."""
        return self.transpose(self.weights[:, None] * self.loss.derivative(self.y, eta))

    def transpose(self, slopes: Array) -> tuple[Array, Array]:
        """Map derivatives in the predictor to coefficients and intercepts; without an intercept, its part is zero."""
        return np.asarray(self.columns.X.T @ slopes), slopes.sum(axis=0) * self.columns.fit_intercept

    def curvature(self, eta: Array, variables: Array, dtype: type = np.float64) -> Array:
        """Return the Hessian in some variables, followed by the intercepts if there are any."""
        outputs, n_features = self.y.shape[1], self.columns.n_features
        intercepts = n_features * outputs + np.arange(outputs * self.columns.fit_intercept)
        features, classes = np.divmod(np.append(variables, intercepts), outputs)
        if self._gram is not None:
            return take_both(self._gram, features)
        unique, places = np.unique(features, return_inverse=True)
        hessian = self._blocks(eta[self.used], self.columns.take(unique, self.used).astype(dtype), places, classes)
        hessian[np.diag_indices_from(hessian)] *= 1 + 10 * np.finfo(dtype).eps  # keeps it positive definite
        return hessian.astype(np.float64)

    def estimate_flops(self, size: int) -> float:
        """Return roughly the number of multiplications of a gradient and of the Hessian in `size` variables."""
        X, outputs = self.columns.X, self.y.shape[1]
        per_entry = 0.0 if self._gram is not None else size**2 / (1 if self.loss.couples_outputs else outputs)
        return X.size * (2 * outputs + per_entry / X.shape[1])

    def _blocks(self, eta: Array, A: Any, places: Array, classes: Array) -> Array:
        """Return Σ_i weight_i (diag(d_i) − p_i p_i') ⊗ x_i x_i' on the chosen pairs of feature and output."""
        weights, hessian = self.weights[self.used], np.zeros((len(classes),) * 2, A.dtype)
        diagonal, coupling = self.loss.curvature_factors(self.y[self.used], eta)
        if coupling is not None:
            mixed = np.ascontiguousarray((np.sqrt(weights)[:, None] * coupling).T, A.dtype)
            size = len(weights) if sp.issparse(A) else _CHUNK
            for rows in (slice(begin, begin + size) for begin in range(0, len(weights), size)):
                part = scale_entries(A[:, rows][places], mixed[classes, rows])
                hessian -= to_dense(part @ part.T)
        for k in range(self.y.shape[1]):
            own = np.flatnonzero(classes == k)
            part = scale_entries(A[places[own]], np.sqrt(weights * diagonal[:, k]).astype(A.dtype))
            hessian[np.ix_(own, own)] += to_dense(part @ part.T)
        return hessian


class SchurComplement:
    """The Hessian on some variables after the elimination of the intercepts."""

    def __init__(self, hessian: Array, size: int) -> None:
        self.cross = hessian[:size, size:]
        self.inverse = np.linalg.pinv(hessian[size:, size:], rcond=1e-12, hermitian=True)
        self.matrix = hessian[:size, :size] - self.cross @ self.inverse @ self.cross.T

    def take(self, variables: Array) -> "SchurComplement":
        """Return a copy on some of the variables."""
        part = copy(self)
        part.cross, part.matrix = self.cross[variables], take_both(self.matrix, variables)
        return part

    def reduce(self, by_coef: Array, by_intercept: Array) -> Array:
        """Return the gradient on the variables after the step of the intercepts."""
        return by_coef - self.cross @ (self.inverse @ by_intercept[: len(self.inverse)])

    def intercept_step(self, step: Array, by_intercept: Array) -> Array:
        """Return the step of the intercepts (zeros without intercepts) that belongs to a step of the variables."""
        size, intercept_step = len(self.inverse), np.zeros_like(by_intercept)
        intercept_step[:size] = -self.inverse @ (by_intercept[:size] + self.cross.T @ step)
        return intercept_step


class Penalty:
    """The penalty Σ_g a_g ‖w_g‖ + ½ Σ_j c_j w_j² on the flat array of coefficients.

    Parameters
    ----------
    norms : a, the strengths of the norms
    squares : c, the strengths of squares
    groups : number of the group of each variable
    """

    def __init__(self, norms: Array, squares: Array, groups: Array) -> None:
        self.norms, self.squares, self.groups = norms, squares, groups
        self._of_single_variables = np.array_equal(groups, np.arange(len(norms)))

    def norms_of(self, w: Array) -> Array:
        """Return the norm of each group."""
        return np.abs(w) if self._of_single_variables else group_norms(w, self.groups, len(self.norms))

    def largest_norm(self, w: Array) -> float:
        """Return the largest norm of a penalized group."""
        return float(self.norms_of(w)[self.norms > 0].max(initial=0))

    def value(self, w: Array) -> float:
        """Return the sum of the norms."""
        return float(self.norms @ self.norms_of(w))

    def residual(self, w: Array, gradient: Array) -> Array:
        """Return the violation of the optimality conditions; the gradient is that of the loss and the squares."""
        beyond = np.maximum(self.norms_of(gradient) - self.norms, 0)[self.groups] * self.direction(gradient)
        inside = gradient + self.norms[self.groups] * self.direction(w)
        return np.where(self.norms_of(w)[self.groups] == 0, beyond, inside)

    def working_set(self, w: Array, residual: Array) -> Array:
        """Return the variables to move: those of nonzero groups, and of groups that should be nonzero.

        The number of new groups is limited; those with the largest violations are taken first.
        """
        used, violation = self.norms_of(w) > 0, self.norms_of(residual)
        entering = np.flatnonzero(~used & (violation > 0))
        used[entering[np.argsort(-violation[entering])[: max(_NEW_GROUPS, np.count_nonzero(used))]]] = True
        return np.flatnonzero(used[self.groups])

    def support(self, w: Array) -> Array:
        """Return the variables of nonzero groups."""
        return np.flatnonzero(self.norms_of(w)[self.groups])

    def _renumber(self, variables: Array) -> tuple[Array, Array]:
        """Return the strengths of the groups of some variables, and the numbers of these groups from 0."""
        used, groups = np.unique(self.groups[variables], return_inverse=True)
        return self.norms[used], groups

    def minimize(self, Q: Array, q: Array, chosen: Array, w: Array) -> Array:
        """Minimize ½ w'Qw − q'w plus the norms over the chosen variables, from a start."""
        norms, groups = self._renumber(chosen)
        return minimize_l1(Q, q, norms, w) if self._of_single_variables else minimize_groups(Q, q, norms, groups, w)

    def curvature(self, w: Array, support: Array) -> Array:
        """Return the second derivative of the norms on the support."""
        return norm_curvature(w[support], *self._renumber(support))

    def direction(self, w: Array) -> Array:
        """Return the gradient of the norms for strengths of 1; zero outside the support."""
        size = self.norms_of(w)
        return w / np.where(size == 0, 1, size)[self.groups]

    def jvp(self, w: Array, norms: Array, squares: Array) -> Array:
        """Return the derivative of the gradient along changes of the log strengths."""
        return (self.norms * norms)[self.groups] * self.direction(w) + self.squares * squares * w

    def vjp(self, w: Array, adjoint: Array) -> tuple[Array, Array]:
        """Return the transpose of `jvp`."""
        of_groups = np.bincount(self.groups, self.direction(w) * adjoint, len(self.norms))
        return self.norms * of_groups, self.squares * w * adjoint


class WorkLimitReached(Exception):
    """Raised if fits need more multiplications than a search may spend."""


@dataclass(eq=False)
class Solution:
    """The result of `solve`, and its derivatives in the log strengths, for a fixed support.

    Attributes
    ----------
    tol : tolerance of `residual`, which is the violation of the optimality conditions relative to the gradient
    w, intercept, eta : flat coefficients, intercepts, and the predictor of every row
    size : number of coefficients that are nonzero or that an exact solution might make nonzero
    flops : rough number of multiplications
    hessian : Hessian on the support, at the start of the last step until derivatives need an accurate one
    is_accurate : whether the last step was so small that derivatives by this Hessian are accurate to `tol`
    """

    loss: WeightedLoss
    penalty: Penalty
    tol: float
    w: Array
    intercept: Array
    eta: Array
    residual: float
    size: int
    flops: float
    hessian: SchurComplement | None = None
    is_accurate: bool = False

    def __post_init__(self) -> None:
        self.support = self.penalty.support(self.w)

    def set_hessian(self, hessian: SchurComplement, *, is_accurate: bool) -> SchurComplement:
        """Add the second derivative of the norms to the Hessian of the loss and the squares, and store it."""
        hessian.matrix += self.penalty.curvature(self.w, self.support)
        self.hessian, self.is_accurate = hessian, is_accurate
        return hessian

    def vjp(self, cotangent: Array) -> tuple[Array, Array]:
        """Return derivatives in the log strengths of norms and squares, given those in the predictor."""
        hessian = self.hessian
        if hessian is None or not self.is_accurate:
            new = _eliminate_intercepts(self.loss, self.penalty, self.eta, self.support, self.tol)
            hessian = self.set_hessian(new, is_accurate=True)
        by_coef, by_intercept = self.loss.transpose(cotangent)
        adjoint = np.zeros_like(self.w)
        right = hessian.reduce(by_coef.ravel()[self.support], by_intercept)
        adjoint[self.support] = -solve_positive(hessian.matrix, right)
        return self.penalty.vjp(self.w, adjoint)

    def extrapolate(self, norms: Array, squares: Array) -> tuple[Array, Array]:
        """Return a start for changed log strengths; coefficients whose sign would change are set to zero."""
        moves = np.concatenate([norms, squares])
        if self.hessian is None or np.abs(moves).max(initial=0) > _MAX_EXTRAPOLATION:
            return self.w, self.intercept
        rate = self.penalty.jvp(self.w, norms, squares)[self.support]
        step = np.zeros_like(self.w)
        step[self.support] = -solve_positive(self.hessian.matrix, rate)
        intercept_step = self.hessian.intercept_step(step[self.support], np.zeros_like(self.intercept))
        return np.where((self.w + step) * self.w > 0, self.w + step, 0), self.intercept + intercept_step


def solve(
    loss: WeightedLoss, penalty: Penalty, w: Array, intercept: Array, tol: float, max_flops: float = np.inf
) -> Solution:
    """Minimize the sum of loss and penalty from a start, until the residual is at most `tol`.

    Raise WorkLimitReached if that needs more than `max_flops`.
    """
    outputs, before, reduced, flops = loss.y.shape[1], np.inf, None, 0.0
    eta = loss.predict(w.reshape(-1, outputs), intercept)
    for _ in range(_MAX_STEPS):
        by_coef, by_intercept = loss.gradient(eta)
        gradient = by_coef.ravel() + penalty.squares * w
        residuals = penalty.residual(w, gradient)
        residual = max(np.abs(residuals).max(initial=0), np.abs(by_intercept).max(initial=0))
        residual /= max(np.abs(by_coef).max(initial=0), _MIN_GRADIENT * loss.scale) or 1.0
        if residual <= tol or before / 2 < residual < _ROUNDING:
            break
        chosen, before = penalty.working_set(w, residuals), residual
        flops += loss.estimate_flops(len(chosen)) + _SYSTEMS * len(chosen) ** 3 / 3
        if flops > max_flops:
            raise WorkLimitReached
        reduced = _eliminate_intercepts(loss, penalty, eta, chosen, residual)
        slope = reduced.reduce(gradient[chosen], by_intercept)
        start = w[chosen]
        step = np.zeros_like(w)
        step[chosen] = penalty.minimize(reduced.matrix, reduced.matrix @ start - slope, chosen, start) - start
        intercept_step = reduced.intercept_step(step[chosen], by_intercept)
        change = gradient @ step + by_intercept @ intercept_step + penalty.value(w + step) - penalty.value(w)
        moved = _line_search(loss, penalty, (w, intercept, eta), (step, intercept_step), change)
        if moved[0] is w:  # rounding errors prevent a decrease
            break
        w, intercept, eta = moved
    shared = intercept.mean() if loss.loss.couples_outputs else 0.0  # the loss does not depend on it
    size = int(np.count_nonzero((w != 0) | (residuals != 0)))
    found = Solution(loss, penalty, tol, w, intercept - shared, eta - shared, residual, size, flops)
    if reduced is not None:
        hessian = reduced.take(np.searchsorted(chosen, found.support))
        found.set_hessian(hessian, is_accurate=before <= np.sqrt(tol))
    return found


def _eliminate_intercepts(
    loss: WeightedLoss, penalty: Penalty, eta: Array, chosen: Array, residual: float
) -> SchurComplement:
    large = loss.loss.couples_outputs and len(eta) * len(chosen) ** 2 >= _LARGE
    hessian = loss.curvature(eta, chosen, np.float32 if residual >= _SINGLE and large else np.float64)
    hessian[np.arange(len(chosen)), np.arange(len(chosen))] += penalty.squares[chosen]
    return SchurComplement(hessian, len(chosen))


def _line_search(
    loss: WeightedLoss, penalty: Penalty, point: tuple[Array, ...], steps: tuple[Array, ...], change: float
) -> tuple[Array, ...]:
    """Halve the step until the objective decreases by a part of the change that its model predicts."""
    w, intercept, eta = point

    def value(w: Array, eta: Array) -> float:
        return loss.value(eta) + penalty.value(w) + penalty.squares @ w**2 / 2

    before = value(w, eta)
    eta_step = loss.predict(steps[0].reshape(-1, loss.y.shape[1]), steps[1])
    for length in 0.5 ** np.arange(30):
        moved = w + length * steps[0], intercept + length * steps[1], eta + length * eta_step
        if value(moved[0], moved[2]) <= before + 1e-4 * length * change + 1e-13 * abs(before):
            return moved
    return point


class SparseFits(NamedTuple):
    """The fits of a model at some log penalties."""

    log_penalties: Array
    solved: list[Solution]


class SparseModel(InnerModel):
    """A linear model with an elastic net, or a group lasso with squares.

    Its log penalties are the log strengths of absolute values (one per penalized feature) or of norms (one per group,
    over all outputs), followed by those of squares (one per penalized feature).

    Parameters
    ----------
    X : dense or sparse, (rows, features)
    y : (rows, outputs), targets as the loss takes them
    loss : loss of the linear predictor
    groups : groups of the penalized features; None means absolute values
    penalized : numbers of the penalized features; None means all
    fit_intercept : whether to fit an intercept, which is not penalized
    tol : stop if the residual of the optimality conditions is at most this part of the gradient of the loss
    """

    loss: RowLoss

    def __init__(
        self,
        X: Any,
        y: Array,
        loss: RowLoss,
        groups: Array | None = None,
        *,
        penalized: Array | None = None,
        fit_intercept: bool = True,
        tol: float = TOLERANCE,
    ) -> None:
        self.X, self.y, self.loss, self.tol = X, y, loss, tol
        self.columns = Columns(X, fit_intercept)
        self.outputs = y.shape[1]
        self.penalized = np.arange(X.shape[1]) if penalized is None else penalized
        # Numbers of the strength of squares of each variable, of its group, and of the strength of each group; numbers
        # after the last one stand for no penalty.
        size = len(self.penalized)
        of_features = np.full(X.shape[1], size)
        of_features[self.penalized] = np.arange(size)
        self._squares = np.repeat(of_features, self.outputs)
        self.n_norms, self._groups, self._norms = size, np.arange(len(self._squares)), self._squares
        self._has_groups = groups is not None
        if groups is not None:
            labels, numbers = np.unique(groups, return_inverse=True)
            self.n_norms, self._norms = len(labels), np.arange(len(labels) + 1)
            self._groups = np.append(numbers, self.n_norms)[self._squares]
        self.n_penalties = self.n_norms + size
        self.flops_left = np.inf  # multiplications that fits may still take
        self._losses: dict[bytes, WeightedLoss] = {}

    def _expand(self, values: Array) -> tuple[Array, Array]:
        """Return values of the norms and squares of the penalty from those of the log penalties."""
        norms, squares = np.split(values, [self.n_norms])
        return np.append(norms, 0.0)[self._norms], np.append(squares, 0.0)[self._squares]

    def _reduce(self, norms: Array, squares: Array) -> Array:
        """Return the transpose of `_expand`."""
        norms = norms[: self.n_norms] if self._has_groups else self._sum_outputs(norms)
        return np.concatenate([norms, self._sum_outputs(squares)])

    def _sum_outputs(self, values: Array) -> Array:
        """Return the sum over outputs for each penalized feature."""
        return values.reshape(-1, self.outputs)[self.penalized].sum(axis=1)

    def fit(self, weights: Array, log_penalties: Array, start: Fits | None = None) -> Fits:
        """Fit once for each row of `weights`; raise WorkLimitReached if that takes more than `flops_left`."""
        penalty = Penalty(*self._expand(np.exp(log_penalties)), self._groups)
        keys = [row.tobytes() for row in weights]  # equal rows, as of parts of one validation set, share a fit
        self._losses = {
            key: self._losses.get(key) or WeightedLoss(self.columns, self.y, self.loss, row, len(keys))
            for key, row in zip(keys, weights, strict=True)
        }
        known = {} if start is None else {one.loss.weights.tobytes(): one for one in start.state.solved}
        solved: dict[bytes, Solution] = {}
        for key, loss in self._losses.items():
            if start is None:
                first = np.zeros(len(self._squares)), np.zeros(self.outputs)
            elif key in known:
                first = known[key].extrapolate(*self._expand(log_penalties - start.state.log_penalties))
            else:
                first = start.coef.mean(axis=0).ravel(), start.intercept.mean(axis=0)
            solved[key] = solve(loss, penalty, *first, self.tol, self.flops_left)
            self.flops_left -= solved[key].flops
        fits = [solved[key] for key in keys]
        coef = np.array([one.w.reshape(-1, self.outputs) for one in fits])
        intercept, eta = (np.array([getattr(one, name) for one in fits]) for name in ("intercept", "eta"))
        return Fits(coef, intercept, eta, SparseFits(log_penalties, fits))

    def vjp(self, fits: Fits, cotangent: Array) -> Array:
        pairs = zip(fits.state.solved, cotangent, strict=True)
        return np.array([self._reduce(*solved.vjp(slopes)) for solved, slopes in pairs])


# Quadratic subproblems: minimize ½ w'Qw − q'w + Σ a_j |w_j|, or + Σ_g a_g ‖w_g‖. Linear systems on the nonzero
# variables (Newton's method for norms) give the minimum to machine precision. The set of nonzero variables is found by
# exchanges; if these cycle, steps that decrease the objective follow.


def solve_positive(Q: Array, right: Array) -> Array:
    """Solve Q x = right for a positive semidefinite Q."""
    if not len(right):
        return right
    found, failed = dposv(Q, right, lower=True)[1:]
    return np.linalg.lstsq(Q, right, rcond=None)[0] if failed else found


def take_both(Q: Array, kept: Array) -> Array:
    """Return Q[kept][:, kept]; two calls of `take` are four times as fast as one index."""
    return Q.take(kept, axis=0).take(kept, axis=1)


def minimize_l1(Q: Array, q: Array, strengths: Array, w: Array) -> Array:
    """Minimize ½ w'Qw − q'w + Σ a_j |w_j| from a start."""
    found = _exchange(Q, q, strengths, w)
    return _follow_signs(Q, q, strengths, w) if found is None else found


def _exchange(Q: Array, q: Array, a: Array, w: Array) -> Array | None:
    """Exchange variables until signs and bounds hold; return None if that cycles, as it may from a start far away."""
    signs = np.sign(w)
    for _ in range(_EXCHANGES):
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
            return found
        signs[missing] = np.sign(slope[missing])
    return None


def _follow_signs(Q: Array, q: Array, a: Array, w: Array) -> Array:
    """Minimize for fixed signs, up to the best point on the segment, and let variables become nonzero, in turn."""
    Q = Q + _JITTER * np.trace(Q) / len(Q) * np.eye(len(Q))  # so that there is a minimum for all signs
    signs, most = np.sign(w), len(w)
    for _ in range(_MAX_SEGMENTS):
        kept, slope, step = np.flatnonzero(signs), q - Q @ w, np.zeros_like(w)
        step[kept] = solve_positive(take_both(Q, kept), q[kept] - a[kept] * signs[kept]) - w[kept]
        moved, whole = _best_on_segment(Q @ step, slope, a, w, step, signs)
        if not whole and np.array_equal(moved, w):  # too many new variables; one alone decreases the objective
            if most == 1:  # except for rounding errors
                break
            most = max(1, most // 16)
        w, signs = moved, np.sign(moved)
        if whole:
            slope = q - Q @ w
            beyond = np.where(w == 0, np.abs(slope) - a * (1 + _SLACK), 0)
            enter = np.argsort(-beyond)[:most]
            enter = enter[beyond[enter] > 0]
            if not len(enter):
                break
            signs[enter] = np.sign(slope[enter])
    return w


def _best_on_segment(image: Array, slope: Array, a: Array, w: Array, step: Array, signs: Array) -> tuple[Array, bool]:
    """Return the best of the ends and of the points where a variable becomes zero, and whether it is a full step."""
    turning = np.flatnonzero(((w + step) * signs < 0) & (a > 0))
    if not len(turning):
        return w + step, True
    lengths = np.unique(np.append(-w[turning] / step[turning], [0.0, 1.0]))
    points = w + lengths[:, None] * step
    points[np.abs(points) < 1e-12 * (np.abs(w) + np.abs(step))] = 0
    smooth = lengths**2 * (step @ image) / 2 - lengths * (slope @ step)
    return points[np.argmin(smooth + np.abs(points) @ a)], False


def minimize_groups(Q: Array, q: Array, strengths: Array, groups: Array, w: Array) -> Array:
    """Minimize ½ w'Qw − q'w + Σ_g a_g ‖w_g‖ from a start, for groups numbered from 0."""
    members = [np.flatnonzero(groups == g) for g in range(len(strengths))]
    blocks = [Q[np.ix_(rows, rows)] for rows in members]
    lipschitz = [np.linalg.eigvalsh(block)[-1] for block in blocks]
    w = w.copy()
    for sweeps in _GROUP_SWEEPS:
        for _ in range(sweeps):
            for rows, block, strength, bound in zip(members, blocks, strengths, lipschitz, strict=True):
                slope = q[rows] - Q[rows] @ w
                if np.linalg.norm(slope + block @ w[rows]) <= strength:
                    w[rows] = 0
                else:
                    moved = w[rows] + slope / bound
                    w[rows] = moved * max(0.0, 1 - strength / bound / np.linalg.norm(moved))
        w, exact = _newton_on_groups(Q, q, strengths, groups, w)
        if exact:
            break
    return w


def group_norms(w: Array, groups: Array, n_groups: int) -> Array:
    """Return the norm of each group."""
    return np.sqrt(np.bincount(groups, w**2, n_groups))


def norm_curvature(w: Array, strengths: Array, groups: Array) -> Array:
    """Return the Hessian of Σ_g a_g ‖w_g‖ at a point without zero groups."""
    norms = group_norms(w, groups, len(strengths))
    unit, scale = w / norms[groups], (strengths / norms)[groups]
    same = groups[:, None] == groups
    return np.diag(scale) - same * np.outer(scale * unit, unit)


def _newton_on_groups(Q: Array, q: Array, strengths: Array, groups: Array, w: Array) -> tuple[Array, bool]:
    """Run damped Newton steps on the nonzero groups; return also whether they end at the minimum over all groups."""

    def value(w: Array) -> float:
        return w @ (Q @ w) / 2 - q @ w + strengths @ group_norms(w, groups, len(strengths))

    active = group_norms(w, groups, len(strengths)) > 0
    kept = np.flatnonzero(active[groups])
    part, a, numbers = take_both(Q, kept), strengths[active], (np.cumsum(active) - 1)[groups[kept]]
    before, scale = value(w), np.abs(q[kept]).max(initial=0) + a.max(initial=0)
    for _ in range(_NEWTON_STEPS):
        slope = q - Q @ w
        gradient = (a / group_norms(w[kept], numbers, len(a)))[numbers] * w[kept] - slope[kept]
        if np.abs(gradient).max(initial=0) <= 1e-12 * scale:
            beyond = group_norms(slope, groups, len(strengths)) > strengths * (1 + _SLACK)
            return w, not np.any(beyond & ~active)
        step = np.zeros_like(w)
        step[kept] = -solve_positive(part + norm_curvature(w[kept], a, numbers), gradient)
        for length in 0.5 ** np.arange(12):
            after = value(w + length * step)
            if after <= before + 1e-4 * length * (gradient @ step[kept]) + 1e-14 * abs(before):
                break
        else:
            break
        w, before = w + length * step, after
    return w, False

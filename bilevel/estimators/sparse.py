"""Linear models with penalties that set coefficients to zero, and their implicit derivatives.

The coefficients minimize  Σ_i weight_i loss_i(x_i'w + b) + Σ_j a_j |w_j| + ½ Σ_j c_j w_j²  (or norms of groups, Σ_g a_g
‖w_g‖, instead of absolute values). The parts are the same as in other solvers of sparse models: the loss of weighted
rows (`WeightedLoss`), the penalty (`L1`, `GroupNorm`), and a solver (`solve`) of proximal Newton steps on a working
set, whose quadratic subproblems `minimize_l1` and `minimize_groups` solve to machine precision. Derivatives in log a
and log c (`ImplicitSolution`) are those on the nonzero coefficients: their set and their signs do not change for small
changes of the strengths. Variables are entries of the flat array of coefficients, (features, outputs).
"""

import warnings
from copy import copy
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from scipy.linalg import LinAlgError, cholesky, solve_triangular
from scipy.linalg.lapack import dposv
from sklearn.exceptions import ConvergenceWarning

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
_NEW_VARIABLES = 200  # that enter the working set in one step, or the number that it contains if that is larger
_MAX_GRAM_ENTRIES = 5e7  # of all fits together, up to which products of all columns are stored
_CHUNK = 512  # rows whose products fit into the cache
_SLACK = 1e-10  # relative amount by which a bound may be exceeded
_EXCHANGES, _MAX_SEGMENTS = 12, 30
_SWEEPS = 100, 1000, 10_000  # of coordinate descent, until its support is almost correct
_GROUP_SWEEPS = 3, 30, 300
_NEWTON_STEPS = 15


def scale_entries(X: Any, factors: Array) -> Any:
    """Multiply each column by its factor, or with factors (rows, columns), each entry."""
    if not sp.issparse(X):
        return X * factors
    scaled = X.copy()
    rows = np.repeat(np.arange(X.shape[0]), np.diff(X.indptr))
    scaled.data *= factors[rows, X.indices] if factors.ndim == 2 else factors[X.indices]
    return scaled


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
        """Return the step of the intercepts that belongs to a step of the variables."""
        return -self.inverse @ (by_intercept[: len(self.inverse)] + self.cross.T @ step)


class GroupNorm:
    """The penalty Σ_g a_g ‖w_g‖ + ½ Σ_j c_j w_j² on the flat array of coefficients.

    Parameters
    ----------
    norms : a, the strengths of the norms
    squares : c, the strengths of squares
    groups : number of the group of each variable
    """

    def __init__(self, norms: Array, squares: Array, groups: Array) -> None:
        self.norms, self.squares, self.groups = norms, squares, groups

    def _norms_of(self, w: Array) -> Array:
        return group_norms(w, self.groups, len(self.norms))

    def value(self, w: Array) -> float:
        """Return the sum of the norms."""
        return float(self.norms @ self._norms_of(w))

    def residual(self, w: Array, gradient: Array) -> Array:
        """Return the violation of the optimality conditions; the gradient is that of the loss and the squares."""
        size, slope = self._norms_of(w), self._norms_of(gradient)
        beyond = np.maximum(1 - self.norms / np.maximum(slope, 1e-300), 0)[self.groups] * gradient
        return np.where(size[self.groups] == 0, beyond, gradient + self.norms[self.groups] * self.direction(w))

    def working_set(self, w: Array, residual: Array) -> Array:
        """Return the variables to move: those of nonzero groups, and of groups that should be nonzero."""
        used = (self._norms_of(w) > 0) | (self._norms_of(residual) > 0)
        return np.flatnonzero(used[self.groups])

    def support(self, w: Array) -> Array:
        """Return the variables of nonzero groups."""
        return self.working_set(w, np.zeros_like(w))

    def _renumber(self, variables: Array) -> tuple[Array, Array]:
        """Return the strengths of the groups of some variables, and the numbers of these groups from 0."""
        used, groups = np.unique(self.groups[variables], return_inverse=True)
        return self.norms[used], groups

    def minimize(self, Q: Array, q: Array, chosen: Array, w: Array) -> Array:
        """Minimize ½ w'Qw − q'w plus the norms over the chosen variables, from a start."""
        return minimize_groups(Q, q, *self._renumber(chosen), w)

    def curvature(self, w: Array, support: Array) -> Array | float:
        """Return the second derivative of the norms on the support."""
        return norm_curvature(w[support], *self._renumber(support))

    def direction(self, w: Array) -> Array:
        """Return the gradient of the norms for strengths of 1; zero outside the support."""
        size = self._norms_of(w)
        return w / np.where(size == 0, 1, size)[self.groups]

    def jvp(self, w: Array, norms: Array, squares: Array) -> Array:
        """Return the derivative of the gradient along changes of the log strengths."""
        return (self.norms * norms)[self.groups] * self.direction(w) + self.squares * squares * w

    def vjp(self, w: Array, adjoint: Array) -> tuple[Array, Array]:
        """Return the transpose of `jvp`."""
        of_groups = np.bincount(self.groups, self.direction(w) * adjoint, len(self.norms))
        return self.norms * of_groups, self.squares * w * adjoint


class L1(GroupNorm):
    """The same for groups of one variable: Σ_j a_j |w_j| + ½ Σ_j c_j w_j²."""

    def __init__(self, norms: Array, squares: Array) -> None:
        super().__init__(norms, squares, np.arange(len(norms)))

    def _norms_of(self, w: Array) -> Array:
        return np.abs(w)

    def residual(self, w: Array, gradient: Array) -> Array:
        beyond = np.sign(gradient) * np.maximum(np.abs(gradient) - self.norms, 0)
        return np.where(w == 0, beyond, gradient + self.norms * np.sign(w))

    def working_set(self, w: Array, residual: Array) -> Array:
        """Limit the number of new variables, the largest violations first."""
        inside = np.flatnonzero(w)
        entering = np.flatnonzero((w == 0) & (residual != 0))
        largest = np.argsort(-np.abs(residual[entering]))[: max(_NEW_VARIABLES, len(inside))]
        return np.sort(np.concatenate([inside, entering[largest]]))

    def minimize(self, Q: Array, q: Array, chosen: Array, w: Array) -> Array:
        return minimize_l1(Q, q, self.norms[chosen], w)

    def curvature(self, w: Array, support: Array) -> float:
        return 0.0


class WorkLimitReached(Exception):
    """Raised if fits need more multiplications than a search may spend."""


class Solution(NamedTuple):
    """The result of `solve`: flat coefficients, intercepts and the predictor of every row.

    Attributes
    ----------
    residual : violation of the optimality conditions, relative to the gradient of the loss
    size : number of coefficients that are nonzero or that an exact solution might make nonzero
    hessian : Hessian of the last step on the support
    previous_residual : residual before the last step
    flops : rough number of multiplications
    """

    w: Array
    intercept: Array
    eta: Array
    residual: float
    size: int
    hessian: SchurComplement | None
    previous_residual: float
    flops: float


def solve(
    loss: WeightedLoss, penalty: GroupNorm, w: Array, intercept: Array, tol: float, max_flops: float = np.inf
) -> Solution:
    """Minimize the sum of loss and penalty from a start, until the residual is at most `tol`.

    A fit that would need more than `max_flops` ends early, with a larger number of flops.
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
            break
        reduced = _eliminate_intercepts(loss, penalty, eta, chosen, residual)
        slope = reduced.reduce(gradient[chosen], by_intercept)
        start = w[chosen]
        step = np.zeros_like(w)
        step[chosen] = penalty.minimize(reduced.matrix, reduced.matrix @ start - slope, chosen, start) - start
        intercept_step = np.zeros(outputs)
        intercept_step[: len(reduced.inverse)] = reduced.intercept_step(step[chosen], by_intercept)
        change = gradient @ step + by_intercept @ intercept_step + penalty.value(w + step) - penalty.value(w)
        moved = _line_search(loss, penalty, (w, intercept, eta), (step, intercept_step), change)
        if moved[0] is w:  # rounding errors prevent a decrease
            break
        w, intercept, eta = moved
    shared = intercept.mean() if loss.loss.couples_outputs else 0.0  # the loss does not depend on it
    size = int(np.count_nonzero((w != 0) | (residuals != 0)))
    hessian = reduced.take(np.searchsorted(chosen, penalty.support(w))) if reduced and flops <= max_flops else None
    return Solution(w, intercept - shared, eta - shared, residual, size, hessian, before, flops)


def _eliminate_intercepts(
    loss: WeightedLoss, penalty: GroupNorm, eta: Array, chosen: Array, residual: float
) -> SchurComplement:
    large = loss.loss.couples_outputs and len(eta) * len(chosen) ** 2 >= _LARGE
    hessian = loss.curvature(eta, chosen, np.float32 if residual >= _SINGLE and large else np.float64)
    hessian[np.arange(len(chosen)), np.arange(len(chosen))] += penalty.squares[chosen]
    return SchurComplement(hessian, len(chosen))


def _line_search(
    loss: WeightedLoss, penalty: GroupNorm, point: tuple[Array, ...], steps: tuple[Array, ...], change: float
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


class ImplicitSolution:
    """A solution and its derivatives in the log strengths, for a fixed support."""

    def __init__(self, loss: WeightedLoss, penalty: GroupNorm, solution: Solution, tol: float) -> None:
        self.loss, self.penalty, self.solution, self.tol = loss, penalty, solution, tol
        self.support = penalty.support(solution.w)

    @cached_property
    def last_hessian(self) -> SchurComplement | None:
        """The Hessian of the last step; None if there was no step."""
        return self.solution.hessian and self._add_curvature(self.solution.hessian)

    @cached_property
    def hessian(self) -> SchurComplement:
        """The Hessian of the last step if that step was so small that it is accurate to `tol`, otherwise a new one."""
        if self.last_hessian is not None and self.solution.previous_residual <= np.sqrt(self.tol):
            return self.last_hessian
        new = _eliminate_intercepts(self.loss, self.penalty, self.solution.eta, self.support, self.tol)
        return self._add_curvature(new)

    def _add_curvature(self, reduced: SchurComplement) -> SchurComplement:
        reduced.matrix += self.penalty.curvature(self.solution.w, self.support)
        return reduced

    def vjp(self, cotangent: Array) -> tuple[Array, Array]:
        """Return derivatives in the log strengths of norms and squares, given those in the predictor."""
        by_coef, by_intercept = self.loss.transpose(cotangent)
        adjoint = np.zeros_like(self.solution.w)
        right = self.hessian.reduce(by_coef.ravel()[self.support], by_intercept)
        adjoint[self.support] = -solve_positive(self.hessian.matrix, right)
        return self.penalty.vjp(self.solution.w, adjoint)

    def jvp(self, norms: Array, squares: Array, hessian: SchurComplement | None = None) -> tuple[Array, Array]:
        """Return the derivatives of coefficients and intercepts along changes of the log strengths."""
        hessian = hessian or self.hessian
        rate = self.penalty.jvp(self.solution.w, norms, squares)[self.support]
        step, intercept_step = np.zeros_like(self.solution.w), np.zeros_like(self.solution.intercept)
        step[self.support] = -solve_positive(hessian.matrix, rate)
        moved = hessian.intercept_step(step[self.support], np.zeros_like(intercept_step))
        intercept_step[: len(moved)] = moved
        return step, intercept_step

    def extrapolate(self, norms: Array, squares: Array) -> tuple[Array, Array]:
        """Return a start for changed log strengths; coefficients whose sign would change are set to zero."""
        hessian = self.__dict__.get("hessian", self.last_hessian)
        w, intercept, largest = self.solution.w, self.solution.intercept, [np.abs(norms), np.abs(squares)]
        if hessian is None or np.concatenate(largest).max(initial=0) > _MAX_EXTRAPOLATION:
            return w, intercept
        step, intercept_step = self.jvp(norms, squares, hessian)
        return np.where((w + step) * w > 0, w + step, 0), intercept + intercept_step


class SparseFits(NamedTuple):
    """The fits of a model at some log penalties."""

    log_penalties: Array
    solved: list[ImplicitSolution]


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
        self.n_features, self.outputs = X.shape[1], y.shape[1]
        self.penalized = np.arange(X.shape[1]) if penalized is None else penalized
        self.n_norms, self._groups = len(self.penalized), None
        if groups is not None:
            numbers = np.unique(groups, return_inverse=True)[1]
            self.n_norms = int(numbers.max()) + 1
            of_features = np.full((self.n_features, self.outputs), self.n_norms)  # the last group has no penalty
            of_features[self.penalized] = numbers[:, None]
            self._groups = of_features.ravel()
        self.n_penalties = self.n_norms + len(self.penalized)
        self.flops_left = np.inf  # multiplications that fits may still take
        self._losses: dict[bytes, WeightedLoss] = {}

    def _spread(self, values: Array) -> Array:
        """Return values of all variables from those of the penalized features."""
        out = np.zeros((self.n_features, self.outputs))
        out[self.penalized] = values[:, None]
        return out.ravel()

    def _gather(self, values: Array) -> Array:
        """Return the transpose of `_spread`."""
        return values.reshape(-1, self.outputs)[self.penalized].sum(axis=1)

    def _expand(self, values: Array) -> tuple[Array, Array]:
        """Return values of the norms and squares of the penalty from those of the log penalties."""
        norms, squares = np.split(values, [self.n_norms])
        return self._spread(norms) if self._groups is None else np.append(norms, 0.0), self._spread(squares)

    def _reduce(self, norms: Array, squares: Array) -> Array:
        """Return the transpose of `_expand`."""
        return np.concatenate([self._gather(norms) if self._groups is None else norms[:-1], self._gather(squares)])

    def _make_penalty(self, log_penalties: Array) -> GroupNorm:
        strengths = self._expand(np.exp(log_penalties))
        return L1(*strengths) if self._groups is None else GroupNorm(*strengths, self._groups)

    def max_strength(self, gradient: Array) -> float:
        """Return the smallest strength, the same for all, that keeps coefficients with this gradient at zero."""
        if self._groups is None:
            return float(np.abs(gradient[self.penalized]).max())
        return float(group_norms(gradient.ravel(), self._groups, self.n_norms + 1)[:-1].max())

    def weighted_losses(self, weights: Array) -> list[WeightedLoss]:
        """Return the losses of these weightings; those of the previous call are reused."""
        keys = [row.tobytes() for row in weights]
        self._losses = {
            key: self._losses.get(key) or WeightedLoss(self.columns, self.y, self.loss, row, len(keys))
            for key, row in zip(keys, weights, strict=True)
        }
        return [self._losses[key] for key in keys]

    def fit(self, weights: Array, log_penalties: Array, start: Fits | None = None) -> Fits:
        """Fit once for each row of `weights`; raise WorkLimitReached if that takes more than `flops_left`."""
        penalty, losses = self._make_penalty(log_penalties), self.weighted_losses(weights)
        once: dict[WeightedLoss, ImplicitSolution] = {}  # parts of the same validation rows share a fit
        for loss, first in zip(losses, self._starts(losses, log_penalties, start), strict=True):
            if loss not in once:
                solution = solve(loss, penalty, *first, self.tol, self.flops_left)
                self.flops_left -= solution.flops
                if self.flops_left < 0:
                    raise WorkLimitReached
                once[loss] = ImplicitSolution(loss, penalty, solution, self.tol)
        solved = [once[loss] for loss in losses]
        coef = np.array([item.solution.w.reshape(-1, self.outputs) for item in solved])
        intercept, eta = (np.array([getattr(item.solution, name) for item in solved]) for name in ("intercept", "eta"))
        return Fits(coef, intercept, eta, SparseFits(log_penalties, solved))

    def _starts(
        self, losses: list[WeightedLoss], log_penalties: Array, start: Fits | None
    ) -> list[tuple[Array, Array]]:
        """Return coefficients and intercepts: extrapolated for known weightings, means for others, or zero."""
        if start is None:
            return [(np.zeros(self.n_features * self.outputs), np.zeros(self.outputs))] * len(losses)
        move = self._expand(log_penalties - start.state.log_penalties)
        if len(start.coef) == len(losses):
            return [solved.extrapolate(*move) for solved in start.state.solved]
        mean = start.coef.mean(axis=0).ravel(), start.intercept.mean(axis=0)
        known = {solved.loss: solved for solved in start.state.solved}
        return [known[loss].extrapolate(*move) if loss in known else mean for loss in losses]

    def vjp(self, fits: Fits, cotangent: Array) -> Array:
        pairs = zip(fits.state.solved, cotangent, strict=True)
        return np.array([self._reduce(*solved.vjp(slopes)) for solved, slopes in pairs])

    def jvp(self, fits: Fits, move: Array) -> Array:
        moves = [solved.jvp(*self._expand(move)) for solved in fits.state.solved]
        return np.array([self.X @ w.reshape(-1, self.outputs) + intercept for w, intercept in moves])


# Quadratic subproblems: minimize ½ w'Qw − q'w + Σ a_j |w_j|, or + Σ_g a_g ‖w_g‖. Linear systems on the nonzero
# variables (Newton's method for norms) give the minimum to machine precision. The set of nonzero variables is found by
# exchanges; if these cycle, coordinate descent gets closer first.


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
    """Minimize ½ w'Qw − q'w + Σ a_j |w_j| from a start; strengths are positive, or all of them zero."""
    if not strengths.any():
        return solve_positive(Q, q)
    w, exact = _exchange(Q, q, strengths, w)
    for sweeps in _SWEEPS:
        if exact:
            break
        w, exact = _exchange(Q, q, strengths, _coordinate_descent(Q, q, strengths, w, sweeps))
        if not exact:
            w, exact = _follow_signs(Q, q, strengths, w)
    return w


def _exchange(Q: Array, q: Array, a: Array, w: Array) -> tuple[Array, bool]:
    """Exchange variables until signs and bounds hold; return the solution and True, or the start and False.

    From a start nearby, a few rounds are enough; from others, the exchange may cycle.
    """
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
            return found, True
        signs[missing] = np.sign(slope[missing])
    return w, False


def _follow_signs(Q: Array, q: Array, a: Array, w: Array) -> tuple[Array, bool]:
    """Move to the best point on the segment to the minimum for fixed signs, and let variables become nonzero, in turn.

    The objective never increases. Return the last point, and whether it is the minimum.
    """
    signs, most = np.sign(w), len(w)
    for _ in range(_MAX_SEGMENTS):
        kept, slope, step = np.flatnonzero(signs), q - Q @ w, np.zeros_like(w)
        step[kept] = solve_positive(take_both(Q, kept), q[kept] - a[kept] * signs[kept]) - w[kept]
        moved, whole = _best_on_segment(Q @ step, slope, a, w, step, signs)
        if np.array_equal(moved, w) and not whole:
            most = 1  # a single new variable always decreases the objective
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


def _coordinate_descent(Q: Array, q: Array, a: Array, w: Array, sweeps: int) -> Array:
    """Run coordinate descent of scikit-learn on rows with this Gram matrix, in variables a_j w_j of strength 1."""
    from sklearn.linear_model import enet_path  # imported here because it takes a tenth of a second

    a = np.maximum(a, 1e-8 * a.max())
    Q, q = Q / np.outer(a, a), q / a
    factor = _cholesky(Q)
    X, y = np.asfortranarray(factor.T), solve_triangular(factor, q, lower=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        options = {"precompute": np.ascontiguousarray(Q), "Xy": q, "coef_init": w * a, "check_input": False}
        paths = enet_path(X, y, l1_ratio=1.0, alphas=[1 / len(y)], tol=1e-13, max_iter=sweeps, **options)
    return paths[1][:, 0] / a


def _cholesky(Q: Array) -> Array:
    """Return a lower Cholesky factor of Q, which rounding errors may have made singular."""
    scale, jitter = np.sqrt(np.diag(Q)) + 1e-300, 0.0
    unit = Q / np.outer(scale, scale)
    while True:
        try:
            return scale[:, None] * cholesky(unit + jitter * np.eye(len(Q)), lower=True, check_finite=False)
        except LinAlgError:
            jitter = max(10 * jitter, 1e-14)


def minimize_groups(Q: Array, q: Array, strengths: Array, groups: Array, w: Array) -> Array:
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


def _minimize_group(Q: Array, q: Array, strength: float, bound: float, rows: Array, w: Array) -> Array:
    """Return zeros if they minimize the objective in this group, and otherwise the result of a proximal step."""
    slope = q[rows] - Q[rows] @ w
    if np.linalg.norm(slope + Q[np.ix_(rows, rows)] @ w[rows]) <= strength:
        return np.zeros(len(rows))
    moved = w[rows] + slope / bound
    return moved * max(0.0, 1 - strength / bound / np.linalg.norm(moved))


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
    """Run Newton's method on the nonzero groups; return also whether its result is the minimum over all groups."""
    active = group_norms(w, groups, len(strengths)) > 0
    kept = np.flatnonzero(active[groups])
    numbers = np.cumsum(active) - 1
    part = take_both(Q, kept), q[kept], strengths[active], numbers[groups[kept]]
    found, exact = _newton_nonzero(*part, w[kept])
    w = np.zeros_like(w)
    w[kept] = found
    slopes = group_norms(q - Q @ w, groups, len(strengths))
    return w, exact and not np.any(slopes[~active] > strengths[~active] * (1 + _SLACK))


def _newton_nonzero(Q: Array, q: Array, strengths: Array, groups: Array, w: Array) -> tuple[Array, bool]:
    """Run damped Newton steps from a point without zero groups; return also whether the gradient has become zero."""

    def value(w: Array) -> float:
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

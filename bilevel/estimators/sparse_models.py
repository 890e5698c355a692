"""Linear models beside absolute values or norms of groups, and squares, of their coefficients.

The coefficients minimize  Σ_i weight_i loss_i(x_i'w + b) + Σ_j a_j |w_j| + ½ Σ_j c_j w_j²  (or Σ_g a_g ‖w_g‖ in place
of absolute values), by proximal Newton steps on a working set. Derivatives in log a and log c are implicit, on the
variables that are not zero: that set, and the signs on it, stay as they are for small changes.
"""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np

from bilevel.estimators.losses import Loss
from bilevel.estimators.quadratic import group_norms, minimize_groups, minimize_l1, norm_curvature, solve_positive
from bilevel.estimators.selection import Fits
from bilevel.estimators.sparse_rows import Columns, Reduced, WeightedLoss

TOLERANCE = 1e-9  # of the optimality conditions, relative to the gradient at zero
_MOST_STEPS = 100
_NEW_VARIABLES = 200  # that enter the working set in one step, or as many as are in it


class Penalty(ABC):
    """Strengths for the flat array of coefficients: `norms` of what is not smooth, `squares` of the rest."""

    norms: np.ndarray
    squares: np.ndarray

    @abstractmethod
    def value(self, w: np.ndarray) -> float:
        """Return the part that is not smooth."""

    @abstractmethod
    def residual(self, w: np.ndarray, gradient: np.ndarray) -> np.ndarray:
        """Return what is left of the optimality conditions; the gradient is that of the smooth part."""

    @abstractmethod
    def working_set(self, w: np.ndarray, residual: np.ndarray) -> np.ndarray:
        """Return the variables to move: those that are not zero, and those that should not be."""

    @abstractmethod
    def minimize(self, Q: np.ndarray, q: np.ndarray, chosen: np.ndarray, w: np.ndarray) -> np.ndarray:
        """Minimize ½ w'Qw − q'w and the part that is not smooth over the chosen variables."""

    @abstractmethod
    def bend(self, w: np.ndarray, support: np.ndarray) -> np.ndarray | float:
        """Return the Hessian on the support of the part that is not smooth elsewhere."""

    @abstractmethod
    def pull_back(self, w: np.ndarray, adjoint: np.ndarray) -> np.ndarray:
        """Return −adjoint' ∂²/∂w∂log a of the penalty, for all `norms`."""


class Absolute(Penalty):
    """Σ a_j |w_j|."""

    def __init__(self, norms: np.ndarray, squares: np.ndarray) -> None:
        self.norms, self.squares = norms, squares

    def value(self, w: np.ndarray) -> float:
        return float(self.norms @ np.abs(w))

    def residual(self, w: np.ndarray, gradient: np.ndarray) -> np.ndarray:
        beyond = np.sign(gradient) * np.maximum(np.abs(gradient) - self.norms, 0)
        return np.where(w == 0, beyond, gradient + self.norms * np.sign(w))

    def working_set(self, w: np.ndarray, residual: np.ndarray) -> np.ndarray:
        inside = np.flatnonzero(w)
        entering = np.flatnonzero((w == 0) & (residual != 0))
        largest = np.argsort(-np.abs(residual[entering]))[: max(_NEW_VARIABLES, len(inside))]
        return np.sort(np.concatenate([inside, entering[largest]]))

    def minimize(self, Q: np.ndarray, q: np.ndarray, chosen: np.ndarray, w: np.ndarray) -> np.ndarray:
        return minimize_l1(Q, q, self.norms[chosen], w)

    def bend(self, w: np.ndarray, support: np.ndarray) -> float:
        return 0.0

    def pull_back(self, w: np.ndarray, adjoint: np.ndarray) -> np.ndarray:
        return -self.norms * np.sign(w) * adjoint


class GroupNorm(Penalty):
    """Σ_g a_g ‖w_g‖; groups number the variables."""

    def __init__(self, norms: np.ndarray, squares: np.ndarray, groups: np.ndarray) -> None:
        self.norms, self.squares, self.groups = norms, squares, groups

    def _norms_of(self, w: np.ndarray) -> np.ndarray:
        return group_norms(w, self.groups, len(self.norms))

    def value(self, w: np.ndarray) -> float:
        return float(self.norms @ self._norms_of(w))

    def residual(self, w: np.ndarray, gradient: np.ndarray) -> np.ndarray:
        size, slope = self._norms_of(w), self._norms_of(gradient)
        beyond = np.maximum(1 - self.norms / np.maximum(slope, 1e-300), 0)[self.groups] * gradient
        pull = (self.norms / np.where(size == 0, 1, size))[self.groups] * w
        return np.where(size[self.groups] == 0, beyond, gradient + pull)

    def working_set(self, w: np.ndarray, residual: np.ndarray) -> np.ndarray:
        used = (self._norms_of(w) > 0) | (self._norms_of(residual) > 0)
        return np.flatnonzero(used[self.groups])

    def minimize(self, Q: np.ndarray, q: np.ndarray, chosen: np.ndarray, w: np.ndarray) -> np.ndarray:
        used, groups = np.unique(self.groups[chosen], return_inverse=True)
        return minimize_groups(Q, q, self.norms[used], groups, w)

    def bend(self, w: np.ndarray, support: np.ndarray) -> np.ndarray:
        used, groups = np.unique(self.groups[support], return_inverse=True)
        return norm_curvature(w[support], self.norms[used], groups)

    def pull_back(self, w: np.ndarray, adjoint: np.ndarray) -> np.ndarray:
        size = self._norms_of(w)
        inner = np.bincount(self.groups, w * adjoint, len(self.norms))
        return -self.norms * inner / np.where(size == 0, 1, size)


class Solution(NamedTuple):
    """Flat coefficients, intercepts, the predictor of every row, and what is left of the optimality conditions."""

    w: np.ndarray
    intercept: np.ndarray
    eta: np.ndarray
    residual: float


def solve(loss: WeightedLoss, penalty: Penalty, w: np.ndarray, intercept: np.ndarray, tol: float) -> Solution:
    """Minimize the loss and the penalty from a start, up to `tol` times the gradient at zero."""
    outputs, last = loss.y.shape[1], np.inf
    eta = loss.predict(w.reshape(-1, outputs), intercept)
    for _ in range(_MOST_STEPS):
        by_coef, by_intercept = loss.gradient(eta)
        gradient = by_coef.ravel() + penalty.squares * w
        residuals = penalty.residual(w, gradient)
        left = max(np.abs(residuals).max(initial=0), np.abs(by_intercept).max(initial=0)) / (loss.scale or 1.0)
        if left <= tol or (left < 1e3 * tol and left > last / 2):  # or where rounding allows no more
            break
        chosen, last = penalty.working_set(w, residuals), left
        reduced = _reduce(loss, penalty, eta, chosen)
        slope = reduced.reduce(gradient[chosen], by_intercept)
        start = w[chosen]
        step = np.zeros_like(w)
        step[chosen] = penalty.minimize(reduced.matrix, reduced.matrix @ start - slope, chosen, start) - start
        follow = np.zeros(outputs)
        follow[: len(reduced.inverse)] = reduced.intercept_step(step[chosen], by_intercept)
        fall = gradient @ step + by_intercept @ follow + penalty.value(w + step) - penalty.value(w)
        w, intercept, eta = _search(loss, penalty, (w, intercept, eta), (step, follow), fall)
    return Solution(w, intercept, eta, left)


def _reduce(loss: WeightedLoss, penalty: Penalty, eta: np.ndarray, chosen: np.ndarray) -> Reduced:
    hessian = loss.curvature(eta, chosen)
    hessian[np.arange(len(chosen)), np.arange(len(chosen))] += penalty.squares[chosen]
    return Reduced(hessian, len(chosen))


def _search(
    loss: WeightedLoss, penalty: Penalty, point: tuple[np.ndarray, ...], steps: tuple[np.ndarray, ...], fall: float
) -> tuple[np.ndarray, ...]:
    """Halve the step until the objective falls by a part of what the model of it promises."""
    w, intercept, eta = point

    def value(w: np.ndarray, eta: np.ndarray) -> float:
        return loss.value(eta) + penalty.value(w) + penalty.squares @ w**2 / 2

    before = value(w, eta)
    change = loss.predict(steps[0].reshape(-1, loss.y.shape[1]), steps[1])
    for length in 0.5 ** np.arange(30):
        moved = w + length * steps[0], intercept + length * steps[1], eta + length * change
        if value(moved[0], moved[2]) <= before + 1e-4 * length * fall + 1e-13 * abs(before):
            return moved
    return point


class SparseModel(ABC):
    """An inner model of the selection: log strengths of what is not smooth, then of the square of each feature.

    Parameters
    ----------
    X : dense or sparse, (rows, features)
    y : (rows, outputs), as the loss takes them
    loss : of the linear predictor
    penalized : numbers of the penalized features; None means all
    fit_intercept : whether there is one, without penalty
    tol : stop where the optimality conditions hold up to this part of the gradient at zero
    """

    n_penalties: int

    def __init__(
        self,
        X: Any,
        y: np.ndarray,
        loss: Loss,
        *,
        penalized: np.ndarray | None = None,
        fit_intercept: bool = True,
        tol: float = TOLERANCE,
    ) -> None:
        self.X, self.y, self.loss, self.tol = X, y, loss, tol
        self.columns = Columns(X, fit_intercept)
        self.n_features, self.outputs = X.shape[1], y.shape[1]
        self.penalized = np.arange(X.shape[1]) if penalized is None else penalized
        self._losses: dict[bytes, WeightedLoss] = {}

    def spread(self, strengths: np.ndarray) -> np.ndarray:
        """Return strengths of the flat array of coefficients for those of the penalized features."""
        out = np.zeros((self.n_features, self.outputs))
        out[self.penalized] = strengths[:, None]
        return out.ravel()

    def gather(self, gradient: np.ndarray) -> np.ndarray:
        """Transpose `spread`."""
        return gradient.reshape(-1, self.outputs)[self.penalized].sum(axis=1)

    @abstractmethod
    def penalty(self, log_penalties: np.ndarray) -> Penalty:
        """Return the penalty on the flat array of coefficients."""

    @abstractmethod
    def gather_norms(self, gradient: np.ndarray) -> np.ndarray:
        """Sum derivatives in the logarithms of the `norms` of a penalty over outputs."""

    @abstractmethod
    def largest_slope(self, gradient: np.ndarray) -> float:
        """Return the least strength, the same for all, that keeps coefficients with this gradient at zero."""

    def weighted(self, weights: np.ndarray) -> list[WeightedLoss]:
        """Return the losses of these weightings; those of the last call are kept."""
        keys = [row.tobytes() for row in weights]
        self._losses = {
            key: self._losses.get(key) or WeightedLoss(self.columns, self.y, self.loss, row)
            for key, row in zip(keys, weights, strict=True)
        }
        return [self._losses[key] for key in keys]

    def fit(self, weights: np.ndarray, log_penalties: np.ndarray, start: Fits | None = None) -> Fits:
        """Fit once for each row of `weights`, (fits, rows)."""
        penalty, losses = self.penalty(log_penalties), self.weighted(weights)
        coef, intercept = np.zeros((len(losses), self.n_features, self.outputs)), np.zeros((len(losses), self.outputs))
        if start is not None:
            same = len(start.coef) == len(losses)
            coef, intercept = (
                start[:2] if same else (coef + start.coef.mean(axis=0), intercept + start.intercept.mean(axis=0))
            )
        starts = zip(losses, coef, intercept, strict=True)
        solutions = [solve(loss, penalty, w.ravel(), b, self.tol) for loss, w, b in starts]
        coef = np.array([solution.w.reshape(-1, self.outputs) for solution in solutions])
        intercept, eta = (np.array([getattr(s, name) for s in solutions]) for name in ("intercept", "eta"))
        return Fits(coef, intercept, eta, (penalty, losses, solutions))

    def pull_back(self, fits: Fits, cotangent: np.ndarray) -> np.ndarray:
        """Return the derivatives in the log penalties, (fits, n_penalties)."""
        penalty, losses, solutions = fits.state
        gradients = []
        for loss, solution, slopes in zip(losses, solutions, cotangent, strict=True):
            adjoint = _adjoint(loss, penalty, solution, slopes)
            by_squares = -penalty.squares * solution.w * adjoint
            by_norms = self.gather_norms(penalty.pull_back(solution.w, adjoint))
            gradients.append(np.concatenate([by_norms, self.gather(by_squares)]))
        return np.array(gradients)


def _adjoint(loss: WeightedLoss, penalty: Penalty, solution: Solution, cotangent: np.ndarray) -> np.ndarray:
    """Solve with the Hessian on the support; zero elsewhere."""
    support = penalty.working_set(solution.w, np.zeros_like(solution.w))
    reduced = _reduce(loss, penalty, solution.eta, support)
    by_coef, by_intercept = loss.transpose(cotangent)
    right = reduced.reduce(by_coef.ravel()[support], by_intercept)
    adjoint = np.zeros_like(solution.w)
    adjoint[support] = solve_positive(reduced.matrix + penalty.bend(solution.w, support), right)
    return adjoint


class ElasticNetModel(SparseModel):
    """Absolute values and squares, each with a strength per feature."""

    @property
    def n_penalties(self) -> int:  # type: ignore[override]
        return 2 * len(self.penalized)

    def penalty(self, log_penalties: np.ndarray) -> Absolute:
        return Absolute(*(self.spread(half) for half in np.exp(log_penalties).reshape(2, -1)))

    def gather_norms(self, gradient: np.ndarray) -> np.ndarray:
        return self.gather(gradient)

    def largest_slope(self, gradient: np.ndarray) -> float:
        return float(np.abs(gradient[self.penalized]).max())


class GroupLassoModel(SparseModel):
    """Norms of groups of features, over all outputs, and squares: a strength per group, then one per feature.

    Parameters
    ----------
    groups : of the penalized features
    """

    def __init__(self, X: Any, y: np.ndarray, loss: Loss, groups: np.ndarray, **options: Any) -> None:
        super().__init__(X, y, loss, **options)
        numbers = np.unique(groups, return_inverse=True)[1]
        self.n_groups = int(numbers.max()) + 1
        self.groups = np.full((self.n_features, self.outputs), self.n_groups)  # the last one has no penalty
        self.groups[self.penalized] = numbers[:, None]
        self.n_penalties = self.n_groups + len(self.penalized)

    def penalty(self, log_penalties: np.ndarray) -> GroupNorm:
        strengths = np.exp(log_penalties)
        norms = np.append(strengths[: self.n_groups], 0.0)
        return GroupNorm(norms, self.spread(strengths[self.n_groups :]), self.groups.ravel())

    def gather_norms(self, gradient: np.ndarray) -> np.ndarray:
        return gradient[: self.n_groups]

    def largest_slope(self, gradient: np.ndarray) -> float:
        return float(group_norms(gradient.ravel(), self.groups.ravel(), self.n_groups + 1)[: self.n_groups].max())

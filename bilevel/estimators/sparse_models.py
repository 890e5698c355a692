"""Linear models beside absolute values or norms of groups, and squares, of their coefficients.

The coefficients minimize  Σ_i weight_i loss_i(x_i'w + b) + Σ_j a_j |w_j| + ½ Σ_j c_j w_j²  (or Σ_g a_g ‖w_g‖ in place
of absolute values), by proximal Newton steps on a working set. Derivatives in log a and log c are implicit, on the
variables that are not zero: that set, and the signs on it, stay as they are for small changes.
"""

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from bilevel.estimators.losses import Loss, Softmax
from bilevel.estimators.nonsmooth import Absolute, GroupNorm, Penalty
from bilevel.estimators.quadratic import group_norms, solve_positive
from bilevel.estimators.selection import Fits
from bilevel.estimators.sparse_rows import Columns, Reduced, WeightedLoss

TOLERANCE = 1e-9  # of the optimality conditions, relative to the gradient of the loss
_LEAST_SLOPE = 1e-6  # of the gradient at zero, which is not taken for less
_ROUNDING = 1e-6  # below which a step that gains little is the last
_MOST_STEPS = 100
_SYSTEMS = 5  # of linear equations that a step solves, about
_SINGLE, _LARGE = 1e-7, 1e7  # down to which Hessians have single precision, and from how many multiplications on
_FAR = 1.0  # a move of a log strength too long to extrapolate along


class OutOfWork(Exception):
    """Fits would take more work than they may."""


class Solution(NamedTuple):
    """Flat coefficients, intercepts, the predictor of every row, and what is left of the optimality conditions.

    `size` counts the coefficients that are not zero, and those that an exact solution might not leave at zero. The
    Hessian is that of the last step, on the support, and `before` what was left before that step. `work` is about the
    number of multiplications that the solution took.
    """

    w: np.ndarray
    intercept: np.ndarray
    eta: np.ndarray
    residual: float
    size: int
    hessian: Reduced | None
    before: float
    work: float


def solve(
    loss: WeightedLoss, penalty: Penalty, w: np.ndarray, intercept: np.ndarray, tol: float, most_work: float = np.inf
) -> Solution:
    """Minimize the loss and the penalty from a start, up to `tol` times the gradient of the loss.

    A fit that would take more than `most_work` multiplications ends early, with a larger `work`.
    """
    outputs, before, reduced, work = loss.y.shape[1], np.inf, None, 0.0
    eta = loss.predict(w.reshape(-1, outputs), intercept)
    for _ in range(_MOST_STEPS):
        by_coef, by_intercept = loss.gradient(eta)
        gradient = by_coef.ravel() + penalty.squares * w
        residuals = penalty.residual(w, gradient)
        left = max(np.abs(residuals).max(initial=0), np.abs(by_intercept).max(initial=0))
        left /= max(np.abs(by_coef).max(initial=0), _LEAST_SLOPE * loss.scale) or 1.0
        if left <= tol or before / 2 < left < _ROUNDING:
            break
        chosen, before = penalty.working_set(w, residuals), left
        work += loss.work(len(chosen)) + _SYSTEMS * len(chosen) ** 3 / 3
        if work > most_work:
            break
        reduced = _reduce(loss, penalty, eta, chosen, left)
        slope = reduced.reduce(gradient[chosen], by_intercept)
        start = w[chosen]
        step = np.zeros_like(w)
        step[chosen] = penalty.minimize(reduced.matrix, reduced.matrix @ start - slope, chosen, start) - start
        follow = np.zeros(outputs)
        follow[: len(reduced.inverse)] = reduced.intercept_step(step[chosen], by_intercept)
        fall = gradient @ step + by_intercept @ follow + penalty.value(w + step) - penalty.value(w)
        moved = _search(loss, penalty, (w, intercept, eta), (step, follow), fall)
        if moved[0] is w:  # rounding allows no descent
            break
        w, intercept, eta = moved
    shared = intercept.mean() if isinstance(loss.loss, Softmax) else 0.0  # by all classes, which the loss does not see
    size = int(np.count_nonzero((w != 0) | (residuals != 0)))
    hessian = reduced.take(np.searchsorted(chosen, penalty.support(w))) if reduced and work <= most_work else None
    return Solution(w, intercept - shared, eta - shared, left, size, hessian, before, work)


def _reduce(loss: WeightedLoss, penalty: Penalty, eta: np.ndarray, chosen: np.ndarray, left: float) -> Reduced:
    single = left >= _SINGLE and isinstance(loss.loss, Softmax) and len(eta) * len(chosen) ** 2 >= _LARGE
    hessian = loss.curvature(eta, chosen, np.float32 if single else np.float64)
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


class Solved:
    """A solution, and how it moves with the strengths as long as its support stays."""

    def __init__(self, loss: WeightedLoss, penalty: Penalty, solution: Solution, tol: float) -> None:
        self.loss, self.penalty, self.solution, self.tol = loss, penalty, solution, tol
        self.support = penalty.support(solution.w)

    @cached_property
    def rough(self) -> Reduced | None:
        """The Hessian of the last step, None where there was no step."""
        return self.solution.hessian and self._bend(self.solution.hessian)

    @cached_property
    def hessian(self) -> Reduced:
        """That of the last step if it began so near that it left about `tol`, and otherwise a new one."""
        if self.rough is not None and self.solution.before <= np.sqrt(self.tol):
            return self.rough
        return self._bend(_reduce(self.loss, self.penalty, self.solution.eta, self.support, self.tol))

    def _bend(self, reduced: Reduced) -> Reduced:
        reduced.matrix += self.penalty.bend(self.solution.w, self.support)
        return reduced

    def pull_back(self, cotangent: np.ndarray) -> np.ndarray:
        """Return the derivatives in the log strengths of what has these derivatives in the predictor."""
        by_coef, by_intercept = self.loss.transpose(cotangent)
        adjoint = np.zeros_like(self.solution.w)
        right = self.hessian.reduce(by_coef.ravel()[self.support], by_intercept)
        adjoint[self.support] = solve_positive(self.hessian.matrix, right)
        return -self.penalty.pull_back(self.solution.w, adjoint)

    def push_forward(self, move: np.ndarray, hessian: Reduced | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the derivatives of coefficients and intercepts along a move of the log strengths."""
        hessian = hessian or self.hessian
        rate = self.penalty.push_forward(self.solution.w, move)[self.support]
        step, follow = np.zeros_like(self.solution.w), np.zeros_like(self.solution.intercept)
        step[self.support] = -solve_positive(hessian.matrix, rate)
        moved = hessian.intercept_step(step[self.support], np.zeros_like(follow))
        follow[: len(moved)] = moved
        return step, follow

    def extrapolate(self, move: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return a start for other strengths; no sign changes on the way there."""
        w, intercept, hessian = self.solution.w, self.solution.intercept, self.__dict__.get("hessian", self.rough)
        if hessian is None or np.abs(move).max(initial=0) > _FAR:
            return w, intercept
        step, follow = self.push_forward(move, hessian)
        return np.where((w + step) * w > 0, w + step, 0), intercept + follow


class State(NamedTuple):
    """What the model keeps of its fits."""

    log_penalties: np.ndarray
    solved: list[Solved]


class SparseModel(ABC):
    """An inner model of the selection: log strengths of what is not smooth, then of the square of each feature.

    Parameters
    ----------
    X : dense or sparse, (rows, features)
    y : (rows, outputs), as the loss takes them
    loss : of the linear predictor
    penalized : numbers of the penalized features; None means all
    fit_intercept : whether there is one, without penalty
    tol : stop where the optimality conditions hold up to this part of the gradient of the loss
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
        self.work_left = np.inf  # multiplications that fits may still take
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
    def by_variable(self, move: np.ndarray) -> np.ndarray:
        """Return a move of the log strengths of the penalty for one of the log penalties."""

    @abstractmethod
    def by_penalty(self, gradient: np.ndarray) -> np.ndarray:
        """Transpose `by_variable`."""

    @abstractmethod
    def largest_slope(self, gradient: np.ndarray) -> float:
        """Return the least strength, the same for all, that keeps coefficients with this gradient at zero."""

    def weighted(self, weights: np.ndarray) -> list[WeightedLoss]:
        """Return the losses of these weightings; those of the last call are kept."""
        keys = [row.tobytes() for row in weights]
        self._losses = {
            key: self._losses.get(key) or WeightedLoss(self.columns, self.y, self.loss, row, len(keys))
            for key, row in zip(keys, weights, strict=True)
        }
        return [self._losses[key] for key in keys]

    def fit(self, weights: np.ndarray, log_penalties: np.ndarray, start: Fits | None = None) -> Fits:
        """Fit once for each row of `weights`, (fits, rows); raise OutOfWork if that takes more than `work_left`."""
        penalty, losses = self.penalty(log_penalties), self.weighted(weights)
        once: dict[WeightedLoss, Solved] = {}  # parts of the same validation rows share a fit
        for loss, first in zip(losses, self._starts(losses, log_penalties, start), strict=True):
            if loss not in once:
                solution = solve(loss, penalty, *first, self.tol, self.work_left)
                self.work_left -= solution.work
                if self.work_left < 0:
                    raise OutOfWork
                once[loss] = Solved(loss, penalty, solution, self.tol)
        solved = [once[loss] for loss in losses]
        coef = np.array([item.solution.w.reshape(-1, self.outputs) for item in solved])
        intercept, eta = (np.array([getattr(item.solution, name) for item in solved]) for name in ("intercept", "eta"))
        return Fits(coef, intercept, eta, State(log_penalties, solved))

    def _starts(
        self, losses: list[WeightedLoss], log_penalties: np.ndarray, start: Fits | None
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return coefficients and intercepts: those of the same rows at other strengths, means over others, or zero."""
        if start is None:
            return [(np.zeros(self.n_features * self.outputs), np.zeros(self.outputs))] * len(losses)
        move = self.by_variable(log_penalties - start.state.log_penalties)
        if len(start.coef) == len(losses):
            return [solved.extrapolate(move) for solved in start.state.solved]
        mean = start.coef.mean(axis=0).ravel(), start.intercept.mean(axis=0)
        known = {solved.loss: solved for solved in start.state.solved}
        return [known[loss].extrapolate(move) if loss in known else mean for loss in losses]

    def pull_back(self, fits: Fits, cotangent: np.ndarray) -> np.ndarray:
        """Return the derivatives in the log penalties, (fits, n_penalties)."""
        pairs = zip(fits.state.solved, cotangent, strict=True)
        return np.array([self.by_penalty(solved.pull_back(slopes)) for solved, slopes in pairs])

    def push_forward(self, fits: Fits, move: np.ndarray) -> np.ndarray:
        """Return the derivative of the predictors along a move of the log penalties, (fits, rows, outputs)."""
        moves = [solved.push_forward(self.by_variable(move)) for solved in fits.state.solved]
        return np.array([self.X @ w.reshape(-1, self.outputs) + intercept for w, intercept in moves])

    def work(self, n_fits: int) -> float:
        """Return about how many multiplications the fits of one evaluation take, if no coefficient is zero."""
        rows, size = self.X.shape[0], self.n_features * self.outputs
        return float(n_fits * 3 * (rows * size**2 + size**3 / 3))


class ElasticNetModel(SparseModel):
    """Absolute values and squares, each with a strength per feature."""

    @property
    def n_penalties(self) -> int:  # type: ignore[override]
        return 2 * len(self.penalized)

    def penalty(self, log_penalties: np.ndarray) -> Absolute:
        return Absolute(*(self.spread(half) for half in np.exp(log_penalties).reshape(2, -1)))

    def by_variable(self, move: np.ndarray) -> np.ndarray:
        return np.concatenate([self.spread(half) for half in move.reshape(2, -1)])

    def by_penalty(self, gradient: np.ndarray) -> np.ndarray:
        return np.concatenate([self.gather(half) for half in gradient.reshape(2, -1)])

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

    def by_variable(self, move: np.ndarray) -> np.ndarray:
        return np.concatenate([move[: self.n_groups], [0.0], self.spread(move[self.n_groups :])])

    def by_penalty(self, gradient: np.ndarray) -> np.ndarray:
        return np.concatenate([gradient[: self.n_groups], self.gather(gradient[self.n_groups + 1 :])])

    def largest_slope(self, gradient: np.ndarray) -> float:
        return float(group_norms(gradient.ravel(), self.groups.ravel(), self.n_groups + 1)[: self.n_groups].max())

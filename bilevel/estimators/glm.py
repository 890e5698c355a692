"""Linear models with a squared penalty on each coefficient: exact fits by Newton's method, implicit derivatives."""

from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from bilevel.estimators.coordinates import Coordinates, Data, coordinates, times
from bilevel.estimators.cox import Cox
from bilevel.estimators.hessian import Blocks, Hessian
from bilevel.estimators.losses import Loss, Softmax, Squared
from bilevel.estimators.selection import Fits

_MOST_STEPS, _HALVINGS = 100, 40
_MOST_DUAL_ROWS = 3000
_SOFTMAX_PRODUCTS = 200  # with Z, of each output, in an evaluation
_NOISE = 1e-9  # a gain that rounding may make up
_SLOW = 0.1  # a gain, as part of the last one, at which blocks of folds together no longer serve alone
_FAR = 1.0  # a move of a log penalty too long to extrapolate along
_NOT_FINITE = "A step of Newton's method is not finite. Scale the columns of X, or set standardize=True."


class State(NamedTuple):
    """A fit in its coordinates: coefficients, predictors, the Hessian there."""

    log_penalties: np.ndarray
    weights: np.ndarray  # as they were given, to be recognized
    at: Coordinates
    w: np.ndarray
    eta: np.ndarray
    hessian: Hessian


class RidgeGLM:
    """Minimizes sum weight_i loss_i + ½ sum_j exp(log_penalties_j) coef_j²; features may be left without penalty.

    Parameters
    ----------
    X : dense or sparse, (rows, features)
    y : (rows, outputs), as the loss takes them
    loss : of the linear predictor
    penalized : numbers of the penalized features; None means all
    intercept : whether there is one, without penalty
    tol : stop where a Newton step would gain less than this, in units of the summed loss
    """

    def __init__(
        self,
        X: Any,
        y: np.ndarray,
        loss: Loss | Cox,
        *,
        penalized: np.ndarray | None = None,
        intercept: bool = True,
        tol: float = 1e-8,
    ) -> None:
        penalized = np.arange(X.shape[1]) if penalized is None else penalized
        self.data, self.y, self.loss, self.tol = Data(X, penalized, intercept=intercept), y, loss, tol
        self.n_penalties = len(penalized)

    def fit(self, weights: np.ndarray, log_penalties: np.ndarray, start: Fits | None = None) -> Fits:
        at = coordinates(self.data, log_penalties, _MOST_DUAL_ROWS)
        state = None if start is None else start.state
        w, blocks = self._start(at, weights, log_penalties, state)
        with np.errstate(over="ignore", invalid="ignore"):
            w, eta, hessian = self._newton(at, np.ascontiguousarray(weights.T), w, blocks)
        columns = at.lift(w)
        coef, intercept = columns[: self.data.n_features], columns[self.data.n_features :].sum(axis=0)
        state = State(log_penalties, weights, at, w, eta, hessian)
        return Fits(np.moveaxis(coef, 0, 1), intercept, np.moveaxis(eta, 0, 1), state)

    def pull_back(self, fits: Fits, cotangent: np.ndarray) -> np.ndarray:
        state = fits.state
        u = state.hessian.solve(times(state.at.ZT, np.moveaxis(cotangent, 0, 1)), 0.1 * self.tol**0.5)
        return -state.at.cotangent(state.w, u).T

    def push_forward(self, fits: Fits, move: np.ndarray) -> np.ndarray:
        """Return the derivative of the predictors along a move of the log penalties, (fits, rows, outputs)."""
        state = fits.state
        step = state.hessian.solve(state.at.tangent(state.w, move), 1e-3)
        return -np.moveaxis(times(state.at.Z, step), 0, 1)

    def work(self, n_fits: int) -> float:
        """Return about how many multiplications the fits of one evaluation take."""
        rows, outputs = self.y.shape
        dual = self.data.wide and rows <= _MOST_DUAL_ROWS
        size = rows if dual else self.data.Z.shape[1]
        entries = self.data.Z.nnz if sp.issparse(self.data.Z) and not dual else rows * size
        kernel = rows**2 * self.n_penalties if dual else 0
        if isinstance(self.loss, Squared) and not dual:
            return n_fits * (size**3 / 3 + 4 * entries * outputs)
        if outputs == 1 or isinstance(self.loss, Squared):
            return kernel + 3 * n_fits * (entries * size + size**3 / 3)
        return kernel + _SOFTMAX_PRODUCTS * n_fits * entries * outputs

    def _start(
        self, at: Coordinates, weights: np.ndarray, log_penalties: np.ndarray, state: State | None
    ) -> tuple[np.ndarray, Blocks | None]:
        """Return coefficients to start from, and blocks of an older Hessian where they still serve."""
        if state is None:
            w = np.zeros((at.Z.shape[1], len(weights), self.y.shape[1]))
            if self.data.intercept and isinstance(self.loss, Loss):
                mean = weights @ self.y / np.maximum(weights.sum(axis=1), 1e-300)[:, None]
                w[-1] = self.loss.link(mean)
            return w, None
        if state.weights is not weights and state.weights.shape != weights.shape:
            mean = state.weights.mean(axis=0)  # coefficients are about linear in weights: mixed weights, mixed fits
            shares = 1 / len(state.weights) + np.linalg.pinv((state.weights - mean).T, rcond=1e-8) @ (weights - mean).T
            return at.restart(*(np.einsum("pfc,fg->pgc", part, shares) for part in (state.w, state.eta))), None
        w, eta = state.w, state.eta
        move = log_penalties - state.log_penalties
        if move.any() and np.abs(move).max() <= _FAR:
            step = -state.hessian.approximate(state.at.tangent(w, move), 1e-1)
            w, eta = w + step, eta + times(state.at.Z, step)
        keeps = state.at.Z is at.Z and state.weights is weights and state.hessian.reusable
        return at.restart(w, eta), state.hessian.blocks if keeps else None

    def _newton(
        self, at: Coordinates, weights: np.ndarray, w: np.ndarray, blocks: Blocks | None
    ) -> tuple[np.ndarray, np.ndarray, Hessian]:
        y, loss, ridge = self.y[:, None, :], self.loss, at.ridge[:, None, None]
        eta = times(at.Z, w)
        value = self._values(at, weights, w, eta)
        gain, slow, done = np.full(w.shape[1], np.inf), False, np.zeros(w.shape[1], bool)
        for _ in range(_MOST_STEPS):
            gradient = times(at.ZT, loss.total_derivative(y, eta, weights)) + ridge * w
            gradient[:, done] = 0  # these fits stay as they are
            hessian = Hessian(loss, y, at, weights, eta, blocks)
            solve = hessian.solve if slow else hessian.approximate
            step, last = solve(gradient, min(1e-2, max(1e-10, gain.max()) ** 0.5)), gain
            gain = np.einsum("pfc,pfc->f", gradient, step)
            if not np.isfinite(gain).all():
                raise FloatingPointError(_NOT_FINITE)
            w, eta, value, falls = self._descend(at, weights, (w, eta, value), step, gain)
            stalls = gain.max() < _NOISE and gain.max() > last.max() / 2
            rate = min(1.0, gain.max() / last.max()) if hessian.near and last.max() < np.inf else 1.0  # of next gains
            done |= ~falls | (gain * rate <= self.tol)
            if done.all() or stalls or (hessian.constant and hessian.exact):
                break
            lags = y.shape[-1] == 1 and gain.max() > _SLOW * last.max()
            stale = hessian.near and hessian.blocks is blocks  # else new blocks would not help
            blocks = None if hessian.blocks.outdated or slow or (lags and stale) else hessian.blocks
            slow |= lags and not stale
        if isinstance(loss, Softmax):  # what all classes share is undetermined but for rounding
            w, eta = (part - part.mean(axis=-1, keepdims=True) for part in (w, eta))
        hessian.move(eta)
        return w, eta, hessian

    def _descend(
        self, at: Coordinates, weights: np.ndarray, now: tuple[np.ndarray, ...], step: np.ndarray, gain: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        """Take the step of each fit, halved until its objective falls enough; return whether it does, too."""
        w, eta, value = now
        move, length = times(at.Z, step), np.ones(len(gain))
        for _ in range(_HALVINGS):
            new = w - length[:, None] * step, eta - length[:, None] * move
            found = self._values(at, weights, *new)
            enough = found <= value - 1e-4 * length * gain + 1e-12 * np.abs(value)
            if enough.all():
                break
            length = np.where(enough, length, length / 2)
        return *new, found, enough

    def _values(self, at: Coordinates, weights: np.ndarray, w: np.ndarray, eta: np.ndarray) -> np.ndarray:
        losses = self.loss.total(self.y[:, None, :], eta, weights)
        return losses + np.einsum("p,pfc->f", at.ridge, w**2) / 2

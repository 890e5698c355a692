"""Penalties that minimize the held-out loss over folds: what an inner model must do, the objective, its minimizer."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from scipy.optimize import minimize

from bilevel.estimators.losses import SummedLoss

# How many of all held-out labels may be wrong. Else many penalties, where classes are told apart perfectly, go to zero
# until a row that is not there would cost them more than all the others.
_DOUBT = 0.25
_LARGEST_UNIT = 2.0
_GRADIENT_TOL = 0.1


class Fits(NamedTuple):
    """Models fitted to the same rows with several weightings of them."""

    coef: np.ndarray  # (fits, features, outputs)
    intercept: np.ndarray  # (fits, outputs)
    predictor: Any  # (fits, rows, outputs), of every row, fitted on or held out
    state: Any = None  # what the model keeps for `pull_back` and for a later start


class InnerModel(Protocol):
    """A model whose coefficients minimize sum weight_i loss_i + its penalties, all of which are exp(log_penalties)."""

    n_penalties: int
    y: np.ndarray  # (rows, outputs), as the loss takes them

    @property
    def loss(self) -> SummedLoss:
        """The loss of rows."""

    def fit(self, weights: np.ndarray, log_penalties: np.ndarray, start: Fits | None = None) -> Fits:
        """Fit once for each row of `weights`, (fits, rows); a start has as many fits, at other penalties."""

    def pull_back(self, fits: Fits, cotangent: np.ndarray) -> np.ndarray:
        """Return the derivatives in the log penalties, (fits, n_penalties), by implicit differentiation.

        The cotangent, (fits, rows, outputs), is the derivative of any function of the predictors.
        """

    def push_forward(self, fits: Fits, move: np.ndarray) -> np.ndarray:
        """Return the derivative of the predictors along a move of the log penalties, (fits, rows, outputs)."""

    def work(self, n_fits: int) -> float:
        """Return about how many multiplications the fits of one evaluation take."""


class Folds(NamedTuple):
    """Weights of the rows in each fit, and in the loss on the rows held out of it; both (folds, rows).

    Where a row stands for several, `sizes` is the weight that each fold holds out. Rows may have been shuffled into
    folds several times; `shuffles` says which of them a fold is of.
    """

    fitted: np.ndarray
    held_out: np.ndarray
    sizes: np.ndarray
    shuffles: np.ndarray

    @classmethod
    def of_rows(cls, fitted: np.ndarray, held_out: np.ndarray, shuffles: np.ndarray | None = None) -> "Folds":
        shuffles = np.zeros(len(fitted), int) if shuffles is None else shuffles
        return cls(fitted, held_out, held_out.sum(axis=1), shuffles)

    def take(self, folds: np.ndarray) -> "Folds":
        """Return some of the folds."""
        return Folds(*(part[folds] for part in self))

    def only(self, folds: np.ndarray) -> "Folds":
        """Return some of the folds, with weights as if they were all."""
        part = self.take(folds)
        factor = self.sizes.sum() / part.sizes.sum()
        return part._replace(held_out=factor * part.held_out, sizes=factor * part.sizes)

    def by_shuffle(self) -> list["Folds"]:
        """Return the folds of each shuffle."""
        return [self.only(np.flatnonzero(self.shuffles == number)) for number in np.unique(self.shuffles)]

    def without(self, folds: np.ndarray) -> "Folds":
        """Return the other folds, with the rows that these hold out taken from both."""
        held_out, rest = self.held_out[folds].any(axis=0), self.take(np.setdiff1d(np.arange(len(self.fitted)), folds))
        rest = rest._replace(fitted=rest.fitted * ~held_out, held_out=rest.held_out * ~held_out)
        return rest.take(np.flatnonzero(rest.held_out.any(axis=1) & rest.fitted.any(axis=1)))

    def join(self, folds: np.ndarray) -> "Folds":
        """Return one fold that holds out what any of these does."""
        held_out = self.held_out[folds].max(axis=0)
        fitted = self.fitted[folds].min(axis=0) * (held_out == 0)
        return Folds(fitted[None], held_out[None], self.sizes[folds].sum(keepdims=True), self.shuffles[folds[:1]])

    def nested(self, most: int) -> list[tuple["Folds", "Folds"]]:
        """Return the folds without a part of them, and that part as one fold, for at most so many parts."""
        parts = np.array_split(np.arange(len(self.fitted)), min(most, len(self.fitted)))
        found = [(self.without(held), self.join(held)) for held in parts]
        return [(inner, outer) for inner, outer in found if len(inner.fitted) and outer.fitted.any()]


class Arena(NamedTuple):
    """Where structures are compared: a model and folds, and the predictors of the rows behind them."""

    model: InnerModel
    folds: Folds
    predict: Callable[[Fits], np.ndarray]  # (fits, rows, outputs)


class Structure(NamedTuple):
    """Which penalties of the model are the same, and how far those that are not may spread around their mean."""

    name: str
    groups: np.ndarray  # (n_penalties of the model,), from 0 on
    prior_scale: float = np.inf

    @property
    def size(self) -> int:
        return int(self.groups.max()) + 1

    def gather(self, gradient: np.ndarray) -> np.ndarray:
        """Sum derivatives in the penalties of the model, (…, n_penalties), within groups."""
        out = np.zeros((*gradient.shape[:-1], self.size))
        np.add.at(np.moveaxis(out, -1, 0), self.groups, np.moveaxis(gradient, -1, 0))
        return out

    def prior(self, log_penalties: np.ndarray) -> tuple[float, np.ndarray]:
        """Return sum (l_g - mean)² / 2s² and its gradient."""
        centered = log_penalties - log_penalties.mean()
        return float(centered @ centered) / (2 * self.prior_scale**2), centered / self.prior_scale**2


def held_out_loss(loss: SummedLoss, y: np.ndarray, folds: Folds, predictor: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the loss on held-out rows in nats, and its derivative in the predictors.

    Where the loss has a scale of its own, that is n/2 log of twice its mean, as far as this is not too small.
    """
    losses, cotangent = loss.held_out(y, predictor, folds.fitted, folds.held_out)
    total, scale, size = float(np.sum(folds.held_out * losses)), 1.0, float(folds.sizes.sum()) * loss.count(y)
    if loss.has_scale:
        scale = max(2 * total / size, loss.least_scale)
        total = size / 2 * float(np.log(scale) - 1) + total / scale
    return total, cotangent / scale


class Objective:
    """J(l), the held-out loss over folds and the prior, with its gradient; each fit starts from the last."""

    def __init__(self, model: InnerModel, folds: Folds, structure: Structure, start: Fits | None = None) -> None:
        self.model, self.folds, self.structure, self.fits = model, folds, structure, start
        self.values: list[float] = []
        self._offset, self._tilt = 0.0, np.zeros(structure.size)
        self._last: tuple[np.ndarray, float, np.ndarray] | None = None
        doubt = _DOUBT if np.isfinite(structure.prior_scale) else 0.0
        self._targets = model.loss.soften(model.y, doubt / max(1.0, folds.sizes.sum()))

    def value(self, log_penalties: np.ndarray) -> float:
        """Return J alone."""
        self._evaluate(log_penalties)
        return self.values[-1]

    def __call__(self, log_penalties: np.ndarray) -> tuple[float, np.ndarray]:
        if self._last is None or not np.array_equal(self._last[0], log_penalties):
            fits, cotangent = self._evaluate(log_penalties)
            gradient = self.structure.gather(self.model.pull_back(fits, cotangent).sum(axis=0))
            gradient += self.structure.prior(log_penalties)[1] + self._tilt
            self._last = log_penalties.copy(), self.values[-1], gradient
        return self._last[1:]

    def correct(self, log_penalties: np.ndarray, value: float, gradient: np.ndarray) -> float:
        """Add what is linear, so that value and gradient are these there; return how far off the value was."""
        about, slope = self(log_penalties)
        self._tilt = gradient - slope
        self._offset = value - about - float(self._tilt @ log_penalties)
        self._last, self.values = None, []
        return value - about

    def _evaluate(self, log_penalties: np.ndarray) -> tuple[Fits, np.ndarray]:
        model, folds = self.model, self.folds
        self.fits = model.fit(folds.fitted, log_penalties[self.structure.groups], self.fits)
        loss, cotangent = held_out_loss(model.loss, self._targets, folds, self.fits.predictor)
        prior = self.structure.prior(log_penalties)[0]
        self.values.append(loss + prior + self._offset + float(self._tilt @ log_penalties))
        return self.fits, cotangent


class Learned(NamedTuple):
    """Log penalties of a structure, the objective there, and its value at every evaluation."""

    structure: Structure
    log_penalties: np.ndarray
    value: float
    fits: Fits
    values: Sequence[float]
    converged: bool


def learn(
    objective: Objective, start: np.ndarray, bounds: tuple[float, float], *, tol: float, max_iter: int
) -> Learned:
    """Minimize J by L-BFGS-B until an iteration gains less than `tol` nats.

    Variables are log penalties in units of the prior's scale: a first step along the gradient is then about Newton's.
    """
    unit = min(objective.structure.prior_scale, _LARGEST_UNIT)
    start = np.clip(start, *bounds) / unit

    def scaled(x: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = objective(np.clip(unit * x, *bounds))
        return value, unit * gradient

    options = {"maxiter": max_iter, "ftol": tol / max(1.0, abs(scaled(start)[0])), "gtol": _GRADIENT_TOL * tol}
    box = [(bounds[0] / unit, bounds[1] / unit)] * len(start)
    found = minimize(scaled, start, jac=True, method="L-BFGS-B", bounds=box, options=options)
    best = np.clip(unit * found.x, *bounds)
    objective(best)
    assert objective.fits is not None
    return Learned(objective.structure, best, float(found.fun), objective.fits, objective.values, found.status != 1)

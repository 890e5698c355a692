"""Penalties that minimize the held-out loss over folds: what an inner model must do, the objective, its minimizer."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from scipy.optimize import minimize

from bilevel.estimators.losses import Loss


class Fits(NamedTuple):
    """Models fitted to the same rows with several weightings of them."""

    coef: np.ndarray  # (fits, features, outputs)
    intercept: np.ndarray  # (fits, outputs)
    predictor: np.ndarray  # (fits, rows, outputs), of every row, fitted on or held out
    state: Any = None  # what the model keeps for `pull_back` and for a later start


class InnerModel(Protocol):
    """A model whose coefficients minimize sum weight_i loss_i + its penalties, all of which are exp(log_penalties)."""

    n_penalties: int
    loss: Loss
    y: np.ndarray  # (rows, outputs), as the loss takes them

    def fit(self, weights: np.ndarray, log_penalties: np.ndarray, start: Fits | None = None) -> Fits:
        """Fit once for each row of `weights`, (fits, rows); a start has as many fits, at other penalties."""

    def pull_back(self, fits: Fits, cotangent: np.ndarray) -> np.ndarray:
        """Return the derivatives in the log penalties, (fits, n_penalties), by implicit differentiation.

        The cotangent, (fits, rows, outputs), is the derivative of any function of the predictors.
        """


class Folds(NamedTuple):
    """Weights of the rows in each fit, and in the loss on the rows held out of it; both (folds, rows)."""

    fitted: np.ndarray
    held_out: np.ndarray

    def without(self, fold: int) -> "Folds":
        """Return the other folds, with the rows that this one holds out taken from both."""
        keep, others = self.held_out[fold] == 0, np.arange(len(self.fitted)) != fold
        folds = Folds(self.fitted[others] * keep, self.held_out[others] * keep)
        used = folds.held_out.any(axis=1) & folds.fitted.any(axis=1)
        return Folds(folds.fitted[used], folds.held_out[used])


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


def held_out_loss(loss: Loss, y: np.ndarray, weights: np.ndarray, predictor: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the loss on held-out rows in nats, and its derivative in the predictors.

    Where the loss has a scale of its own, that is n/2 log of its mean.
    """
    total, cotangent = float(np.sum(weights * loss.value(y, predictor))), loss.derivative(y, predictor)
    factor = 1.0
    if loss.has_scale:
        size, total = float(weights.sum()), max(total, np.finfo(float).tiny)
        total, factor = size / 2 * np.log(2 * total / size), size / (2 * total)
    return total, factor * weights[..., None] * cotangent


class Objective:
    """J(l), the held-out loss over folds and the prior, with its gradient; each fit starts from the last."""

    def __init__(self, model: InnerModel, folds: Folds, structure: Structure, start: Fits | None = None) -> None:
        self.model, self.folds, self.structure, self.fits = model, folds, structure, start
        self.values: list[float] = []

    def __call__(self, log_penalties: np.ndarray) -> tuple[float, np.ndarray]:
        model, folds = self.model, self.folds
        self.fits = model.fit(folds.fitted, log_penalties[self.structure.groups], self.fits)
        loss, cotangent = held_out_loss(model.loss, model.y, folds.held_out, self.fits.predictor)
        gradient = self.structure.gather(model.pull_back(self.fits, cotangent).sum(axis=0))
        prior, prior_gradient = self.structure.prior(log_penalties)
        self.values.append(loss + prior)
        return loss + prior, gradient + prior_gradient


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
    """Minimize J by L-BFGS-B until an iteration gains less than `tol` nats."""
    scale = max(1.0, abs(objective(start)[0]))
    options = {"maxiter": max_iter, "ftol": tol / scale, "gtol": tol}
    found = minimize(objective, start, jac=True, method="L-BFGS-B", bounds=[bounds] * len(start), options=options)
    objective(found.x)
    assert objective.fits is not None
    return Learned(objective.structure, found.x, float(found.fun), objective.fits, objective.values, found.status != 1)

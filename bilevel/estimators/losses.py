"""Losses of a linear predictor: value, derivative and curvature of each row.

Targets are (rows, outputs) and predictors (…, rows, outputs). Values are half deviances, (…, rows): zero where a row is
predicted perfectly.
"""

import functools
from abc import abstractmethod
from collections.abc import Callable

import numpy as np
from scipy.special import expit, logit, xlogy

Bender = Callable[[np.ndarray], np.ndarray]
_LEAST = 1e-6  # probability or count, in a start


class SummedLoss:
    """A convex loss of rows under weights; `has_scale` where its unit is unknown, so that n/2 log of its mean counts.

    The unit, twice the mean, is at least `least_scale`: counts vary by chance as much as their mean, and often more.
    Predictors are (rows, fits, outputs) and weights (rows, fits), of held-out rows the other way around.
    """

    has_scale = False
    least_scale = 1e-12

    def count(self, y: np.ndarray) -> int:
        """Return how many targets a row has."""
        return y.shape[-1]

    def soften(self, y: np.ndarray, doubt: float) -> np.ndarray:
        """Return targets of which a part may be of any class; numbers stay as they are."""
        return y

    @abstractmethod
    def total(self, y: np.ndarray, eta: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return the loss of each fit, (fits,)."""

    @abstractmethod
    def total_derivative(self, y: np.ndarray, eta: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return its derivative in the predictors."""

    @abstractmethod
    def total_bender(self, y: np.ndarray, eta: np.ndarray, weights: np.ndarray) -> Bender:
        """Return what multiplies a move of the predictors by its second derivative."""

    @abstractmethod
    def held_out(
        self, y: np.ndarray, eta: np.ndarray, fitted: np.ndarray, weights: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the losses of rows, (fits, rows), and the derivative of their weighted sum in the predictors.

        `fitted` are the weights of rows in each fit, `weights` those of the rows held out of it.
        """

    @abstractmethod
    def held_out_bender(self, y: np.ndarray, eta: np.ndarray, fitted: np.ndarray, weights: np.ndarray) -> Bender:
        """Return what multiplies a move by about the second derivative of that sum; it is not negative."""


class Loss(SummedLoss):
    """A loss that each row has by itself."""

    @abstractmethod
    def link(self, mean: np.ndarray) -> np.ndarray:
        """Return the predictor of a mean, for a start."""

    @abstractmethod
    def value(self, y: np.ndarray, eta: np.ndarray) -> np.ndarray:
        """Return the loss of each row, (…, rows)."""

    @abstractmethod
    def derivative(self, y: np.ndarray, eta: np.ndarray) -> np.ndarray:
        """Return the derivative in the predictor, (…, rows, outputs)."""

    @abstractmethod
    def curvature(self, y: np.ndarray, eta: np.ndarray) -> np.ndarray:
        """Return the second derivative in each output of the predictor, (…, rows, outputs)."""

    def bender(self, y: np.ndarray, eta: np.ndarray) -> Bender:
        """Return what multiplies a move of the predictor by the second derivative."""
        curvature = self.curvature(y, eta)
        return lambda move: curvature * move

    def total(self, y: np.ndarray, eta: np.ndarray, weights: np.ndarray) -> np.ndarray:
        return np.sum(weights * self.value(y, eta), axis=0)

    def total_derivative(self, y: np.ndarray, eta: np.ndarray, weights: np.ndarray) -> np.ndarray:
        return weights[..., None] * self.derivative(y, eta)

    def total_bender(self, y: np.ndarray, eta: np.ndarray, weights: np.ndarray) -> Bender:
        bend = self.bender(y, eta)
        return lambda move: weights[..., None] * bend(move)

    def held_out(
        self, y: np.ndarray, eta: np.ndarray, fitted: np.ndarray, weights: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        return self.value(y, eta), self.total_derivative(y, eta, weights)

    def held_out_bender(self, y: np.ndarray, eta: np.ndarray, fitted: np.ndarray, weights: np.ndarray) -> Bender:
        return self.total_bender(y, eta, weights)


class Squared(Loss):
    """½ error², summed over outputs, which may stand for more or fewer targets than they are."""

    has_scale = True

    def __init__(self, targets: int | None = None) -> None:
        self.targets = targets

    def count(self, y: np.ndarray) -> int:
        return y.shape[-1] if self.targets is None else self.targets

    def link(self, mean: np.ndarray) -> np.ndarray:
        return mean

    def value(self, y: np.ndarray, eta: np.ndarray) -> np.ndarray:
        return np.sum((eta - y) ** 2, axis=-1) / 2

    def derivative(self, y: np.ndarray, eta: np.ndarray) -> np.ndarray:
        return eta - y

    def curvature(self, y: np.ndarray, eta: np.ndarray) -> np.ndarray:
        return np.ones(np.broadcast_shapes(y.shape, eta.shape))


class Logistic(Loss):
    """Log-loss of targets 0 and 1."""

    def soften(self, y: np.ndarray, doubt: float) -> np.ndarray:
        return y + doubt * (0.5 - y)

    def link(self, mean: np.ndarray) -> np.ndarray:
        return logit(np.clip(mean, _LEAST, 1 - _LEAST))

    def value(self, y: np.ndarray, eta: np.ndarray) -> np.ndarray:
        return np.sum(np.log1p(np.exp(-np.abs(eta))) + np.maximum(eta, 0) - y * eta, axis=-1)

    def derivative(self, y: np.ndarray, eta: np.ndarray) -> np.ndarray:
        return expit(eta) - y

    def curvature(self, y: np.ndarray, eta: np.ndarray) -> np.ndarray:
        p = expit(eta)
        return p * (1 - p)


class Softmax(Loss):
    """Log-loss of targets that are rows of the identity."""

    def soften(self, y: np.ndarray, doubt: float) -> np.ndarray:
        return y + doubt * (1 / y.shape[-1] - y)

    def link(self, mean: np.ndarray) -> np.ndarray:
        logs = np.log(np.maximum(mean, _LEAST))
        return logs - logs.mean(axis=-1, keepdims=True)

    def value(self, y: np.ndarray, eta: np.ndarray) -> np.ndarray:
        shifted = eta - _largest(eta)
        return (np.log(_total(np.exp(shifted))) - _total(y * shifted))[..., 0]

    def derivative(self, y: np.ndarray, eta: np.ndarray) -> np.ndarray:
        return _softmax(eta) - y

    def curvature(self, y: np.ndarray, eta: np.ndarray) -> np.ndarray:
        p = _softmax(eta)
        return p * (1 - p)

    def bender(self, y: np.ndarray, eta: np.ndarray) -> Bender:
        p = _softmax(eta)
        return lambda move: p * (move - _total(p * move))


def _softmax(eta: np.ndarray) -> np.ndarray:
    p = np.exp(eta - _largest(eta))
    return p / _total(p)


def _largest(x: np.ndarray) -> np.ndarray:
    """Return the maximum over the last axis, which stays; few outputs are quicker one by one than as an axis."""
    return functools.reduce(np.maximum, [x[..., c] for c in range(x.shape[-1])])[..., None]


def _total(x: np.ndarray) -> np.ndarray:
    """Return the sum over the last axis, which stays, as a product for the same reason."""
    return (x.reshape(-1, x.shape[-1]) @ np.ones(x.shape[-1], x.dtype)).reshape(*x.shape[:-1], 1)


class Poisson(Loss):
    """Half deviance of counts whose mean is exp(predictor)."""

    has_scale = True
    least_scale = 1.0

    def link(self, mean: np.ndarray) -> np.ndarray:
        return np.log(np.maximum(mean, _LEAST))

    def value(self, y: np.ndarray, eta: np.ndarray) -> np.ndarray:
        return np.sum(np.exp(eta) - y * eta + xlogy(y, y) - y, axis=-1)

    def derivative(self, y: np.ndarray, eta: np.ndarray) -> np.ndarray:
        return np.exp(eta) - y

    def curvature(self, y: np.ndarray, eta: np.ndarray) -> np.ndarray:
        return np.exp(eta)


class Gamma(Loss):
    """Half deviance of positive targets whose mean is exp(predictor)."""

    has_scale = True

    def link(self, mean: np.ndarray) -> np.ndarray:
        return np.log(mean)

    def value(self, y: np.ndarray, eta: np.ndarray) -> np.ndarray:
        return np.sum(y * np.exp(-eta) + eta - np.log(y) - 1, axis=-1)

    def derivative(self, y: np.ndarray, eta: np.ndarray) -> np.ndarray:
        return 1 - y * np.exp(-eta)

    def curvature(self, y: np.ndarray, eta: np.ndarray) -> np.ndarray:
        return y * np.exp(-eta)


class Huber(Loss):
    """½ error² up to `threshold`, linear beyond."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def link(self, mean: np.ndarray) -> np.ndarray:
        return mean

    def value(self, y: np.ndarray, eta: np.ndarray) -> np.ndarray:
        error, t = np.abs(eta - y), self.threshold
        return np.sum(np.where(error <= t, error**2 / 2, t * error - t**2 / 2), axis=-1)

    def derivative(self, y: np.ndarray, eta: np.ndarray) -> np.ndarray:
        return np.clip(eta - y, -self.threshold, self.threshold)

    def curvature(self, y: np.ndarray, eta: np.ndarray) -> np.ndarray:
        return (np.abs(eta - y) <= self.threshold).astype(float)

"""Losses of a linear predictor: value, derivative and curvature of each row.

Targets are (rows, outputs) and predictors (…, rows, outputs). Values are half deviances, (…, rows): zero where a row is
predicted perfectly.
"""

from abc import abstractmethod
from collections.abc import Callable

import numpy as np
from scipy.special import expit, log_softmax, logit, softmax, xlogy

_LEAST = 1e-6  # probability or count, in a start


class Loss:
    """A convex loss; `has_scale` where its unit is unknown, so that n/2 log of its mean counts in nats.

    The unit, twice the mean, is at least `least_scale`: counts vary by chance as much as their mean, and often more.
    """

    has_scale = False
    least_scale = 1e-12

    def soften(self, y: np.ndarray, doubt: float) -> np.ndarray:
        """Return targets of which a part may be of any class; numbers stay as they are."""
        return y

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

    def bender(self, y: np.ndarray, eta: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        """Return what multiplies a move of the predictor by the second derivative."""
        curvature = self.curvature(y, eta)
        return lambda move: curvature * move


class Squared(Loss):
    """½ error², summed over outputs."""

    has_scale = True

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
        return -np.sum(y * log_softmax(eta, axis=-1), axis=-1)

    def derivative(self, y: np.ndarray, eta: np.ndarray) -> np.ndarray:
        return softmax(eta, axis=-1) - y

    def curvature(self, y: np.ndarray, eta: np.ndarray) -> np.ndarray:
        p = softmax(eta, axis=-1)
        return p * (1 - p)

    def bender(self, y: np.ndarray, eta: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        p = softmax(eta, axis=-1)
        return lambda move: p * (move - np.sum(p * move, axis=-1, keepdims=True))


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

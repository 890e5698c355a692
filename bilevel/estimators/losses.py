"""Losses of a linear predictor, with the derivatives that exact fits and hypergradients need.

Targets are (rows, outputs) and predictors (..., rows, outputs). The values of rows are half deviances, (..., rows):
zero if the prediction is perfect. Solvers choose their linear algebra by the structure that a loss reports:
`is_quadratic`, `couples_outputs` and `couples_rows`.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.special import expit, logit, xlogy

Array = np.ndarray
Operator = Callable[[Array], Array]
Correction = Callable[[Any], Array]
_SMALLEST_MEAN = 1e-6  # probability or count from which a start is computed


class Loss(ABC):
    """A convex loss, summed over weighted rows.

    Predictors are (rows, fits, outputs) and weights (rows, fits). The methods for held-out rows take predictors
    (fits, rows, outputs) and weights (fits, rows).

    Attributes
    ----------
    is_quadratic : whether the second derivative is constant
    couples_outputs : whether the second derivative of a row has entries between different outputs
    couples_rows : whether the loss of a row depends on the predictors of other rows
    unknown_dispersion : whether the scale of the loss is unknown; the held-out loss is then n/2 times its logarithm
    min_dispersion : lower bound of the estimated scale; the variance of counts is at least their mean
    """

    is_quadratic = False
    couples_outputs = False
    couples_rows = False
    unknown_dispersion = False
    min_dispersion = 1e-12

    def count(self, y: Array) -> int:
        """Return the number of targets per row."""
        return y.shape[-1]

    def dispersion(self, mean: float) -> float:
        """Return the scale that a mean held-out loss implies, or 1 if the scale of the loss is known."""
        return max(2 * mean, self.min_dispersion) if self.unknown_dispersion else 1.0

    def smooth_labels(self, y: Array, share: float) -> Array:
        """Replace a share of each label by the uniform distribution; numeric targets stay as they are."""
        return y

    def link(self, mean: Array) -> Array:
        """Return the predictor with this mean, from which the fit of an intercept starts."""
        return np.zeros_like(mean)

    @abstractmethod
    def total(self, y: Array, eta: Array, weights: Array) -> Array:
        """Return the summed loss of each fit, (fits,)."""

    @abstractmethod
    def gradient(self, y: Array, eta: Array, weights: Array) -> Array:
        """Return the derivative of `total` with respect to the predictors."""

    @abstractmethod
    def hessian_operator(self, y: Array, eta: Array, weights: Array) -> Operator:
        """Return the function that multiplies a change of the predictors by the second derivative of `total`."""

    @abstractmethod
    def block_curvature(self, y: Array, eta: Array, weights: Array) -> tuple[Array, Correction | None]:
        """Return D, (rows, fits, outputs), and a function M or None.

        The second derivative in the coefficients of one output is Z' D Z - M(Z), or approximately that.
        """

    @abstractmethod
    def held_out(self, y: Array, eta: Array, fitted: Array, weights: Array) -> tuple[Array, Array]:
        """Return the losses of rows, (fits, rows), and the derivative of their weighted sum in the predictors.

        `fitted` are the weights of the rows in each fit, `weights` those of the rows held out of it.
        """


class RowLoss(Loss):
    """A loss that is a sum over rows, each of which depends on its own predictor only."""

    @abstractmethod
    def value(self, y: Array, eta: Array) -> Array:
        """Return the loss of each row, (..., rows)."""

    @abstractmethod
    def derivative(self, y: Array, eta: Array) -> Array:
        """Return the derivative in the predictor, (..., rows, outputs)."""

    @abstractmethod
    def curvature(self, y: Array, eta: Array) -> Array:
        """Return the second derivative in each output of the predictor, (..., rows, outputs)."""

    def curvature_factors(self, y: Array, eta: Array) -> tuple[Array, Array | None]:
        """Return d and p such that the second derivative of a row is diag(d) - p p'; without p if it is zero."""
        return self.curvature(y, eta), None

    def total(self, y: Array, eta: Array, weights: Array) -> Array:
        return np.sum(weights * self.value(y, eta), axis=0)

    def gradient(self, y: Array, eta: Array, weights: Array) -> Array:
        return weights[..., None] * self.derivative(y, eta)

    def hessian_operator(self, y: Array, eta: Array, weights: Array) -> Operator:
        curvature = self.curvature(y, eta)
        return lambda move: weights[..., None] * (curvature * move)

    def block_curvature(self, y: Array, eta: Array, weights: Array) -> tuple[Array, Correction | None]:
        return weights[:, :, None] * self.curvature(y, eta), None

    def held_out(self, y: Array, eta: Array, fitted: Array, weights: Array) -> tuple[Array, Array]:
        return self.value(y, eta), self.gradient(y, eta, weights)


class Squared(RowLoss):
    """Half the squared error, summed over outputs.

    Parameters
    ----------
    targets : number of targets that the outputs represent, if it differs from the number of outputs
    """

    is_quadratic = True
    unknown_dispersion = True

    def __init__(self, targets: int | None = None) -> None:
        self.targets = targets

    def count(self, y: Array) -> int:
        return y.shape[-1] if self.targets is None else self.targets

    def link(self, mean: Array) -> Array:
        return mean

    def value(self, y: Array, eta: Array) -> Array:
        return np.sum((eta - y) ** 2, axis=-1) / 2

    def derivative(self, y: Array, eta: Array) -> Array:
        return eta - y

    def curvature(self, y: Array, eta: Array) -> Array:
        return np.ones(np.broadcast_shapes(y.shape, eta.shape))


class Logistic(RowLoss):
    """Log-loss of targets 0 and 1."""

    def smooth_labels(self, y: Array, share: float) -> Array:
        return y + share * (0.5 - y)

    def link(self, mean: Array) -> Array:
        return logit(np.clip(mean, _SMALLEST_MEAN, 1 - _SMALLEST_MEAN))

    def value(self, y: Array, eta: Array) -> Array:
        return np.sum(np.log1p(np.exp(-np.abs(eta))) + np.maximum(eta, 0) - y * eta, axis=-1)

    def derivative(self, y: Array, eta: Array) -> Array:
        return expit(eta) - y

    def curvature(self, y: Array, eta: Array) -> Array:
        p = expit(eta)
        return p * (1 - p)


class Softmax(RowLoss):
    """Log-loss of one-hot targets. A constant that is added to all outputs of a row does not change the loss."""

    couples_outputs = True

    def smooth_labels(self, y: Array, share: float) -> Array:
        return y + share * (1 / y.shape[-1] - y)

    def link(self, mean: Array) -> Array:
        logs = np.log(np.maximum(mean, _SMALLEST_MEAN))
        return logs - logs.mean(axis=-1, keepdims=True)

    def value(self, y: Array, eta: Array) -> Array:
        shifted = eta - _max_over_outputs(eta)
        return (np.log(_sum_over_outputs(np.exp(shifted))) - _sum_over_outputs(y * shifted))[..., 0]

    def derivative(self, y: Array, eta: Array) -> Array:
        return _probabilities(eta) - y

    def curvature(self, y: Array, eta: Array) -> Array:
        p = _probabilities(eta)
        return p * (1 - p)

    def curvature_factors(self, y: Array, eta: Array) -> tuple[Array, Array | None]:
        p = _probabilities(eta)
        return p, p

    def hessian_operator(self, y: Array, eta: Array, weights: Array) -> Operator:
        p = _probabilities(eta)
        return lambda move: weights[..., None] * (p * (move - _sum_over_outputs(p * move)))


def _probabilities(eta: Array) -> Array:
    p = np.exp(eta - _max_over_outputs(eta))
    return p / _sum_over_outputs(p)


def _max_over_outputs(x: Array) -> Array:
    """Return x.max(axis=-1, keepdims=True); for few outputs, a loop over them is faster than the reduction."""
    return functools.reduce(np.maximum, [x[..., c] for c in range(x.shape[-1])])[..., None]


def _sum_over_outputs(x: Array) -> Array:
    """Return x.sum(axis=-1, keepdims=True), as a matrix product because that is faster."""
    return (x.reshape(-1, x.shape[-1]) @ np.ones(x.shape[-1], x.dtype)).reshape(*x.shape[:-1], 1)


class Poisson(RowLoss):
    """Half deviance of counts whose mean is exp(predictor)."""

    unknown_dispersion = True
    min_dispersion = 1.0

    def link(self, mean: Array) -> Array:
        return np.log(np.maximum(mean, _SMALLEST_MEAN))

    def value(self, y: Array, eta: Array) -> Array:
        return np.sum(np.exp(eta) - y * eta + xlogy(y, y) - y, axis=-1)

    def derivative(self, y: Array, eta: Array) -> Array:
        return np.exp(eta) - y

    def curvature(self, y: Array, eta: Array) -> Array:
        return np.exp(eta)


class Gamma(RowLoss):
    """Half deviance of positive targets whose mean is exp(predictor)."""

    unknown_dispersion = True

    def link(self, mean: Array) -> Array:
        return np.log(mean)

    def value(self, y: Array, eta: Array) -> Array:
        return np.sum(y * np.exp(-eta) + eta - np.log(y) - 1, axis=-1)

    def derivative(self, y: Array, eta: Array) -> Array:
        return 1 - y * np.exp(-eta)

    def curvature(self, y: Array, eta: Array) -> Array:
        return y * np.exp(-eta)


class Huber(RowLoss):
    """Half the squared error up to `threshold`, and linear beyond it."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def link(self, mean: Array) -> Array:
        return mean

    def value(self, y: Array, eta: Array) -> Array:
        error, t = np.abs(eta - y), self.threshold
        return np.sum(np.where(error <= t, error**2 / 2, t * error - t**2 / 2), axis=-1)

    def derivative(self, y: Array, eta: Array) -> Array:
        return np.clip(eta - y, -self.threshold, self.threshold)

    def curvature(self, y: Array, eta: Array) -> Array:
        return (np.abs(eta - y) <= self.threshold).astype(float)

"""Regression by other losses, with learned penalties: counts, positive targets, outliers."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.base import RegressorMixin

from bilevel.estimators.glm import RidgeGLM
from bilevel.estimators.losses import Gamma, Huber, Loss, Poisson
from bilevel.estimators.penalties import PenaltySelector

_NORMAL = 0.6744897501960817  # the median of |x| for normal x
_ROUNDS, _WEAK = 3, 1e-2


class _OneTarget(RegressorMixin, PenaltySelector):
    """A regressor of one target, as it is."""

    def _encode(self, y: np.ndarray, y_val: np.ndarray | None, weights: np.ndarray) -> tuple[np.ndarray, Any]:
        self._check_targets("y", y)
        if y_val is not None:
            self._check_targets("y_val", y_val)
        return y[:, None], None if y_val is None else y_val[:, None]

    def _check_targets(self, name: str, y: np.ndarray) -> None:
        """Refuse targets that the loss has no value for."""

    def _set_model(self, coef: np.ndarray, intercept: np.ndarray) -> None:
        self.coef_, self.intercept_ = coef[0], float(intercept[0])


class _LogLink(_OneTarget):
    """A regressor of targets that are not negative."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = True
        return tags

    def predict(self, X: Any) -> np.ndarray:
        """Return the mean of each row."""
        return np.exp(self._score(X))


class BilevelPoissonRegressor(_LogLink):
    """Poisson regression with learned penalties: targets are counts, and their mean is exp(X coef_ + intercept_).

    Fits minimize sum half deviance + ½ sum penalty_k coef_k², as `PoissonRegressor` does with its mean. All else is as
    in `BilevelRidge`.

    Parameters
    ----------
    structure, groups, unpenalized, prior_scale, cv, scoring, fit_intercept, standardize : as there
    max_iter, tol, random_state, verbose : as there
    """

    def _check_targets(self, name: str, y: np.ndarray) -> None:
        if y.min() < 0 or not y.any():
            raise ValueError(f"Some value(s) of {name} are negative, or all are zero; counts are needed.")

    def _make_loss(self) -> Loss:
        return Poisson()


class BilevelGammaRegressor(_LogLink):
    """Gamma regression with learned penalties: targets are positive, and their mean is exp(X coef_ + intercept_).

    Fits minimize sum half deviance + ½ sum penalty_k coef_k², as `GammaRegressor` does with its mean. Penalties
    minimize n/2 log of the mean deviance of held-out rows. All else is as in `BilevelRidge`.

    Parameters
    ----------
    structure, groups, unpenalized, prior_scale, cv, scoring, fit_intercept, standardize : as there
    max_iter, tol, random_state, verbose : as there
    """

    def _check_targets(self, name: str, y: np.ndarray) -> None:
        if y.min() <= 0:
            raise ValueError(f"Some value(s) of {name} are not positive; the gamma distribution needs that.")

    def _make_loss(self) -> Loss:
        return Gamma()


@dataclass(eq=False, repr=False, kw_only=True)
class BilevelHuberRegressor(_OneTarget):
    """Robust regression with learned penalties: errors count by their square up to `epsilon` deviations, then linearly.

    Fits minimize sum ρ(error / scale_) + ½ sum penalty_k coef_k². The scale is the median size of the errors of a
    robust fit, over 0.674, as it would be for normal errors. All else is as in `BilevelRidge`.

    Parameters
    ----------
    epsilon : in deviations
    structure, groups, unpenalized, prior_scale, cv, scoring, fit_intercept, standardize : as there
    max_iter, tol, random_state, verbose : as there

    Attributes
    ----------
    scale_ : deviation of the errors that are not outliers
    """

    epsilon: float = 1.35

    def _make_loss(self) -> Loss:
        return Huber(self.epsilon)

    def _prepare(self, X: Any, y: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Note the scale, and return targets divided by it."""
        errors = y - _weighted_median(y, weights)
        for _ in range(_ROUNDS):
            self.scale_ = _weighted_median(np.abs(errors), weights) / _NORMAL or float(np.abs(errors).mean()) or 1.0
            model = RidgeGLM(X, y / self.scale_, self._make_loss(), intercept=self.fit_intercept)
            fits = model.fit(weights[None], np.full(X.shape[1], np.log(_WEAK * weights.sum())))
            errors = y - self.scale_ * fits.predictor[0]
        return y / self.scale_

    def _set_model(self, coef: np.ndarray, intercept: np.ndarray) -> None:
        self.coef_, self.intercept_ = coef[0] * self.scale_, float(intercept[0] * self.scale_)

    def predict(self, X: Any) -> np.ndarray:
        """Return the prediction of each row."""
        return self._score(X)


def _weighted_median(values: np.ndarray, weights: np.ndarray) -> float:
    order = np.argsort(values[:, 0], kind="stable")
    cumulated = np.cumsum(weights[order])
    return float(values[order[np.searchsorted(cumulated, cumulated[-1] / 2)], 0])

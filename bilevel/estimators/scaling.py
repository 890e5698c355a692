"""Columns of mean 0 and deviation 1, which penalties and steps are alike for, and the way back to the user's units."""

from typing import NamedTuple

import numpy as np
from sklearn.preprocessing import StandardScaler


class Scaling(NamedTuple):
    """What was taken from each column, and what it was divided by."""

    mean: np.ndarray
    scale: np.ndarray

    @classmethod
    def of(cls, X: np.ndarray, *, centred: bool, divided: bool) -> "Scaling":
        """Take means and deviations of these rows; constant columns are not divided."""
        scaler = StandardScaler(with_mean=centred, with_std=divided).fit(X)
        mean = scaler.mean_ if centred else np.zeros(X.shape[1])
        return cls(mean, scaler.scale_ if divided else np.ones(X.shape[1]))

    def done(self, X: np.ndarray) -> np.ndarray:
        """Return the columns centred and divided."""
        return (X - self.mean) / self.scale

    def undone(self, coef: np.ndarray, intercept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return coefficients, last axis = features, and intercept for the columns as the user has them."""
        coef = coef / self.scale
        return coef, intercept - coef @ self.mean

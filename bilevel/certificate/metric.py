"""Metrics in which a problem is well conditioned."""

from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

# Up to this many numbers per row, eigenvalues of mean dd' are computed; above, their sum bounds them.
DENSE = 1024
_SMALLEST = 1e-10  # eigenvalue, relative to the largest, that is known to some six digits


@dataclass(frozen=True)
class Metric:
    """M = L L', positive definite; ``inverse_root`` is L⁻¹, or its diagonal where M is diagonal."""

    inverse_root: np.ndarray
    least: float

    @classmethod
    def dense(cls, matrix: np.ndarray) -> "Metric":
        """Return the metric of a matrix; LinAlgError where float64 cannot tell it from a singular one."""
        eigenvalues = np.linalg.eigvalsh(matrix)
        if not eigenvalues[0] > _SMALLEST * eigenvalues[-1]:
            raise np.linalg.LinAlgError("not positive definite")
        return cls(np.linalg.inv(np.linalg.cholesky(matrix)), float(eigenvalues[0]))

    @classmethod
    def diagonal(cls, values: np.ndarray) -> "Metric":
        """Return the metric with this diagonal."""
        return cls(1 / np.sqrt(values), float(values.min()))

    def dual_norm(self, residual: np.ndarray) -> float:
        """Return √(r'M⁻¹r)."""
        root = self.inverse_root
        return float(np.linalg.norm(root * residual if root.ndim == 1 else root @ residual))

    def operator_norm(self, matrix: np.ndarray) -> float:
        """Return the norm of w -> matrix w, from the metric to the Euclidean one."""
        return float(np.linalg.norm(matrix @ self.inverse_root.T, 2))

    def largest(self, matrix: np.ndarray) -> float:
        """Return the largest eigenvalue of M⁻¹ times a symmetric matrix."""
        return largest(self.inverse_root @ matrix @ self.inverse_root.T)

    def smallest(self, matrix: np.ndarray) -> float:
        """Return the smallest eigenvalue of M⁻¹ times a symmetric matrix."""
        return float(np.linalg.eigvalsh(self.inverse_root @ matrix @ self.inverse_root.T)[0])

    def grouped_norm(self, factors: np.ndarray, groups: np.ndarray) -> float:
        """Return the norm of w -> (sum of factors w over each group)."""
        if self.inverse_root.ndim == 1:
            return float(np.sqrt(np.bincount(groups, (factors * self.inverse_root) ** 2).max()))
        summed = np.zeros((groups.max() + 1, len(factors)))
        summed[groups, np.arange(len(factors))] = factors
        return self.operator_norm(summed)


def largest(matrix: Any) -> float:
    """Return the largest eigenvalue of a matrix without negative ones, infinite where the matrix is not finite."""
    array = np.asarray(matrix)
    return max(0.0, float(np.linalg.eigvalsh(array)[-1])) if np.all(np.isfinite(array)) else inf

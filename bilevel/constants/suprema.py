"""What the constants of logistic and softmax losses share: suprema of derivatives and moments of rows."""

from math import sqrt
from typing import NamedTuple

import numpy as np

# Suprema of |σ|, |σ'|, …: of the derivatives of log(1 + exp(s)) from the first on.
SIGMOID = (1.0, 1 / 4, 1 / (6 * sqrt(3)), 1 / 8)
_ROOT = sqrt(0.5 - sqrt(105) / 30)
SIGMOID_FOURTH = _ROOT * (1 - _ROOT**2) * (2 - 3 * _ROOT**2) / 4


class Moments(NamedTuple):
    """Largest eigenvalues of mean dd' and of mean ||d|| dd', the longest row, and how many there are."""

    second: float
    third: float
    longest: float
    n: int

    @classmethod
    def of(cls, rows: np.ndarray) -> "Moments":
        """Return those of a table, one row per sample."""
        n, norms = len(rows), np.linalg.norm(rows, axis=1)
        second, third = (float(np.linalg.eigvalsh((rows.T * weight) @ rows / n)[-1]) for weight in (1.0, norms))
        return cls(second, third, float(norms.max()), n)


def largest_on_circle(terms: np.ndarray, points: int = 4096) -> float:
    """Return an upper bound of sum_j t_j |b|^j |a|^(k - j) over a² + b² = 1, for t_j >= 0 and k <= 4.

    Between points of the grid the sum, a trigonometric polynomial of degree k, exceeds them by no more than
    k²/2 (step/2)² sum t_j, and sum t_j is at most 2^(k/2) times its value at a = b.
    """
    degree = len(terms) - 1
    angles, step = np.linspace(0, np.pi / 2, points, retstep=True)
    powers = np.cos(angles)[:, None] ** np.arange(degree, -1, -1) * np.sin(angles)[:, None] ** np.arange(degree + 1)
    return float((powers @ terms).max() * (1 + degree**2 * step**2 / 8 * 2 ** (degree / 2)))

"""Structures compared on rows that their penalties were not learned by, shuffle by shuffle as long as that is open."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bilevel.estimators.losses import SummedLoss
from bilevel.estimators.selection import Structure

OUTER_FOLDS = 5
_MARGIN = 1.0  # standard errors by which many penalties must be ahead of one
_LEAST_GAIN = 2.0  # nats by which they must be ahead at least


class Comparison(NamedTuple):
    """Structures, their summed losses, differences from the first with standard errors, and which one to take."""

    structures: Sequence[Structure]
    how: str
    losses: np.ndarray
    differences: np.ndarray
    standard_errors: np.ndarray
    chosen: int


class Race:
    """Structures against the first of them; one that is behind by a standard error is not tried on further shuffles."""

    def __init__(self, structures: Sequence[Structure], loss: SummedLoss) -> None:
        self.structures, self.loss = structures, loss
        self.open = np.arange(len(structures))
        self._first: list[float] = []
        self._weights = np.zeros(0)
        self._sums, self._counts = np.zeros((len(structures), 0)), np.zeros(len(structures))

    @property
    def decided(self) -> bool:
        return len(self.open) == 1

    def add(self, losses: np.ndarray, weights: np.ndarray) -> None:
        """Take the losses of the open structures on one shuffle, (structures, rows), and the weights of rows."""
        if self.loss.has_scale:
            losses = losses / max(2 * np.average(losses[0], weights=weights), self.loss.least_scale)
        if not self._first:
            self._weights, self._sums = weights, np.zeros((len(self.structures), len(weights)))
        self._first.append(float(losses[0] @ weights))
        self._sums[self.open] += losses - losses[0]
        self._counts[self.open] += 1
        differences, spread = self._differences()
        self.open = self.open[(differences <= spread)[self.open]]

    def _differences(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the differences from the first structure, in nats, and their standard errors."""
        each = self._sums / self._counts[:, None]
        sums = each @ self._weights
        deviations = each - (sums / self._weights.sum())[:, None]
        return sums, np.sqrt(deviations**2 @ self._weights)

    def result(self, how: str) -> Comparison:
        """Choose the first structure unless another is ahead by the margin."""
        sums, spread = self._differences()
        ahead = np.flatnonzero(sums < -np.maximum(_MARGIN * spread, _LEAST_GAIN))
        chosen = int(ahead[np.argmin(sums[ahead])]) if len(ahead) else 0
        return Comparison(self.structures, how, np.mean(self._first) + sums, sums, spread, chosen)


def join_losses(losses: Sequence[np.ndarray], weights: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the losses of rows, (structures, rows), from those of fits without a fold, and weights of rows.

    Both have an item for each outer fold, which weighs the rows that it holds out.
    """
    total = np.sum(weights, axis=0)
    sums = sum((weight * each for weight, each in zip(weights, losses, strict=True)), np.zeros_like(losses[0]))
    return sums / np.where(total > 0, total, 1.0), total

"""The loss of Cox's model, in which rows meet in risk sets: the negative log partial likelihood, Breslow's for ties.

    sum_i weight_i event_i (log S(time_i) - eta_i),   S(t) = sum of weight_j exp(eta_j) over rows with time_j >= t

Rows are sorted by time, the latest first, so that sums over risk sets are cumulated ones: nothing is rows x rows.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from bilevel.estimators.losses import Bender, SummedLoss

_TINY = np.finfo(float).tiny
_MOST_ENTRIES = 2_000_000  # of the means of risk sets at once


class RiskSets:
    """Which rows are at risk at each distinct time, the latest first; arrays are (rows, …) or (times, …)."""

    def __init__(self, times: np.ndarray) -> None:
        self.first = np.flatnonzero(np.diff(times, prepend=np.inf))
        self.ends = np.append(self.first[1:], len(times))
        self.of_row = np.repeat(np.arange(len(self.first)), self.ends - self.first)

    def at_risk(self, values: np.ndarray) -> np.ndarray:
        """Sum over the rows at risk at each time."""
        return np.cumsum(values, axis=0)[self.ends - 1]

    def at_time(self, values: np.ndarray) -> np.ndarray:
        """Sum over the rows of each time."""
        return np.add.reduceat(values, self.first, axis=0)

    def up_to(self, values: np.ndarray) -> np.ndarray:
        """Sum over the times until that of each row."""
        return np.cumsum(values[::-1], axis=0)[::-1][self.of_row]


class Hazards(NamedTuple):
    """Weighted hazards of rows over exp(shift), (rows, fits), their sums at risk, or 1, and events, (times, fits)."""

    shift: np.ndarray
    rows: np.ndarray
    sums: np.ndarray
    events: np.ndarray


class Cox(SummedLoss):
    """The loss of rows sorted by decreasing time; targets are 1 where the event was seen, 0 where censored.

    Held-out rows have Verweij and van Houwelingen's loss: that of all rows less that of the rows fitted on.

    Parameters
    ----------
    times : (rows,), decreasing
    weights : (rows,), of the rows where they are held out
    """

    def __init__(self, times: np.ndarray, weights: np.ndarray) -> None:
        self.sets, self.weights = RiskSets(times), weights
        self._last: tuple[np.ndarray, np.ndarray, Hazards] | None = None

    def hazards(self, events: np.ndarray, eta: np.ndarray, weights: np.ndarray) -> Hazards:
        """Take events, (rows, 1), predictors and weights, both (rows, fits)."""
        shift = eta.max(axis=0)
        rows = weights * np.exp(eta - shift)
        sums = self.sets.at_risk(rows)
        return Hazards(shift, rows, np.where(sums > 0, sums, 1.0), self.sets.at_time(weights * events))

    def _at(self, y: np.ndarray, eta: np.ndarray, weights: np.ndarray) -> Hazards:
        """Return the hazards, kept from the last call where a Newton step asks for more about the same place."""
        if self._last is None or self._last[0] is not eta or self._last[1] is not weights:
            self._last = eta, weights, self.hazards(y[..., 0], eta[..., 0], weights)
        return self._last[2]

    def total(self, y: np.ndarray, eta: np.ndarray, weights: np.ndarray) -> np.ndarray:
        at = self._at(y, eta, weights)
        return np.sum(at.events * (np.log(at.sums) + at.shift), axis=0) - np.sum(weights * (y * eta)[..., 0], axis=0)

    def total_derivative(self, y: np.ndarray, eta: np.ndarray, weights: np.ndarray) -> np.ndarray:
        return self.diagonal(y, eta, weights) - weights[..., None] * y

    def diagonal(self, y: np.ndarray, eta: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return what the second derivative would be if sums over risk sets were constant, (rows, fits, 1)."""
        at = self._at(y, eta, weights)
        return (at.rows * self.sets.up_to(at.events / at.sums))[..., None]

    def total_bender(self, y: np.ndarray, eta: np.ndarray, weights: np.ndarray) -> Bender:
        at, diagonal = self._at(y, eta, weights), self.diagonal(y, eta, weights)[..., 0]
        pairs = at.events / at.sums / at.sums

        def bend(move: np.ndarray) -> np.ndarray:
            shared = self.sets.up_to(pairs * self.sets.at_risk(at.rows * move[..., 0]))
            return (diagonal * move[..., 0] - at.rows * shared)[..., None]

        return bend

    def outer_means(self, Z: Any, y: np.ndarray, eta: np.ndarray, weights: np.ndarray) -> Iterator[np.ndarray]:
        """Yield for each fit the sum of events × m m' over times, where m is the mean of Z at risk.

        By so much Z' diagonal Z is larger than the second derivative in coefficients.
        """
        at = self._at(y, eta, weights)
        for rows, factors in zip(at.rows.T, (np.sqrt(at.events) / at.sums).T, strict=True):
            out, reached = np.zeros((Z.shape[1], Z.shape[1])), np.zeros(Z.shape[1])
            times = np.flatnonzero(factors)
            ends, step = self.sets.ends[times], max(1, _MOST_ENTRIES // Z.shape[1])
            for start in range(0, len(rows), step):
                part = Z[start : start + step]
                part = part.toarray() if sp.issparse(part) else part
                sums = np.cumsum(rows[start : start + step, None] * part, axis=0) + reached
                inside = slice(*np.searchsorted(ends, [start, start + step], side="right"))
                means = sums[ends[inside] - 1 - start] * factors[times[inside], None]
                out, reached = out + means.T @ means, sums[-1]
            yield out

    def held_out(
        self, y: np.ndarray, eta: np.ndarray, fitted: np.ndarray, weights: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        train, held_out, share = self._divide(fitted, weights)
        eta = eta.swapaxes(0, 1)
        losses = share * held_out * self._row_losses(y, eta[..., 0], train, held_out)
        before, after = (self.total_derivative(y[:, None], eta, part) for part in (train, train + held_out))
        return losses.T / np.where(weights > 0, weights, 1.0), (share[:, None] * (after - before)).swapaxes(0, 1)

    def _divide(self, fitted: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the weights fitted on and held out, (rows, fits), and how much each fold counts.

        A row that several folds hold out has a part of its weight in each, but all of it in its risk sets.
        """
        held_out = np.ascontiguousarray((self.weights * (weights > 0)).T)
        share = weights.sum(axis=1) / np.maximum(held_out.sum(axis=0), _TINY)
        return np.ascontiguousarray(fitted.T), held_out, share

    def _row_losses(self, y: np.ndarray, eta: np.ndarray, train: np.ndarray, held_out: np.ndarray) -> np.ndarray:
        """Return the losses of held-out rows, (rows, fits), whose weighted sum is that of all rows less the others'.

        This is what held-out events cost among all rows, and what held-out rows add to the risk sets of other events,
        log(1 + S_held_out / S_train) each. They share it by their hazards.
        """
        before, after = (self.hazards(y, eta, part) for part in (train, train + held_out))
        hazard = np.exp(eta - after.shift)
        own = self.sets.at_risk(held_out * hazard)
        rate = self.sets.up_to(before.events * np.log1p(own / before.sums) / np.maximum(own, _TINY))
        return y * (np.log(after.sums)[self.sets.of_row] + after.shift - eta) + hazard * rate

    def held_out_bender(self, y: np.ndarray, eta: np.ndarray, fitted: np.ndarray, weights: np.ndarray) -> Bender:
        """Take sums over risk sets as constant, and those of the rows held out as small."""
        train, held_out, share = self._divide(fitted, weights)
        at = self.hazards(y, eta[..., 0].T, train)
        rate = self.sets.up_to(at.events / at.sums)
        curvature = share * held_out * np.exp(eta[..., 0].T - at.shift) * rate
        return lambda move: curvature.T[..., None] * move

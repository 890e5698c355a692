"""The loss of Cox's model, in which rows meet in risk sets: the negative log partial likelihood, Breslow's for ties.

    sum_i weight_i event_i (log S(time_i) - eta_i),   S(t) = sum of weight_j exp(eta_j) over rows with time_j >= t

Rows are sorted by time, the latest first, so that sums over risk sets are cumulated ones: nothing is rows x rows.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from bilevel.estimators.losses import Bender, SummedLoss

OuterMeans = Callable[[Any], np.ndarray]
_TINY = np.finfo(float).tiny
_KNOTS = 16  # times kept while the hazard at risk grows by the factor e


class RiskSets:
    """Which rows are at risk at each distinct time, the latest first; arrays are (rows, …) or (times, …)."""

    def __init__(self, times: np.ndarray) -> None:
        self.first = np.flatnonzero(np.diff(times, prepend=np.inf))
        self.ends = np.append(self.first[1:], len(times))
        self.of_row = np.repeat(np.arange(len(self.first)), self.ends - self.first)

    def at_risk(self, values: np.ndarray) -> np.ndarray:
        """Sum over the rows at risk at each time."""
        return np.cumsum(values, axis=0).take(self.ends - 1, axis=0)

    def at_risk_times(self, Z: Any, values: np.ndarray) -> np.ndarray:
        """Sum Z, each row times its values, (rows, fits), over those at risk: (fits, times, columns of Z)."""
        size, fits = values.shape
        starts = np.append(0, (np.arange(fits)[:, None] * size + self.ends).ravel())
        within = sp.csr_array((values.T.ravel(), np.tile(np.arange(size), fits), starts), (len(starts) - 1, size)) @ Z
        return np.cumsum((within.toarray() if sp.issparse(Z) else within).reshape(fits, -1, Z.shape[1]), axis=1)

    def at_time(self, values: np.ndarray) -> np.ndarray:
        """Sum over the rows of each time."""
        return np.add.reduceat(values, self.first, axis=0)

    def up_to(self, values: np.ndarray) -> np.ndarray:
        """Sum over the times until that of each row."""
        return np.cumsum(values[::-1], axis=0)[::-1].take(self.of_row, axis=0)

    def thin(self, sums: np.ndarray, events: np.ndarray) -> tuple["RiskSets", np.ndarray, np.ndarray]:
        """Return few times, from one to the next of which sums at risk grow little, sums, and events moved there."""
        reached = _KNOTS * np.append(0.0, np.cumsum(np.abs(np.diff(np.log(sums), axis=0)).max(axis=1)))
        kept = np.flatnonzero(np.diff(np.floor(reached), append=np.inf))
        places = np.interp(reached, reached[kept], np.arange(len(kept)))
        share, starts = (places % 1)[:, None], np.searchsorted(places, np.arange(len(kept)))
        moved, later = (np.add.reduceat(part * events, starts, axis=0) for part in (1 - share, share))
        moved[1:] += later[:-1]
        return RiskSets(np.searchsorted(kept, self.of_row)), sums[kept], moved


class Hazards(NamedTuple):
    """Weighted hazards over exp(shift), (rows, fits), their sums at risk, or 1, events of rows and of times."""

    shift: np.ndarray
    rows: np.ndarray
    sums: np.ndarray
    seen: np.ndarray
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

    def hazards(self, events: np.ndarray, eta: np.ndarray, weights: np.ndarray, like: Hazards | None = None) -> Hazards:
        """Take events, (rows, 1), predictors and weights, both (rows, fits); others may be of the same weights."""
        shift = np.ascontiguousarray(eta.T).max(axis=1)  # few columns are quicker one by one
        rows = weights * np.exp(eta - shift)
        sums = self.sets.at_risk(rows)
        seen, times = (like.seen, like.events) if like else (weights * events, self.sets.at_time(weights * events))
        return Hazards(shift, rows, np.where(sums > 0, sums, 1.0), seen, times)

    def _at(self, y: np.ndarray, eta: np.ndarray, weights: np.ndarray) -> Hazards:
        """Return the hazards, kept from the last call where a Newton step asks for more about the same place."""
        last = self._last if self._last is not None and self._last[1] is weights else None
        if last is None or last[0] is not eta:
            last = self._last = eta, weights, self.hazards(y[..., 0], eta[..., 0], weights, last and last[2])
        return last[2]

    def total(self, y: np.ndarray, eta: np.ndarray, weights: np.ndarray) -> np.ndarray:
        at = self._at(y, eta, weights)
        return np.einsum("tf,tf->f", at.events, np.log(at.sums) + at.shift) - np.einsum(
            "rf,rf->f", at.seen, eta[..., 0]
        )

    def total_derivative(self, y: np.ndarray, eta: np.ndarray, weights: np.ndarray) -> np.ndarray:
        return (self._diagonal(at := self._at(y, eta, weights)) - at.seen)[..., None]

    def _diagonal(self, at: Hazards) -> np.ndarray:
        """Return what the second derivative would be if sums over risk sets were constant, (rows, fits)."""
        return at.rows * self.sets.up_to(at.events / at.sums)

    def total_bender(self, y: np.ndarray, eta: np.ndarray, weights: np.ndarray) -> Bender:
        at = self._at(y, eta, weights)
        diagonal, rates = self._diagonal(at), at.events / at.sums

        def bend(move: np.ndarray) -> np.ndarray:
            shared = self.sets.up_to(rates * (self.sets.at_risk(at.rows * move[..., 0]) / at.sums))
            return (diagonal * move[..., 0] - at.rows * shared)[..., None]

        return bend

    def thin_curvature(self, y: np.ndarray, eta: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, OuterMeans]:
        """Return D, (rows, fits, 1), and M, so that Z' D Z - M(Z) is about the second derivative in coefficients.

        M(Z), (fits, columns, columns), sums events × m m' over few times, where m is the mean of Z at risk.
        """
        at = self._at(y, eta, weights)
        sets, sums, events = self.sets.thin(at.sums, at.events)

        def outer_means(Z: Any) -> np.ndarray:
            means = (np.sqrt(events) / sums).T[..., None] * sets.at_risk_times(Z, at.rows)
            return means.swapaxes(1, 2) @ means

        return (at.rows * sets.up_to(events / sums))[..., None], outer_means

    def held_out(
        self, y: np.ndarray, eta: np.ndarray, fitted: np.ndarray, weights: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        train, held_out, share = self._divide(fitted, weights)
        eta = eta.swapaxes(0, 1)
        before, after = (self.hazards(y, eta[..., 0], part) for part in (train, train + held_out))
        losses = share * held_out * self._row_losses(y, eta[..., 0], before, after)
        slopes = share * (self._diagonal(after) - self._diagonal(before) - after.seen + before.seen)
        return losses.T / np.where(weights > 0, weights, 1.0), slopes.T[..., None]

    def _divide(self, fitted: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the weights fitted on and held out, (rows, fits), and how much each fold counts.

        A row that several folds hold out has a part of its weight in each, but all of it in its risk sets.
        """
        held_out = np.ascontiguousarray((self.weights * (weights > 0)).T)
        share = weights.sum(axis=1) / np.maximum(held_out.sum(axis=0), _TINY)
        return np.ascontiguousarray(fitted.T), held_out, share

    def _row_losses(self, y: np.ndarray, eta: np.ndarray, before: Hazards, after: Hazards) -> np.ndarray:
        """Return the losses of held-out rows, (rows, fits), whose weighted sum is that of all rows less the others'.

        This is what held-out events cost among all rows, and what held-out rows add to the risk sets of other events,
        log(1 + S_held_out / S_train) each. They share it by their hazards.
        """
        hazard = np.exp(eta - after.shift)
        own = self.sets.at_risk(after.rows - before.rows)
        rate = self.sets.up_to(before.events * np.log1p(own / before.sums) / np.maximum(own, _TINY))
        return y * (np.log(after.sums).take(self.sets.of_row, axis=0) + after.shift - eta) + hazard * rate

    def held_out_bender(self, y: np.ndarray, eta: np.ndarray, fitted: np.ndarray, weights: np.ndarray) -> Bender:
        """Take sums over risk sets as constant, and those of the rows held out as small."""
        train, held_out, share = self._divide(fitted, weights)
        at = self.hazards(y, eta[..., 0].T, train)
        curvature = share * held_out * np.exp(eta[..., 0].T - at.shift) * self.sets.up_to(at.events / at.sums)
        return lambda move: curvature.T[..., None] * move

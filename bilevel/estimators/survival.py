"""Cox's proportional hazards: the loss, whose rows meet in risk sets, and the estimator with learned penalties.

The loss is the negative log partial likelihood, with Breslow's formula for ties,

    sum_i weight_i event_i (log S(time_i) - eta_i),   S(t) = sum of weight_j exp(eta_j) over rows with time_j >= t

Rows are sorted by decreasing time, so that sums over risk sets are cumulative sums: no array is rows x rows. Targets
and risk scores of the estimator follow scikit-survival.
"""

import warnings
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import scipy.sparse as sp
from sklearn.utils import assert_all_finite

from bilevel.estimators.base import Groups, document
from bilevel.estimators.linear_model import PenaltySelector, TrainingData
from bilevel.estimators.losses import Array, Correction, Loss, Operator
from bilevel.estimators.ridge import RidgeGLM, to_dense
from bilevel.estimators.selection import InnerModel

_TINY = np.finfo(float).tiny
_KNOTS = 16  # times that are kept while the sum of hazards at risk grows by a factor of e


class RiskSets:
    """The rows at risk at each distinct time, the latest first; arrays are (rows, ...) or (times, ...)."""

    def __init__(self, times: Array) -> None:
        self.first = np.flatnonzero(np.diff(times, prepend=np.inf))
        self.ends = np.append(self.first[1:], len(times))
        self.of_row = np.repeat(np.arange(len(self.first)), self.ends - self.first)

    def at_risk(self, values: Array) -> Array:
        """Sum over the rows at risk at each time."""
        return np.cumsum(values, axis=0).take(self.ends - 1, axis=0)

    def at_risk_times(self, Z: Any, values: Array) -> Array:
        """Sum Z, each row times its values, (rows, fits), over the rows at risk: (fits, times, columns of Z)."""
        size, fits = values.shape
        starts = np.append(0, (np.arange(fits)[:, None] * size + self.ends).ravel())
        within = sp.csr_array((values.T.ravel(), np.tile(np.arange(size), fits), starts), (len(starts) - 1, size)) @ Z
        return np.cumsum(to_dense(within).reshape(fits, -1, Z.shape[1]), axis=1)

    def at_time(self, values: Array) -> Array:
        """Sum over the rows of each time."""
        return np.add.reduceat(values, self.first, axis=0)

    def up_to(self, values: Array) -> Array:
        """Sum over all times until the time of each row."""
        return np.cumsum(values[::-1], axis=0)[::-1].take(self.of_row, axis=0)

    def thin(self, sums: Array, events: Array) -> tuple["RiskSets", Array, Array]:
        """Keep few times, between which sums at risk change little.

        Return the risk sets, the sums at the kept times, and the events, which are divided between the kept times
        before and after them.
        """
        reached = _KNOTS * np.append(0.0, np.cumsum(np.abs(np.diff(np.log(sums), axis=0)).max(axis=1)))
        kept = np.flatnonzero(np.diff(np.floor(reached), append=np.inf))
        places = np.interp(reached, reached[kept], np.arange(len(kept)))
        share, starts = (places % 1)[:, None], np.searchsorted(places, np.arange(len(kept)))
        moved, later = (np.add.reduceat(part * events, starts, axis=0) for part in (1 - share, share))
        moved[1:] += later[:-1]
        return RiskSets(np.searchsorted(kept, self.of_row)), sums[kept], moved


class Hazards(NamedTuple):
    """Weighted hazards of rows divided by exp(shift), their sums at risk (1 if zero), events of rows and of times."""

    shift: Array
    rows: Array
    sums: Array
    seen: Array
    events: Array


class Cox(Loss):
    """The loss of rows sorted by decreasing time; targets are 1 if the event was seen, and 0 if censored.

    The loss of held-out rows is that of all rows less that of the rows fitted on (Verweij and van Houwelingen).

    Parameters
    ----------
    times : (rows,), decreasing
    weights : (rows,), weights of the rows if they are held out
    """

    couples_rows = True

    def __init__(self, times: Array, weights: Array) -> None:
        self.sets, self.weights = RiskSets(times), weights
        self._last: tuple[Array, Array, Hazards] | None = None

    def hazards(self, events: Array, eta: Array, weights: Array) -> Hazards:
        """Compute hazards from events, (rows, 1), predictors and weights, both (rows, fits)."""
        shift = np.ascontiguousarray(eta.T).max(axis=1)  # contiguous columns are faster
        rows = weights * np.exp(eta - shift)
        sums, seen = self.sets.at_risk(rows), weights * events
        return Hazards(shift, rows, np.where(sums > 0, sums, 1.0), seen, self.sets.at_time(seen))

    def _at(self, y: Array, eta: Array, weights: Array) -> Hazards:
        """Return the hazards; a Newton step uses those of the last call several times."""
        if self._last is None or self._last[0] is not eta or self._last[1] is not weights:
            self._last = eta, weights, self.hazards(y[..., 0], eta[..., 0], weights)
        return self._last[2]

    def total(self, y: Array, eta: Array, weights: Array) -> Array:
        at = self._at(y, eta, weights)
        of_times = np.einsum("tf,tf->f", at.events, np.log(at.sums) + at.shift)
        return of_times - np.einsum("rf,rf->f", at.seen, eta[..., 0])

    def gradient(self, y: Array, eta: Array, weights: Array) -> Array:
        return (self._diagonal(at := self._at(y, eta, weights)) - at.seen)[..., None]

    def _diagonal(self, at: Hazards) -> Array:
        """Return the second derivative for constant sums over risk sets, (rows, fits)."""
        return at.rows * self.sets.up_to(at.events / at.sums)

    def hessian_operator(self, y: Array, eta: Array, weights: Array) -> Operator:
        at = self._at(y, eta, weights)
        diagonal, rates = self._diagonal(at), at.events / at.sums

        def multiply(move: Array) -> Array:
            shared = self.sets.up_to(rates * (self.sets.at_risk(at.rows * move[..., 0]) / at.sums))
            return (diagonal * move[..., 0] - at.rows * shared)[..., None]

        return multiply

    def block_curvature(self, y: Array, eta: Array, weights: Array) -> tuple[Array, Correction | None]:
        """Return D and M such that Z' D Z - M(Z) is approximately the second derivative in the coefficients.

        M(Z), (fits, columns, columns), sums events × m m' over few times, where m is the mean of Z at risk.
        """
        at = self._at(y, eta, weights)
        sets, sums, events = self.sets.thin(at.sums, at.events)

        def outer_means(Z: Any) -> Array:
            means = (np.sqrt(events) / sums).T[..., None] * sets.at_risk_times(Z, at.rows)
            return means.swapaxes(1, 2) @ means

        return (at.rows * sets.up_to(events / sums))[..., None], outer_means

    def held_out(self, y: Array, eta: Array, fitted: Array, weights: Array) -> tuple[Array, Array]:
        train, held_out, share = self._divide(fitted, weights)
        eta = eta.swapaxes(0, 1)
        before, after = (self.hazards(y, eta[..., 0], part) for part in (train, train + held_out))
        losses = share * held_out * self._row_losses(y, eta[..., 0], before, after)
        slopes = share * (self._diagonal(after) - self._diagonal(before) - after.seen + before.seen)
        return losses.T / np.where(weights > 0, weights, 1.0), slopes.T[..., None]

    def _divide(self, fitted: Array, weights: Array) -> tuple[Array, Array, Array]:
        """Return the weights fitted on and held out, (rows, fits), and the factor of the loss of each fold.

        A row that several folds hold out has a part of its weight in the loss of each, but all of it in risk sets.
        """
        held_out = np.ascontiguousarray((self.weights * (weights > 0)).T)
        share = weights.sum(axis=1) / np.maximum(held_out.sum(axis=0), _TINY)
        return np.ascontiguousarray(fitted.T), held_out, share

    def _row_losses(self, y: Array, eta: Array, before: Hazards, after: Hazards) -> Array:
        """Return losses of held-out rows, (rows, fits), whose weighted sum is that of all rows less the others'.

        It consists of the loss of held-out events among all rows, and of the increase of the risk sets of other events
        by held-out rows, log(1 + S_held_out / S_train) each, which these share in proportion to their hazards.
        """
        hazard = np.exp(eta - after.shift)
        own = self.sets.at_risk(after.rows - before.rows)
        rate = self.sets.up_to(before.events * np.log1p(own / before.sums) / np.maximum(own, _TINY))
        return y * (np.log(after.sums).take(self.sets.of_row, axis=0) + after.shift - eta) + hazard * rate


@document
@dataclass(eq=False, repr=False, kw_only=True)
class BilevelCoxPH(PenaltySelector):
    """Cox's proportional hazards with learned penalties: one, one per group of features, or one per feature.

    Targets are structured arrays of two fields: whether the event was seen (bool), and the time of the event or of
    censoring (not negative). Fits minimize the negative log partial likelihood (Breslow's for ties) + ½ sum penalty_k
    coef_k², as CoxPHSurvivalAnalysis of scikit-survival does with one alpha. Penalties minimize the loss of held-out
    rows. The loss of a fold is that of all rows less that of the rows fitted on (Verweij and van Houwelingen): held-out
    rows are compared with all rows at risk, not only with those of their fold, so that small folds and late events have
    their proper influence.

    Examples
    --------
    >>> import numpy as np
    >>> from bilevel.estimators import BilevelCoxPH
    >>> rng = np.random.default_rng(0)
    >>> X = rng.standard_normal((200, 5))
    >>> time, censored = rng.exponential(np.exp(-X[:, 0])), rng.exponential(2.0, 200)
    >>> y = np.array(list(zip(time <= censored, np.minimum(time, censored))), [("event", bool), ("time", float)])
    >>> model = BilevelCoxPH(random_state=0).fit(X, y)
    >>> model.predict_survival_function(X[:2]).shape
    (2, 200)
    """

    fit_intercept: bool = field(default=True, init=False)  # centers columns; hazards have no intercept

    _classifies = True  # by whether the event was seen, so that folds are stratified
    _many_outputs = True

    _entries: ClassVar[str] = """
unique_times_ : ndarray of shape (n_times,)
    Times of events and of censoring, sorted.
"""

    def _validate(self, X: Any, y: Any, sample_weight: Any) -> tuple[Any, Array, Groups]:
        if y is None:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None.")
        return super()._validate(X, _to_columns(y, "y"), sample_weight)

    def _encode(self, y: Array, y_val: Array | None, weights: Array) -> tuple[Array, Any]:
        if not (weights * y[:, 0]).any():
            raise ValueError("All rows of `y` that have weight are censored; give rows whose event was seen.")
        return y, y_val

    def _split(self, X: Any, y: Array, weights: Array, cv_groups: Any) -> list[tuple[Array, Array]]:
        with warnings.catch_warnings():  # few events or few censored rows are no problem
            warnings.filterwarnings("ignore", "The least populated class", UserWarning)
            return super()._split(X, y[:, 0], weights, cv_groups)

    def _make_rows(
        self, X: Any, y: Array, groups: Groups, sample_weight: Any, X_val: Any, y_val: Any, cv_groups: Any
    ) -> TrainingData:
        """Sort rows by decreasing time."""
        y_val = None if y_val is None else _to_columns(y_val, "y_val")
        data = super()._make_rows(X, y, groups, sample_weight, X_val, y_val, cv_groups)
        return data.take(np.argsort(-data.y[:, 1], kind="stable"))

    def _make_model(self, data: TrainingData) -> InnerModel:
        loss = Cox(data.y[:, 1], data.weights)
        return RidgeGLM(data.X, data.y[:, :1], loss, penalized=data.groups.penalized, intercept=False)

    def _learn(self, data: TrainingData) -> tuple[Array, Array]:
        coef, intercept = super()._learn(data)
        sets, (events, times) = RiskSets(data.y[:, 1]), data.y.T
        hazards = data.weights * np.exp(data.X @ coef[:, 0])
        steps = sets.at_time(data.weights * events) / sets.at_risk(hazards)
        self.unique_times_ = times[sets.first][::-1]
        self._baseline = np.cumsum(steps[::-1])  # Breslow's cumulative hazard of scaled rows
        return coef, intercept

    def _set_model(self, coef: Array, intercept: Array) -> None:
        self.coef_, self.intercept_, self._shift = coef[0], 0.0, float(intercept[0])

    def predict(self, X: Any) -> Array:
        """Return the risk score X @ coef_ of each row: the higher, the sooner the event."""
        return self._linear_predictor(X)

    def predict_cumulative_hazard_function(self, X: Any) -> Array:
        """Return the cumulative hazard of each row at `unique_times_`, (samples, times)."""
        return np.exp(self.predict(X) + self._shift)[:, None] * self._baseline

    def predict_survival_function(self, X: Any) -> Array:
        """Return the survival probability of each row at `unique_times_`, (samples, times)."""
        return np.exp(-self.predict_cumulative_hazard_function(X))

    def score(self, X: Any, y: Any) -> float:
        """Return Harrell's concordance index: the share of comparable pairs whose riskier row has its event first."""
        events, times = _to_columns(y, "y").T
        return concordance_index(events > 0, times, self.predict(X))


def _to_columns(y: Any, name: str) -> Array:
    """Return events and times as two columns of numbers."""
    kinds = [y.dtype[field].kind for field in y.dtype.names or ()] if isinstance(y, Array) and y.ndim == 1 else []
    if len(kinds) != 2 or kinds[0] != "b" or kinds[1] not in "iuf":
        found = f"an array of {y.dtype} and shape {y.shape}" if isinstance(y, Array) else type(y).__name__
        raise ValueError(
            f"`{name}` must be a structured array of two fields, whether the event was seen (bool) and its time (float)"
            f", as np.array([(True, 2.5)], [('event', bool), ('time', float)]). Got {found}."
        )
    events, times = (y[field] for field in y.dtype.names)
    assert_all_finite(times, input_name=name)
    if (times < 0).any():
        raise ValueError(f"Some times of `{name}` are negative; shift them so that the first is 0 or later.")
    return np.column_stack([events, times]).astype(float)


def concordance_index(events: Array, times: Array, risk: Array) -> float:
    """Return the share of comparable pairs that the risk orders correctly; equal risks count half.

    A row with an event is compared with each row that is later, or censored at the same time.
    """
    correct, pairs = 0.0, 0
    for time, own in zip(times[events], risk[events], strict=True):
        later = risk[(times > time) | ((times == time) & ~events)]
        correct += np.sum(later < own) + np.sum(later == own) / 2
        pairs += len(later)
    if not pairs:
        raise ValueError("No two rows of `y` can be compared: none is later than an event.")
    return float(correct / pairs)

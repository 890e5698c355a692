"""Cox's proportional hazards with learned penalties; targets and predictions are as in scikit-survival."""

import warnings
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
from sklearn.utils import assert_all_finite

from bilevel.estimators.base import all_or_nothing
from bilevel.estimators.cox import Cox, RiskSets
from bilevel.estimators.glm import RidgeGLM
from bilevel.estimators.groups import Groups
from bilevel.estimators.penalties import PenaltySelector, Rows

_BLOCK = 512  # rows whose pairs are counted one by one


class StepFunction(NamedTuple):
    """A function that is y[k] from x[k] to x[k + 1], and `before` until x[0]."""

    x: np.ndarray
    y: np.ndarray
    before: float

    def __call__(self, at: Any) -> Any:
        return np.append(self.before, self.y)[np.searchsorted(self.x, at, side="right")]


@dataclass(eq=False, repr=False, kw_only=True)
class BilevelCoxPH(PenaltySelector):
    """Cox's proportional hazards with one penalty, one for each group of features or one for each feature, all learned.

    Fits minimize the negative log partial likelihood (Breslow's for ties) + ½ sum penalty_k coef_k², as does
    `CoxPHSurvivalAnalysis(alpha)` of scikit-survival. Penalties are learned over folds, and their structure is chosen,
    as in `BilevelLogisticRegression`. What a fold costs is the loss of all rows less that of the rows fitted on
    (Verweij and van Houwelingen): held-out rows are compared with all rows at risk, not only with those of their fold,
    so that small folds and late events count as they should.

    Parameters
    ----------
    structure, groups, unpenalized, prior_scale, scoring, standardize, max_iter, tol, random_state, verbose : as there
    cv : number of folds (shuffled, each with its part of the events), a splitter of scikit-learn, or pairs of numbers
        of rows

    Attributes
    ----------
    coef_ : (features,)
    unique_times_ : times of events and of censoring, sorted
    penalties_, penalty_structure_, prior_scale_, candidates_, penalty_table_, history_ : as there
    n_iter_, n_features_in_, feature_names_in_ : as in scikit-learn

    Examples
    --------
    >>> import numpy as np
    >>> from bilevel.estimators import BilevelCoxPH
    >>> rng = np.random.default_rng(0)
    >>> X = rng.standard_normal((200, 5))
    >>> time, censored = rng.exponential(np.exp(-X[:, 0])), rng.exponential(2.0, 200)
    >>> y = np.array(list(zip(time <= censored, np.minimum(time, censored))), [("event", bool), ("time", float)])
    >>> model = BilevelCoxPH(random_state=0).fit(X, y)
    >>> model.predict_survival_function(X[:2], return_array=True).shape
    (2, 200)
    """

    fit_intercept: bool = field(default=True, init=False)  # hazards have none of their own; columns are centered

    _classifies = True  # by whether the event was seen, so that each fold has its part of the events
    _many_outputs = True

    @all_or_nothing
    def fit(
        self, X: Any, y: Any, sample_weight: Any = None, *, X_val: Any = None, y_val: Any = None, cv_groups: Any = None
    ) -> Self:
        """Learn the penalties over folds, fit the model with them to all rows, and return the estimator.

        Parameters
        ----------
        X : dense or sparse, (samples, features)
        y : a structured array of two fields: whether the event was seen (bool), and the time (not negative)
        sample_weight : of rows, in the fits and in the loss of held-out rows; 2 means the row twice
        X_val, y_val : rows to learn the penalties by, in the place of folds of X
        cv_groups : of rows, for a splitter that needs groups, such as GroupKFold
        """
        if y is None:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None.")
        y, self._target_type = _read(y, "y"), y.dtype
        y_val = None if y_val is None else _read(y_val, "y_val")
        return super().fit(X, y, sample_weight, X_val=X_val, y_val=y_val, cv_groups=cv_groups)

    def _encode(self, y: np.ndarray, y_val: np.ndarray | None, weights: np.ndarray) -> tuple[np.ndarray, Any]:
        if not (weights * y[:, 0]).any():
            raise ValueError("All rows of `y` that have weight are censored; give rows whose event was seen.")
        return y, y_val

    def _split(self, X: Any, y: np.ndarray, weights: np.ndarray, cv_groups: Any) -> list[tuple[np.ndarray, np.ndarray]]:
        with warnings.catch_warnings():  # the classes are events and censored rows, of which either may be few
            warnings.filterwarnings("ignore", "The least populated class", UserWarning)
            return super()._split(X, y[:, 0], weights, cv_groups)

    def _make_rows(self, *parts: Any) -> Rows:
        """Sort rows by time, the latest first; targets are again as the user has them, for a score."""
        rows = super()._make_rows(*parts)
        order = np.argsort(-rows.y[:, 1], kind="stable")
        folds = rows.folds._replace(fitted=rows.folds.fitted[:, order], held_out=rows.folds.held_out[:, order])
        y = rows.y[order]
        targets = np.empty(len(y), self._target_type)
        for name, column in zip(self._target_type.names, y.T, strict=True):
            targets[name] = column
        return Rows(rows.X[order], y, rows.weights[order], folds, targets)

    def _make_ridge(self, rows: Rows, groups: Groups) -> RidgeGLM:
        loss = Cox(rows.y[:, 1], rows.weights)
        return RidgeGLM(rows.X, rows.y[:, :1], loss, penalized=groups.penalized, intercept=False)

    def _learn(self, rows: Rows, groups: Groups) -> tuple[np.ndarray, np.ndarray]:
        coef, intercept = super()._learn(rows, groups)
        self._set_baseline(rows, rows.X @ coef[:, 0])
        return coef, intercept

    def _set_baseline(self, rows: Rows, risk: np.ndarray) -> None:
        """Note Breslow's cumulative hazard, of rows as they were scaled."""
        sets, (events, times) = RiskSets(rows.y[:, 1]), rows.y.T
        steps = sets.at_time(rows.weights * events) / sets.at_risk(rows.weights * np.exp(risk))
        self.unique_times_ = times[sets.first][::-1]
        self._baseline = np.cumsum(steps[::-1])

    def _set_model(self, coef: np.ndarray, intercept: np.ndarray) -> None:
        self.coef_, self.intercept_, self._shift = coef[0], 0.0, float(intercept[0])

    def predict(self, X: Any) -> np.ndarray:
        """Return the risk score X @ coef_ of each row: the higher, the sooner the event."""
        return self._score(X)

    def predict_cumulative_hazard_function(self, X: Any, return_array: bool = False) -> np.ndarray:
        """Return the cumulative hazard of each row, a function of time, or an array, (samples, len(unique_times_))."""
        hazards = np.exp(self.predict(X) + self._shift)[:, None] * self._baseline
        return hazards if return_array else _functions(self.unique_times_, hazards, 0.0)

    def predict_survival_function(self, X: Any, return_array: bool = False) -> np.ndarray:
        """Return the probability of no event so far, a function of time, or an array, (samples, len(unique_times_))."""
        survival = np.exp(-self.predict_cumulative_hazard_function(X, return_array=True))
        return survival if return_array else _functions(self.unique_times_, survival, 1.0)

    def score(self, X: Any, y: Any) -> float:
        """Return Harrell's concordance index: the part of comparable pairs in which the riskier row comes first."""
        events, times = _read(y, "y").T
        return concordance_index(events > 0, times, self.predict(X))


def _functions(times: np.ndarray, values: np.ndarray, before: float) -> np.ndarray:
    out = np.empty(len(values), dtype=object)
    out[:] = [StepFunction(times, row, before) for row in values]
    return out


def _read(y: Any, name: str) -> np.ndarray:
    """Return events and times as two columns of numbers."""
    fields = getattr(getattr(y, "dtype", None), "names", None)
    if fields is None or len(fields) != 2 or y.ndim != 1:
        found = f"an array of {y.dtype} and shape {y.shape}" if isinstance(y, np.ndarray) else type(y).__name__
        raise ValueError(
            f"`{name}` must be a structured array of two fields, whether the event was seen (bool) and its time (float)"
            f", as np.array([(True, 2.5)], [('event', bool), ('time', float)]). Got {found}."
        )
    events, times = y[fields[0]], y[fields[1]]
    if events.dtype != bool:
        raise ValueError(f"The first field of `{name}`, {fields[0]!r}, must be of bool. Got {events.dtype}.")
    if times.dtype.kind not in "iuf":
        raise ValueError(f"The second field of `{name}`, {fields[1]!r}, must be of numbers. Got {times.dtype}.")
    assert_all_finite(times, input_name=name)
    if (times < 0).any():
        raise ValueError(f"Some times of `{name}` are negative; shift them so that the first is 0 or later.")
    return np.column_stack([events, times]).astype(float)


def concordance_index(events: np.ndarray, times: np.ndarray, risk: np.ndarray) -> float:
    """Return the part of comparable pairs that the risk orders rightly; equal risks count half.

    A row with an event is compared with every row that is later, or censored at the same time.
    """
    order = np.lexsort([events, -times])  # the latest first, and of tied rows the censored
    events, times, risk = events[order], times[order], risk[order]
    new = np.append(True, (np.diff(times) != 0) | (events[1:] != events[:-1]))
    before = np.maximum.accumulate(np.where(new, np.arange(len(risk)), 0))[events]
    if not before.any():
        raise ValueError("No two rows of `y` can be compared: none is later than an event.")
    # Of the rows before an event, whole blocks are sorted, and the others looked at one by one.
    risk_of_events, blocks, right = risk[events], before // _BLOCK * _BLOCK, 0.0
    for start in np.unique(blocks):
        own, last = risk_of_events[blocks == start][:, None], before[blocks == start][:, None]
        known, near = np.sort(risk[:start]), risk[start : start + _BLOCK]
        right += (np.searchsorted(known, own, "left") + np.searchsorted(known, own, "right")).sum() / 2
        used = start + np.arange(len(near)) < last
        right += np.sum(used * ((near < own) + 0.5 * (near == own)))
    return right / float(before.sum())

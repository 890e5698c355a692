"""Estimators: `fit` with unusual rows, targets, weights and parameters, and `predict` of unusual rows."""

import inspect

import numpy as np
import pandas as pd
from hypothesis import strategies as st

from bilevel import estimators
from tests.faults.bad_input import tables, values
from tests.faults.bad_input.judge import Case

N, P = 24, 3
X = tables.rows(N)
LABELS, COUNTS = np.resize([0, 1, 1], N), np.resize([0, 1, 2, 5], N)
REAL = X[:, 0] + tables.rows(N, 1, seed=3)[:, 0]
SURVIVAL = tables.survival_times(np.exp(REAL), LABELS == 1)
TARGETS = {
    estimators.BilevelLogisticRegression: LABELS,
    estimators.BilevelSparseLogisticRegression: LABELS,
    estimators.DataCleaningClassifier: LABELS,
    estimators.BilevelRidge: REAL,
    estimators.BilevelElasticNet: REAL,
    estimators.BilevelHuberRegressor: REAL,
    estimators.BilevelPoissonRegressor: COUNTS,
    estimators.BilevelGammaRegressor: np.exp(REAL),
    estimators.BilevelCoxPH: SURVIVAL,
}
# Slices and scales of the rows.
ROWS = {
    "one row": (slice(0, 1), 1.0),
    "two rows": (slice(0, 2), 1.0),
    "three rows": (slice(0, 3), 1.0),
    "five rows": (slice(0, 5), 1.0),
    "no rows": (slice(0, 0), 1.0),
    "huge": (slice(None), 1e200),
    "large": (slice(None), 1e100),
    "tiny": (slice(None), 1e-200),
    "constant": (slice(None), 0.0),
}
WEIGHTS = [np.zeros(N), -np.ones(N), np.ones(N - 1), np.full(N, np.nan), np.full(N, 1e300), np.full(N, 1e-300), np.inf]
WEIGHTS += [np.ones((N, 2)), np.arange(N), np.where(np.arange(N) < 3, 1.0, 0.0), "balanced", pd.Series(np.ones(N)), 2.0]
PARAMETERS = {
    "groups": [[0, 0, 1], [0, 1], ["a", "b", "a"], [0.5, 1, 2], {}, [0, 0, 5], [[0], [1, 2]]],
    "unpenalized": [[0], [0, 1, 2], [5], [-1], ["c0"], [0.5], [0, 0], "c0", [True, False, False]],
    "cv": [2, 3, 24, 25, 1000, 1, 0, -1, [([0, 1], [2, 3])], [], [([0], [0])], iter([]), 2.5],
}


@st.composite
def cases(draw):
    """Return a case of one kind."""
    return draw(draw(st.sampled_from([_fits(), _fits(), _few(), _predicts(), _parameters()])))


def _case(what, act, extra=()):
    names = ("X", "y", "sample", "weight", "class", "label", "fold", "row", "feature", *extra)
    return Case(what, act, names, _complaint, others=("sklearn",))


@st.composite
def _fits(draw):
    cls = draw(st.sampled_from([*TARGETS]))
    odd = draw(st.sampled_from(["X", "X", "y", "y", "sample_weight", "X_val", "y_val"]))
    y = TARGETS[cls]
    given, targets = {"X": X, "y": y}, tables.survival if y is SURVIVAL else tables.column
    if odd.endswith("_val"):
        given |= {"X_val": X[:8], "y_val": y[:8]}
    strategies = {
        "X": tables.table(N, P),
        "y": targets(y),
        "sample_weight": values.among(WEIGHTS) | values.anything,
    }
    strategies |= {"X_val": tables.table(8, P), "y_val": targets(y[:8])}
    given[odd] = draw(strategies[odd])
    return _case(f"{cls.__name__}().fit({odd}={values.text(given[odd])})", lambda: (_fitted(cls, given), given["X"]))


@st.composite
def _few(draw):
    cls, name = draw(st.sampled_from([*TARGETS])), draw(st.sampled_from([*ROWS]))
    which, scale = ROWS[name]
    target_scale = draw(st.sampled_from([1.0, 1e-200, 1e100, 1e200, 0.0])) if TARGETS[cls] is not LABELS else 1
    rows, y = scale * X[which], TARGETS[cls][which]
    y = tables.survival_times(target_scale * y["time"], y["event"]) if y.dtype.names else target_scale * y
    what = f"{cls.__name__}().fit({name}, y times {target_scale:g})"
    return _case(what, lambda: (_fitted(cls, {"X": rows, "y": y}), rows))


@st.composite
def _predicts(draw):
    cls, odd = draw(st.sampled_from([*TARGETS])), draw(tables.table(N, P))
    method = "predict_proba" if hasattr(cls, "predict_proba") and draw(st.booleans()) else "predict"

    def act():
        if cls not in _models:
            _models[cls] = _fitted(cls, {"X": X, "y": TARGETS[cls]})
        getattr(_models[cls], method)(odd)
        return _models[cls], X

    return _case(f"{cls.__name__}.{method}({values.text(odd)})", act)


_models: dict = {}


@st.composite
def _parameters(draw):
    cls = draw(st.sampled_from([*TARGETS]))
    name = draw(st.sampled_from([*inspect.signature(cls).parameters]))
    value = draw(values.among(PARAMETERS[name]) | values.anything if name in PARAMETERS else values.anything)
    given = {"X": X, "y": TARGETS[cls]}
    what = f"{cls.__name__}({name}={values.text(value)}).fit"
    return _case(what, lambda: (_fitted(cls, given, **{name: value}), X), (name,))


def _fitted(cls, given, **parameters):
    return cls(**{"random_state": 0} | parameters).fit(**given)


def _complaint(answer):
    """Return which numbers of a fitted model are not finite, or None."""
    model, rows = answer
    if not np.isfinite(model.coef_).all() or not np.isfinite(getattr(model, "intercept_", 0.0)).all():
        return "coefficients are not finite"
    found = np.asarray(model.predict(rows))
    return None if found.dtype.kind not in "fc" or np.isfinite(found).all() else "predictions are not finite"

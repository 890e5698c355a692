"""Builders of problems with one or two invalid arguments."""

import warnings

import numpy as np
from hypothesis import strategies as st

import bilevel
from bilevel import problems
from bilevel._core.compilation import arithmetic
from bilevel.engine.metrics import cheap_metrics, exact_metrics
from tests.faults.bad_input import tables, values
from tests.faults.bad_input.judge import Case

X, X_VAL = tables.rows(), tables.rows(tables.N_OTHER, seed=1)
SIGNS, SIGNS_VAL = np.resize([1, -1], tables.N), np.resize([1, -1], tables.N_OTHER)
CLASSES, CLASSES_VAL = np.resize([0, 1, 2], tables.N), np.resize([0, 1, 2], tables.N_OTHER)
P, N, N_OTHER = tables.P, tables.N, tables.N_OTHER
CHOICES = ["class", "feature", "classes", "individual", "mean_squared", "coordinates", "random", ""]
DTYPES = ["float32", "float64", "float16", np.float32, float, int, "int32", None, np.dtype("f8"), "f4"]
GROUPS = [[0] * P, [0, 0, 1], [0, 2, 1], [1, 1, 1], [0.0, 1.0, 2.0], [-1, 0, 1], ["a", "b", "c"], [0, 1], [[0, 1, 2]]]


def _arguments(y, y_val, shape, n_outer):
    """Return the arguments of a builder of data: a valid value, and a strategy of others."""
    return {
        "X_train": (X, tables.table()),
        "y_train": (y, tables.column(y)),
        "X_val": (X_VAL, tables.table(N_OTHER)),
        "y_val": (y_val, tables.column(y_val)),
        "inner_var": (None, tables.variable(shape)),
        "outer_var": (None, tables.variable((n_outer,))),
        "outer_bounds": (None, tables.bounds((n_outer,))),
        "groups": (None, values.among(GROUPS) | values.anything),
        "dtype": ("float32", values.among(DTYPES) | values.anything),
        "seed": (0, values.anything),
    }


def _of_cleaning(arguments):
    del arguments["groups"]
    return arguments | {"regularization": (0.2, values.anything)}


def squared_selection(**given):
    return problems.penalty_selection(loss="squared", **given)


def softmax_selection(**given):
    return problems.penalty_selection(loss="softmax", **given)


_ROWS = ("X_train", "y_train", "X_val", "y_val")
_sizes = values.integers | values.anything
_choices = st.sampled_from(CHOICES) | values.anything
_drawn = {"dtype": ("float32", values.among(DTYPES) | values.anything), "seed": (0, values.anything)}
_counts = {"n_inner": (32, _sizes), "n_outer": (32, _sizes)}
BUILDERS = {
    problems.penalty_selection: _arguments(SIGNS, SIGNS_VAL, (P,), P)
    | {"loss": ("logistic", values.among(["squared", "softmax", "hinge"]) | values.anything)},
    squared_selection: _arguments(X[:, 0], X_VAL[:, 0], (P,), P),
    softmax_selection: _arguments(CLASSES, CLASSES_VAL, (3, P), 3) | {"per": ("class", _choices)},
    problems.data_cleaning: _of_cleaning(_arguments(CLASSES, CLASSES_VAL, (3, P), N)),
    problems.cross_validation: {
        "X": (X, tables.table()),
        "y": (SIGNS, tables.column(SIGNS)),
        "folds": (3, values.among([np.arange(N) % 3, np.zeros(N, int), np.arange(N), [0, 1]]) | values.anything),
        "loss": ("logistic", values.among(["squared", "softmax", "hinge"]) | values.anything),
        "prior_scale": (1.0, values.anything),
        **{name: pair for name, pair in _arguments(SIGNS, SIGNS_VAL, (3, P), P).items() if name not in _ROWS},
    },
    problems.quadratic: _counts
    | {"dim_inner": (4, _sizes), "dim_outer": (2, _sizes)}
    | {n: (v, values.anything) for n, v in (("smallest_eigenvalue", 0.5), ("largest_eigenvalue", 1.0))}
    | {n: (v, values.anything) for n, v in (("coupling", 0.1), ("common_linear", 0.0))}
    | _drawn,
    problems.breast_cancer: _drawn,
    problems.digits_cleaning: {"corruption": (0.5, values.anything), "n_train": (100, _sizes), "n_val": (50, _sizes)}
    | _drawn,
    problems.distillation: {"data": ("digits", _choices), "n_train": (100, _sizes)} | _drawn,
}


@st.composite
def cases(draw):
    """Return a case: a builder and its arguments, one or two of them unusual."""
    builder = draw(st.sampled_from([*BUILDERS][:4]) | st.sampled_from([*BUILDERS]))
    arguments = BUILDERS[builder]
    odd = draw(st.lists(st.sampled_from([*arguments]), min_size=1, max_size=draw(st.integers(1, 2)), unique=True))
    given = {name: draw(strategy) if name in odd else good for name, (good, strategy) in arguments.items()}
    if draw(st.integers(0, 30)) == 15:
        odd = [draw(st.sampled_from(["x", "Seed", "regularisation", "n"]))]
        given[odd[0]] = 1
    shown = ", ".join(f"{name}={values.text(given[name])}" for name in odd)
    # A message may name another argument than the invalid one if their sizes must agree.
    return Case(f"{builder.__name__}({shown})", lambda: builder(**given), tuple(arguments) + tuple(odd), complaint)


def complaint(problem):
    """Return what is wrong with a problem, or None."""
    if not isinstance(problem, bilevel.BilevelProblem):
        return f"a {type(problem).__name__}"
    with arithmetic(problem.dtype):
        found = {name: float(value) for name, value in cheap_metrics(problem.oracles, problem.start).items()}
    try:
        found |= exact_metrics(problem, problem.start, None)[0]
    except (np.linalg.LinAlgError, ValueError):  # there is no exact solution at the start
        return silent(problem, "value")
    bad = [name for name, value in found.items() if not np.isfinite(value)]
    return silent(problem, bad[0]) if bad else None


def silent(problem, name):
    """Return a complaint if a run does not warn that a metric is not finite at the start."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = bilevel.run(problem, bilevel.SOBA(1e-3, 1.0, 4), max_steps=2)
    is_told = result.status == "diverged" or any(issubclass(one.category, RuntimeWarning) for one in said)
    return None if is_told else f"{name} is not finite at the start, and a run ends {result.status}"

"""Hypothesis strategies of tables, labels and variables that are almost valid."""

import jax.numpy as jnp
import numpy as np
import pandas as pd
import scipy.sparse as sp
from hypothesis import strategies as st

from tests.faults.bad_input import values

N, N_OTHER, P = 12, 8, 3
SPARSE = ["csr", "csc", "coo", "lil", "dok", "dia", "bsr"]


def rows(n=N, p=P, seed=0):
    return np.random.default_rng(seed).standard_normal((n, p))


def _with(array, value, at=(2, 1)):
    array = array.copy()
    array[at] = value
    return array


def _frame(array, **changes):
    frame = pd.DataFrame(array, columns=[f"c{k}" for k in range(array.shape[1])])
    return frame.assign(**changes) if changes else frame


def table(n=N, p=P):
    """Return a strategy of tables of n rows and p columns, most of them with one defect."""
    plain = rows(n, p)
    filled = [float("nan"), float("inf"), -float("inf"), 1e200, -1e200, 1e308, 1e38, 1e30, 1e19, 1e-320, 1e15]
    entries = values.among(filled).map(lambda value: _with(plain, value))
    scaled = values.among([0.0, 1e-300, 1e-30, 1e-10, 1e10, 1e15, 1e18, 1e20, 1e100, 1e300]).map(lambda s: s * plain)
    kinds = ["f2", "f4", "f8", "longdouble", "i1", "i2", "i4", "i8", "u1", "u8", "?", "c8", "O", "U8", "S8"]
    typed = values.among(kinds).map(lambda kind: np.abs(10 * plain).astype(kind))
    integers = values.among([2**62, 2**53 + 1, -(2**63), 2**31]).map(lambda k: np.full((n, p), k))
    unsigned = st.just(np.full((n, p), 2**64 - 1, np.uint64))
    shapes = [(n,), (n, 0), (0, p), (0, 0), (n, p, 2), (), (1, p), (n, 1), (n + 1, p), (n, p + 1), (p, n)]
    shaped = values.among(shapes).map(lambda shape: np.ones(shape))
    lists = values.among([plain.tolist(), [[1.0], [1.0, 2.0]], [], [[]], [["a"] * p] * n, [[None] * p] * n])
    sparse = values.among(SPARSE).map(lambda kind: sp.csr_array(np.where(plain > 0, plain, 0)).asformat(kind))
    matrices = values.among(SPARSE).map(lambda kind: sp.csr_matrix(plain).asformat(kind))
    masked = values.among([np.ma.masked_greater(plain, 0), np.ma.masked_greater(plain, 99), np.ma.masked_all((n, p))])
    repeated = _frame(plain).set_axis(["c"] * p, axis=1)
    frames = [
        *(_frame(plain), repeated, _frame(plain, c0=pd.NA), _frame(plain, c0=None), _frame(plain, c0="a")),
        *(_frame(plain, c0=pd.Series(range(n), dtype="Int64")), _frame(plain, c0=pd.Timestamp(0))),
        *(_frame(plain, c0=pd.Categorical(["a", "b"] * (n // 2))), _frame(plain).set_axis(range(p), axis=1)),
        *(_frame(plain, c0=pd.array([1, pd.NA] * (n // 2), dtype="Int64")), _frame(plain).iloc[:0]),
        *(_frame(plain, c0=float("nan")), _frame(plain, c0=True), _frame(plain, c0=1.0), _frame(plain, extra=1.0)),
    ]
    constant = values.among([np.zeros((n, p)), np.ones((n, p)), np.full((n, p), 7), np.repeat(plain[:, :1], p, 1)])
    strange = [np.matrix(plain), jnp.asarray(plain), plain[:, ::-1], np.asfortranarray(plain), memoryview(plain)]
    strange += [plain.view([("a", "f8")] * 1), (plain, plain), {"a": plain}, iter(plain), plain.astype(str)]
    return st.one_of(
        *(entries, scaled, typed, integers, unsigned, shaped, lists, sparse, matrices, masked),
        *(values.among(frames), constant, values.among(strange), values.anything, st.just(plain)),
    )


def column(good):
    """Return a strategy of targets, most of them with one defect, from valid ones."""
    good = np.asarray(good)
    n, floats = len(good), good.astype(float)
    entries = [float("nan"), float("inf"), 1e200, 1e39, 1e20, -1.0, 0.5, 7.0]
    odd = [
        *(np.zeros(n), np.ones(n, int), np.full(n, -1), good[:-1], good[:0], good[:1], good[:, None], good[None]),
        *(np.column_stack([good, good]), good.astype(str), good.astype(object), good.astype(complex), good > 0),
        *(
            good.astype("u8"),
            good.astype("f2"),
            good.tolist(),
            pd.Series(good),
            pd.Series(np.sign(floats)).astype("Int64"),
        ),
        *(pd.Series(good.astype(object)).where(good == good[0], None), pd.Series(floats).where(good == good[0])),
        *(np.ma.masked_equal(good, good[0]), np.array(["a", "b"] * n)[:n], np.array([None] * n), np.arange(n)),
        *(np.full(n, 2**31), np.full(n, 2**62), np.full(n, 2**64 - 1, np.uint64), np.arange(n) * 1000, ["a", 1] * n),
        *(pd.Categorical(good), sp.csr_array(np.atleast_2d(floats)), np.full(n, np.datetime64("2020-01-01"))),
    ]
    changed = values.among(entries).map(lambda value: _with(floats, value, 0))
    return st.one_of(changed, values.among(odd), values.anything, st.just(good))


def survival_times(times, events):
    """Return targets with two fields."""
    return np.array(list(zip(events, times, strict=True)), [("event", bool), ("time", float)])


def survival(good):
    """Return a strategy of survival times, most of them with one defect, from valid ones."""
    events, times, n = good["event"], good["time"], len(good)
    changed = [np.nan, np.inf, -1.0, 0.0, 1e200, 1e308, 1e-320]
    whole = [-times, 0 * times, np.ones(n), 1e300 * times, 1e-300 * times, np.arange(1, n + 1)]
    kinds = [("f8", "f8"), ("i8", "i8"), ("U8", "f8"), ("O", "O"), ("?", "U8"), ("c16", "f8"), ("f8", "?")]
    odd = [
        *(survival_times(times, np.zeros(n, bool)), survival_times(times, np.ones(n, bool))),
        *(survival_times(other, events) for other in whole),
        *(good.astype([("event", event), ("time", time)]) for event, time in kinds),
        *(good.astype([("a", "?"), ("b", "f8")]), good.astype([("time", "?"), ("event", "f8")]), good[["time"]]),
        *(good[["time", "event"]], times, events, np.column_stack([events, times]), good.tolist(), good[:-1]),
        *(good[:0], good[:1], good[:, None], good[None], pd.DataFrame(good), np.ma.masked_array(good)),
        *(np.array(list(zip(events, times, times, strict=True)), [("e", "?"), ("t", "f8"), ("u", "f8")]), {"time": 1}),
    ]
    entries = values.among(changed).map(lambda value: survival_times(_with(times, value, 0), events))
    return st.one_of(entries, values.among(odd), values.anything, st.just(good))


def variable(shape):
    """Return a strategy of starts, most of them with one defect."""
    good = np.zeros(shape)
    odd = [good.astype(int), good + np.nan, good + 1e39, good + 1e300, good[:-1], good.tolist(), (good,), {"a": good}]
    odd += [
        good.astype("f2"),
        good.astype("f4"),
        good + 1j,
        good + 800.0,
        good - 800.0,
        [],
        {},
        None,
        [None],
        jnp.ones(shape),
    ]
    return st.one_of(values.among(odd), values.anything)


def bounds(shape):
    """Return a strategy of outer bounds."""
    side = st.one_of(values.anything, variable(shape), values.among([None, -5.0, 0.0, 5, -np.inf, np.ones(shape)]))
    return st.tuples(side, side) | values.anything

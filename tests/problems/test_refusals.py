"""Input that is refused with its name and a way out: traced, too precise, reordered, or a whole model."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import bilevel
from bilevel import problems
from bilevel.oracles import HostData
from tests import cases

RNG = np.random.default_rng(5)
X, Y = RNG.standard_normal((24, 3)), np.resize([1, -1, -1], 24)
CLASSES = (Y + 1) // 2


def loss(z, x, row):
    return (row[0] @ z - row[1]) ** 2 / 2 + jnp.exp(x) @ z**2 / 2


def own(inner_loss=loss, rows=(X, 1.0 * Y), z=X[0], x=X[0], **more):
    return bilevel.BilevelProblem.from_losses(inner_loss, loss, rows, rows, z, x, **more)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (lambda value: (value, value), "tuple"),
        (lambda value: (value, {"fit": value}), "tuple"),
        (lambda value: {"loss": value}, "dict"),
        (lambda value: [value], "list"),
        (lambda value: None, "NoneType"),
    ],
)
def test_an_auxiliary_output_of_a_loss_is_named(answer, kind):
    due = rf"must return one real scalar for one sample, got a {kind}; return only the loss, without auxiliary outputs"
    with pytest.raises(ValueError, match=f"`inner_loss` {due}"):
        own(lambda z, x, row: answer(loss(z, x, row)))


def traced(transform, function):
    start = jnp.zeros(3)
    if transform == "grad":
        return jax.grad(lambda x: jnp.sum(function(x)))(start)
    return jax.vmap(function)(start[None]) if transform == "vmap" else jax.jit(function)(start)


@pytest.mark.parametrize("transform", ["jit", "grad", "vmap"])
@pytest.mark.parametrize("act", ["own", "ridge", "logistic", "quadratic", "certificate", "data"])
def test_what_computes_with_concrete_numbers_says_that_it_cannot_be_traced(act, transform):
    problem = {
        "ridge": lambda: problems.penalty_selection(X, Y, X, Y, loss="squared"),
        "logistic": lambda: problems.penalty_selection(X, Y, X, Y),
        "quadratic": cases.quadratic,
        "certificate": cases.quadratic,
    }.get(act, lambda: own(strongly_convex=True))()
    point = problem.start
    acts = {
        "certificate": lambda x: problem.certifier()(point._replace(outer_var=x)).error_bound,
        "data": lambda x: problems.penalty_selection(x * X, Y, X, Y, loss="squared").start.outer_var,
    }
    with pytest.raises(TypeError, match=r"is traced by JAX.*cannot be traced\. Call it outside of `jax.jit`"):
        traced(transform, acts.get(act, lambda x: problem.exact_solver(x).hypergrad))


@pytest.mark.parametrize(
    "stopped", [lambda z, x: (jax.lax.stop_gradient(z), x), lambda z, x: (z, jax.lax.stop_gradient(x))]
)
def test_check_names_stop_gradient_as_a_cause(stopped):
    problem = own(lambda z, x, row: loss(*stopped(z, x), row) + z @ z)
    with pytest.raises(ValueError, match=r"differs from finite differences.*uses `stop_gradient`"):
        problem.check()


@pytest.mark.parametrize("name", ["z", "x"])
def test_a_model_of_equinox_is_to_be_partitioned(name):
    model = eqx.nn.MLP(3, "scalar", 4, 1, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"eqx\.partition\(model, eqx\.is_inexact_array\).*combine them"):
        own(**{name: model})


WIDE = X.astype(np.longdouble)
TOO_PRECISE = {
    "`inner_data`": lambda: own(rows=(WIDE, Y)),
    "`inner_var`": lambda: own(z=WIDE[0]),
    "`outer_var`": lambda: own(x=WIDE[0]),
    "`outer_bounds`": lambda: own(outer_bounds=(-np.ones(3, np.longdouble), None)),
    "`X_train`": lambda: problems.penalty_selection(WIDE, Y, X, Y),
    "`X_val`": lambda: problems.penalty_selection(X, CLASSES, WIDE, CLASSES, loss="softmax", per="class"),
    "`y_train`": lambda: problems.penalty_selection(X, WIDE[:, 0], X, Y, loss="squared"),
    "`X`": lambda: problems.cross_validation(WIDE, Y, dtype="float64"),
    "`outer_var` ": lambda: own(strongly_convex=True).exact_solver(WIDE[0]),
    "`inner_data` ": lambda: own(rows=HostData((WIDE, Y))),
    "`point`": lambda: cases.quadratic().certifier()(cases.quadratic().start._replace(outer_var=WIDE[0])),
}


@pytest.mark.skipif(np.dtype(np.longdouble).itemsize == 8, reason="longdouble is float64 here")
@pytest.mark.parametrize("name", list(TOO_PRECISE))
def test_extended_precision_is_refused_by_name(name):
    told = rf"{name.strip()} has the dtype float\d+, in which JAX does not compute; use `.astype\(np.float64\)`"
    with pytest.raises(ValueError, match=told):
        TOO_PRECISE[name]()


@pytest.mark.parametrize("dtype", ["complex128", "object"])
def test_points_that_are_not_real_are_refused(dtype):
    problem = cases.quadratic()
    x = np.zeros(3, dtype)
    for act in (problem.exact_solver, lambda x: problem.certifier()(problem.start._replace(outer_var=x))):
        with pytest.raises(ValueError, match="real"):
            act(x)


FRAME = pd.DataFrame(X, columns=["age", "dose", "weight"])


@pytest.mark.parametrize(
    "build",
    [
        lambda other: problems.penalty_selection(FRAME, Y, other, Y, loss="squared"),
        lambda other: problems.penalty_selection(FRAME, Y, other, Y),
        lambda other: problems.penalty_selection(FRAME, CLASSES, other, CLASSES, loss="softmax", per="class"),
        lambda other: problems.data_cleaning(FRAME, CLASSES, other, CLASSES),
    ],
)
def test_validation_rows_with_columns_in_another_order_are_refused(build):
    with pytest.raises(
        ValueError, match=r"in the same order, got \['age', 'weight', 'dose'\] and \['age', 'dose', 'weight'\]; use"
    ):
        build(FRAME[["age", "weight", "dose"]])
    with pytest.raises(ValueError, match=r"the columns of `X_train`.*'height'"):
        build(FRAME.rename(columns={"weight": "height"}))
    assert build(FRAME.copy()).n_inner == build(X).n_inner == 24


@pytest.mark.parametrize(
    ("within", "features", "place"),
    [
        (lambda frame: frame, lambda row: row, ""),
        (lambda frame: (frame, X[:, 0]), lambda row: row[0], r"\[0\]"),
        (lambda frame: {"features": frame}, lambda row: row["features"], r"\['features'\]"),
        (lambda frame: bilevel.HostData(frame), lambda row: row, ""),
    ],
    ids=["frame", "tuple", "dictionary", "rows on the host"],
)
def test_reordered_columns_of_own_rows_are_refused_and_other_columns_are_not(within, features, place):
    def made(outer):
        def inner_loss(z, x, row):
            return (features(row)[:3] @ z) ** 2

        def outer_loss(z, x, row):
            return (features(row)[:3] @ z - x[0]) ** 2

        data = within(FRAME), within(outer)
        return bilevel.BilevelProblem.from_losses(inner_loss, outer_loss, *data, X[0], X[0], dtype="float64")

    with pytest.raises(ValueError, match=rf"use `outer_data{place}\[inner_data{place}.columns\]`"):
        made(FRAME[["dose", "age", "weight"]])
    assert made(FRAME.assign(more=1.0)).n_outer == 24


@pytest.mark.parametrize("logit", [-30.0, 30.0, 36.0])
def test_derivatives_of_weights_near_0_and_1_are_exact(logit):
    problem = problems.data_cleaning(X, CLASSES, X, CLASSES, outer_bounds=None, dtype="float64")
    z = RNG.standard_normal((2, 3))
    point = bilevel.Point(z, np.full(24, logit), z)
    scores = X @ z.T
    losses = np.logaddexp(*scores.T) - scores[np.arange(24), CLASSES]
    small = np.exp(-np.longdouble(abs(logit)))
    expected = (small / (1 + small) ** 2 * losses / 24).astype(float)
    with jax.enable_x64(True):
        found = jax.jit(problem.oracles.inner_grad_outer)(point)
    np.testing.assert_allclose(np.sort(np.asarray(found)), np.sort(expected), rtol=1e-13)


@pytest.mark.parametrize("margin", [-30.0, 30.0])
def test_curvatures_of_logistic_rows_far_from_the_boundary_are_exact(margin):
    rows = np.array([[margin]])
    problem = problems.penalty_selection(rows, [1], rows, [1], inner_var=[1.0], outer_var=[-90.0], dtype="float64")
    with jax.enable_x64(True):
        found = float(jax.jit(problem.oracles.hvp)(bilevel.Point(*(np.ones(1), np.full(1, -90.0), np.ones(1))))[0])
    small = np.exp(-np.longdouble(30))
    np.testing.assert_allclose(found, float(900 * small / (1 + small) ** 2), rtol=1e-13)

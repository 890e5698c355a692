"""A user's own losses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevel
from bilevel.problems.penalized_linear import logistic
from tests import cases

X, Y, X_VAL, Y_VAL = cases.logistic_data(dim=6)


def inner_loss(inner_var, outer_var, sample):
    row, label = sample
    return logistic(label * (row @ inner_var)) + jnp.sum(jnp.exp(outer_var) * inner_var**2) / 2


def outer_loss(inner_var, outer_var, sample):
    row, label = sample
    return logistic(label * (row @ inner_var))


def problem(**changes):
    arguments = {
        "inner_loss": inner_loss,
        "outer_loss": outer_loss,
        "inner_data": (X, Y.astype(float)),
        "outer_data": (X_VAL, Y_VAL.astype(float)),
        "inner_var": np.zeros(6),
        "outer_var": np.full(6, -1.0),
        "dtype": "float32",
    }
    return bilevel.BilevelProblem.from_losses(**(arguments | changes))


def as_dict(variable):
    return {"left": variable[:2].reshape(1, 2), "right": {"rest": variable[2:]}}


def as_flat(tree):
    return jnp.concatenate([jnp.ravel(tree["left"]), tree["right"]["rest"]])


def nested_problem(**changes):
    def nested(loss):
        return lambda inner_var, outer_var, sample: loss(
            as_flat(inner_var), outer_var["penalty"], (sample["x"], sample["y"])
        )

    return problem(
        inner_loss=nested(inner_loss),
        outer_loss=nested(outer_loss),
        inner_data={"x": X, "y": Y.astype(float)},
        outer_data={"x": X_VAL, "y": Y_VAL.astype(float)},
        inner_var=as_dict(np.zeros(6)),
        outer_var={"penalty": np.full(6, -1.0)},
        **changes,
    )


@pytest.mark.parametrize("name", cases.marked(["SRBA", "F2SA"], quick=("SRBA",)))
def test_a_dict_of_arrays_runs_like_the_flat_vector(name):
    solver = dataclasses.replace(cases.SOLVERS[name], step_size=0.3, outer_ratio=1.0)
    settings = {"dtype": "float64", "strongly_convex": True}
    flat = bilevel.run(problem(**settings), solver, max_steps=20, eval_every=20)
    nested = bilevel.run(nested_problem(**settings), solver, max_steps=20, eval_every=20)
    for part in ("inner_var", "v"):
        cases.assert_trees_close(getattr(nested.point, part), as_dict(getattr(flat.point, part)), atol=1e-14)
    np.testing.assert_allclose(nested.point.outer_var["penalty"], flat.point.outer_var, rtol=1e-12)
    for metric in ("value", "hypergrad_norm_sq", "outer_value"):
        np.testing.assert_allclose(nested.history[metric], flat.history[metric], rtol=1e-8)


def test_generic_exact_solution_equals_the_one_of_logistic_selection():
    special = bilevel.problems.penalty_selection(
        X, Y, X_VAL, Y_VAL, inner_var=np.zeros(6), outer_var=np.full(6, -1.0), dtype="float64"
    )
    generic = problem(strongly_convex=True, dtype="float64")
    x = np.linspace(-3, 1, 6)
    cases.assert_trees_close(generic.exact_solver(x, None)[:4], special.exact_solver(x)[:4], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("x64", [False, True])
def test_the_dtype_of_the_data_is_the_default_as_in_jax(x64):
    with jax.enable_x64(x64):
        wide = np.dtype(np.float64 if x64 else np.float32)
        data, narrow = (X, Y, X_VAL, Y_VAL), (X.astype(np.float32), Y, X_VAL.astype(np.float32), Y_VAL)
        assert problem(dtype=None).dtype == wide
        assert problem(dtype="float64").dtype == np.float64
        assert problem(dtype="float32").dtype == np.float32
        assert bilevel.problems.penalty_selection(*data).dtype == wide
        assert bilevel.problems.penalty_selection(*narrow, loss="squared").dtype == np.float32
        integers = np.eye(4, dtype=int), np.arange(4), np.eye(4, dtype=int), np.arange(4)
        assert bilevel.problems.penalty_selection(*integers, loss="softmax", per="class").dtype == wide
        assert bilevel.problems.data_cleaning(X, Y > 0, narrow[2], Y_VAL > 0).dtype == wide, "the wider of two"
        assert bilevel.problems.quadratic(64, 64, 5, 2).dtype == wide


def test_integers_in_the_data_stay_integers():
    def loss(inner_var, outer_var, sample):
        row, label = sample
        return outer_loss(inner_var, outer_var, (row, label.astype(jnp.float32))) + jnp.sum(inner_var**2)

    made = problem(inner_loss=loss, inner_data=(X, Y))
    leaves = made.oracles.inner_samples.leaves
    assert made.dtype == np.float32
    assert leaves[0].dtype == np.float32 and np.issubdtype(leaves[1].dtype, np.integer)
    bilevel.run(made, bilevel.SRBA(batch_size=8), max_steps=3)


def test_check_passes_good_losses_and_names_a_wrong_derivative():
    assert max(problem().check().values()) < 1e-5

    @jax.custom_jvp
    def crooked(margin):
        return margin**2

    crooked.defjvp(lambda primals, tangents: (primals[0] ** 2, 3 * primals[0] * tangents[0]))

    def wrong(inner_var, outer_var, sample):
        return crooked(sample[0] @ inner_var)

    with pytest.raises(ValueError, match=r"`outer_grad` differs from finite differences"):
        problem(outer_loss=wrong).check()


def test_check_names_a_gradient_that_is_not_finite():
    def cusp(inner_var, outer_var, sample):
        return inner_loss(inner_var, outer_var, sample) + jnp.sqrt(0 * inner_var[0])

    with pytest.raises(ValueError, match=r"`inner_grad`"):
        problem(inner_loss=cusp).check()


def test_bounds_may_be_numbers_trees_or_half_open():
    bounds = ({"penalty": np.full(6, -2.0)}, None)
    made = nested_problem(outer_bounds=bounds)
    lower, upper = made.oracles.outer_bounds
    assert np.all(lower["penalty"] == -2) and np.all(upper["penalty"] == np.inf)
    run = bilevel.run(nested_problem(outer_bounds=(-1.0, 2.0)), bilevel.SRBA(1.0, 0.01, 8), max_steps=50)
    assert run.point.outer_var["penalty"].min() == -1.0


def calls_back(z, x, s):
    return jax.pure_callback(lambda z: z[0], jax.ShapeDtypeStruct((), z.dtype), z)


def keeping():
    kept = []
    return lambda z, x, s: kept.append(z) or jnp.sum(kept[0])


def fickle(times):
    left = iter(range(times))
    return lambda z, x, s: jnp.sum(z) if next(left, None) is not None else z


def test_a_loss_that_changes_its_answer_is_named_by_a_run():
    made = problem(inner_loss=fickle(2))
    with pytest.raises(
        ValueError, match=r"`inner_loss` must return one real scalar for one sample, got float\d\d\[6\]"
    ):
        bilevel.run(made, bilevel.SOBA(0.1, 1.0, 8), max_steps=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inner_data": (X, Y[:-1])}, r"`inner_data`: leaves have \[52, 53\] samples"),
        ({"outer_data": (X_VAL[:0], Y_VAL[:0])}, "`outer_data` is empty"),
        ({"outer_data": ()}, "`outer_data` holds no array"),
        ({"inner_data": (X, 1.0)}, "without axes"),
        ({"inner_data": (np.where(X > 1, np.inf, X), Y)}, "`inner_data` holds NaN or infinite"),
        ({"inner_var": np.full(6, np.nan)}, "`inner_var` holds NaN"),
        ({"inner_var": np.zeros(6, int)}, "`inner_var` has a leaf of dtype int64.*use floats"),
        ({"outer_var": {}}, "`outer_var` holds no array"),
        ({"inner_var": np.zeros(4)}, "`inner_loss` failed on one sample.*shapes"),
        ({"inner_loss": lambda z, x, s: z}, "`inner_loss` must return one real scalar"),
        ({"outer_loss": lambda z, x, s: (z[0], z[1])}, "`outer_loss` must return one real scalar"),
        ({"outer_loss": lambda z, x, s: jnp.sum(z > 0)}, "`outer_loss` must return one real scalar"),
        (
            {"inner_loss": lambda z, x, s: None},
            "`inner_loss` must return one real scalar for one sample, got a NoneType",
        ),
        (
            {"outer_loss": lambda z, x, s: {"loss": z[0]}},
            "`outer_loss` must return one real scalar for one sample, got a dict",
        ),
        ({"outer_loss": calls_back}, "`outer_loss`: JAX cannot take its derivatives over many samples: "),
        ({"inner_loss": keeping()}, "`inner_loss` uses an array that JAX traced"),
        ({"inner_loss": fickle(1)}, "`inner_loss` must return one real scalar for one sample, got float"),
        ({"outer_bounds": (np.zeros(3), None)}, "does not have the shape of the outer variable"),
        ({"dtype": "complex64"}, "dtype='complex64'"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        problem(**changes)


def test_fingerprints_tell_problems_apart():
    base = problem().fingerprint()
    assert base == problem().fingerprint()
    others = (
        problem(seed=1),
        problem(dtype="float64"),
        problem(outer_var=np.full(6, -1.5)),
        problem(inner_data=(X + 1e-3, Y.astype(float))),
        problem(outer_bounds=(-5.0, None)),
    )
    assert base not in {other.fingerprint() for other in others}

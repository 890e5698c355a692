"""The untuned solver where it is hard: units, counts, rows that teach, powers; what it returns and what it says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevel
from bilevel._precision import arithmetic
from bilevel.solvers import low_rank
from bilevel.solvers.preconditioning import Preconditioning
from bilevel.solvers.progress import Reading, init_progress, return_to_best
from bilevel.solvers.rollback import init_rollback
from tests import cases

AUTO = bilevel.SRBA("auto")


def penalized(loss, data, val, *, of_outer=1.0, of_inner=1.0, dtype="float32", columns=None):
    """A linear model of one's own loss, with a penalty exp(x) for each column."""

    def outer(z, x, sample):
        return of_outer * loss(sample[0] @ z, sample[1])

    def inner(z, x, sample):
        return of_inner * (loss(sample[0] @ z, sample[1]) + jnp.sum(jnp.exp(x) * z**2) / 2)

    start = np.zeros(data[0].shape[1]), np.zeros(columns or data[0].shape[1])
    return bilevel.BilevelProblem.from_losses(inner, outer, data, val, *start, dtype=dtype, strongly_convex=True)


def squared(score, target):
    return (score - target) ** 2


def poisson(score, target):
    return jnp.exp(score) - target * score


def table(rows=70, columns=4, seed=21):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((rows, columns))
    return X, X @ np.arange(columns) + rng.standard_normal(rows)


def halves(X, y):
    return (X[::2], y[::2]), (X[1::2], y[1::2])


def regression(of_y=1.0, **more):
    X, y = table()
    return penalized(squared, *halves(X, of_y * y), **more)


# Units


@pytest.mark.filterwarnings("ignore:SRBA. z is far from")  # while x moves fast
@pytest.mark.parametrize(
    "units",
    [
        {"of_outer": 2.0**80},
        {"of_y": 2.0**-35},
        *(pytest.param(units, marks=pytest.mark.slow) for units in ({"of_outer": 2.0**-80}, {"of_inner": 2.0**-60})),
    ],
)
def test_units_that_are_powers_of_two_change_no_bit_of_x(units):
    points = [bilevel.run(regression(**some), AUTO, max_steps=120, exact=False).point for some in ({}, units)]
    assert np.any(points[0].outer_var != 0), "x was meant to move"
    np.testing.assert_array_equal(*(point.outer_var for point in points))


@pytest.mark.slow
@pytest.mark.parametrize("units", [{"of_outer": 3e-24}, {"of_y": 7e11}, {"of_y": 7e-12}])
def test_other_units_change_neither_the_steps_nor_the_end(units):
    runs = [bilevel.run(regression(**some), AUTO, exact=False) for some in ({}, units)]
    assert runs[0].status == runs[1].status == "converged"
    assert runs[0].history["step"][-1] == pytest.approx(runs[1].history["step"][-1], rel=0.1)
    gains = [run.history["outer_value"][-1] / run.history["outer_value"][0] for run in runs]
    assert gains[0] == pytest.approx(gains[1], rel=1e-3)


@pytest.mark.parametrize(
    ("units", "message"),
    [
        ({"of_outer": 1e-34}, "outer loss is .*e-3.* at the start, too small in float32: scale the loss or the data"),
        ({"of_outer": 1e-44}, "outer loss is .*e-4.* at the start, too small in float32"),
        ({"of_inner": 1e-43}, "inner loss is .*e-4.* at the start, too small in float32"),
        ({"of_outer": 3e38}, "outer loss is not finite at the start, in float32.*dtype='float64'"),
    ],
)
def test_losses_out_of_range_are_refused(units, message):
    with pytest.raises(ValueError, match=message):
        bilevel.run(regression(**units), AUTO, max_steps=3)


# The Hessian of few coordinates


def test_of_few_coordinates_the_metric_is_the_hessian():
    problem = regression(dtype="float64")
    with arithmetic("float64"):
        point = problem.start._replace(inner_var=np.linspace(-1, 1, 4))
        _, memory = low_rank.init_low_rank(problem.oracles, point, lambda _: ())
        diagonal, memory = low_rank.update(problem.oracles, point, 1, point.inner_var, memory)
        units = np.eye(4)
        hessian = np.stack([problem.oracles.hvp(point._replace(v=unit)) for unit in units])
        inverse = np.stack([low_rank.solve(memory, diagonal, unit) for unit in units])
        lengths = [float(low_rank.length_sq(memory, diagonal, unit)) for unit in units]
    np.testing.assert_allclose(inverse @ hessian, units, atol=1e-10)
    np.testing.assert_allclose(lengths, np.diag(hessian), rtol=1e-10)


# What is returned


def after(readings, errors=0.0):
    """The best upper bound, the pace and whether each pass was undone, of passes with these values of h."""
    point = bilevel.Point(np.zeros(1), np.zeros(1), np.zeros(1))
    told = []
    with arithmetic("float64"):
        zero = jnp.zeros(())
        here = init_rollback(point, Preconditioning(), zero)
        progress = init_progress(zero, 10.0, here)._replace(first=(zero, zero), waited=zero)
        for number, h in enumerate(readings):
            progress = progress._replace(reading=Reading(zero + h, zero + errors, zero, zero))
            at = here._replace(point=jax.tree.map(lambda leaf, number=number: leaf + number, point))
            progress, back = return_to_best(progress, at)
            undone = float(back.point.outer_var[0]) != number
            told.append((float(sum(progress.best_reading[:2])), float(progress.pace), undone))
    return told


def test_where_h_rises_x_goes_back_to_its_best_pass_and_its_steps_are_halved():
    assert after([5.0, 4.0, 4.003, 4.5]) == [(5.0, 1, False), (4.0, 1, False), (4.0, 1, False), (4.0, 0.5, True)]


def test_after_a_return_h_is_estimated_anew():
    assert after([4.0, 4.5, 4.2, 4.201])[2:] == [(4.2, 0.525, False), (4.2, 0.525, False)]


def test_a_rise_within_what_z_leaves_open_is_none():
    assert not any(undone for _, _, undone in after([4.0, 4.5], errors=0.3))
    assert after([4.0, 4.7], errors=0.3)[-1][2]


def teaching(columns=3, seed=22):
    """x are the features of two rows, on which a logistic model is fitted."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((60, columns))
    y = np.sign(X[:, 0] + 0.3 * rng.standard_normal(60))

    def outer(z, x, sample):
        return jax.nn.softplus(-sample[1] * (sample[0] @ z))

    def inner(z, x, sample):
        return outer(z, x, (x[sample[0]], sample[1])) + 0.05 * z @ z

    data = np.arange(2), np.array([-1.0, 1.0])
    start = np.zeros(columns), 6 * rng.standard_normal((2, columns))
    return bilevel.BilevelProblem.from_losses(inner, outer, data, (X, y), *start, dtype="float32", strongly_convex=True)


def test_h_of_the_point_never_rises_and_ends_below_its_start():
    values = bilevel.run(teaching(), AUTO, max_steps=3000).history["value"]
    assert values[-1] < 0.9 * values[0] and values[-1] <= 1.001 * values.min()
    assert np.all(values[1:] <= 1.002 * values[:-1])


@pytest.mark.slow
def test_rows_that_teach_digits_end_below_their_start():
    from sklearn.datasets import load_digits

    X, y = load_digits(return_X_y=True)
    X, y = X[:1500] / 16, y[:1500]

    def outer(z, x, sample):
        scores = sample[0] @ z
        return jax.nn.logsumexp(scores) - scores[sample[1]]

    def inner(z, x, sample):
        return outer(z, x, (x[sample], sample)) + 0.002 * jnp.sum(z**2)

    first = np.stack([X[np.flatnonzero(y == digit)[1]] for digit in range(10)])
    problem = bilevel.BilevelProblem.from_losses(
        inner, outer, np.arange(10), (X, y), np.zeros((64, 10)), first, dtype="float32", strongly_convex=True
    )
    values = bilevel.run(problem, AUTO, max_steps=2500, eval_every=500).history["value"]
    assert values[-1] < 0.5 * values[0] and np.all(values[1:] <= 1.01 * values[:-1])


# Counts and powers


def least(problem, ends):
    """The least h that L-BFGS finds from these x, by exact solutions in float64."""
    from scipy.optimize import minimize

    def value(x):
        exact = problem.exact_solver(x, None)
        return float(exact.value), np.asarray(exact.hypergrad, float)

    return min(minimize(value, x, jac=True, method="L-BFGS-B", bounds=[(-15, 15)] * len(x)).fun for x in ends)


@pytest.mark.slow
@pytest.mark.parametrize("mean", [150, 6000])
@pytest.mark.parametrize("effect", [0.25, 0.8])
def test_counts_are_fitted(mean, effect, recwarn):
    rng = np.random.default_rng(23)
    X = np.c_[rng.standard_normal((120, 3)), np.ones(120)]
    y = rng.poisson(mean * np.exp(effect * X[:, 1])).astype(float)
    problem = penalized(poisson, *halves(X, y), columns=1)
    result = bilevel.run(problem, AUTO)
    values = result.history["value"]
    assert result.status == "converged" and not recwarn.list
    best = least(problem, [np.zeros(1), result.point.outer_var.astype(float)])
    assert values[-1] - best <= 1e-3 * abs(best) and values[-1] <= values[0]
    np.testing.assert_allclose(result.history["outer_value"][-1], values[-1], rtol=1e-4)


@pytest.mark.slow
def test_powers_of_a_column_are_followed():
    rng = np.random.default_rng(7)
    t = rng.uniform(-1, 3, 200)
    y = np.where(np.sin(2.5 * t) + 0.8 * rng.logistic(size=200) > 0, 1.0, -1.0)

    def loss(score, target):
        return jax.nn.softplus(-target * score)

    problem = penalized(loss, *halves(t[:, None] ** np.arange(10), y))
    result = bilevel.run(problem, AUTO, max_steps=30_000)
    values = result.history["value"]
    assert result.status == "converged" and values[-1] <= 1.0003 * values.min()
    assert values[-1] <= 1.02 * least(problem, [np.zeros(10), np.full(10, -4.0), result.point.outer_var.astype(float)])


# What is said


@pytest.fixture(scope="module")
def ended():
    return bilevel.run(regression(), AUTO, max_steps=100_000, exact=False)


def test_a_run_that_ends_by_itself_does_not_speak_of_a_tolerance(ended):
    assert ended.status == "converged" and ended.reason.startswith("h has stopped falling")
    assert "own criterion" in ended.status.sentence
    assert "h has stopped falling" in ended._repr_html_()


def test_a_run_that_a_tolerance_ends_says_so():
    result = bilevel.run(cases.quadratic(), bilevel.Exact(), max_steps=200, tolerance=1e-2)
    assert result.status == "converged" and "fell to the tolerance" in result.reason

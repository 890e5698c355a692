"""The problems of the literature on real data."""

import os

import numpy as np
import pytest
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import minimize
from scipy.special import expit

import bilevel
from bilevel import datasets, problems
from bilevel.problems import real_data

with_data = pytest.mark.skipif(not os.environ.get("BILEVEL_DATA"), reason="BILEVEL_DATA names no folder with the data")


def scipy_ijcnn1(x):
    """h, ∇h and z* on IJCNN1 from the labels and features of the file, by SciPy."""
    data = datasets.load("ijcnn1")
    levels = [(data.X_train, data.y_train.astype(float)), (data.X_test, data.y_test.astype(float))]
    (X, y), (X_val, y_val) = levels
    penalty = np.exp(x)

    def inner(z):
        margins = y * (X @ z)
        slopes = -y * expit(-margins)
        return np.mean(np.logaddexp(0, -margins)) + penalty @ z**2 / 2, X.T @ slopes / len(y) + penalty * z

    def hessian(z):
        s = expit(X @ z)
        return (X * (s * (1 - s))[:, None]).T @ X / len(y) + np.diag(penalty)

    z = minimize(inner, np.zeros(22), jac=True, hess=hessian, method="trust-exact", options={"gtol": 1e-9}).x
    factor = cho_factor(hessian(z))
    z = z - cho_solve(factor, inner(z)[1])
    margins = y_val * (X_val @ z)
    v = -cho_solve(cho_factor(hessian(z)), X_val.T @ (-y_val * expit(-margins)) / len(y_val))
    return np.mean(np.logaddexp(0, -margins)), penalty * z * v, z


@with_data
def test_ijcnn1_equals_an_independent_scipy_implementation_and_finite_differences():
    problem = problems.ijcnn1(dtype="float64")
    x = problem.start.outer_var
    assert (problem.n_inner, problem.n_outer, x.shape) == (49_990, 91_701, (22,)) and np.all(x < 0)
    solution = problem.exact_solver(x)
    value, hypergrad, z = scipy_ijcnn1(x)
    np.testing.assert_allclose(solution.value, value, rtol=1e-11)
    np.testing.assert_allclose(solution.inner_var, z, rtol=1e-8)
    np.testing.assert_allclose(solution.hypergrad, hypergrad, rtol=1e-7, atol=1e-12)
    assert max(solution.inner_residual, solution.v_residual) < 1e-14

    def h(x):
        return problem.exact_solver(x, solution).value

    step = 1e-4
    slopes = [(h(x + step * e) - h(x - step * e)) / (2 * step) for e in np.eye(22)]
    assert np.linalg.norm(slopes - solution.hypergrad) < 1e-6 * np.linalg.norm(solution.hypergrad)


@with_data
def test_float32_rows_of_ijcnn1_give_h_to_seven_digits():
    narrow, wide = problems.ijcnn1(dtype="float32"), problems.ijcnn1(dtype="float64")
    x = wide.start.outer_var
    np.testing.assert_allclose(narrow.exact_solver(x).value, wide.exact_solver(x).value, rtol=1e-7)


@with_data
@pytest.mark.slow
def test_ijcnn1_starts_where_the_specification_says_and_the_exact_baseline_reaches_the_known_value():
    problem = problems.ijcnn1(dtype="float32")
    run = bilevel.run(problem, bilevel.Exact(), max_steps=60, eval_every=60)
    assert run.history["value"][0] > 0.5 and run.history["value"][-1] < 0.2086


@with_data
@pytest.mark.slow
def test_mnist_cleaning_finds_the_corrupted_rows_and_beats_the_noisy_fit_on_validation():
    problem = problems.mnist_cleaning(dtype="float32")
    assert (problem.n_inner, problem.n_outer) == (20_000, 5_000) and problem.start.inner_var.shape == (10, 784)
    unweighted = problem.exact_solver(np.full(20_000, 30.0), None)
    solver = bilevel.SRBA(0.003, 1e-5, 64, period=64)
    run = bilevel.run(problem, solver, max_steps=3000, eval_every=3000, exact=False)
    found = problem.exact_solver(run.point.outer_var, unweighted)
    assert found.value < 0.7 * unweighted.value
    assert run.history["weight_auc"][-1] > 0.95
    assert run.history["test_error"][-1] < 0.15
    assert found.inner_residual < 1e-10


@with_data
@pytest.mark.slow
@pytest.mark.parametrize("per", ["class", "feature"])
def test_covtype_splits_standardizes_and_has_an_exact_solution(per):
    problem = problems.covtype(per=per, dtype="float32")
    assert (problem.n_inner, problem.n_outer) == (348_607, 116_203)
    rows = np.asarray(problem.oracles.inner_samples.leaves.features)
    np.testing.assert_allclose(rows.mean(0, dtype=float), 0, atol=1e-4)
    deviations = rows.std(0, dtype=float)
    np.testing.assert_allclose(deviations[deviations > 0], 1, atol=1e-3)
    solution = problem.exact_solver(problem.start.outer_var, None)
    assert solution.inner_residual < 1e-10 and 0.5 < solution.value < 1.5


@pytest.mark.slow
def test_embedded_problems_need_no_file(monkeypatch):
    monkeypatch.delenv("BILEVEL_DATA", raising=False)
    settings = {problems.breast_cancer: (0.05, 1.0), problems.digits_cleaning: (0.05, 0.01)}
    settings[problems.breast_cancer_folds] = 0.05, 1.0
    for problem, (step_size, outer_ratio) in settings.items():
        run = bilevel.run(problem(), bilevel.SRBA(step_size, outer_ratio, 32), max_steps=400, eval_every=400)
        assert run.status == "out_of_budget" and run.history["value"][-1] < run.history["value"][0]


def test_seeds_choose_rows_and_noise_of_cleaning():
    first, again, other = (problems.digits_cleaning(seed=seed) for seed in (0, 0, 1))
    assert first.fingerprint() == again.fingerprint() != other.fingerprint()


def images(full_range, seed):
    """Four pixels: a constant one, and three with two values each, this share of the range on either side of half."""
    sides = np.random.default_rng(seed).choice([-1, 1], (60, 3)) * np.array([0.01, 0.09, 0.4])
    pixels = full_range * np.hstack([np.zeros((60, 1)), 0.5 + sides])
    return pixels.reshape(60, 2, 2), np.resize(np.arange(10), 60)


@pytest.mark.parametrize(("name", "full_range"), [("mnist", 255), ("digits", 16)])
def test_pixels_are_divided_by_their_deviation_or_by_a_tenth_of_the_range(name, full_range, monkeypatch):
    known = datasets.Dataset(name, *images(full_range, 0), *images(full_range, 1), tuple(range(10)), "")
    monkeypatch.setattr(real_data, "load", {name: known}.get)
    problem = getattr(problems, f"{name}_cleaning")(n_train=30, n_val=10, dtype="float64")
    for level in (problem.oracles.inner_samples, problem.oracles.outer_samples):
        spreads = np.ptp(np.asarray(level.leaves.features), axis=0)
        np.testing.assert_allclose(spreads[:3], [0, 0.02 / 0.1, 0.18 / 0.1], atol=1e-12)
    train = np.asarray(problem.oracles.inner_samples.leaves.features)
    np.testing.assert_allclose(train.mean(axis=0), 0, atol=1e-12)
    np.testing.assert_allclose(train[:, 3].std(), 1)

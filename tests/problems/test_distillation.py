"""Dataset distillation: the exact solution against SciPy, its certificate, and what is learned from the digits."""

import os
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import logsumexp, softmax

import bilevel
from bilevel import datasets, problems
from bilevel._core.compilation import arithmetic
from bilevel._core.types import Calls
from tests import cases
from tests.scripts import load_example

CLASSES = np.arange(10)


def made(monkeypatch, pixels=4, dtype="float64", images=60, n_train=40, **arguments):
    """Return a problem on some of 60 images of few pixels, which belong to other classes than their neighbors."""
    labels = np.resize(CLASSES, images).astype(np.int8)
    pictures = np.random.default_rng(0).integers(0, 17, (images, pixels, 1))
    known = datasets.Dataset("digits", pictures, labels, None, None, (*range(10),), "")
    module = sys.modules[problems.distillation.__module__]
    monkeypatch.setattr(module, "load", {"digits": known}.get)
    return problems.distillation(n_train=n_train, dtype=dtype, **arguments)


def real_rows(problem):
    rows = problem.oracles.outer_samples.leaves
    return np.asarray(rows.features, np.float64), np.asarray(rows.labels)


def entropy(z, X, labels):
    scores = X @ z.T
    losses = logsumexp(scores, axis=1) - scores[np.arange(len(X)), labels]
    residuals = softmax(scores, axis=1) - np.eye(10)[labels]
    return losses.mean(), residuals.T @ X / len(X)


def solve(x):
    """Return the fit to the learned images x, by SciPy."""

    def inner(flat):
        z = flat.reshape(10, -1)
        value, grad = entropy(z, x, CLASSES)
        return value + 0.2 * np.sum(z**2), (grad + 0.4 * z).ravel()

    return minimize(inner, np.zeros(x.size), jac=True, method="BFGS", options={"gtol": 1e-10}).x.reshape(10, -1)


def test_the_exact_solution_and_its_hypergradient_are_those_of_scipy_and_of_finite_differences(monkeypatch):
    problem = made(monkeypatch)
    X, labels = real_rows(problem)
    rng = np.random.default_rng(1)
    x = problem.start.outer_var + 0.3 * rng.standard_normal((10, 4))
    solution = problem.exact_solver(x)
    np.testing.assert_allclose(solution.inner_var, solve(x), atol=1e-8)
    np.testing.assert_allclose(solution.value, entropy(solve(x), X, labels)[0], rtol=1e-8)
    for move in rng.standard_normal((3, 10, 4)):
        values = [entropy(solve(x + step * move), X, labels)[0] for step in (-1e-3, 1e-3)]
        np.testing.assert_allclose(np.sum(solution.hypergrad * move), np.diff(values)[0] / 2e-3, rtol=1e-4)


def test_a_run_starts_at_real_images_of_each_digit_and_test_images_are_on_no_level(monkeypatch):
    problem = made(monkeypatch)
    X, labels = real_rows(problem)
    rows = [np.flatnonzero((x == X).all(axis=1)) for x in problem.start.outer_var]
    assert [set(labels[found]) for found in rows] == [{label} for label in CLASSES]
    test_rows, test_labels = map(np.asarray, problem.metrics["test_error"].args)
    assert len(test_rows) == 20 and X.min() >= 0 and X.max() == 1
    assert not {(*row, label) for row, label in zip(test_rows, test_labels, strict=True)} & {
        (*row, label) for row, label in zip(X, labels, strict=True)
    }
    again, other = made(monkeypatch), made(monkeypatch, seed=1)
    assert problem.fingerprint() == again.fingerprint() != other.fingerprint()


@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.slow)])
def test_no_bound_of_the_certificate_is_exceeded(monkeypatch, dtype):
    problem, rng = made(monkeypatch, dtype=dtype), np.random.default_rng(2)
    certifier = problem.certifier()
    ratios = []
    for x in problem.start.outer_var + rng.standard_normal((4, 10, 4)):
        solution = problem.exact_solver(x)
        for size in (1e-5, 1e-3, 0.1, 1.0):
            moved = (part + size * rng.standard_normal((10, 4)) for part in (solution.inner_var, solution.v))
            point = bilevel.Point(next(moved), x, next(moved))
            with arithmetic(np.float64):
                found = cases.direction(problem.oracles.in_float64(), point).outer_var
            certificate = certifier(point)
            assert np.linalg.norm(point.inner_var - solution.inner_var) <= certificate.inner_distance_bound
            assert np.linalg.norm(point.v - solution.v) <= certificate.v_distance_bound
            ratios.append(certificate.error_bound / np.linalg.norm(np.asarray(found) - solution.hypergrad))
    assert min(ratios) >= 1 and np.median(ratios) < 40


def one_direction(outer):
    """Return the cost of one direction on all learned images and some real ones."""
    return Calls(inner_grad=10, hvp=10, cross=10, outer_grad=outer, outer_grad_outer=outer)


@pytest.mark.parametrize("sampling", ["blocks", "iid", "reshuffle", "full"])
def test_each_batch_has_all_learned_images(monkeypatch, sampling):
    problem = made(monkeypatch)
    x, start = problem.start.outer_var, np.random.default_rng(3).standard_normal((10, 4))
    problem = replace(problem, start=problem.start._replace(inner_var=start))
    expected = start - 0.1 * (entropy(start, x, CLASSES)[1] + 0.4 * start)
    alone, sharded = (
        bilevel.run(one, bilevel.SOBA(0.1, 1.0, 5, sampling=sampling), max_steps=1, exact=False)
        for one in (problem, problem.sharded(jax.devices()[:1]))
    )
    for run in (alone, sharded):
        np.testing.assert_allclose(run.point.inner_var, expected, rtol=1e-10)
    outer = 40 if sampling == "full" else 5
    assert alone.calls == sharded.calls == one_direction(outer)


@pytest.mark.parametrize("name", ["SRBA", "SABA", "NeumannAID", "AutoSRBA"])
def test_costs_contain_all_learned_images_and_the_default_batch_of_real_ones(monkeypatch, name):
    problem = made(monkeypatch, images=1700, n_train=1600, dtype="float32")  # too many for full batches by default
    solver = {
        "SRBA": bilevel.SRBA(period=5),
        "SABA": bilevel.SABA(0.01),
        "NeumannAID": bilevel.NeumannAID(0.01, n_inner_steps=2, n_neumann=3),
        "AutoSRBA": bilevel.AutoSRBA(preconditioner="diagonal", period=5),
    }[name]
    calls = bilevel.run(problem, solver, max_steps=4, exact=False).calls
    inner, outer = {
        "SRBA": (10 + 3 * 20, 1600 + 3 * 128),
        "SABA": (40, 4 * 64),
        "NeumannAID": (80, 4 * 64),
        "AutoSRBA": (10 + 3 * 20, 1600 + 3 * 128),
    }[name]
    assert (calls.inner_grad, calls.outer_grad) == (inner, outer)


def test_only_the_real_images_limit_the_batch_size(monkeypatch):
    problem = made(monkeypatch)
    with pytest.raises(ValueError, match=r"`SOBA\(outer_batch_size=64\)` exceeds.*10 inner and 40 outer"):
        bilevel.run(problem, bilevel.SOBA(), max_steps=1)
    run = bilevel.run(problem, bilevel.SOBA(batch_size=64, outer_batch_size=40), max_steps=1, exact=False)
    assert run.solver == bilevel.SOBA(batch_size=10, outer_batch_size=40)
    assert run.calls == one_direction(40)


@pytest.mark.parametrize("n_train", [3, 60])
def test_real_images_of_all_digits_and_images_for_tests_are_needed(monkeypatch, n_train):
    made(monkeypatch)
    with pytest.raises(ValueError, match=rf"`n_train={n_train}`: take all ten digits, and leave some of 60 images"):
        problems.distillation(n_train=n_train)


def test_other_data_are_refused():
    with pytest.raises(ValueError, match="`data='covtype'`: must be one of 'digits', 'mnist'"):
        problems.distillation("covtype")


@pytest.mark.slow
def test_a_model_fitted_to_learned_digits_errs_less_than_one_fitted_to_real_ones():
    example = load_example("dataset_distillation")
    problem = example.build("digits")
    images = example.learn(problem, "digits", 500)
    value, accuracy = example.score(problem, images)
    real_value, real = example.score(problem, example.draw(problem, np.random.default_rng(0)))
    assert value < 0.9 * real_value and accuracy > 0.85 > 0.75 > real
    assert [len(line) for line in example.as_text(images).splitlines()] == [8 * 10 + 2 * 9] * 8


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("BILEVEL_DATA"), reason="BILEVEL_DATA names no folder with the data")
def test_a_model_fitted_to_learned_images_of_mnist_errs_less_than_one_fitted_to_real_ones():
    example, problem = load_example("dataset_distillation"), problems.distillation("mnist", n_train=2000)
    assert (problem.n_inner, problem.n_outer) == (10, 2000) and problem.start.outer_var.shape == (10, 784)
    value, accuracy = example.score(problem, example.learn(problem, "mnist", 800))
    real_value, real = example.score(problem, problem.start.outer_var)
    assert value < 0.8 * real_value and accuracy > 0.75 > 0.65 > real

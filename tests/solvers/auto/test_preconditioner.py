"""Preconditioners against their transcriptions and dense algebra, and on data for which a diagonal is not enough."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import bilevel
from bilevel._core import trees
from bilevel._core.compilation import arithmetic
from bilevel._core.types import Calls
from bilevel.oracles.curvature import diagonal_majorizer, majorized_hvp, probe_signs
from bilevel.problems import cross_validation, penalty_selection
from bilevel.solvers.auto.preconditioner import (
    LOW_RANK,
    N_NORM_PROBES,
    diagonal_preconditioner,
    init_calls,
    init_preconditioner,
    norm_preconditioner,
    preconditioner_calls,
    update_preconditioner,
)
from tests import cases
from tests.solvers.auto.problems import (
    AUTO,
    BATCH,
    BOUNDED,
    DIM,
    PERIOD,
    PLAIN,
    adam_of_the_library,
    drawn_rows,
    selection,
    wide_selection,
)
from tests.solvers.auto.test_start import with_curvatures
from tests.solvers.test_contract import CountingOracles
from tests.solvers.transcribed import start_of
from tests.transcription.adaptive import Adam, adaptive_srba, metric, norm
from tests.transcription.low_rank import low_rank_srba

# Transcriptions


def norm_of(plain, index, z, x):
    with arithmetic("float64"):
        signs = np.asarray(probe_signs(len(z), index))[:N_NORM_PROBES]
    return norm(plain, z, x, signs)


KINDS = {"diagonal": lambda plain, index, z, x: metric(plain, z, x, BATCH), "norm": norm_of}


def assert_same_path(run, expected, rtol):
    for t, (state, step) in enumerate(zip(run.states, expected, strict=True)):
        for part, wanted in step.items():
            actual = np.asarray(getattr(state.point, part))
            assert np.linalg.norm(actual - wanted) <= rtol * np.linalg.norm(wanted), (t, part)
    assert float(run.states[-1].rollback.rollbacks) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [pytest.param("quadratic", marks=pytest.mark.slow), "logistic"])
def test_iterates_equal_the_transcription(name, kind):
    inner = "adam" if kind == "norm" else None
    method = bilevel.AutoSRBA(
        0.1, 1.0, BATCH, period=PERIOD, preconditioner=kind, inner_optimizer=inner, outer_bounds=BOUNDED.outer_bounds
    )
    problem = cases.quadratic() if name == "quadratic" else selection()
    if kind == "norm":  # which is refused if the inner loss is known to be convex
        problem = replace(problem, oracles=cases.by_autodiff(name, problem), exact_solver=None)
    run = cases.trajectory(problem, method, 56)
    draws = [SimpleNamespace(**rows) for rows in drawn_rows(run)]
    plain = cases.in_numpy(name, problem)
    settings = {"step_size": 0.1, "period": PERIOD, "bounds": (-0.5, 0.35), "scale_at": partial(KINDS[kind], plain)}
    settings["inner_adam"] = Adam(1e-3, np.inf) if inner else None
    expected = adaptive_srba(plain, *start_of(problem), draws, adam=adam_of_the_library(), **settings)
    assert_same_path(run, expected, 1e-10)
    diagonals = {tuple(np.ravel(state.preconditioner.diagonal)) for state in run.states}
    assert len(diagonals) == (1 if (name, kind) == ("quadratic", "diagonal") else 56 // PERIOD)


def test_iterates_stay_within_active_bounds():
    problem, narrow = (
        selection(),
        bilevel.AutoSRBA(0.1, 1.0, BATCH, period=PERIOD, preconditioner="diagonal", outer_bounds=(-0.21, -0.19)),
    )
    last = trees.to_numpy(cases.trajectory(problem, narrow, 56).states[-1].point.outer_var)
    assert np.all((last >= -0.21) & (last <= -0.19))
    assert np.any((last == -0.21) | (last == -0.19))


def first_signs(size):
    key = jax.random.key(0, impl="threefry2x32")
    return 2.0 * np.asarray(jax.random.randint(key, (8, size), 0, 2, np.int32)) - 1


def test_iterates_with_the_low_rank_metric_equal_the_transcription():
    problem = wide_selection()
    run = cases.trajectory(problem, AUTO, 100)
    draws = [SimpleNamespace(**rows) for rows in drawn_rows(run)]
    settings = {"step_size": 0.1, "period": 20, "batch": BATCH, "bounds": (-20.0, 20.0)}
    settings |= {"adam": adam_of_the_library(), "subspace": first_signs(DIM)}
    expected = low_rank_srba(cases.in_numpy("logistic", problem), *start_of(problem), draws, **settings)
    assert_same_path(run, expected, 1e-8)
    start = problem.start.outer_var
    moved = [bool(np.any(np.asarray(state.point.outer_var) != start)) for state in run.states]
    assert not moved[19] and moved[-1], "x was meant to be frozen, and then to move"


# Diagonal and norm


@pytest.mark.parametrize(("passes", "floor"), [(1, 1e-6), (8, 0.1 * (1e6 + 2.0 + 1e-8) / 3)])
@pytest.mark.parametrize(("sampling", "batch"), [("blocks", 5), ("full", 40)])
def test_the_diagonal_is_positive_and_includes_the_variance_of_batches(passes, floor, sampling, batch, monkeypatch):
    diagonal, squares = np.array([1e6, -2.0, 1e-8]), np.array([1.0, 3.0, 0.0])
    samples = SimpleNamespace(sampling=sampling, batch_size=5)
    oracles = SimpleNamespace(inner_samples=samples, n_inner=40, has_row_diagonals=passes == 1)
    monkeypatch.setattr("bilevel.solvers.auto.preconditioner.diagonal_majorizer", lambda *_: diagonal)
    monkeypatch.setattr("bilevel.solvers.auto.preconditioner.squared_diagonals", lambda *_: squares)
    with arithmetic("float64"):
        found = diagonal_preconditioner(oracles, None, 0)
    lifted = np.maximum(abs(diagonal), floor)
    np.testing.assert_allclose(found, lifted + squares / (batch * lifted), rtol=1e-12)


def test_the_norm_is_the_frobenius_norm_on_average():
    problem, hessian = with_curvatures(np.array([-1.0, 0.5, 2.0, 4.0]))
    with arithmetic("float64"):
        norms = jax.jit(jax.vmap(partial(norm_preconditioner, problem.oracles, problem.start)))
        found = np.asarray(norms(np.arange(400, dtype=np.int32)))
    squares, wanted = found**2, np.sum(hessian**2)
    assert abs(squares.mean() - wanted) < 4 * squares.std() / 20 and squares.std() > 0


# Low rank


@jax.jit
def metric_at(oracles, point):
    first, made = init_preconditioner(LOW_RANK, oracles, point)
    return update_preconditioner(LOW_RANK, oracles, first, 1, made)


def metric_at_start(problem):
    return metric_at(problem.oracles.with_batches(BATCH, "blocks"), problem.start)


def test_division_and_norm_belong_to_one_matrix():
    with arithmetic("float64"):
        found = metric_at_start(wide_selection())
        inverse = np.stack([found.solve(unit) for unit in np.eye(DIM)])
        vector = np.linspace(1, 2, DIM)
        length_sq = float(found.length_sq(vector))
    np.testing.assert_allclose(inverse, inverse.T, rtol=1e-7, atol=1e-12)
    np.testing.assert_allclose(vector @ np.linalg.solve(inverse, vector), length_sq, rtol=1e-7)


def test_columns_with_a_large_mean_are_divided_by_their_variance():
    rows, signs, val, val_signs = cases.logistic_data(400, 300, dim=DIM)
    start = {"outer_var": np.full(DIM, -12.0), "inner_var": np.zeros(DIM)}
    problem = bilevel.problems.penalty_selection(rows + 500, signs, val + 500, val_signs, **start, dtype="float64")
    with arithmetic("float64"):
        hessian = np.stack([problem.oracles.hvp(problem.start._replace(v=unit)) for unit in np.eye(DIM)])
        found = metric_at_start(problem)
        inverse = np.stack([found.solve(unit) for unit in np.eye(DIM)])
    low_rank = np.linalg.eigvals(inverse @ hessian).real
    diagonal = np.linalg.eigvals(hessian / np.diag(hessian)[:, None]).real
    assert low_rank.max() / low_rank.min() < 100 and diagonal.max() / diagonal.min() > 1e5


def test_with_few_coordinates_the_metric_is_the_hessian():
    problem, hessian = with_curvatures(np.array([0.1, 0.5, 2.0, 4.0]))
    with arithmetic("float64"):
        point = problem.start._replace(inner_var=np.linspace(-1, 1, 4))
        found = update_preconditioner(
            LOW_RANK, problem.oracles, point, 1, init_preconditioner(LOW_RANK, problem.oracles, point)[1]
        )
        units = np.eye(4)
        inverse = np.stack([found.solve(unit) for unit in units])
        lengths = [float(found.length_sq(unit)) for unit in units]
    np.testing.assert_allclose(inverse @ hessian, units, atol=1e-10)
    np.testing.assert_allclose(lengths, np.diag(hessian), rtol=1e-10)


def majorizing_problem(kind):
    rows, signs, val, _ = cases.logistic_data(dim=3)
    if kind == "softmax":
        labels, val_labels = (np.arange(len(part)) % 4 for part in (rows, val))
        return penalty_selection(
            rows, labels, val, val_labels, inner_var=np.ones((4, 3)), loss="softmax", per="class", dtype="float64"
        )
    if kind == "folds":
        return cross_validation(rows, signs, 3, inner_var=np.ones((3, 3)), dtype="float64")
    return wide_selection()


@pytest.mark.parametrize("kind", ["logistic", "softmax", "folds"])
def test_majorized_products_have_the_majorizer_as_their_diagonal_and_exceed_the_hessian(kind):
    problem = majorizing_problem(kind)
    point = problem.start
    size, shape = point.inner_var.size, point.inner_var.shape

    def dense(product):
        return np.stack([np.ravel(product(point._replace(v=unit.reshape(shape)))) for unit in np.eye(size)])

    with arithmetic("float64"):
        majorized, hessian = (
            dense(jax.jit(partial(majorized_hvp, problem.oracles))),
            dense(jax.jit(problem.oracles.hvp)),
        )
        diagonal = np.ravel(diagonal_majorizer(problem.oracles, point))
    np.testing.assert_allclose(np.diag(majorized), diagonal, rtol=1e-10)
    assert np.linalg.eigvalsh(majorized - hessian).min() > -1e-10


# Costs


@pytest.mark.parametrize("kind", ["diagonal", "norm", pytest.param("low_rank", marks=pytest.mark.slow)])
def test_a_pass_costs_what_is_declared(kind):
    problem = selection()
    oracles = cases.by_autodiff("logistic", problem).with_batches(BATCH, "blocks")
    with arithmetic("float64"), jax.disable_jit():
        counting = CountingOracles(oracles)
        start, made = init_preconditioner(kind, counting, problem.start)
        at_the_start = Calls(**counting.counted)
        update_preconditioner(kind, counting, start, 0, made)
    assert at_the_start == init_calls(kind, oracles)
    assert trees.subtract(Calls(**counting.counted), at_the_start) == preconditioner_calls(kind, oracles)


@pytest.mark.parametrize("by_autodiff", [False, True])
def test_a_pass_of_the_solver_adds_products_and_one_value_to_a_pass_of_srba(by_autodiff):
    problem = wide_selection()
    oracles = cases.by_autodiff("logistic", problem) if by_autodiff else problem.oracles
    method = AUTO.configure(problem)
    more = np.subtract(method.calls(oracles, None, refresh=True), PLAIN.calls(oracles, None, refresh=True))
    products = 8 + (8 if by_autodiff else 1)
    assert dict(zip(Calls._fields, more, strict=True)) == dict.fromkeys(Calls._fields, 0) | {
        "hvp": products * problem.n_inner,
        "outer_value": problem.n_outer,
    }

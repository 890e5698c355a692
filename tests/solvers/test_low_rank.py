"""The metric of a diagonal and a few directions, against dense algebra and where a diagonal fails; how auto ends."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevel
from bilevel._precision import arithmetic
from bilevel._types import Calls
from bilevel.engine.driver import sweep
from bilevel.problems import cross_validation, softmax_selection
from bilevel.solvers import low_rank
from bilevel.solvers.preconditioning import metric_diagonal
from bilevel.solvers.progress import Reading, check_following, init_progress
from bilevel.solvers.rollback import Rollback
from tests import cases
from tests.solvers.test_adaptive import BATCH, adam_of_the_library, selection
from tests.solvers.test_auto import badly_scaled
from tests.solvers.test_contract import CountingOracles
from tests.solvers.transcribed import start_of
from tests.transcription.low_rank import low_rank_srba

DIM = 12
AUTO = bilevel.SRBA("auto", batch_size=BATCH)


def wide_selection(**kwargs):
    start = {"outer_var": np.full(DIM, -2.0), "inner_var": np.linspace(-1, 1, DIM)}
    return bilevel.problems.logistic_selection(
        *cases.logistic_data(dim=DIM), **start, **({"dtype": "float64"} | kwargs)
    )


def first_signs(size):
    key = jax.random.key(0, impl="threefry2x32")
    return 2.0 * np.asarray(jax.random.randint(key, (8, size), 0, 2, np.int32)) - 1


def test_auto_equals_the_transcription():
    problem = wide_selection()
    run = cases.trajectory(problem, AUTO, 100)
    draws = [
        SimpleNamespace(
            inner=cases.indices(run.oracles.inner_samples, d.inner),
            outer=cases.indices(run.oracles.outer_samples, d.outer),
        )
        for d in run.draws
    ]
    settings = {"step_size": 0.1, "period": 20, "batch": BATCH, "bounds": (-20.0, 20.0)}
    settings |= {"adam": adam_of_the_library(), "subspace": first_signs(DIM)}
    expected = low_rank_srba(cases.in_numpy("logistic", problem), *start_of(problem), draws, **settings)
    for t, (state, step) in enumerate(zip(run.states, expected, strict=True)):
        for part, wanted in step.items():
            actual = np.asarray(getattr(state.point, part))
            assert np.linalg.norm(actual - wanted) <= 1e-8 * np.linalg.norm(wanted), (t, part)
    start = problem.start.outer_var
    moved = [bool(np.any(np.asarray(state.point.outer_var) != start)) for state in run.states]
    assert not moved[19] and moved[-1], "x was meant to wait, and then to move"
    assert float(run.states[-1].rollback.rollbacks) == 0


# The metric


@jax.jit
def metric_at(oracles, point):
    first, memory = low_rank.init_low_rank(oracles, point, lambda at: metric_diagonal(oracles, at, 0))
    return low_rank.update(oracles, first, 1, metric_diagonal(oracles, first, 0), memory)


def metric_at_start(problem):
    return metric_at(problem.oracles.with_batches(BATCH, "blocks"), problem.start)


def test_division_and_norm_belong_to_one_matrix():
    with arithmetic("float64"):
        diagonal, memory = metric_at_start(wide_selection())
        inverse = np.stack([low_rank.solve(memory, diagonal, unit) for unit in np.eye(DIM)])
        vector = np.linspace(1, 2, DIM)
        length = float(low_rank.length_sq(memory, diagonal, vector))
    np.testing.assert_allclose(inverse, inverse.T, rtol=1e-7, atol=1e-12)
    np.testing.assert_allclose(vector @ np.linalg.solve(inverse, vector), length, rtol=1e-7)


def test_columns_with_a_large_mean_are_divided_by_their_variance():
    rows, signs, val, val_signs = cases.logistic_data(400, 300, dim=DIM)
    start = {"outer_var": np.full(DIM, -12.0), "inner_var": np.zeros(DIM)}
    problem = bilevel.problems.logistic_selection(rows + 500, signs, val + 500, val_signs, **start, dtype="float64")
    with arithmetic("float64"):
        hessian = np.stack([problem.oracles.hvp(problem.start._replace(v=unit)) for unit in np.eye(DIM)])
        diagonal, memory = metric_at_start(problem)
        inverse = np.stack([low_rank.solve(memory, diagonal, unit) for unit in np.eye(DIM)])
    seen = np.linalg.eigvals(inverse @ hessian).real
    alone = np.linalg.eigvals(hessian / np.diag(hessian)[:, None]).real
    assert seen.max() / seen.min() < 100 and alone.max() / alone.min() > 1e5


def majorizing_problem(kind):
    rows, signs, val, _ = cases.logistic_data(dim=3)
    if kind == "softmax":
        labels, val_labels = (np.arange(len(part)) % 4 for part in (rows, val))
        return softmax_selection(rows, labels, val, val_labels, inner_var=np.ones((4, 3)), dtype="float64")
    if kind == "folds":
        return cross_validation(rows, signs, 3, inner_var=np.ones((3, 3)), dtype="float64")
    return wide_selection()


@pytest.mark.parametrize("kind", ["logistic", "softmax", "folds"])
def test_majorized_products_have_the_majorizer_for_a_diagonal_and_exceed_the_hessian(kind):
    problem = majorizing_problem(kind)
    point = problem.start
    size, shape = point.inner_var.size, point.inner_var.shape

    def dense(product):
        return np.stack([np.ravel(product(point._replace(v=unit.reshape(shape)))) for unit in np.eye(size)])

    with arithmetic("float64"):
        majorized, hessian = dense(jax.jit(problem.oracles.majorized_hvp)), dense(jax.jit(problem.oracles.hvp))
        diagonal = np.ravel(problem.oracles.diagonal_majorizer(point))
    np.testing.assert_allclose(np.diag(majorized), diagonal, rtol=1e-10)
    assert np.linalg.eigvalsh(majorized - hessian).min() > -1e-10


@pytest.mark.parametrize("by_autodiff", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_passes_cost_what_is_declared(by_autodiff):
    problem = wide_selection()
    oracles = cases.by_autodiff("logistic", problem) if by_autodiff else problem.oracles
    method = AUTO.resolve(oracles)
    plain = bilevel.SRBA(0.1, batch_size=BATCH, period=20)
    more = np.subtract(method.calls(oracles, None, refresh=True), plain.calls(oracles, None, refresh=True))
    products = 8 + (8 if by_autodiff else 1)
    assert dict(zip(Calls._fields, more, strict=True)) == dict.fromkeys(Calls._fields, 0) | {
        "hvp": products * problem.n_inner,
        "outer_value": problem.n_outer,
    }
    if by_autodiff:
        with arithmetic("float64"), jax.disable_jit():
            counting = CountingOracles(oracles)
            low_rank.init_low_rank(counting, problem.start, lambda _: ())
        declared = method.init_calls(oracles)
        assert {kind: counting.counted[kind] for kind in ("hvp", "inner_grad", "inner_value")} == {
            kind: getattr(declared, kind) for kind in ("hvp", "inner_grad", "inner_value")
        }


# Weak spots of a diagonal


@pytest.mark.slow
def test_scales_of_a_users_columns_do_not_leave_z_behind(recwarn):
    result = bilevel.run(badly_scaled(strongly_convex=True), bilevel.SRBA("auto", batch_size=8), max_steps=1500)
    last = {name: column[-1] for name, column in result.history.items()}
    assert abs(last["outer_value"] - last["value"]) < 0.01 * last["value"] and not recwarn.list


def shifted(mean):
    rng = np.random.default_rng(5)
    rows, truth = rng.standard_normal((600, 10)), rng.standard_normal(10)
    signs = np.where(rows @ truth + rng.logistic(size=600) > 0, 1, -1)
    data = rows[:400] + mean, signs[:400], rows[400:] + mean, signs[400:]
    return bilevel.problems.logistic_selection(*data, dtype="float32")


@pytest.fixture(scope="module")
def ended():
    """A run without a budget, on columns with a mean of 200."""
    return bilevel.run(shifted(200), bilevel.SRBA("auto"))


def test_columns_with_a_large_mean_are_solved_without_a_budget(ended):
    from scipy.optimize import minimize

    problem = shifted(200)

    def value(x):
        exact = problem.exact_solver(x, None)
        return float(exact.value), exact.hypergrad

    starts = np.full(10, -2.0), np.full(10, -6.0), ended.point.outer_var.astype(float)
    found = [minimize(value, start, jac=True, method="L-BFGS-B", bounds=[(-20, 20)] * 10).fun for start in starts]
    assert ended.history["value"][-1] <= 1.001 * min(found)
    assert ended.history["outer_value"][-1] == pytest.approx(ended.history["value"][-1], rel=1e-3)


# The end


def test_the_reason_tells_what_the_last_passes_measured(ended):
    last = {name: column[-1] for name, column in ended.history.items()}
    assert ended.status == "converged" and last["quiet_windows"] >= 2 and last["h_change"] <= 3e-5
    for shown in ("h has stopped falling", f"{last['h_change']:.2g} of h", f"{last['h_gradient']:.2g} of h"):
        assert shown in ended.reason and shown in ended.summary()
    assert "nearly stationary" in ended.reason
    assert last["hypergrad_norm_sq"] < 1e-4 * ended.history["hypergrad_norm_sq"][0]


def test_a_budget_that_ends_a_run_before_is_said_to():
    result = bilevel.run(shifted(200), bilevel.SRBA("auto"), max_steps=200)
    assert result.status == "out_of_budget"
    assert result.reason.startswith("A budget was used up. Until then h was not seen to stop falling: ")


def test_a_resumed_run_ends_where_a_whole_one_does(ended, tmp_path):
    part = bilevel.run(shifted(200), bilevel.SRBA("auto"), max_steps=700)
    part.save(tmp_path / "run.npz")
    resumed = bilevel.resume(tmp_path / "run.npz", shifted(200), max_steps=300_000)
    assert (resumed.status, resumed.reason) == (ended.status, ended.reason)
    cases.assert_trees_equal(resumed.point, ended.point)


@pytest.mark.slow
def test_a_sweep_ends_where_a_run_does(ended):
    (cells,) = sweep(shifted(200), [ended.solver], [0], int(1.2 * ended.history["calls"][-1]))
    assert cells[0].status == "converged" and cells[0].rows[-1]["step"] == ended.history["step"][-1]


def test_a_solver_that_does_not_end_needs_a_budget():
    with pytest.raises(ValueError, match="no budget"):
        bilevel.run(selection(), bilevel.SRBA(0.1, batch_size=BATCH))


def test_least_progress_is_read_from_the_passes_of_the_metric():
    with pytest.raises(ValueError, match=r"SRBA\(least_progress=0.001\)`: needs preconditioner='low_rank'"):
        bilevel.run(selection(), bilevel.SRBA(0.1, batch_size=BATCH, least_progress=1e-3), max_steps=3)


# Few rows


@pytest.mark.parametrize(
    ("n_inner", "n_outer", "sampling", "batch"),
    [(20, 10, "full", 64), (1000, 24, "full", 64), (5000, 24, "blocks", 24), (100, 64, "blocks", 64)],
)
def test_batches_fit_the_rows(n_inner, n_outer, sampling, batch):
    chosen = bilevel.SRBA("auto").fit_rows(n_inner, n_outer)
    assert (chosen.sampling, chosen.batch_size) == (sampling, batch)
    assert bilevel.SRBA(0.1).fit_rows(n_inner, n_outer) == bilevel.SRBA(0.1)


@pytest.mark.slow
def test_twenty_rows_are_enough():
    rows, signs, val, val_signs = cases.logistic_data(20, 10, dim=3)
    result = bilevel.run(bilevel.problems.logistic_selection(rows, signs, val, val_signs), bilevel.SRBA("auto"))
    assert result.status == "converged"
    assert result.history["hypergrad_norm_sq"][-1] < 1e-3 * result.history["hypergrad_norm_sq"][0]


def waits(lag, passes, first):
    """Whether x moves after each of so many passes that find z and v at rest, and F so far behind h."""
    zero = jnp.zeros(())
    rollback = Rollback(*[None] * 3, sizes=(zero + 1, zero + 1), scale=zero, streak=zero, rollbacks=zero)
    reading = Reading(zero + 1, zero, zero + lag, zero)
    progress = init_progress(zero, 10.0, rollback)._replace(reading=reading, first=(zero + first, zero + first))
    moves = []
    for _ in range(passes):
        progress = check_following(progress, [zero + 1, zero + 1], [zero, zero], rollback)
        moves.append(bool(progress.x_moves))
    return moves


def test_x_waits_wherever_z_is_far_behind_and_only_at_first_for_fifty_passes():
    assert waits(lag=0.05, passes=3, first=0.0) == [True] * 3
    assert not any(waits(lag=0.5, passes=200, first=0.0))
    assert waits(lag=0.5, passes=60, first=1.0).index(True) == 49

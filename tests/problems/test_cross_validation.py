"""Penalties chosen over folds: K models at once equal K separate fits, and solvers find the optimum."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import expit, softmax
from sklearn.linear_model import LogisticRegression, Ridge

import bilevel
from bilevel import problems
from bilevel._core.compilation import arithmetic
from bilevel._core.types import Calls, Point, Rows
from bilevel.engine.loop import draw_page, run_key
from bilevel.estimators import selection
from bilevel.estimators.losses import Logistic
from bilevel.estimators.ridge import RidgeGLM
from bilevel.oracles import RowwiseOracles
from tests import cases
from tests.problems import small

each_loss = pytest.mark.parametrize("name", small.FOLDED)
SHORT = jnp.int32(cases.N_INNER // cases.BATCH)
X_AT = {"logistic_folds": np.array([-1.0, 0.5, -3.0]), "squared_folds": np.array([-1.0, 0.5, -3.0, 0.0])}
X_AT["softmax_folds"] = X_AT["squared_folds"]


@cache
def problem_of(name):
    return small.FOLDED[name](dtype="float64")


@cache
def solution_of(name):
    return problem_of(name).exact_solver(X_AT[name], None)


def somewhere(problem, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(leaf + rng.standard_normal(leaf.shape)), problem.start)


@pytest.mark.parametrize(
    "name",
    ["logistic_folds", *(pytest.param(name, marks=pytest.mark.slow) for name in ("squared_folds", "softmax_folds"))],
)
def test_every_kind_equals_autodiff(name):
    problem = problem_of(name)
    with arithmetic("float64"):
        closed = problem.oracles.with_batches(cases.BATCH, "blocks")
        auto, point = small.by_autodiff(name, closed), somewhere(problem, 0)
        for block in (SHORT, jnp.int32(1)):  # one program
            rows = Rows(block, block)
            cases.assert_trees_close(*(cases.every_kind(each, point, rows) for each in (closed, auto)))
            cases.assert_trees_close(*(cases.direction(each, point, rows) for each in (closed, auto)))


@each_loss
def test_differences_equal_two_directions(name):
    problem, rows = problem_of(name), Rows(SHORT, SHORT)
    with arithmetic("float64"):
        oracles = problem.oracles.with_batches(cases.BATCH, "blocks")
        point, previous = somewhere(problem, 0), somewhere(problem, 1)
        here, there = (cases.direction(oracles, at, rows) for at in (point, previous))
        apart = jax.jit(RowwiseOracles.difference)  # each level read by itself
        for difference in (cases.difference, apart):
            found = difference(oracles, point, previous, rows)
            cases.assert_trees_close(found, jax.tree.map(np.subtract, here, there))


@pytest.mark.slow
@each_loss
def test_finite_differences_agree_with_every_derivative(name):
    assert max(problem_of(name).check().values()) < 1e-6


@pytest.mark.slow
@each_loss
def test_rows_held_in_float32_are_read_in_pieces_for_float64(name, monkeypatch):
    monkeypatch.setattr("bilevel.oracles.samples.PIECE", 7)
    problem = small.FOLDED[name](dtype="float32")
    with arithmetic("float64"):
        wide, copied, point = problem.oracles.in_float64(), problem.oracles.astype("float64"), somewhere(problem, 0)
        cases.assert_trees_close(*(cases.every_kind(each, point) for each in (wide, copied)))
        cases.assert_trees_close(*(cases.direction(each, point) for each in (wide, copied)))


def penalties(name, x):
    return np.exp(x[small.GROUPS] if name == "logistic_folds" else x)


def fit(name, X, y, x):
    """A model of all rows but a fold's, by scikit-learn: its one penalty is ours once columns are scaled."""
    scale = np.sqrt(cases.N_INNER * penalties(name, x))
    options = {"C": 1.0, "fit_intercept": False, "tol": 1e-12, "max_iter": 10_000}
    if name == "squared_folds":
        return Ridge(1.0, fit_intercept=False).fit(X / scale, y).coef_ / scale
    coef = LogisticRegression(**options).fit(X / scale, y).coef_
    return (coef[0] if name == "logistic_folds" else coef) / scale


def table(name):
    X, y, *_ = {"logistic_folds": small.signs, "squared_folds": small.targets}.get(name, small.classes)()
    return X, y


def losses(name, scores, y):
    if name == "logistic_folds":
        return np.logaddexp(0, -y * scores)
    if name == "squared_folds":
        return (scores - y) ** 2 / 2
    return -np.log(softmax(scores, axis=1)[np.arange(len(y)), y])


def prior(x):
    return np.sum((x - x.mean()) ** 2) / (2 * small.PRIOR_SCALE**2 * cases.N_INNER)


@each_loss
def test_exact_solution_is_a_fit_of_each_fold_by_itself(name):
    x, (X, y), fold = X_AT[name], table(name), small.folds()
    models = [fit(name, X[fold != k], y[fold != k], x) for k in range(small.FOLDS)]
    np.testing.assert_allclose(solution_of(name).inner_var, models, rtol=2e-5, atol=2e-6)
    held_out = sum(losses(name, X[fold == k] @ model.T, y[fold == k]).sum() for k, model in enumerate(models))
    np.testing.assert_allclose(solution_of(name).value, held_out / len(X) + prior(x), rtol=1e-6)


@each_loss
def test_hypergradient_is_the_gradient_of_h(name):
    move = np.random.default_rng(5).standard_normal(X_AT[name].shape)
    ahead, behind = (
        problem_of(name).exact_solver(X_AT[name] + step * move, solution_of(name)).value for step in (1e-4, -1e-4)
    )
    np.testing.assert_allclose(solution_of(name).hypergrad @ move, (ahead - behind) / 2e-4, rtol=1e-6)


def test_value_and_hypergradient_equal_dense_numpy():
    """An independent version of the logistic problem: fits by SciPy, and a dense system for each fold."""
    x, (X, y), fold = X_AT["logistic_folds"], table("logistic_folds"), small.folds()
    penalty, n = penalties("logistic_folds", x), len(X)
    value, gradient = prior(x), (x - x.mean()) / (small.PRIOR_SCALE**2 * n)
    for k in range(small.FOLDS):
        D, s, D_out, s_out = X[fold != k], y[fold != k], X[fold == k], y[fold == k]

        def slope(z, D=D, s=s):
            return -D.T @ (s * expit(-s * (D @ z))) / n + penalty * z

        z = minimize(lambda z, D=D, s=s: np.logaddexp(0, -s * (D @ z)).sum() / n + penalty @ z**2 / 2, np.zeros(4)).x
        for _ in range(5):
            p = expit(D @ z)
            hessian = (D.T * (p * (1 - p))) @ D / n + np.diag(penalty)
            z = z - np.linalg.solve(hessian, slope(z))
        v = np.linalg.solve(hessian, D_out.T @ (s_out * expit(-s_out * (D_out @ z)))) / n
        value += np.logaddexp(0, -s_out * (D_out @ z)).sum() / n
        gradient += np.bincount(small.GROUPS, penalty * z * v)
    solution = solution_of("logistic_folds")
    np.testing.assert_allclose(solution.value, value, rtol=1e-11)
    np.testing.assert_allclose(solution.hypergrad, gradient, rtol=1e-9)


def test_certificates_hold_around_the_solution():
    problem, rng = problem_of("logistic_folds"), np.random.default_rng(0)
    certifier, x, solution = problem.certifier(), X_AT["logistic_folds"], solution_of("logistic_folds")
    for distance in (1e-6, 1e-3, 0.1, 1.0):
        z, v = (part + distance * rng.standard_normal(part.shape) for part in (solution.inner_var, solution.v))
        point, certificate = Point(z, x, v), certifier(Point(z, x, v))
        with arithmetic("float64"):
            found = np.asarray(cases.direction(problem.oracles, point).outer_var)
        truths = [found - solution.hypergrad, z - solution.inner_var, v - solution.v]
        bounds = certificate.error_bound, certificate.inner_distance_bound, certificate.v_distance_bound
        assert certificate.certified
        assert np.all([np.linalg.norm(truth) <= bound for truth, bound in zip(truths, bounds, strict=True)])


def test_both_levels_hold_the_same_rows_and_draw_the_same_batch():
    problem = problem_of("logistic_folds")
    with arithmetic("float64"):
        oracles = problem.oracles.with_batches(cases.BATCH, "blocks")
        assert oracles.outer_samples is oracles.inner_samples
        rows = draw_page(bilevel.SOBA(0.1, 1.0, cases.BATCH), oracles, run_key(0), np.int32(0), 64).draws
    np.testing.assert_array_equal(rows.inner, rows.outer)
    assert len(np.unique(rows.inner)) > 3


def test_calls_are_rows_read_whatever_the_number_of_models():
    problem, n, q, steps = problem_of("logistic_folds"), cases.N_INNER, 5, 12
    solver = bilevel.SRBA(0.05, 1.0, cases.BATCH, period=q)
    run = cases.trajectory(problem, solver, steps)
    result = bilevel.run(problem, solver, max_steps=steps)
    sizes = [min(cases.BATCH, n - cases.BATCH * int(draw.inner)) for draw in run.draws]
    rows = sum(n if step % q == 0 else 2 * sizes[step] for step in range(steps))
    kinds = dict.fromkeys(("inner_grad", "hvp", "cross", "outer_grad", "outer_grad_outer"), rows)
    assert result.calls == Calls(**kinds)


@cache
def optimum():
    return bilevel.run(problem_of("logistic_folds"), bilevel.Exact(), max_steps=50)


@pytest.mark.parametrize(
    ("solver", "steps", "gap"),
    [
        (bilevel.SRBA(0.3, 0.3, 16), 5_000, 1e-10),
        (bilevel.SOBA(1.0, 0.3, 16), 30_000, 1e-4),
        pytest.param(bilevel.SABA(0.3, 0.3, 16, memory="rows"), 10_000, 1e-8, marks=pytest.mark.slow),
    ],
)
def test_solvers_find_what_exact_steps_find(solver, steps, gap):
    found = bilevel.run(problem_of("logistic_folds"), solver, max_steps=steps, eval_every=steps)
    assert found.history["value"][0] > optimum().history["value"][-1] + 0.05
    assert abs(found.history["value"][-1] - optimum().history["value"][-1]) < gap


def test_optimum_is_that_of_the_estimators(monkeypatch):
    monkeypatch.setattr(selection, "_WRONG_LABELS", 0.0)  # estimators smooth labels; the problem does not
    X, y = table("logistic_folds")
    fold, n = small.folds(), len(X)
    held_out = fold == np.arange(small.FOLDS)[:, None]
    model = RidgeGLM(X, (y[:, None] + 1) / 2, Logistic(), intercept=False, tol=1e-14)
    structure = selection.Structure("per_group", small.GROUPS, small.PRIOR_SCALE)
    folds = selection.Folds.of_rows(1.0 * ~held_out, 1.0 * held_out)
    objective = selection.Objective(model, folds, structure)
    learned = selection.minimize_objective(objective, np.full(3, np.log(n) - 2), (-10.0, 20.0), tol=1e-12, max_iter=200)
    solution = problem_of("logistic_folds").exact_solver(learned.log_penalties - np.log(n), None)
    np.testing.assert_allclose(solution.value, learned.value / n, rtol=1e-9)
    np.testing.assert_allclose(optimum().point.outer_var + np.log(n), learned.log_penalties, atol=1e-4)
    np.testing.assert_allclose(optimum().history["value"][-1], learned.value / n, rtol=1e-10)


def test_folds_are_dealt_out_evenly_by_the_seed():
    X, y = table("logistic_folds")
    one, same, other = (
        np.asarray(problems.cross_validation(X, y, 4, seed=seed).oracles.inner_samples.leaves.fold)
        for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)
    assert sorted(np.bincount(one)) == [13, 13, 13, 14]


X, Y = table("logistic_folds")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": (Y + 1) // 2}, "`y` must hold labels -1 and 1"),
        ({"y": Y[:-1]}, "`X` has 53 rows and `y` 52"),
        ({"loss": "softmax"}, "`y` must hold classes 0, 1"),
        ({"loss": "softmax", "y": np.zeros(53, int)}, "`y` holds the class 0 alone"),
        ({"loss": "squared", "y": np.full(53, np.nan)}, "`y` holds NaN"),
        ({"loss": "hinge"}, "`loss='hinge'`: must be one of 'logistic', 'squared', 'softmax'"),
        ({"folds": 1}, "`folds=1`: must be at least 2 and at most the number of rows, 53"),
        ({"folds": np.zeros(53, int)}, "`folds` holds the fold 0 alone"),
        ({"folds": 2 * small.folds()}, "`folds` must be numbered 0, 1, … without gaps"),
        ({"folds": small.folds()[1:]}, r"`folds` must hold one integer per row \(53\)"),
        ({"folds": True}, r"`folds` must hold one integer per row \(53\)"),
        ({"groups": np.zeros(3, int)}, r"`groups` must hold one integer per feature \(4\)"),
        ({"prior_scale": 0.0}, "`prior_scale=0.0`: must be above 0"),
        ({"X": 1e30 * X, "dtype": "float32"}, "`X` holds .* overflows"),
        ({"inner_var": np.zeros(4)}, r"this problem needs \(5, 4\)"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        problems.cross_validation(**({"X": X, "y": Y} | changes))

"""Exact, HOAG, D-TFBO, SHINE and MAID: their accuracy, their costs, and their runs."""

import dataclasses
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize

import bilevel
from bilevel._core.compilation import arithmetic
from bilevel._core.types import Calls
from bilevel.solvers import exact, hoag, host
from bilevel.solvers.exact import Exact
from bilevel.solvers.hoag import HOAG
from tests import cases
from tests.solvers.test_contract import CountingOracles
from tests.solvers.test_convergence import tiny
from tests.solvers.transcribed import KIND_NAMES
from tests.transcription.d_tfbo import d_tfbo
from tests.transcription.hoag import exponential
from tests.transcription.hoag import hoag as transcribed_hoag
from tests.transcription.shine import shine

SOLVERS = {
    "Exact": Exact(),
    "HOAG": HOAG(),
    "DTFBO": bilevel.DTFBO(inner_tolerance=0.02),
    "SHINE": bilevel.SHINE(opa_period=2, refine=True),
    "MAID": bilevel.MAID(outer_step=1.0),
}
EACH = ["Exact", "HOAG", *(pytest.param(name, marks=pytest.mark.slow) for name in ("DTFBO", "SHINE", "MAID"))]
# L-BFGS amplifies rounding errors from step to step, and more so if moves are short: tolerances must be large.
SHINES = {  # settings, first tolerance, steps
    "plain": ({"tolerance_decay": 0.97}, 1e-3, 20),
    "short memory": ({"n_pairs": 3, "step_size": 2.0, "tolerance_decay": 1.0}, 0.1, 20),
    "opa": ({"opa_period": 3, "tolerance_decay": 1.0}, 1e-3, 20),
    "refined": ({"opa_period": 2, "refine": True, "tolerance_decay": 1.0}, 1e-4, 12),
}


def path(problem, solver, steps):
    """Return the state after each of the first steps."""
    solver = solver.configure(problem)
    with arithmetic(np.float64):
        oracles = problem.oracles.astype(np.float64)
        states = [solver.init(oracles, problem.start)]
        for index in range(steps):
            states.append(solver.step(oracles, states[-1], index))
    return states[1:]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["Exact", "HOAG"])
def test_exact_and_hoag_solve_quadratics(name, seed):
    result = bilevel.run(tiny(seed), SOLVERS[name], max_steps={"Exact": 30, "HOAG": 250}[name], stop=1e-20)
    assert result.status == "converged"
    np.testing.assert_allclose(result.point.outer_var, tiny(seed).exact_solver.minimizer, atol=1e-8)


def test_exact_finds_the_same_value_as_scipy_on_logistic_selection():
    problem = cases.logistic_selection()

    def value_and_grad(x):
        exact_solution = problem.exact_solver(x, None)
        return exact_solution.value, exact_solution.hypergrad

    options = {"ftol": 0.0, "gtol": 1e-12, "maxiter": 1000}
    found = minimize(value_and_grad, problem.start.outer_var, jac=True, method="L-BFGS-B", options=options)
    history = bilevel.run(problem, Exact(), max_steps=100, stop=1e-20).history
    # The infimum of h is at infinity; if the gradient is 1e-10, h is within 1e-9 of it.
    assert history["hypergrad_norm_sq"][-1] <= 1e-20
    np.testing.assert_allclose(history["value"][-1], found.fun, atol=1e-9)


def test_exact_solves_its_systems_to_rounding_level():
    history = bilevel.run(cases.logistic_selection(), Exact(), max_steps=8, eval_every=1).history
    assert np.all(history["inner_residual_sq"][1:] < 1e-24) and np.all(history["v_residual_sq"][1:] < 1e-24)
    assert np.all(np.diff(history["value"]) < 0), "each step of a line search lowers h"


def test_exact_with_conjugate_gradients_takes_the_same_steps(monkeypatch):
    problem = cases.logistic_selection()
    dense = path(problem, Exact(), 6)
    monkeypatch.setattr(exact, "_LARGEST_MATRIX", 0)
    for a, b in zip(dense, path(problem, Exact(), 6), strict=True):
        cases.assert_trees_close(a.point, b.point, rtol=1e-6, atol=1e-6)


def test_exact_counts_one_matrix_per_newton_iterate():
    """On a quadratic, one evaluation takes one Newton step, with a matrix before and after it."""
    problem = cases.quadratic()
    evaluations = path(problem, Exact(), 1)[0].calls[Calls._fields.index("cross")] // cases.N_INNER
    n, m, p = cases.N_INNER, cases.N_OUTER, 5
    one = Calls(inner_grad=2 * n, hvp=2 * p * n, cross=n, outer_grad=m, outer_grad_outer=m, outer_value=m)
    np.testing.assert_array_equal(path(problem, Exact(), 1)[0].calls, evaluations * np.array(one))


@pytest.mark.parametrize(
    "name", [*cases.marked(SOLVERS, ("Exact", "HOAG", "DTFBO")), "Exact by conjugate gradients", "HOAG, last steps"]
)
def test_declared_cost_equals_counted_cost(name, monkeypatch):
    def by_columns(oracles, point):
        return np.stack([oracles.hvp(point._replace(v=unit)) for unit in np.eye(point.v.size)])

    def compiled_bound(self, *arguments, bound=bilevel.MAID._bound):
        with jax.disable_jit(False):  # certificates are not oracle calls
            return bound(self, *arguments)

    monkeypatch.setattr(host, "hessian", by_columns)
    monkeypatch.setattr(bilevel.MAID, "_bound", compiled_bound)
    if name == "Exact by conjugate gradients":
        monkeypatch.setattr(exact, "_LARGEST_MATRIX", 0)
    if name == "HOAG, last steps":
        monkeypatch.setitem(hoag._SEQUENCES, "exponential", lambda k: 1e-12)
    problem = cases.logistic_selection()
    solver = SOLVERS[name.split()[0].strip(",")].configure(problem)
    counting = CountingOracles(problem.oracles)
    with arithmetic(np.float64), jax.disable_jit():
        state = solver.init(counting, problem.start)
        for index in range(3):
            state = solver.step(counting, state, index)
            assert dict(zip(Calls._fields, state.calls.tolist(), strict=True)) == counting.counted


def assert_same_path_and_calls(name, solver, transcribe, settings, steps=20):
    problem = cases.PROBLEMS[name]()
    start, plain = [np.asarray(part) for part in problem.start[:2]], cases.in_numpy(name, problem)
    expected = transcribe(plain, *start, range(steps), **settings)
    states = path(problem, solver, steps)
    for state, wanted in zip(states, expected, strict=True):
        for part in ("inner_var", "v", "outer_var"):
            gap = np.linalg.norm(getattr(state.point, part) - wanted[part])
            assert gap <= 1e-10 * np.linalg.norm(wanted[part]), part
    counted = dict(zip(Calls._fields, states[-1].calls.tolist(), strict=True))
    assert counted == {kind: plain.calls[short] for kind, short in KIND_NAMES.items()}


@pytest.mark.parametrize("name", cases.PROBLEMS)
def test_iterates_and_calls_of_d_tfbo_equal_its_transcription(name):
    settings = {"step_size": 2.0, "outer_ratio": 1.5, "tolerance": 0.02}
    assert_same_path_and_calls(name, bilevel.DTFBO(2.0, 1.5, inner_tolerance=0.02), d_tfbo, settings)


@pytest.mark.parametrize("variant", cases.marked(SHINES, quick=("plain",)))
@pytest.mark.parametrize("name", cases.PROBLEMS)
def test_iterates_and_calls_of_shine_equal_its_transcription(name, variant, monkeypatch):
    parameters, tolerance, steps = SHINES[variant]
    monkeypatch.setattr("bilevel.solvers.shine._FIRST_TOLERANCE", tolerance)
    solver = bilevel.SHINE(**parameters)
    settings = {"scale": solver.step_size, "memory": solver.n_pairs, "decay": solver.tolerance_decay}
    settings |= {"first_tolerance": tolerance, "opa": solver.opa_period, "refine": solver.refine}
    assert_same_path_and_calls(name, solver, shine, settings, steps)


@pytest.mark.slow
def test_opa_reduces_the_bias_of_shine_and_refinement_removes_it():
    def floor(**settings):
        history = bilevel.run(tiny(0), bilevel.SHINE(**settings), max_steps=120, eval_every=120).history
        return history["hypergrad_norm_sq"][-1]

    plain, opa, refined = floor(), floor(opa_period=5), floor(refine=True)
    assert refined < 1e-12 < 100 * opa < plain


@pytest.mark.slow
def test_the_accuracy_of_d_tfbo_is_limited_by_its_tolerance():
    def floor(tolerance):
        solver = bilevel.DTFBO(1.0, 0.1, inner_tolerance=tolerance)
        return bilevel.run(tiny(0), solver, max_steps=400, eval_every=400).history["hypergrad_norm_sq"][-1]

    assert floor(1e-14) < 1e-12 < floor(1e-4)


def test_a_loop_of_d_tfbo_converges_if_its_first_steps_are_too_long():
    problem = tiny(0)
    state = path(problem, bilevel.DTFBO(1e3, 1e3, inner_tolerance=1e-12), 1)[0]
    exact_solution = problem.exact_solver(np.asarray(problem.start.outer_var))
    np.testing.assert_allclose(state.point.inner_var, exact_solution.inner_var, atol=1e-4)
    np.testing.assert_allclose(state.point.v, exact_solution.v, atol=1e-4)


def test_hoag_stays_close_to_its_exact_sequence_as_its_tolerances_imply():
    problem, steps = cases.quadratic(), 40
    start = np.asarray(problem.start.inner_var), np.asarray(problem.start.outer_var)
    expected = transcribed_hoag(cases.in_numpy("quadratic", problem), *start, range(steps), lipschitz=1.0)
    states = path(problem, HOAG(lipschitz=1.0), steps)
    inner, outer = problem.exact_solver.inner, problem.exact_solver.outer
    mu, norm = np.linalg.eigvalsh(inner.a_inner)[0], lambda matrix: np.linalg.norm(matrix, 2)
    # The error of g for errors of eps in z and in the residual of v; Lanczos gives mu with 1% accuracy.
    growth = 1.05 * (norm(inner.b) * (1 + norm(outer.a_inner)) / mu + norm(outer.b))
    first = states[0].outer.size / expected[0]["step"]
    assert expected[-1]["step"] * norm(problem.exact_solver.hessian) < 2, "the bound requires that errors do not grow"
    bound, x = 0.0, start[1]
    for k, (ours, exact_step) in enumerate(zip(states, expected, strict=True), start=1):
        np.testing.assert_allclose(ours.outer.size / exact_step["step"], first, rtol=1e-12)
        grad = np.linalg.norm(problem.exact_solver(x).hypergrad)
        bound += float(ours.outer.size) * growth * exponential(k) + abs(ours.outer.size - exact_step["step"]) * grad
        x = exact_step["outer_var"]
        assert np.linalg.norm(ours.point.outer_var - x) <= bound
    assert bound < np.linalg.norm(start[1] - problem.exact_solver.minimizer), (
        "the bound must be smaller than the distance to the solution"
    )


@pytest.mark.parametrize("name", cases.PROBLEMS)
@pytest.mark.parametrize("decrease", [0.5, 1.0])
def test_hoag_with_tight_tolerances_equals_its_transcription(name, decrease, monkeypatch):
    monkeypatch.setitem(hoag._SEQUENCES, "exponential", lambda k: 1e-12)
    problem, steps = cases.PROBLEMS[name](), 20
    start = np.asarray(problem.start.inner_var), np.asarray(problem.start.outer_var)
    settings = {"decrease": decrease, "lipschitz": 0.5}
    numpy_problem = cases.in_numpy(name, problem)
    expected = transcribed_hoag(numpy_problem, *start, range(steps), tolerance=lambda k: 1e-12, **settings)
    states = path(problem, HOAG(**settings), steps)
    np.testing.assert_allclose([state.outer.size for state in states], [row["step"] for row in expected], rtol=1e-7)
    for state, row in zip(states, expected, strict=True):
        np.testing.assert_allclose(state.point.outer_var, row["outer_var"], rtol=1e-7, atol=1e-7)


def test_hoag_estimates_the_lipschitz_constant_as_the_largest_gradient():
    problem = cases.quadratic()
    numpy_problem = cases.in_numpy("quadratic", problem)
    seen, x = 0.0, np.asarray(problem.start.outer_var)
    for state in path(problem, HOAG(), 5):
        z = state.point.inner_var
        seen = max(seen, np.hypot(np.linalg.norm(numpy_problem.fz(z, x)), np.linalg.norm(numpy_problem.fx(z, x))))
        np.testing.assert_allclose(state.outer.lipschitz, seen, rtol=1e-10)
        x = state.point.outer_var


def test_hoag_as_printed_stalls_and_with_half_the_decrease_converges():
    def final(decrease):
        solver = HOAG(tolerances="cubic", decrease=decrease, lipschitz=0.25, strong_convexity=0.05)
        return bilevel.run(tiny(0), solver, max_steps=60)

    printed, corrected = final(1.0), final(0.5)
    assert printed.history["hypergrad_norm_sq"][-1] > 0.1 and float(printed.state.outer.size) < 1e-2
    assert corrected.history["hypergrad_norm_sq"][-1] < 1e-8 and float(corrected.state.outer.size) > 1e-2


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(name, dtype, tmp_path):
    problem, solver = cases.logistic_selection(dtype), SOLVERS[name]
    whole = bilevel.run(problem, solver, max_steps=20)
    bilevel.run(problem, solver, max_steps=7).save(tmp_path / "run.npz")
    resumed = bilevel.resume(tmp_path / "run.npz", cases.logistic_selection(dtype), solver=solver, max_steps=20)
    cases.assert_trees_equal(resumed.state, whole.state)
    cases.assert_trees_equal(resumed.point, whole.point)
    assert resumed.calls == whole.calls and resumed.point.outer_var.dtype == dtype
    assert set(whole.history["step"]) <= set(resumed.history["step"])


@pytest.mark.parametrize("name", EACH)
def test_a_run_ends_with_the_first_step_that_reaches_max_calls(name):
    problem = cases.quadratic()
    steps = bilevel.run(problem, SOLVERS[name], max_steps=5, eval_every=1).history["calls"]
    for budget, taken in ((0, 0), (1, 1), (steps[3], 3), (steps[3] + 1, 4)):
        result = bilevel.run(problem, SOLVERS[name], max_calls=int(budget))
        assert result.status == "out_of_budget" and result.history["step"][-1] == taken
        assert sum(result.calls) == steps[taken]


@pytest.mark.parametrize("name", EACH)
def test_evaluations_follow_the_schedule_and_do_not_change_a_run(name):
    problem = cases.quadratic("float32")
    often = bilevel.run(problem, SOLVERS[name], max_steps=9, eval_every=2)
    default = bilevel.run(problem, SOLVERS[name], max_steps=9)
    assert often.history["step"].tolist() == [0, 2, 4, 6, 8, 9]
    assert default.history["step"][0] == 0 and default.history["step"][-1] == 9
    cases.assert_trees_equal(often.state, default.state)
    assert np.all(np.diff(often.history["seconds"]) > 0) and often.history["seconds"][0] == 0
    kinds = sum(often.history[f"calls_{kind}"] for kind in Calls._fields)
    np.testing.assert_array_equal(kinds, often.history["calls"])


@pytest.mark.parametrize("name", EACH[:-1])  # MAID ends by itself
def test_max_seconds_ends_a_run_that_makes_no_more_progress(name):
    result = bilevel.run(cases.quadratic(), SOLVERS[name], max_seconds=0.3)
    assert result.status == "out_of_budget" and result.history["seconds"][-1] >= 0.3
    assert np.all(np.isfinite(result.point.outer_var))


@pytest.mark.parametrize("name", SOLVERS)
def test_a_step_is_discarded_if_it_takes_longer_than_twice_max_seconds(name, monkeypatch):
    clock, now = SimpleNamespace(perf_counter=lambda: next(now)), itertools.count(step=0.001)
    monkeypatch.setattr("bilevel.solvers.host.time", clock)
    monkeypatch.setattr("bilevel.engine.steps.time", clock)
    result = bilevel.run(cases.logistic_selection(), SOLVERS[name], max_seconds=0.002)
    assert result.status == "out_of_budget" and next(now) < 0.2
    assert result.history["step"].tolist() == [0] and result.calls == Calls()


def test_exact_refuses_an_inner_level_that_is_not_known_to_be_convex():
    problem = dataclasses.replace(cases.quadratic(), exact_solver=None)
    with pytest.raises(ValueError, match=r"`Exact` needs a strongly convex inner level; .* `strongly_convex=True`"):
        bilevel.run(problem, Exact(), max_steps=1)


def test_an_interrupt_within_a_step_keeps_the_steps_before_it(monkeypatch):
    problem, plain_step = cases.quadratic(), HOAG.step

    def interrupted_step(self, oracles, state, index):
        if index == 3:
            raise KeyboardInterrupt
        return plain_step(self, oracles, state, index)

    monkeypatch.setattr(HOAG, "step", interrupted_step)
    result = bilevel.run(problem, HOAG(), max_steps=9)
    monkeypatch.undo()
    assert result.status == "interrupted" and result.history["step"][-1] == 3
    cases.assert_trees_equal(result.state, bilevel.run(problem, HOAG(), max_steps=3).state)


def custom(inner_loss, outer_loss, inner_var, outer_var, **kwargs):
    data = np.random.default_rng(0).standard_normal((20, 3))
    losses, kwargs = (inner_loss, outer_loss), {"strongly_convex": True} | kwargs
    return bilevel.BilevelProblem.from_losses(*losses, data, data, inner_var, outer_var, **kwargs)


CUSTOM = SOLVERS | {"MAID": bilevel.MAID(outer_step=1.0, mu_G=1.0, L1_F=5.0, L1_G=10.0, L2_G=3.0)}


def test_hoag_diverges_and_exact_stays_finite_if_the_outer_problem_has_no_minimum():
    def inner_loss(z, x, row):
        return jnp.sum((z - row) ** 2) / 2

    def outer_loss(z, x, row):
        return -jnp.sum(jnp.exp(x)) - z @ row

    problem = custom(inner_loss, outer_loss, np.zeros(3), np.zeros(2))
    runs = [bilevel.run(problem, solver, max_steps=40) for solver in (HOAG(), Exact())]
    assert [run.status for run in runs] == ["diverged", "out_of_budget"]
    for run in runs:
        assert all(np.all(np.isfinite(part)) for part in run.point)


@pytest.mark.parametrize("name", EACH)
def test_a_run_diverges_in_its_first_step_if_the_inner_problem_is_undefined_at_the_start(name):
    def inner_loss(z, x, row):
        return jnp.sum((z - row) ** 2) / 2 + jnp.sum(jnp.log(x)) * jnp.sum(z)

    problem = custom(inner_loss, lambda z, x, row: z @ row, np.zeros(3), -np.ones(2))
    result = bilevel.run(problem, CUSTOM[name], max_steps=9)
    assert result.status == "diverged" and result.history["step"].tolist() == [0]


@pytest.mark.parametrize("name", cases.marked(SOLVERS, ("Exact",)))
@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
def test_variables_may_be_dicts_of_arrays(name, dtype):
    def inner_loss(z, x, row):
        return (row @ z["w"] + z["b"] - row[0]) ** 2 / 2 + jnp.exp(x["w"]) * (z["w"] @ z["w"]) / 2 + z["b"] ** 2 / 2

    def outer_loss(z, x, row):
        return (row @ z["w"] + z["b"] - row[1]) ** 2 / 2 + (x["w"] - 1) ** 2 / 2

    def flat_inner(z, x, row):
        return inner_loss({"b": z[0], "w": z[1:]}, {"w": x[0]}, row)

    def flat_outer(z, x, row):
        return outer_loss({"b": z[0], "w": z[1:]}, {"w": x[0]}, row)

    start = {"b": np.zeros(()), "w": np.ones(3)}, {"w": np.zeros(())}
    nested = bilevel.run(custom(inner_loss, outer_loss, *start, dtype=dtype), CUSTOM[name], max_steps=6)
    flat_start = np.r_[0.0, 1.0, 1.0, 1.0], np.zeros(1)
    flat = bilevel.run(custom(flat_inner, flat_outer, *flat_start, dtype=dtype), CUSTOM[name], max_steps=6)
    assert nested.history["direction_norm_sq"][-1] < 0.1 * nested.history["direction_norm_sq"][0]
    assert nested.point.inner_var["w"].dtype == dtype and nested.point.outer_var["w"].shape == ()
    np.testing.assert_allclose(nested.state.point.outer_var["w"], flat.state.point.outer_var[0], rtol=1e-6)
    np.testing.assert_allclose(nested.state.point.inner_var["w"], flat.state.point.inner_var[1:], rtol=1e-6)


@pytest.mark.parametrize("name", ["Exact", "HOAG"])
def test_the_outer_variable_stays_within_its_bounds(name):
    problem = cases.logistic_selection(outer_var=np.zeros(4), outer_bounds=(-0.5, 0.5))
    result = bilevel.run(problem, SOLVERS[name], max_steps=200, stop=1e-12)
    assert result.status == "converged"
    assert np.max(np.abs(result.point.outer_var)) == 0.5


@pytest.mark.parametrize(
    "upper", [0.5, 2.0, np.array([0.0, 5.0, 1.0, 5.0])], ids=["active", "inactive", "per coordinate"]
)
def test_exact_within_bounds_agrees_with_lbfgsb_of_scipy(upper):
    problem = cases.logistic_selection(outer_var=np.full(4, -1.0), outer_bounds=(-3.0, upper))
    result = bilevel.run(problem, Exact(), max_steps=100, stop=1e-18, eval_every=1)
    assert result.status == "converged"

    def value_and_grad(x):
        exact_solution = problem.exact_solver(x, None)
        return exact_solution.value, exact_solution.hypergrad

    box = list(zip(np.full(4, -3.0), np.broadcast_to(upper, 4), strict=True))
    options = {"ftol": 0.0, "gtol": 1e-10}
    found = minimize(value_and_grad, np.full(4, -1.0), jac=True, method="L-BFGS-B", bounds=box, options=options)
    np.testing.assert_allclose(result.history["value"][-1], found.fun, rtol=1e-10)
    np.testing.assert_allclose(result.state.point.outer_var, found.x, atol=1e-5)
    assert np.all(np.diff(result.history["value"]) <= 1e-15)
    assert result.history["step"][-1] <= 3 * found.nit + 10


def test_float32_problems_are_solved_in_float64():
    result = bilevel.run(cases.quadratic("float32"), Exact(), max_steps=30, stop=1e-20)
    assert result.status == "converged"
    assert result.point.outer_var.dtype == np.float32 and result.state.point.outer_var.dtype == np.float64


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Exact(sampling="blocks"), r"`Exact\(sampling='blocks'\)`: must be one of 'full'"),
        (lambda: HOAG(sampling="iid"), r"`HOAG\(sampling='iid'\)`"),
        (lambda: HOAG(tolerances="fast"), r"tolerances='fast'.*'exponential', 'quadratic', 'cubic'"),
        (lambda: HOAG(decrease=0.0), r"decrease=0.0"),
        (lambda: HOAG(decrease=2.0), r"decrease=2.0.*\(0, 1\]"),
        (lambda: HOAG(lipschitz=-1.0), r"lipschitz=-1.0.*use None to estimate it"),
        (lambda: HOAG(strong_convexity=np.inf), r"strong_convexity=inf.*use None to estimate it"),
    ],
)
def test_bad_parameters_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()

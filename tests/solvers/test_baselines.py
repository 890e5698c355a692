"""Properties that the papers state of their methods, on quadratics with a closed-form solution."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import lsq_linear

import bilevel
from bilevel._core import trees
from bilevel._core.compilation import arithmetic
from bilevel._core.types import Rows
from bilevel.solvers import neumann
from tests import cases

ETA = 0.5


def tiny(seed=0):
    return bilevel.problems.quadratic(512, 256, 8, 4, seed=seed, common_linear=0.5, dtype="float64")


def neumann_floor(problem, n_terms):
    """Return ||∇h||² at the limit of x if v is a Neumann series of ``n_terms`` terms, from dense matrices."""
    exact_solver = problem.exact_solver
    inner, outer = exact_solver.inner, exact_solver.outer
    decay = np.eye(8) - ETA * inner.a_inner
    series = ETA * sum(np.linalg.matrix_power(decay, k) for k in range(n_terms))

    def biased(x):
        z = exact_solver.jacobian @ x + exact_solver.offset
        v = -series @ (outer.a_inner @ z + outer.b.T @ x + outer.linear_inner)
        return inner.b @ v + outer.a_outer @ x + outer.b @ z + outer.linear_outer

    constant = biased(np.zeros(4))
    matrix = np.stack([biased(unit) - constant for unit in np.eye(4)], axis=1)
    return np.sum(exact_solver(-np.linalg.solve(matrix, constant)).hypergrad ** 2)


@pytest.mark.slow
def test_truncated_series_converge_to_the_bias_computed_from_dense_matrices():
    problem = tiny()
    series = {"neumann_step": ETA, "sampling": "full"}
    for n_neumann in (1, 10, 40):
        solvers = [
            bilevel.StocBiO(0.5, 0.5, n_neumann=n_neumann, **series),
            bilevel.NeumannAID(ETA, 0.5, n_neumann=n_neumann, sampling="full"),
            bilevel.MRBO(1.0, 0.5, n_neumann=n_neumann, **series),
            bilevel.VRBO(0.5, 0.5, n_inner_steps=2, n_neumann=n_neumann, period=50, **series),
        ]
        for solver in solvers:
            floor = bilevel.run(problem, solver, max_steps=3000, eval_every=3000).history["hypergrad_norm_sq"][-1]
            np.testing.assert_allclose(floor, neumann_floor(problem, n_neumann + 1), rtol=0.02, err_msg=repr(solver))


@pytest.mark.slow
def test_series_of_random_length_converge_close_to_the_bias_of_their_mean():
    problem = tiny()
    for n_neumann in (1, 10, 40):
        series = {"n_neumann": n_neumann, "neumann_step": ETA, "sampling": "full"}
        expected = neumann_floor(problem, n_neumann)
        for solver in (bilevel.BSA(0.5, 2.0, n_inner_steps=5, **series), bilevel.TTSA(0.5, 2.0, **series)):
            history = bilevel.run(problem, solver, max_steps=20_000, eval_every=2000).history["hypergrad_norm_sq"]
            assert expected / 2 < np.median(history[-4:]) < 2 * expected + 3e-3, solver


def test_the_bias_falls_with_the_number_of_terms():
    floors = [neumann_floor(tiny(), n + 1) for n in (1, 10, 40)]
    assert floors[0] > 2 * floors[1] > 20 * floors[2] > 0


@pytest.mark.parametrize("name", ["SRBA", "SABA", "SPABA", "SBOLSVRG"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.slow
def test_variance_reduced_methods_converge_to_rounding_level(name, seed):
    result = bilevel.run(tiny(seed), bilevel.SOLVERS[name](0.2, 1.0, 16), seed=seed, max_calls=1_000_000)
    assert result.history["hypergrad_norm_sq"][-1] < 1e-25


@pytest.mark.parametrize("step_size", [1.0, pytest.param(1e4, marks=pytest.mark.slow)])
def test_s_tfbo_converges_for_any_initial_step(step_size):
    result = bilevel.run(tiny(), bilevel.STFBO(step_size), max_steps=20_000, eval_every=20_000)
    assert result.history["hypergrad_norm_sq"][-1] < 1e-12


@pytest.mark.slow
def test_the_sums_of_s_tfbo_grow_under_noise():
    solver = bilevel.STFBO(1.0, batch_size=16, sampling="blocks")
    sums = [bilevel.run(tiny(), solver, max_steps=steps).state.inner_sum for steps in (4000, 16_000)]
    assert 3 < sums[1] / sums[0] < 5
    full = [bilevel.run(tiny(), bilevel.STFBO(1.0), max_steps=steps).state.inner_sum for steps in (4000, 16_000)]
    assert full[1] / full[0] < 1.01


@pytest.mark.slow
@pytest.mark.parametrize("perturbation", [1e-3, 1.0])
def test_differences_of_fde_hbo_are_exact_on_quadratics(perturbation):
    solver = bilevel.FdeHBO(2.0, 1.0, perturbation=perturbation, sampling="full")
    result = bilevel.run(tiny(), solver, max_steps=3000, eval_every=3000)
    assert result.history["hypergrad_norm_sq"][-1] < 1e-20
    assert result.calls.hvp == result.calls.cross == 0


@pytest.mark.slow
@pytest.mark.parametrize(("period", "seed"), [(3, 0), (8, 1), (10, 2)])
def test_lanc_bio_converges_whether_or_not_its_subspace_is_the_whole_space(period, seed):
    solver = bilevel.LancBiO(0.5, 0.5, period=period)
    history = bilevel.run(tiny(seed), solver, max_steps=300, eval_every=300).history
    assert history["hypergrad_norm_sq"][-1] < 1e-25 and history["v_residual_sq"][-1] < 1e-25


@pytest.mark.slow
def test_the_dimension_of_lanc_bio_grows_with_a_restart_and_stays_at_its_largest():
    solver = bilevel.LancBiO(period=4, growth_period=5, growth_percent=60)
    positions = [int(solver._position(jnp.int32(index))) for index in range(24)]
    assert positions == [0] * 5 + [0, 1, 0, 1, 0] + [0, 1, 2, 3] * 3 + [0, 1]
    run = cases.trajectory(cases.quadratic(), bilevel.LancBiO(0.2, 2.0, period=4, growth_period=5), 24)
    assert np.flatnonzero(run.page.refreshes[:24]).tolist() == [0, 1, 2, 3, 4, 5, 7, 9, 10, 13, 15, 19, 23]


@pytest.mark.slow
@pytest.mark.parametrize("solver", [bilevel.SubBiO(0.5, 1.0), bilevel.LancBiO(0.5, 0.5, growth_period=20, period=15)])
def test_solvers_with_subspaces_converge(solver):
    history = bilevel.run(tiny(), solver, max_steps=1000, eval_every=1000).history
    assert history["hypergrad_norm_sq"][-1] < 1e-25 and history["v_residual_sq"][-1] < 1e-25


@pytest.mark.slow
def test_sub_bio_in_two_dimensions_solves_for_v_from_its_second_step():
    problem = cases.quadratic(dim_inner=2)
    run = cases.trajectory(problem, bilevel.SubBiO(0.2, 2.0, sampling="full"), 2)
    with arithmetic("float64"):
        z, _, v = (np.asarray(part) for part in run.states[1].point)
        before = run.states[0].point._replace(inner_var=z)
        residuals = [run.oracles.hvp(before._replace(v=u)) + run.oracles.outer_grad(before) for u in (v, before.v)]
    assert np.linalg.norm(residuals[0]) < 1e-13 < 1e-2 < np.linalg.norm(residuals[1])


@pytest.mark.slow
def test_errors_of_v_accumulate_in_lanc_bio_with_batches_unless_it_restarts_from_0():
    def path(warm_start):
        solver = bilevel.LancBiO(0.1, 1.0, 16, period=3, warm_start=warm_start, sampling="blocks")
        return bilevel.run(tiny(), solver, max_steps=2000, eval_every=50).history

    warm, cold = path(True), path(False)
    assert warm["v_residual_sq"][-1] > 1e20
    assert np.median(cold["v_residual_sq"][-20:]) < 1e4


@pytest.mark.slow
def test_ada_bio_converges_to_the_bias_of_its_series_without_noise():
    problem = tiny()
    solver = bilevel.AdaBiO(1.0, 0.5, n_neumann=10, neumann_step=ETA, sampling="full")
    history = bilevel.run(problem, solver, max_steps=20_000, eval_every=1000).history["hypergrad_norm_sq"]
    np.testing.assert_allclose(np.median(history[-10:]), neumann_floor(problem, 11), rtol=0.1)


def nesterov(exact_solver, x, steps):
    """Return the iterates of Nesterov's method on h, from dense matrices."""
    curvatures = np.linalg.eigvalsh(exact_solver.hessian)
    root, y, path = np.sqrt(curvatures[-1] / curvatures[0]), x, []
    for _ in range(steps):
        new = x - exact_solver(x).hypergrad / curvatures[-1]
        x, y = new + (root - 1) / (root + 1) * (new - y), new
        path.append(y)
    return path


def acc_bio(problem, **settings):
    curvature = problem.oracles.largest_curvature
    return bilevel.AccBiO(1 / curvature, problem.info["L_h"] / curvature, **settings)


def test_acc_bio_with_long_loops_is_nesterovs_method_on_h():
    problem = tiny()
    run = cases.trajectory(problem, acc_bio(problem, n_inner_steps=150, n_v_steps=150), 20)
    path = nesterov(problem.exact_solver, problem.start.outer_var, 20)
    for state, expected in zip(run.states, path, strict=True):
        np.testing.assert_allclose(state.point.outer_var, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "limits"), [("bg", (1e-3, 1e-9, 1e-20)), ("general", (1e-1, 1e-3, 1e-8))])
def test_acc_bio_converges_as_fast_as_the_condition_numbers_imply(form, limits):
    problem = tiny()
    history = bilevel.run(problem, acc_bio(problem, form=form), max_steps=100, eval_every=10).history
    for step, limit in zip((20, 50, 100), limits, strict=True):
        assert history["hypergrad_norm_sq"][list(history["step"]).index(step)] < limit * problem.info["L_h"]
    descent = problem.start.outer_var
    for _ in range(100):
        descent = descent - problem.exact_solver(descent).hypergrad / problem.info["L_h"]
    exact_descent = np.sum(problem.exact_solver(descent).hypergrad ** 2)
    assert history["hypergrad_norm_sq"][-1] < 0.1 * exact_descent, "it is faster than exact gradient steps"


@pytest.mark.slow
def test_acc_bio_finds_the_minimizer_within_bounds():
    problem = tiny()
    exact_solver, upper = problem.exact_solver, float(np.median(problem.exact_solver.minimizer)) - 0.1
    limits = np.full(4, -3.0), np.full(4, upper)
    bounded = dataclasses.replace(problem, oracles=dataclasses.replace(problem.oracles, outer_bounds=limits))
    found = bilevel.run(bounded, acc_bio(problem), max_steps=200, eval_every=200).point.outer_var
    expected = lsq_linear(*whitened(exact_solver), bounds=limits, tol=1e-14).x
    np.testing.assert_allclose(found, expected, atol=1e-8)
    assert 1 <= np.sum(found == upper) < 4


def whitened(exact_solver):
    """Return A and b with h(x) = ½ ||A x - b||² up to a constant."""
    root = np.linalg.cholesky(exact_solver.hessian).T
    return root, root @ exact_solver.minimizer


def test_acc_bio_refuses_problems_that_do_not_declare_a_strongly_convex_h():
    with pytest.raises(ValueError, match=r"`AccBiO\(strong_convexity=None\)`: the constant must be given"):
        bilevel.run(cases.logistic_selection(), bilevel.AccBiO(), max_steps=1)
    with pytest.raises(ValueError, match=r"outer_strong_convexity=None.*such as SRBA"):
        bilevel.run(cases.logistic_selection(), bilevel.AccBiO(strong_convexity=1.0), max_steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("n_inner_steps", [1, 5])
def test_nbo_converges_to_rounding_level_on_full_batches(n_inner_steps):
    solver = bilevel.NBO(0.5, 0.5, n_inner_steps=n_inner_steps, sampling="full")
    history = bilevel.run(tiny(), solver, max_steps=2000, eval_every=2000).history
    assert history["hypergrad_norm_sq"][-1] < 1e-20


@pytest.mark.parametrize("form", ["bfgs", pytest.param("sr1", marks=pytest.mark.slow)])
def test_qnbo_with_a_warm_start_of_v_converges_to_rounding_level(form):
    solver = bilevel.QNBO(0.5, 0.5, n_inner_steps=2, n_v_steps=2, form=form)
    history = bilevel.run(tiny(), solver, max_steps=300, eval_every=300).history
    assert history["hypergrad_norm_sq"][-1] < 1e-20


@pytest.mark.slow
def test_the_bias_of_qnbo_with_a_cold_start_of_v_falls_with_its_steps():
    def floor(n_v_steps):
        solver = bilevel.QNBO(0.5, 0.5, n_v_steps=n_v_steps, warm_start_v=False)
        return bilevel.run(tiny(), solver, max_steps=400, eval_every=400).history["hypergrad_norm_sq"][-1]

    assert floor(40) < 1e-20 < 1e-6 < floor(3)


ESTIMATORS = ("inner_estimator", "v_estimator", "outer_estimator")
MIXTURES = {
    "SFFBA": ("zerosarah", "zerosarah", "zerosarah"),
    "MSEBA": ("zerosarah", "page", "page"),
    "MA-SABA": ("saga", "saga", "saga"),
}


def mixture(estimators, *args, **kwargs):
    return bilevel.PnPBO(*args, **dict(zip(ESTIMATORS, estimators, strict=True)), **kwargs)


@pytest.mark.parametrize(
    "name", ["SFFBA", *(pytest.param(name, marks=pytest.mark.slow) for name in list(MIXTURES)[1:])]
)
def test_mixtures_of_variance_reduced_estimators_converge_to_rounding_level(name):
    result = bilevel.run(tiny(), mixture(MIXTURES[name], 0.2, 1.0, 16), max_calls=1_000_000)
    assert result.history["hypergrad_norm_sq"][-1] < 1e-25


@pytest.mark.slow
@pytest.mark.parametrize("estimators", [("sgd", "saga", "saga"), ("saga", "sgd", "saga"), ("saga", "saga", "sgd")])
def test_a_single_noisy_estimator_prevents_convergence(estimators):
    solver = mixture(estimators, 0.2, 1.0, 16, momentum=1.0)
    history = bilevel.run(tiny(), solver, max_calls=1_000_000, eval_every=500).history["hypergrad_norm_sq"]
    assert np.median(history[-5:]) > 1e-8


@pytest.mark.parametrize(
    ("special", "general"),
    [
        (bilevel.SABA(0.1, 5.0, 8), mixture(["saga"] * 3, 0.1, 5.0, 8, momentum=1.0)),
        pytest.param(
            bilevel.SABA(0.1, 5.0, 8), mixture(["zerosarah"] * 3, 0.1, 5.0, 8, mixing=1.0), marks=pytest.mark.slow
        ),
        pytest.param(
            bilevel.SPABA(0.1, 5.0, 8, period=6, v_radius=0.3),
            mixture(["page"] * 3, 0.1, 5.0, 8, period=6, v_radius=0.3),
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.slow
def test_saba_and_spaba_are_settings_of_pnpbo(special, general):
    one, other = (bilevel.run(cases.quadratic(), solver, max_steps=40) for solver in (special, general))
    cases.assert_trees_close(one.point, other.point, rtol=1e-10)
    assert (one.calls == other.calls) == (general.inner_estimator != "zerosarah"), "zerosarah evaluates two points"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_soba_converges_slowly_under_noise_and_amigo_levels_off(seed):
    problem = tiny(seed)

    def path(solver, steps):
        return bilevel.run(problem, solver, seed=seed, max_steps=steps, eval_every=steps // 40).history

    amigo = path(bilevel.AmIGO(0.1, 1.0, 16, n_inner_steps=5), 8000)["hypergrad_norm_sq"]
    late, later = np.median(amigo[10:20]), np.median(amigo[-10:])
    assert later > 1e-6 and later > late / 4, "constant steps level off"
    lower = path(bilevel.AmIGO(0.02, 1.0, 16, n_inner_steps=5), 8000)["hypergrad_norm_sq"]
    assert np.median(lower[-10:]) < later / 2, "smaller steps level off lower"
    soba = path(bilevel.SOBA(0.5, 1.0, 16), 80_000)["hypergrad_norm_sq"]
    assert 1e-8 < np.median(soba[-10:]) < np.median(soba[3:8]) / 2, "decreasing steps continue to converge, slowly"


def test_the_normal_equations_of_amigo_hold_for_an_indefinite_hessian():
    def saddle(z, x, row):
        return (z[0] ** 2 - 0.5 * z[1] ** 2) / 2 + 0 * x[0]

    def linear(z, x, row):
        return 3 * z[0] + 2 * z[1] + x[0] ** 2

    data, start = np.zeros((4, 1)), (np.zeros(2), np.ones(1))
    problem = bilevel.BilevelProblem.from_losses(saddle, linear, data, data, *start, dtype="float64")

    def last_v(**settings):
        solver = bilevel.AmIGO(0.5, 1.0, sampling="full", **settings)
        return bilevel.run(problem, solver, max_steps=20, eval_every=20).point.v

    np.testing.assert_allclose(last_v(normal_equations=True, v_step=1.5), [-3, 4], rtol=1e-8)
    assert np.linalg.norm(last_v()) > 1e6, "gradient descent on the quadratic diverges"


def test_the_estimates_of_vrbo_are_exact_at_the_current_point_on_full_batches():
    problem = tiny()
    solver = bilevel.VRBO(0.3, 1.0, n_inner_steps=3, n_neumann=4, neumann_step=ETA, period=1000, sampling="full")
    run = cases.trajectory(problem, solver, 5)
    state = run.states[-1]
    with arithmetic("float64"):
        exact = solver._gradients(run.oracles, state.point, None, None)
    cases.assert_trees_close(state.inner_estimate, exact.inner_var, rtol=1e-12)
    cases.assert_trees_close(state.outer_estimate, exact.outer_var, rtol=1e-12)
    assert np.linalg.norm(np.asarray(state.point.outer_var) - problem.start.outer_var) > 0.1, (
        "the test requires moves of x"
    )


def test_the_estimate_of_acc_bo_is_exact_on_full_batches():
    solver = bilevel.AccBO(0.3, 1.0, n_neumann=4, neumann_step=ETA, momentum=0.2, warm_up=2, sampling="full")
    run = cases.trajectory(tiny(), solver, 6)
    x, state = np.asarray(run.states[-2].point.outer_var), run.states[-1]
    with arithmetic("float64"):
        everything = neumann.NeumannDraw(None, None, None)
        exact = neumann.hypergradient(run.oracles, state.previous, everything, 4, ETA)
    np.testing.assert_allclose(state.estimate, exact.outer_var, rtol=1e-11)
    cases.assert_trees_equal(state.previous.inner_var, state.average)
    np.testing.assert_allclose(np.linalg.norm(np.asarray(state.point.outer_var) - x), 0.3, rtol=1e-12)


@pytest.mark.slow
def test_acc_bo_stops_within_a_few_moves_of_the_bias_of_its_series():
    problem = tiny(1)
    settings = {"n_neumann": 20, "neumann_step": ETA}
    full = bilevel.run(problem, bilevel.AccBO(0.1, 10.0, **settings, sampling="full"), max_steps=4000, eval_every=2000)
    noisy = bilevel.run(problem, bilevel.AccBO(0.1, 10.0, 16, **settings), max_steps=4000, eval_every=500)
    floor, history = neumann_floor(problem, 21), noisy.history["hypergrad_norm_sq"]
    np.testing.assert_allclose(full.history["hypergrad_norm_sq"][-1], floor, rtol=0.1)
    assert history[0] > 2 * history[1] > 10 * np.median(history[-4:]) > 5 * floor


def test_bsa_with_a_warm_start_is_alset():
    settings = {"n_inner_steps": 3, "n_neumann": 4}
    problem = cases.quadratic()
    bsa = bilevel.run(problem, bilevel.BSA(0.1, 5.0, 8, **settings), max_steps=30)
    alset = bilevel.run(problem, bilevel.ALSET(0.1, 5.0, 8, **settings), max_steps=30)
    cases.assert_trees_equal(bsa.point, alset.point)
    assert bsa.calls == alset.calls


def test_neumann_aid_on_full_batches_is_stocbio_with_equal_steps_of_both_loops():
    settings = {"n_inner_steps": 2, "n_neumann": 3, "sampling": "full"}
    solvers = bilevel.NeumannAID(0.1, 5.0, **settings), bilevel.StocBiO(0.1, 5.0, neumann_step=0.1, **settings)
    one, other = (bilevel.run(cases.quadratic(), solver, max_steps=30) for solver in solvers)
    cases.assert_trees_equal(one.point, other.point)
    assert one.calls == other.calls


def test_itd_equals_automatic_differentiation_through_its_inner_loop():
    problem = cases.logistic_selection()
    solver = bilevel.ITD(0.3, 1.0, 8, n_inner_steps=5)
    with arithmetic("float64"):
        oracles = problem.oracles.with_batches(8, "blocks")
        draw = solver.draw(oracles, jax.random.key(0), jnp.int32(3))

        def value(outer_var):
            point = problem.start._replace(outer_var=outer_var)
            for k in range(5):
                grad = oracles.inner_grad(point, draw.inner[k])
                point = point._replace(inner_var=point.inner_var - 0.3 * grad)
            return oracles.outer_value(point, draw.outer)

        _, grad = solver.unroll(oracles, problem.start, draw)
        np.testing.assert_allclose(grad, jax.grad(value)(jnp.asarray(problem.start.outer_var)), rtol=1e-12)


def test_itd_approaches_the_exact_hypergradient_at_the_rate_of_the_inner_problem():
    problem, step_size = tiny(), 0.5
    x = np.array([1.0, -1.0, 0.5, 2.0])
    exact = problem.exact_solver(x)
    eigenvalues = np.linalg.eigvalsh(problem.exact_solver.inner.a_inner)
    rate = np.max(np.abs(1 - step_size * eigenvalues))
    with arithmetic("float64"):
        start = problem.start._replace(inner_var=exact.inner_var, outer_var=x)

        def error(n_steps):
            solver = bilevel.ITD(step_size, 1.0, n_inner_steps=n_steps, sampling="full")
            _, grad = solver.unroll(problem.oracles, start, Rows(None, None))
            return float(jnp.sqrt(trees.norm_sq(grad - exact.hypergrad)))

        errors = [error(n_steps) for n_steps in (40, 80, 120)]
    for shorter, longer in itertools.pairwise(errors):
        np.testing.assert_allclose(longer / shorter, rate**40, rtol=0.15)


@pytest.mark.parametrize("n_steps", [10, *(pytest.param(steps, marks=pytest.mark.slow) for steps in (1, 2, 3, 26))])
def test_checkpoints_change_no_step_of_itd_and_cost_less_than_a_second_loop(n_steps):
    problem, settings = cases.quadratic(), {"n_inner_steps": n_steps, "momentum": 0.5}
    plain, repeated = (
        bilevel.run(problem, bilevel.ITD(0.2, 2.0, 8, checkpoints=kept, **settings), max_steps=5)
        for kept in (False, True)
    )
    cases.assert_trees_close(repeated.point, plain.point, rtol=1e-12)
    assert plain.calls.inner_grad <= repeated.calls.inner_grad < 2 * plain.calls.inner_grad + (n_steps == 1)
    assert repeated.calls._replace(inner_grad=0) == plain.calls._replace(inner_grad=0)


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [None, 0.5])
def test_checkpoints_save_memory(momentum):
    problem = bilevel.problems.penalty_selection(*cases.logistic_data(60, 40, dim=50), dtype="float64")

    def memory(checkpoints):
        solver = bilevel.ITD(n_inner_steps=400, momentum=momentum, checkpoints=checkpoints, sampling="full")
        with arithmetic("float64"):
            oracles = problem.oracles.with_batches(8, "full")
            program = cases.lowered_steps(problem, solver.cast("float64"), oracles).compile()
        return program.memory_analysis().temp_size_in_bytes / (8 * 50)

    plain, repeated = memory(False), memory(True)
    assert plain > 400 and plain - repeated > 400 - 80, "vectors like z"


def f2sa(lambda_0, delta_0, settings, max_calls, **kwargs):
    """Return the smallest final ||∇h||² over some settings of the steps."""
    solvers = [bilevel.F2SA(*setting, 16, lambda_0=lambda_0, delta_0=delta_0, **kwargs) for setting in settings]
    runs = [bilevel.run(tiny(), solver, max_calls=max_calls, eval_every=10**6) for solver in solvers]
    return min(run.history["hypergrad_norm_sq"][-1] for run in runs if run.status != "diverged")


@pytest.mark.slow
def test_the_bias_of_f2sa_falls_with_lambda_0_and_delta_0():
    def final(lambda_0, delta_0):
        return f2sa(lambda_0, delta_0, [(2.0, 1.0), (1.0, 1.0)], 20_000_000, sampling="full")

    weak, growing, strong = final(1.0, 0.1), final(1.0, 1.0), final(30.0, 1.0)
    assert weak > 3 * growing > 9 * strong


def f2sa_p_floor(problem, order, nu):
    """Return ||∇h||² at the x where the difference of this order is 0, from dense matrices."""
    exact_solver = problem.exact_solver
    inner, outer = exact_solver.inner, exact_solver.outer
    nodes = [j for j in range(-(order // 2), (order + 1) // 2 + 1) if j or order % 2]
    weights = np.linalg.solve([[float(j) ** k for j in nodes] for k in range(len(nodes))], np.eye(len(nodes))[1])

    def slope(x, j):
        a_inner, b = inner.a_inner + j * nu * outer.a_inner, inner.b + j * nu * outer.b
        y = -np.linalg.solve(a_inner, b.T @ x + inner.linear_inner + j * nu * outer.linear_inner)
        a_outer = inner.a_outer + j * nu * outer.a_outer
        return a_outer @ x + b @ y + inner.linear_outer + j * nu * outer.linear_outer

    def difference(x):
        return sum(weight * slope(x, j) for weight, j in zip(weights, nodes, strict=True)) / nu

    constant = difference(np.zeros(4))
    matrix = np.stack([difference(unit) - constant for unit in np.eye(4)], axis=1)
    return np.sum(exact_solver(-np.linalg.solve(matrix, constant)).hypergrad ** 2)


@pytest.mark.parametrize("order", [2, *(pytest.param(order, marks=pytest.mark.slow) for order in (1, 3, 4))])
def test_f2sa_p_converges_to_the_bias_computed_from_dense_matrices(order):
    problem, nu = tiny(), 0.03
    solver = bilevel.F2SAp(0.8, 2.0, order=order, perturbation=nu, normalized=False, sampling="full")
    found = bilevel.run(problem, solver, max_steps=1500, eval_every=1500).history["hypergrad_norm_sq"][-1]
    floor, lower = (f2sa_p_floor(problem, order, size) for size in (nu, nu / 2))
    np.testing.assert_allclose(found, floor, rtol=1e-3)
    np.testing.assert_allclose(floor / lower, 4**order, rtol=0.3)


def test_f2sa_stays_bounded_on_logistic_selection():
    problem = cases.logistic_selection()
    for step_size, outer_ratio in ((0.25, 0.1), (0.25, 1.0), (0.03, 0.1)):
        result = bilevel.run(problem, bilevel.F2SA(step_size, outer_ratio, 8, delta_0=1.0), max_steps=5000)
        assert result.status == "out_of_budget"
        assert np.max(np.abs(result.point.outer_var)) < 20


@pytest.mark.slow
def test_f2sa_is_noisier_with_two_batches_than_with_one():
    settings = [(0.1, 0.3), (0.5, 1.0), (2.0, 10.0)]
    assert f2sa(30.0, 1.0, settings, 10**6, shared_batch=False) > 3 * f2sa(30.0, 1.0, settings, 10**6)


@pytest.mark.parametrize("name", ["StocBiO", "MRBO", "VRBO", "BSA", "TTSA", "ALSET", "SUSTAIN", "AdaBiO", "AccBO"])
def test_a_neumann_step_beyond_the_known_curvature_is_refused(name):
    solver = bilevel.SOLVERS[name](0.1, 1.0, 16, neumann_step=5.0)
    with pytest.raises(ValueError, match=rf"`{name}\(neumann_step=5\)`.*neumann_step < 2/L"):
        bilevel.run(tiny(), solver, max_steps=1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: bilevel.StocBiO(n_inner_steps=0), "n_inner_steps=0"),
        (lambda: bilevel.StocBiO(neumann_step=0.0), "neumann_step=0.0"),
        (lambda: bilevel.AmIGO(n_inner_steps=-1), "n_inner_steps=-1"),
        (lambda: bilevel.MRBO(momentum=1.5), "momentum=1.5"),
        (lambda: bilevel.ITD(momentum=1.0), "momentum=1.0.*below 1"),
        (lambda: bilevel.SUSTAIN(momentum=-0.1), "momentum=-0.1"),
        (lambda: bilevel.MRBO(n_neumann=0), "n_neumann=0"),
        (lambda: bilevel.VRBO(period=0), "period=0"),
        (lambda: bilevel.F2SA(lambda_0=0.0), "lambda_0=0.0"),
        (lambda: bilevel.F2SA(schedule="other"), "schedule='other'"),
        (lambda: bilevel.F2SA(shared_batch="yes"), "shared_batch='yes'"),
        (lambda: bilevel.F2SAp(order=0), "order=0"),
        (lambda: bilevel.F2SAp(perturbation=-0.1), "perturbation=-0.1"),
        (lambda: bilevel.PnPBO(inner_estimator="adam"), "inner_estimator='adam'.*'sgd', 'saga'"),
        (lambda: bilevel.PnPBO(sampling="iid"), "sampling='iid'.*use sampling='blocks'"),
        (lambda: bilevel.PnPBO(mixing=1.5), "mixing=1.5"),
        (lambda: bilevel.FdeHBO(perturbation=0.0), "perturbation=0.0"),
        (lambda: bilevel.LancBiO(period=0), "period=0"),
        (lambda: bilevel.BOME(sampling="blocks"), "sampling='blocks'"),
        (lambda: bilevel.BOME(barrier=-1.0), "barrier=-1.0"),
        (lambda: bilevel.VPBGD(penalty=0.0), "penalty=0.0"),
        (lambda: bilevel.GPBGD(ramp=-1), "ramp=-1"),
        (lambda: bilevel.MEHA(c_power=1.5), "c_power=1.5"),
        (lambda: bilevel.AccBO(averaging=0.0), "averaging=0.0"),
        (lambda: bilevel.AccBO(outer_optimizer="adam"), "its moves of x have a fixed length"),
        (lambda: bilevel.PZOBO(smoothing=0.0), "smoothing=0.0"),
        (lambda: bilevel.PZOBO(n_directions=0), "n_directions=0"),
        (lambda: bilevel.MASOBA(momentum=2.0), "momentum=2.0"),
    ],
)
def test_bad_parameters_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()

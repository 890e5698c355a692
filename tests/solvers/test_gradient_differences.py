"""DARTS and SAMA: their differences of gradients, the derivative of their inner step, and their bias."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import bilevel
from bilevel._core.compilation import arithmetic
from bilevel._core.types import Rows
from bilevel.solvers.darts import cross_difference, inner_step
from tests import cases
from tests.solvers.test_baselines import ETA, neumann_floor, tiny
from tests.solvers.test_transcriptions import assert_same_path, both
from tests.transcription.sama import B1, B2, EPS, adam

FULL = Rows(None, None)


def weighted_losses():
    """A problem whose ∇x G is not quadratic in z, and whose F depends on x."""

    def inner_loss(z, x, row):
        return jnp.exp(x[0]) * jnp.logaddexp(0.0, row @ z) + jnp.sum(jnp.exp(x) * z**2) / 2

    def outer_loss(z, x, row):
        return jnp.logaddexp(0.0, -row @ z) + jnp.sum(jnp.sin(x))

    rng = np.random.default_rng(2)
    data = rng.standard_normal((20, 3)), rng.standard_normal((10, 3)) + 0.5
    z, x = np.array([0.5, -1.0, 0.7]), np.array([0.3, -0.2, 0.1])
    return bilevel.BilevelProblem.from_losses(inner_loss, outer_loss, *data, z, x, dtype="float64")


def distance_to_itd(problem, perturbation, step_size=0.3):
    """Return the distance of the gradient of DARTS from that of ITD with one inner step."""
    settings = {"sampling": "full"}
    with arithmetic("float64"):
        solver = bilevel.DARTS(step_size, perturbation=perturbation, **settings)
        found = solver._unrolled_grad(problem.oracles, problem.start, solver.moves.init(problem.start), FULL)
        _, wanted = bilevel.ITD(step_size, n_inner_steps=1, **settings).unroll(problem.oracles, problem.start, FULL)
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


def test_the_gradient_of_darts_on_a_quadratic_is_that_of_itd_with_one_step():
    for perturbation in (0.01, 10.0):
        assert distance_to_itd(cases.quadratic(), perturbation) < 1e-11


def test_the_error_of_the_difference_in_darts_is_quadratic_in_its_distance():
    problem = weighted_losses()
    errors = [distance_to_itd(problem, perturbation) for perturbation in (0.02, 0.01, 0.001)]
    np.testing.assert_allclose([errors[0] / errors[1], errors[1] / errors[2]], [4, 100], rtol=0.02)


def test_a_difference_along_zero_is_zero():
    problem = cases.quadratic("float32")
    with arithmetic("float32"):
        zero = np.zeros_like(problem.start.v)
        found, behind = cross_difference(problem.oracles, problem.start, zero, np.float32(0.01), None)
    np.testing.assert_array_equal(found, 0)
    np.testing.assert_array_equal(behind, problem.start.inner_var)


def test_first_order_steps_equal_the_transcription():
    solver = bilevel.DARTS(0.2, 2.0, cases.BATCH, first_order=True)
    run, expected, plain = both("quadratic", solver)
    assert_same_path(run, expected)
    declared = {kind: int(np.sum(getattr(run.page.calls, kind)[:20])) for kind in ("inner_grad", "outer_grad_outer")}
    assert declared == {"inner_grad": plain.calls["gz"], "outer_grad_outer": plain.calls["fx"]}
    assert plain.calls["fz"] == plain.calls["gx"] == 0


def without_x():
    problem = weighted_losses()
    data = problem.oracles.inner_samples.leaves
    losses = (lambda z, x, row: jnp.sum((z - x) ** 2), lambda z, x, row: jnp.sum(z**2))
    return bilevel.BilevelProblem.from_losses(*losses, data, data, np.ones(3), np.ones(3), dtype="float32")


def on_the_host():
    rows = np.random.default_rng(0).standard_normal((30, 3))
    losses = (lambda z, x, row: jnp.sum((z - x) ** 2), lambda z, x, row: (row @ z) ** 2)
    data = bilevel.HostData(rows), bilevel.HostData(rows)
    return bilevel.BilevelProblem.from_losses(*losses, *data, np.ones(3), np.ones(3), dtype="float32")


@pytest.mark.parametrize(
    "build",
    [
        cases.logistic_selection,
        without_x,
        pytest.param(on_the_host, marks=pytest.mark.slow),
        pytest.param(lambda: cases.logistic_selection().sharded(), marks=pytest.mark.slow),
    ],
)
def test_first_order_is_refused_if_the_outer_loss_does_not_depend_on_x(build):
    problem = build()
    with pytest.raises(ValueError, match=r"`DARTS\(first_order=True\)`: .* so that x would never move"):
        bilevel.run(problem, bilevel.DARTS(batch_size=8, first_order=True), max_steps=1)


def test_first_order_is_accepted_if_the_gradient_is_zero_at_the_start_only():
    def squares(z, x, row):
        return jnp.sum((z - x) ** 2) + jnp.sum(x**2)

    data = np.zeros((4, 1))
    problem = bilevel.BilevelProblem.from_losses(squares, squares, data, data, np.zeros(2), np.zeros(2))
    assert bilevel.DARTS(first_order=True).configure(problem).first_order


def test_the_trial_step_of_darts_reads_the_momentum_of_z_and_does_not_change_it():
    problem, rate, momentum, outer_step = cases.quadratic(), 0.1, 0.9, 0.05
    settings = {"sampling": "full", "inner_optimizer": optax.sgd(rate, momentum)}
    run = bilevel.run(problem, bilevel.DARTS(rate, rate / outer_step, **settings), max_steps=5)
    plain, (z, x, _) = cases.in_numpy("quadratic", problem), problem.start
    buffer = np.zeros_like(z)
    for _ in range(5):
        trial = z - rate * (momentum * buffer + plain.gz(z, x))
        w = plain.fz(trial, x)
        x = x - outer_step * (plain.fx(trial, x) - rate * plain.cr(z, x, w))
        buffer = momentum * buffer + plain.gz(z, x)
        z = z - rate * buffer
    np.testing.assert_allclose(run.point.outer_var, x, rtol=1e-10)
    np.testing.assert_allclose(run.point.inner_var, z, rtol=1e-10)


def test_the_derivative_of_adam_is_the_published_formula_once_its_averages_have_forgotten_their_start():
    rng, rate, steps = np.random.default_rng(0), 0.1, 20_000
    m, v = rng.standard_normal(4), 2.0 + rng.random(4)
    q, w = rng.standard_normal((2, 4))
    m_new, v_new = B1 * m + (1 - B1) * q, B2 * v + (1 - B2) * q**2
    m_old, v_old = (m_new - (1 - B1) * q) / B1, (v_new - (1 - B2) * q**2) / B2
    published = rate * w * ((1 - B1) * B2 * v_old - B1 * (1 - B2) * q * m_old) / (np.sqrt(v_new) + EPS) ** 3
    np.testing.assert_allclose(adam(q, m, v, steps, rate)[1] * w, published, rtol=1e-6)
    moves = SimpleNamespace(inner_optimizer=optax.adam(rate))
    with arithmetic("float64"):
        adam_state, *rest = optax.adam(rate).init(q)
        adam_state = adam_state._replace(count=jnp.int32(steps - 1), mu=jnp.asarray(m), nu=jnp.asarray(v))
        state = SimpleNamespace(inner=(adam_state, *rest), _replace=lambda inner: inner)
        point = bilevel.Point(q, q, q)
        change, transposed, _ = inner_step(moves, point, jnp.asarray(q), state, 1.0)
        np.testing.assert_allclose(transposed(jnp.asarray(w)), published, rtol=1e-6)
    np.testing.assert_allclose(change, adam(q, m, v, steps, rate)[0], rtol=1e-10)


def test_the_derivative_of_adam_is_zero_where_all_gradients_were_zero():
    moves, gradient = SimpleNamespace(inner_optimizer=optax.adam(0.1)), jnp.array([0.0, 1.0])
    state = SimpleNamespace(inner=optax.adam(0.1).init(gradient), _replace=lambda inner: inner)
    _, transposed, _ = inner_step(moves, bilevel.Point(gradient, gradient, gradient), gradient, state, 1.0)
    response = np.asarray(transposed(jnp.ones(2)))
    assert response[0] == 0 and np.isfinite(response[1])


def test_sama_with_plain_steps_replaces_the_inverse_hessian_by_a_multiple_of_the_identity():
    problem, rate, scale = cases.quadratic(), 0.1, 7.0
    settings = {"n_inner_steps": 3, "response_scale": scale, "perturbation": 2.0, "sampling": "full"}
    found = bilevel.run(problem, bilevel.SAMA(rate, 1.0, **settings), max_steps=1)
    z, x = np.asarray(found.point.inner_var), problem.start.outer_var
    plain = cases.in_numpy("quadratic", problem)
    expected = x - rate * (plain.fx(z, x) - scale * rate * plain.cr(z, x, plain.fz(z, x)))
    np.testing.assert_allclose(found.point.outer_var, expected, rtol=1e-10)
    assert found.calls.hvp == found.calls.cross == 0


@pytest.mark.slow
def test_a_nudge_of_sama_lowers_the_outer_loss():
    problem = cases.logistic_selection()
    settings = {"perturbation": 0.05, "sampling": "full", "n_inner_steps": 2}
    nudged, plain = (
        bilevel.run(problem, bilevel.SAMA(0.1, 1.0, nudge=nudge, **settings), max_steps=1).point
        for nudge in (True, False)
    )
    np.testing.assert_allclose(np.linalg.norm(nudged.inner_var - plain.inner_var), 0.05)
    with arithmetic(np.float64):
        values = [float(problem.oracles.outer_value(point)) for point in (nudged, plain)]
    assert values[0] < values[1]


@pytest.mark.slow
def test_idarts_converges_to_the_bias_of_a_series_with_three_terms():
    problem = tiny()
    solver = bilevel.NeumannAID(ETA, 0.5, n_inner_steps=5, n_neumann=2, finite_difference=True, sampling="full")
    result = bilevel.run(problem, solver, max_steps=3000, eval_every=3000)
    np.testing.assert_allclose(result.history["hypergrad_norm_sq"][-1], neumann_floor(problem, 3), rtol=1e-3)
    assert result.calls.cross == 0


@pytest.mark.slow
@pytest.mark.parametrize("solver", [bilevel.DARTS(ETA, 0.5, sampling="full"), bilevel.SAMA(ETA, 0.5, sampling="full")])
def test_darts_and_sama_converge_to_the_bias_of_a_series_with_one_term(solver):
    problem = tiny()
    floor = bilevel.run(problem, solver, max_steps=3000, eval_every=3000).history["hypergrad_norm_sq"][-1]
    np.testing.assert_allclose(floor, neumann_floor(problem, 1), rtol=1e-3)

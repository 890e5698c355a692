"""Transcriptions of methods with loops, in cases where their steps are known or equal those of another method."""

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from tests.transcription.draws import (
    ALL,
    STEPS,
    B,
    D,
    M,
    N,
    P,
    Q,
    T,
    assert_same,
    blocks,
    make_draws,
    make_quadratic,
    point,
    slope,
)

from .alset import alset
from .amigo import amigo
from .bome import bome
from .bsa import bsa
from .directions import ball, directions
from .f2sa import f2sa
from .f2sa_p import f2sa_p, indices_of, rule
from .hoag import exponential, hoag
from .itd import itd, itd_gradient
from .problems import Problem
from .pzobo import pzobo
from .saba import saba
from .spaba import spaba
from .srba import srba
from .stocbio import stocbio
from .ttsa import ttsa


def test_bsa_with_a_warm_start_is_alset(problem: Problem) -> None:
    z, x, _ = point(problem)
    draws = make_draws(problem, 5)
    assert_same(bsa(problem, z, x, draws, n_neumann=Q, **STEPS), alset(problem, z, x, draws, n_neumann=Q, **STEPS))


def test_bsa_with_a_cold_start_begins_at_the_initial_z(problem: Problem) -> None:
    z0, x, _ = point(problem)
    draws = make_draws(problem, 2)
    one, two = bsa(problem, z0, x, draws, n_neumann=Q, warm_start=False, **STEPS)
    for record, draw, at in ((one, draws[0], x), (two, draws[1], one["outer_var"])):
        z = z0
        for s, rows in enumerate(draw.inner_loop):
            z = z - 0.1 / (s + 1) * problem.gz(z, at, rows)
        np.testing.assert_allclose(record["inner_var"], z, rtol=1e-12)


def test_the_first_step_of_ttsa_is_alset_with_one_inner_step(problem: Problem) -> None:
    z, x, _ = point(problem)
    draw = make_draws(problem, 1)[0]
    draw.inner_loop = [draw.inner]
    one = ttsa(problem, z, x, [draw], n_neumann=Q, **STEPS)
    assert_same(one, alset(problem, z, x, [draw], n_neumann=Q, **STEPS))


def test_amigo_and_stocbio_with_long_loops_follow_the_gradient(problem: Problem) -> None:
    _, x, _ = point(problem)
    z, _, _, grad_h = problem.solve(x)
    many = SimpleNamespace(inner_loop=[None], outer=None, linear_loop=[None] * 2000, neumann=[None] * 600, cross=None)
    for history in (
        amigo(problem, z, x, [many], **STEPS),
        stocbio(problem, z, x, [many], neumann_step=0.3, **STEPS),
    ):
        np.testing.assert_allclose((x - history[0]["outer_var"]) / 0.05, grad_h, rtol=1e-6, atol=1e-8)


def test_the_first_steps_of_f2sa_equal_its_formulas(problem: Problem) -> None:
    z0, x, _ = point(problem)
    draw = make_draws(problem, 1)[0]
    options = {"lambda_0": 3.0, "delta_0": 0.5, **STEPS}
    one, two = f2sa(problem, z0, x, [draw] * 2, shared_batch=False, **options)
    z, y = z0, z0
    for k in range(T):
        z = z - 0.1 * problem.gz(z, x, draw.inner_loop[k])
        grad = problem.fz(y, x, draw.y_outer_loop[k]) / 3.0 + problem.gz(y, x, draw.y_inner_loop[k])
        y = y - 0.05 * grad
    move = problem.fx(y, x, draw.outer)
    move = move + 3.0 * (problem.gx(y, x, draw.inner) - problem.gx(z, x, draw.inner_at_z))
    np.testing.assert_allclose(one["inner_var"], z, rtol=1e-12)
    np.testing.assert_allclose(one["y"], y, rtol=1e-12)
    np.testing.assert_allclose(one["outer_var"], x - 0.05 * move, rtol=1e-12)
    assert one["lam"] == 3.5 and two["lam"] == pytest.approx(3.5 + 0.5 * 2 ** (-6 / 7))
    printed = f2sa(problem, z0, x, [draw] * 2, shared_batch=False, published=True, **options)
    assert printed[1]["lam"] == pytest.approx(3.5 + 0.5 * 2 ** (-1 / 7))
    assert_same(printed[:1], [one], "inner_var outer_var y")
    planned = f2sa(problem, z0, x, [draw], shared_batch=False, published_y_step=True, **options)
    assert_same(planned, [one], "inner_var outer_var y")
    shared = f2sa(problem, z0, x, [draw], shared_batch=True, **options)[0]
    move = move - 3.0 * (problem.gx(z, x, draw.inner) - problem.gx(z, x, draw.inner_at_z))
    np.testing.assert_allclose(shared["outer_var"], x - 0.05 * move, rtol=1e-10)


def test_f2sa_with_a_large_multiplier_follows_the_gradient(problem: Problem) -> None:
    _, x, _ = point(problem)
    z, _, _, grad_h = problem.solve(x)
    loops = dict.fromkeys(("inner_loop", "y_inner_loop", "y_outer_loop"), [None] * 900)
    long = SimpleNamespace(**{**vars(ALL), **loops})
    record = f2sa(problem, z, x, [long], lambda_0=1e4, delta_0=0.0, shared_batch=True, **STEPS)[0]
    np.testing.assert_allclose((x - record["outer_var"]) / 0.05, grad_h, rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_itd_is_the_derivative_of_the_unrolled_value(problem: Problem, momentum: float) -> None:
    z, x, _ = point(problem)

    def unrolled(at: np.ndarray) -> float:
        end, velocity = z, np.zeros_like(z)
        for _ in range(T):
            velocity = momentum * velocity - (1 - momentum) * problem.gz(end, at)
            end = end + 0.1 * velocity
        return problem.outer_value(end, at)

    end, gradient = itd_gradient(problem, z, x, ALL, 0.1, momentum)
    np.testing.assert_allclose(gradient, slope(unrolled, x), rtol=1e-6, atol=1e-9)
    record = itd(problem, z, x, [ALL], momentum=momentum, **STEPS)[0]
    np.testing.assert_allclose(record["outer_var"], x - 0.05 * gradient)
    np.testing.assert_array_equal(record["inner_var"], end)


def test_itd_on_batches_is_the_derivative_of_the_unrolled_value(problem: Problem) -> None:
    z, x, _ = point(problem)
    draw = make_draws(problem, 1)[0]

    def unrolled(at: np.ndarray) -> float:
        end = z
        for rows in draw.inner_loop:
            end = end - 0.1 * problem.gz(end, at, rows)
        return problem.outer_value(end, at, draw.outer)

    np.testing.assert_allclose(itd_gradient(problem, z, x, draw, 0.1)[1], slope(unrolled, x), rtol=1e-6, atol=1e-9)
    cold = itd(problem, z, x, [draw] * 2, warm_start=False, **STEPS)
    end, _ = itd_gradient(problem, z, cold[0]["outer_var"], draw, 0.1)
    np.testing.assert_array_equal(cold[1]["inner_var"], end)


def test_pzobo_with_orthogonal_directions_is_itd(problem: Problem) -> None:
    """For u = sqrt(d) times the coordinate vectors, the mean of u u' is I; with a small smoothing this is ITD."""
    z, x, _ = point(problem)
    draw = make_draws(problem, 1)[0]
    draw.gaussians = np.sqrt(problem.d) * np.eye(problem.d)
    record = pzobo(problem, z, x, [draw], smoothing=1e-6, **STEPS)[0]
    expected = itd(problem, z, x, [draw], **STEPS)[0]
    np.testing.assert_allclose(record["inner_var"], expected["inner_var"])
    np.testing.assert_allclose(record["outer_var"], expected["outer_var"], rtol=1e-6, atol=1e-8)


def test_the_multiplier_of_bome_enforces_its_barrier(problem: Problem) -> None:
    """The move's product with the gap's gradient q is at least eta_b q'q, with equality if lam > 0."""
    z, x, _ = point(problem)
    record = bome(problem, z, x, [None], n_inner_steps=T, eta_b=0.5, **STEPS)[0]
    w = z
    for _ in range(T):
        w = w - 0.1 * problem.gz(w, x)
    q = np.concatenate([problem.gz(z, x), problem.gx(z, x) - problem.gx(w, x)])
    move = np.concatenate([z - record["inner_var"], x - record["outer_var"]]) / 0.05
    if record["lam"] > 0:
        assert move @ q == pytest.approx(0.5 * q @ q, rel=1e-8)
    else:
        assert move @ q >= 0.5 * q @ q


def test_bome_at_the_inner_solution_moves_along_the_gradient_of_f() -> None:
    problem = make_quadratic()
    problem.inner.az[:] = np.eye(P)
    problem.inner.b[:] = 0.0
    problem.inner.dz[:] = 0.0
    x = np.ones(D)
    record = bome(problem, np.zeros(P), x, [None], n_inner_steps=T, **STEPS)[0]
    assert record["lam"] == 0.0
    np.testing.assert_allclose(record["outer_var"], x - 0.05 * problem.fx(np.zeros(P), x))


def test_the_weights_of_f2sa_p_are_those_of_finite_difference_tables() -> None:
    assert [indices_of(order) for order in (1, 2, 3)] == [[0, 1], [-1, 1], [-1, 0, 1, 2]]
    for order, weights in {
        1: [-1, 1],
        2: [-1 / 2, 1 / 2],
        3: [-1 / 3, -1 / 2, 1, -1 / 6],
        4: [1 / 12, -2 / 3, 2 / 3, -1 / 12],
    }.items():
        np.testing.assert_allclose(rule(indices_of(order), 1), weights, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(rule([-2, -1, 1, 2], 0), [-1 / 6, 2 / 3, 2 / 3, -1 / 6], rtol=1e-13)


def test_the_value_barrier_of_bome_lowers_the_gap_at_its_rate(problem: Problem) -> None:
    """If lam > 0, the move's product with the gap's gradient q is eta_b times the gap, except for the damping."""
    z, x, _ = point(problem)
    record = bome(problem, z, x, [None], n_inner_steps=T, eta_b=100.0, of_value=True, z_size=0.02, **STEPS)[0]
    w = z
    for _ in range(T):
        w = w - 0.1 * problem.gz(w, x)
    gap = problem.inner_value(z, x) - problem.inner_value(w, x)
    move = np.concatenate([(z - record["inner_var"]) / 0.02, (x - record["outer_var"]) / 0.05])
    q = np.concatenate([problem.gz(z, x), problem.gx(z, x) - problem.gx(w, x)])
    assert record["lam"] > 0
    assert move @ q == pytest.approx(100.0 * gap, rel=1e-6)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_the_error_of_f2sa_p_is_proportional_to_nu_to_its_order(order: int) -> None:
    problem = make_quadratic()
    _, x, _ = point(problem)
    z, _, _, grad_h = problem.solve(x)
    loops = {j: [None] * 500 for j in range(-2, 3)}
    draw = SimpleNamespace(inner_loops=loops, outer_loops=loops, inner=None, outer=None)

    def error(nu: float) -> float:
        one = f2sa_p(problem, z, x, [draw], order=order, nu=nu, normalized=False, **STEPS)[0]
        return float(np.linalg.norm((x - one["outer_var"]) / 0.05 - grad_h))

    np.testing.assert_allclose(error(0.04) / error(0.02), 2**order, rtol=0.15)


def test_clipping_the_coordinates_of_v_changes_the_solution_and_a_large_ball_does_not() -> None:
    problem = make_quadratic()
    largest = np.max(np.abs(problem.solve(np.zeros(D)).v))

    def final_gradient_norm(projection: Callable[[np.ndarray], np.ndarray]) -> float:
        z, v, x = np.zeros(P), np.zeros(P), np.zeros(D)
        for _ in range(800):
            d_z, d_v, d_x = directions(problem, (z, v, x), None, None)
            z, v, x = z - 0.1 * d_z, projection(v - 0.1 * d_v), x - 0.1 * d_x
        return float(np.linalg.norm(problem.solve(x).grad_h))

    assert final_gradient_norm(lambda v: ball(v, 10 * largest)) < 1e-4
    assert final_gradient_norm(lambda v: np.clip(v, -largest / 4, largest / 4)) > 1e-2


def test_hoag_converges_and_adapts_its_step_by_its_rule(problem: Problem) -> None:
    z, x, _ = point(problem)
    history = hoag(problem, z, x, range(150))
    first = problem.solve(x)
    assert history[0]["step"] == pytest.approx(1.0 / np.linalg.norm(first.grad_h))
    ratios = np.array([b["step"] / a["step"] for a, b in pairwise(history)])
    assert np.all(np.isclose(ratios, 1.05) | np.isclose(ratios, 0.5))
    last = problem.solve(history[-1]["outer_var"])
    assert np.linalg.norm(last.grad_h) < 1e-2 * np.linalg.norm(first.grad_h)
    assert exponential(1) == pytest.approx(0.09) and exponential(10_000) == 1e-12


@pytest.mark.slow
def test_variance_reduced_methods_converge_on_the_quadratic() -> None:
    problem = make_quadratic()
    z, x = np.zeros(P), np.full(D, -2.0)
    rng = np.random.default_rng(11)
    draws = [
        SimpleNamespace(
            inner=rng.integers(N, size=B),
            outer=rng.integers(M, size=B),
            refresh=rng.random() < 0.1,
            inner_block=int(rng.integers(N // B)),
            outer_block=int(rng.integers(M // B)),
        )
        for _ in range(2500)
    ]
    steps = {"step_size": 0.08, "outer_ratio": 2.0}
    for history in (
        srba(problem, z, x, draws, period=10, **steps),
        spaba(problem, z, x, draws, **steps),
        saba(problem, z, x, draws, inner_blocks=blocks(N), outer_blocks=blocks(M), **steps),
    ):
        assert np.linalg.norm(problem.solve(history[-1]["outer_var"]).grad_h) ** 2 < 1e-20

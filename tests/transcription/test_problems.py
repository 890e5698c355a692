"""The problems of the transcriptions: derivatives, exact solutions, counts, Neumann series."""

import numpy as np
import pytest

from tests.transcription.draws import D, P, Q, factors, make_draws, point, slope

from .directions import ball, directions
from .neumann import hyp1, n1, n2
from .problems import Problem, Quadratic


@pytest.mark.parametrize("rows", [None, np.array([0, 3, 3, 7])], ids=["all", "repeated"])
def test_derivatives_match_finite_differences(problem: Problem, rows: np.ndarray | None) -> None:
    z, x, w = point(problem)
    close = {"rtol": 1e-6, "atol": 1e-8}
    np.testing.assert_allclose(problem.gz(z, x, rows), slope(lambda s: problem.inner_value(s, x, rows), z), **close)
    np.testing.assert_allclose(problem.gx(z, x, rows), slope(lambda s: problem.inner_value(z, s, rows), x), **close)
    np.testing.assert_allclose(problem.fz(z, x, rows), slope(lambda s: problem.outer_value(s, x, rows), z), **close)
    np.testing.assert_allclose(problem.fx(z, x, rows), slope(lambda s: problem.outer_value(z, s, rows), x), **close)
    np.testing.assert_allclose(problem.hv(z, x, w, rows), slope(lambda s: problem.gz(s, x, rows), z).T @ w, **close)
    np.testing.assert_allclose(problem.cr(z, x, w, rows), slope(lambda s: problem.gz(z, s, rows), x) @ w, **close)


def test_the_mean_over_rows_is_the_full_batch(problem: Problem) -> None:
    z, x, w = point(problem)
    single = [np.array([i]) for i in range(problem.n)]
    np.testing.assert_allclose(np.mean([problem.gz(z, x, r) for r in single], axis=0), problem.gz(z, x))
    np.testing.assert_allclose(np.mean([problem.hv(z, x, w, r) for r in single], axis=0), problem.hv(z, x, w))
    np.testing.assert_allclose(np.mean([problem.cr(z, x, w, r) for r in single], axis=0), problem.cr(z, x, w))


def test_the_quadratic_equals_its_sample_loss() -> None:
    rng = np.random.default_rng(7)
    inner, outer = factors(rng, 6, P, D), factors(rng, 4, P, D)
    quadratic = Quadratic(inner, outer)
    z, x, _ = point(quadratic)
    for level, size, value in ((inner, 6, quadratic.inner_value), (outer, 4, quadratic.outer_value)):
        for i in range(size):
            a, c, e, f, dz, dx = (level[k][i] for k in ("a", "c", "e", "f", "dz", "dx"))
            expected = 0.5 * (a @ z) ** 2 + 0.5 * (c @ x) ** 2 + (e @ x) * (f @ z) + dz @ z + dx @ x
            assert value(z, x, np.array([i])) == pytest.approx(expected, rel=1e-12)


def test_the_exact_solution_satisfies_its_equations(problem: Problem) -> None:
    _, x, _ = point(problem)
    problem.reset()
    z, v, h, grad_h = problem.solve(x)
    assert sum(problem.calls.values()) == 0
    d_z, d_v, d_x = directions(problem, (z, v, x), None, None)
    np.testing.assert_allclose(d_z, 0.0, atol=1e-12)
    np.testing.assert_allclose(d_v, 0.0, atol=1e-12)
    np.testing.assert_allclose(d_x, grad_h, atol=1e-12)
    assert h == pytest.approx(problem.outer_value(z, x))
    np.testing.assert_allclose(grad_h, slope(lambda s: problem.solve(s).h, x), rtol=1e-6, atol=1e-8)


def test_calls_count_rows(problem: Problem) -> None:
    z, x, w = point(problem)
    problem.reset()
    problem.gz(z, x, np.array([1, 1, 2]))
    problem.hv(z, x, w)
    problem.outer_value(z, x)
    assert {k: c for k, c in problem.calls.items() if c} == {
        "gz": 3,
        "hv": problem.n,
        "outer_value": problem.m,
    }
    problem.reset()
    assert not any(problem.calls.values())


def test_the_ball_shortens_only_longer_vectors() -> None:
    v = np.array([3.0, 4.0])
    np.testing.assert_allclose(ball(v, 1.0), [0.6, 0.8])
    assert ball(v, 6.0) is v and ball(v, None) is v


# Neumann series


def test_full_batch_neumann_series_equal_sums_of_powers(problem: Problem) -> None:
    z, x, _ = point(problem)
    eta, f = 0.2, problem.fz(z, x)
    hessian = np.stack([problem.hv(z, x, e) for e in np.eye(problem.p)], axis=1)
    contraction = np.eye(problem.p) - eta * hessian
    powers = [np.linalg.matrix_power(contraction, k) @ f for k in range(Q + 1)]
    np.testing.assert_allclose(n1(problem, z, x, None, [None] * Q, eta), -eta * sum(powers), rtol=1e-10)
    estimates = [n2(problem, z, x, None, [None] * (Q - 1), length, Q, eta) for length in range(Q)]
    for length in range(Q):
        np.testing.assert_allclose(estimates[length], -eta * Q * powers[length], rtol=1e-10)
    np.testing.assert_allclose(np.mean(estimates, axis=0), -eta * sum(powers[:Q]), rtol=1e-10)


def test_neumann_series_multiply_their_batches_in_order(problem: Problem) -> None:
    z, x, _ = point(problem)
    eta, draw = 0.1, make_draws(problem, 1)[0]
    product, terms = np.eye(problem.p), [problem.fz(z, x, draw.outer)]
    for rows in draw.neumann:
        hessian = np.stack([problem.hv(z, x, e, rows) for e in np.eye(problem.p)], axis=1)
        product = (np.eye(problem.p) - eta * hessian) @ product
        terms.append(product @ terms[0])
    v = n1(problem, z, x, draw.outer, draw.neumann, eta)
    np.testing.assert_allclose(v, -eta * np.sum(terms, axis=0), rtol=1e-10)
    random_length = n2(problem, z, x, draw.outer, draw.neumann, 3, Q, eta)
    np.testing.assert_allclose(random_length, -eta * Q * terms[3], rtol=1e-10)


def test_a_long_neumann_series_gives_the_gradient(problem: Problem) -> None:
    _, x, _ = point(problem)
    z, _, _, grad_h = problem.solve(x)
    np.testing.assert_allclose(hyp1(problem, z, x, None, [None] * 600, None, 0.3), grad_h, rtol=1e-8, atol=1e-10)

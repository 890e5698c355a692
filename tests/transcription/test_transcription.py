"""Tests of the transcriptions themselves: derivatives, exact solutions, known special cases, and costs."""

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from .alset import alset
from .amigo import amigo
from .bome import bome
from .bsa import bsa
from .directions import ball, directions
from .f2sa import f2sa
from .fsla import fsla
from .hoag import exponential, hoag
from .itd import itd, itd_gradient
from .ma_soba import ma_soba
from .mrbo import mrbo
from .neumann import hyp1, n1, n2
from .problems import LogisticSelection, Problem, Quadratic
from .pzobo import pzobo
from .saba import saba
from .soba import soba
from .spaba import spaba
from .srba import srba
from .stocbio import stocbio
from .sustain import sustain
from .ttsa import ttsa
from .vrbo import vrbo

N, M, P, D = 40, 24, 5, 3
B, T, Q, K = 4, 3, 4, 2


def factors(rng: np.random.Generator, size: int, p: int, d: int) -> dict[str, np.ndarray]:
    """Random factors of one level; the common parts keep the solution away from 0."""
    return {
        "a": rng.normal(size=(size, p)),
        "c": rng.normal(size=(size, d)),
        "e": 0.3 * rng.normal(size=(size, d)) + 0.2,
        "f": 0.3 * rng.normal(size=(size, p)) + 0.2,
        "dz": rng.normal(size=(size, p)) + 0.5 * rng.normal(size=p),
        "dx": rng.normal(size=(size, d)) + 0.5 * rng.normal(size=d),
    }


def make_quadratic() -> Quadratic:
    rng = np.random.default_rng(0)
    return Quadratic(factors(rng, N, P, D), factors(rng, M, P, D))


def make_logistic() -> LogisticSelection:
    rng = np.random.default_rng(1)
    truth = rng.normal(size=P)
    x_train, x_val = rng.normal(size=(N, P)), rng.normal(size=(M, P))
    y_train = np.sign(x_train @ truth + rng.normal(size=N))
    y_val = np.sign(x_val @ truth + rng.normal(size=M))
    return LogisticSelection(x_train, y_train, x_val, y_val)


@pytest.fixture(params=[make_quadratic, make_logistic], ids=["quadratic", "logistic"])
def problem(request: pytest.FixtureRequest) -> Problem:
    return request.param()


def point(problem: Problem, seed: int = 3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=problem.p), 0.5 * rng.normal(size=problem.d) - 1.0, rng.normal(size=problem.p)


def slope(f: Callable[[np.ndarray], Any], at: np.ndarray, h: float = 1e-5) -> np.ndarray:
    """Central differences, one row per coordinate of the argument."""
    return np.stack([(np.asarray(f(at + h * e)) - np.asarray(f(at - h * e))) / (2 * h) for e in np.eye(len(at))])


def make_draw(problem: Problem, rng: np.random.Generator, length: int = 2) -> SimpleNamespace:
    """All the fields any one-batch-per-name algorithm reads."""

    def inner() -> np.ndarray:
        return rng.integers(problem.n, size=B)

    def outer() -> np.ndarray:
        return rng.integers(problem.m, size=B)

    return SimpleNamespace(
        inner=inner(),
        inner_at_z=inner(),
        outer=outer(),
        cross=inner(),
        inner_loop=[inner() for _ in range(T)],
        linear_loop=[inner() for _ in range(T)],
        y_inner_loop=[inner() for _ in range(T)],
        y_outer_loop=[outer() for _ in range(T)],
        neumann=[inner() for _ in range(Q)],
        length=length,
        v_inner=inner(),
        v_outer=outer(),
        x_inner=inner(),
        x_outer=outer(),
        refresh=False,
        inner_block=int(rng.integers(problem.n // B)),
        outer_block=int(rng.integers(problem.m // B)),
        gaussians=rng.normal(size=(K, problem.d)),
    )


def make_loop_draw(problem: Problem, rng: np.random.Generator) -> SimpleNamespace:
    """The lists over k = 0..T that VRBO reads."""
    return SimpleNamespace(
        inner=[rng.integers(problem.n, size=B) for _ in range(T + 1)],
        outer=[rng.integers(problem.m, size=B) for _ in range(T + 1)],
        cross=[rng.integers(problem.n, size=B) for _ in range(T + 1)],
        neumann=[[rng.integers(problem.n, size=B) for _ in range(Q)] for _ in range(T + 1)],
    )


def make_draws(problem: Problem, steps: int, seed: int = 5) -> list[SimpleNamespace]:
    rng = np.random.default_rng(seed)
    return [make_draw(problem, rng) for _ in range(steps)]


ALL = SimpleNamespace(
    inner=None,
    inner_at_z=None,
    outer=None,
    cross=None,
    inner_loop=[None] * T,
    linear_loop=[None] * T,
    y_inner_loop=[None] * T,
    y_outer_loop=[None] * T,
    neumann=[None] * Q,
    length=2,
    v_inner=None,
    v_outer=None,
    x_inner=None,
    x_outer=None,
    refresh=False,
)
ALL_LOOP = SimpleNamespace(
    inner=[None] * (T + 1), outer=[None] * (T + 1), cross=[None] * (T + 1), neumann=[[None] * Q] * (T + 1)
)
STEPS = {"step_size": 0.1, "outer_ratio": 2.0}


def blocks(size: int) -> list[np.ndarray]:
    return np.split(np.arange(size), range(B, size, B))


def assert_same(one: list[dict[str, Any]], two: list[dict[str, Any]], keys: str = "inner_var outer_var") -> None:
    assert len(one) == len(two)
    for left, right in zip(one, two, strict=True):
        for key in keys.split():
            np.testing.assert_allclose(left[key], right[key], rtol=1e-10, atol=1e-12)


# ---------------------------------------------------------------- the problems


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


def test_batches_average_to_all_rows(problem: Problem) -> None:
    z, x, w = point(problem)
    single = [np.array([i]) for i in range(problem.n)]
    np.testing.assert_allclose(np.mean([problem.gz(z, x, r) for r in single], axis=0), problem.gz(z, x))
    np.testing.assert_allclose(np.mean([problem.hv(z, x, w, r) for r in single], axis=0), problem.hv(z, x, w))
    np.testing.assert_allclose(np.mean([problem.cr(z, x, w, r) for r in single], axis=0), problem.cr(z, x, w))


def test_sample_loss_of_the_quadratic() -> None:
    rng = np.random.default_rng(7)
    inner, outer = factors(rng, 6, P, D), factors(rng, 4, P, D)
    quadratic = Quadratic(inner, outer)
    z, x, _ = point(quadratic)
    for level, size, value in ((inner, 6, quadratic.inner_value), (outer, 4, quadratic.outer_value)):
        for i in range(size):
            a, c, e, f, dz, dx = (level[k][i] for k in ("a", "c", "e", "f", "dz", "dx"))
            expected = 0.5 * (a @ z) ** 2 + 0.5 * (c @ x) ** 2 + (e @ x) * (f @ z) + dz @ z + dx @ x
            assert value(z, x, np.array([i])) == pytest.approx(expected, rel=1e-12)


def test_exact_solution(problem: Problem) -> None:
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


def test_counts(problem: Problem) -> None:
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


def test_ball() -> None:
    v = np.array([3.0, 4.0])
    np.testing.assert_allclose(ball(v, 1.0), [0.6, 0.8])
    assert ball(v, 6.0) is v and ball(v, None) is v


# ---------------------------------------------------------------- Neumann series


def test_neumann_closed_sums(problem: Problem) -> None:
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


def test_neumann_multiplies_the_batches_in_order(problem: Problem) -> None:
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


def test_long_neumann_series_gives_the_gradient(problem: Problem) -> None:
    _, x, _ = point(problem)
    z, _, _, grad_h = problem.solve(x)
    np.testing.assert_allclose(hyp1(problem, z, x, None, [None] * 600, None, 0.3), grad_h, rtol=1e-8, atol=1e-10)


# ---------------------------------------------------------------- special cases


def test_srba_of_period_one_is_full_gradient(problem: Problem) -> None:
    z, x, _ = point(problem)
    history = srba(problem, z, x, make_draws(problem, 6), period=1, **STEPS)
    v = np.zeros(problem.p)
    for record in history:
        d_z, d_v, d_x = directions(problem, (z, v, x), None, None)
        z, v, x = z - 0.1 * d_z, v - 0.1 * d_v, x - 0.05 * d_x
        for key, value in (("inner_var", z), ("v", v), ("outer_var", x)):
            np.testing.assert_allclose(record[key], value, rtol=1e-12)


def test_srba_on_all_rows_forgets_the_period(problem: Problem) -> None:
    z, x, _ = point(problem)
    one = srba(problem, z, x, [ALL] * 7, period=1, v_radius=0.3, **STEPS)
    assert_same(one, srba(problem, z, x, [ALL] * 7, period=3, v_radius=0.3, **STEPS), "inner_var v outer_var")
    assert max(np.linalg.norm(r["v"]) for r in one) == pytest.approx(0.3)


def test_spaba_with_a_regular_coin_is_srba(problem: Problem) -> None:
    z, x, _ = point(problem)
    draws = make_draws(problem, 8)
    for s, draw in enumerate(draws):
        draw.refresh = s > 0 and s % 3 == 0
    one = spaba(problem, z, x, draws, v_radius=0.5, **STEPS)
    assert_same(one, srba(problem, z, x, draws, period=3, v_radius=0.5, **STEPS), "inner_var v outer_var")


def test_srba_estimate_by_hand(problem: Problem) -> None:
    z, x, _ = point(problem)
    draws = make_draws(problem, 2)
    first, second = srba(problem, z, x, draws, period=2, bounds=(-1.0, 1.0), **STEPS)
    u0 = (z, np.zeros(problem.p), x)
    u1 = (first["inner_var"], first["v"], first["outer_var"])
    full = directions(problem, u0, None, None)
    new = directions(problem, u1, draws[1].inner, draws[1].outer)
    old = directions(problem, u0, draws[1].inner, draws[1].outer)
    estimate = [f + a - b for f, a, b in zip(full, new, old, strict=True)]
    np.testing.assert_allclose(second["inner_var"], u1[0] - 0.1 * estimate[0], rtol=1e-12)
    np.testing.assert_allclose(second["v"], u1[1] - 0.1 * estimate[1], rtol=1e-12)
    np.testing.assert_allclose(second["outer_var"], np.clip(u1[2] - 0.05 * estimate[2], -1, 1), rtol=1e-12)


@pytest.mark.parametrize("init", ["zero", "full"])
def test_saba_keeps_the_weighted_mean(problem: Problem, init: str) -> None:
    z, x, _ = point(problem)
    rng = np.random.default_rng(8)
    uneven = [np.arange(problem.n)[: problem.n - 3], np.arange(problem.n - 3, problem.n)]
    outer = [np.arange(5), np.arange(5, 11), np.arange(11, problem.m)]
    draws = [SimpleNamespace(inner_block=int(rng.integers(2)), outer_block=int(rng.integers(3))) for _ in range(9)]
    history = saba(problem, z, x, draws, inner_blocks=uneven, outer_blocks=outer, init=init, **STEPS)
    for record in history:
        for kind, parts in (("gz", uneven), ("hv", uneven), ("cr", uneven), ("fz", outer), ("fx", outer)):
            table = record["tables"][kind]
            mean = sum(len(part) * row for part, row in zip(parts, table, strict=True)) / sum(map(len, parts))
            np.testing.assert_allclose(record["means"][kind], mean, atol=1e-12)


def test_saba_is_unbiased(problem: Problem) -> None:
    """The mean of the next iterate over all pairs of blocks, weighted, is a step along the full direction."""
    z, x, _ = point(problem)
    inner = [np.arange(10), np.arange(10, problem.n)]
    outer = [np.arange(4), np.arange(4, problem.m)]
    start = [SimpleNamespace(inner_block=1, outer_block=0), SimpleNamespace(inner_block=0, outer_block=1)]
    here = saba(problem, z, x, start, inner_blocks=inner, outer_blocks=outer, **STEPS)[-1]
    u = (here["inner_var"], here["v"], here["outer_var"])
    mean = [0.0, 0.0, 0.0]
    for i, block_i in enumerate(inner):
        for j, block_j in enumerate(outer):
            draws = [*start, SimpleNamespace(inner_block=i, outer_block=j)]
            last = saba(problem, z, x, draws, inner_blocks=inner, outer_blocks=outer, **STEPS)[-1]
            weight = len(block_i) * len(block_j) / (problem.n * problem.m)
            for k, key in enumerate(("inner_var", "v", "outer_var")):
                mean[k] = mean[k] + weight * last[key]
    for k, (size, step) in enumerate(zip(directions(problem, u, None, None), (0.1, 0.1, 0.05), strict=True)):
        np.testing.assert_allclose(mean[k], u[k] - step * size, rtol=1e-10, atol=1e-12)


def test_saba_on_one_block_is_full_gradient(problem: Problem) -> None:
    z, x, _ = point(problem)
    draws = [SimpleNamespace(inner_block=0, outer_block=0)] * 4
    one = [np.arange(problem.n)]
    history = saba(problem, z, x, draws, inner_blocks=one, outer_blocks=[np.arange(problem.m)], **STEPS)
    assert_same(history, srba(problem, z, x, [ALL] * 4, period=1, **STEPS), "inner_var v outer_var")


def test_ma_soba_lags_one_step(problem: Problem) -> None:
    z, x, _ = point(problem)
    draws = make_draws(problem, 3)
    one, two, _ = ma_soba(problem, z, x, draws, **STEPS)
    np.testing.assert_array_equal(one["outer_var"], x)
    d_x = directions(problem, (z, np.zeros(problem.p), x), draws[0].inner, draws[0].outer)[2]
    np.testing.assert_allclose(two["outer_var"], x - 0.05 * 2**-0.5 * d_x)
    soba_one = soba(problem, z, x, draws, **STEPS)[0]
    np.testing.assert_allclose(one["inner_var"], soba_one["inner_var"])
    np.testing.assert_allclose(soba_one["outer_var"], x - 0.05 * d_x)


def test_storm_and_sarah_are_exact_on_all_rows(problem: Problem) -> None:
    """Without sampling, the carried estimates equal the direction at the point where they were taken."""
    z, x, _ = point(problem)
    for history, old in (
        (mrbo(problem, z, x, [ALL] * 4, **STEPS), True),
        (vrbo(problem, z, x, [ALL_LOOP] * 4, period=9, n_inner_steps=T, n_neumann=Q, **STEPS), False),
    ):
        places = [(z, x), *((r["inner_var"], r["outer_var"]) for r in history)]
        for k, record in enumerate(history):
            at = places[k] if old else places[k + 1]
            np.testing.assert_allclose(record["dz"], problem.gz(*at), rtol=1e-8, atol=1e-10)
            expected = hyp1(problem, *at, None, [None] * Q, None, 0.5)
            np.testing.assert_allclose(record["dh"], expected, rtol=1e-8, atol=1e-10)


def test_sustain_without_memory_is_plain(problem: Problem) -> None:
    z, x, _ = point(problem)
    draws = make_draws(problem, 4)
    history = sustain(problem, z, x, draws, n_neumann=Q, momentum=1e9, **STEPS)
    for t, (draw, record) in enumerate(zip(draws, history, strict=True), start=1):
        v = n2(problem, z, x, draw.outer, draw.neumann, draw.length, Q, 0.5)
        h = problem.cr(z, x, v, draw.cross) + problem.fx(z, x, draw.outer)
        z, x = z - 0.1 * t ** (-1 / 3) * problem.gz(z, x, draw.inner), x - 0.05 * t ** (-1 / 3) * h
        np.testing.assert_allclose(record["inner_var"], z, rtol=1e-10)
        np.testing.assert_allclose(record["outer_var"], x, rtol=1e-10)


def test_storm_by_hand(problem: Problem) -> None:
    """MRBO at t = 3: the estimate of step 2, its batch at both points, and a = c 2^(-2/3)."""
    z, x, _ = point(problem)
    draws = make_draws(problem, 3)
    one, two, three = mrbo(problem, z, x, draws, momentum=0.7, **STEPS)
    a = 0.7 * 2 ** (-2 / 3)
    new = problem.gz(two["inner_var"], two["outer_var"], draws[2].inner)
    old = problem.gz(one["inner_var"], one["outer_var"], draws[2].inner)
    np.testing.assert_allclose(three["dz"], new + (1 - a) * (two["dz"] - old), rtol=1e-12)


def test_sustain_on_all_rows(problem: Problem) -> None:
    z, x, _ = point(problem)
    for record in sustain(problem, z, x, [ALL] * 4, n_neumann=Q, outer_momentum=0.2, **STEPS):
        v = n2(problem, z, x, None, [None] * Q, ALL.length, Q, 0.5)
        np.testing.assert_allclose(record["dz"], problem.gz(z, x), rtol=1e-10)
        np.testing.assert_allclose(record["dh"], problem.cr(z, x, v) + problem.fx(z, x), rtol=1e-10, atol=1e-12)
        z, x = record["inner_var"], record["outer_var"]


def test_fsla_by_hand(problem: Problem) -> None:
    """Second step: each variable at the others' newest values, a = c 2^(-1/2), one batch at both points."""
    z0, x0, _ = point(problem)
    draws = make_draws(problem, 2)
    one, two = fsla(problem, z0, x0, draws, momentum=0.6, **STEPS)
    draw, x1, size, a = draws[1], one["outer_var"], 0.1 * 2**-0.5, 0.6 * 2**-0.5
    z = one["inner_var"] - size * problem.gz(one["inner_var"], x1, draw.inner)
    v = one["v"] - size * (problem.hv(z, x1, one["v"], draw.v_inner) + problem.fz(z, x1, draw.v_outer))
    new = problem.cr(z, x1, v, draw.x_inner) + problem.fx(z, x1, draw.x_outer)
    old = problem.cr(one["inner_var"], x0, one["v"], draw.x_inner)
    old = old + problem.fx(one["inner_var"], x0, draw.x_outer)
    dh = new + (1 - a) * (one["dh"] - old)
    np.testing.assert_allclose(two["inner_var"], z, rtol=1e-12)
    np.testing.assert_allclose(two["v"], v, rtol=1e-12)
    np.testing.assert_allclose(two["outer_var"], x1 - size / 2.0 * dh, rtol=1e-12)


def test_soba_and_ttsa_second_steps(problem: Problem) -> None:
    z, x, _ = point(problem)
    draws = make_draws(problem, 2)
    one, two = soba(problem, z, x, draws, **STEPS)
    u = (one["inner_var"], one["v"], one["outer_var"])
    d_z, d_v, d_x = directions(problem, u, draws[1].inner, draws[1].outer)
    np.testing.assert_allclose(two["inner_var"], u[0] - 0.1 / np.sqrt(2) * d_z)
    np.testing.assert_allclose(two["v"], u[1] - 0.1 / np.sqrt(2) * d_v)
    np.testing.assert_allclose(two["outer_var"], u[2] - 0.05 / np.sqrt(2) * d_x)
    one, two = ttsa(problem, z, x, draws, n_neumann=Q, neumann_step=0.2, **STEPS)
    z, x, draw = one["inner_var"], one["outer_var"], draws[1]
    z = z - 0.1 * 2**-0.4 * problem.gz(z, x, draw.inner)
    v = n2(problem, z, x, draw.outer, draw.neumann, draw.length, Q, 0.2)
    x = x - 0.05 * 2**-0.6 * (problem.cr(z, x, v, draw.cross) + problem.fx(z, x, draw.outer))
    np.testing.assert_allclose(two["inner_var"], z)
    np.testing.assert_allclose(two["outer_var"], x)


def test_fsla_on_all_rows(problem: Problem) -> None:
    z, x, _ = point(problem)
    places = x
    for record in fsla(problem, z, x, [ALL] * 4, **STEPS):
        expected = directions(problem, (record["inner_var"], record["v"], places), None, None)[2]
        np.testing.assert_allclose(record["dh"], expected, rtol=1e-10, atol=1e-12)
        places = record["outer_var"]


def test_bsa_with_warm_start_is_alset(problem: Problem) -> None:
    z, x, _ = point(problem)
    draws = make_draws(problem, 5)
    assert_same(bsa(problem, z, x, draws, n_neumann=Q, **STEPS), alset(problem, z, x, draws, n_neumann=Q, **STEPS))


def test_bsa_cold_start(problem: Problem) -> None:
    z0, x, _ = point(problem)
    draws = make_draws(problem, 2)
    one, two = bsa(problem, z0, x, draws, n_neumann=Q, warm_start=False, **STEPS)
    for record, draw, at in ((one, draws[0], x), (two, draws[1], one["outer_var"])):
        z = z0
        for s, rows in enumerate(draw.inner_loop):
            z = z - 0.1 / (s + 1) * problem.gz(z, at, rows)
        np.testing.assert_allclose(record["inner_var"], z, rtol=1e-12)


def test_ttsa_first_step_is_alset_with_one_inner_step(problem: Problem) -> None:
    z, x, _ = point(problem)
    draw = make_draws(problem, 1)[0]
    draw.inner_loop = [draw.inner]
    one = ttsa(problem, z, x, [draw], n_neumann=Q, **STEPS)
    assert_same(one, alset(problem, z, x, [draw], n_neumann=Q, **STEPS))


def test_amigo_and_stocbio_approach_the_gradient(problem: Problem) -> None:
    _, x, _ = point(problem)
    z, _, _, grad_h = problem.solve(x)
    many = SimpleNamespace(inner_loop=[None], outer=None, linear_loop=[None] * 2000, neumann=[None] * 600, cross=None)
    for history in (
        amigo(problem, z, x, [many], **STEPS),
        stocbio(problem, z, x, [many], neumann_step=0.3, **STEPS),
    ):
        np.testing.assert_allclose((x - history[0]["outer_var"]) / 0.05, grad_h, rtol=1e-6, atol=1e-8)


def test_f2sa_step_and_multiplier(problem: Problem) -> None:
    z0, x, _ = point(problem)
    draw = make_draws(problem, 1)[0]
    options = {"lambda_0": 3.0, "delta_0": 0.5, **STEPS}
    one, two = f2sa(problem, z0, x, [draw] * 2, shared_batch=False, **options)
    z, y = z0, z0
    for k in range(T):
        z = z - 0.1 * problem.gz(z, x, draw.inner_loop[k])
        push = problem.fz(y, x, draw.y_outer_loop[k]) / 3.0 + problem.gz(y, x, draw.y_inner_loop[k])
        y = y - 0.05 * push
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


def test_itd_is_the_derivative_of_the_unrolled_value(problem: Problem) -> None:
    z, x, _ = point(problem)

    def unrolled(at: np.ndarray) -> float:
        end = z
        for _ in range(T):
            end = end - 0.1 * problem.gz(end, at)
        return problem.outer_value(end, at)

    end, gradient = itd_gradient(problem, z, x, ALL, 0.1)
    np.testing.assert_allclose(gradient, slope(unrolled, x), rtol=1e-6, atol=1e-9)
    record = itd(problem, z, x, [ALL], **STEPS)[0]
    np.testing.assert_allclose(record["outer_var"], x - 0.05 * gradient)
    np.testing.assert_array_equal(record["inner_var"], end)


def test_itd_on_batches(problem: Problem) -> None:
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
    """sqrt(d) times the coordinate vectors average u u' to I; a small smoothing leaves the ITD gradient."""
    z, x, _ = point(problem)
    draw = make_draws(problem, 1)[0]
    draw.gaussians = np.sqrt(problem.d) * np.eye(problem.d)
    record = pzobo(problem, z, x, [draw], smoothing=1e-6, **STEPS)[0]
    expected = itd(problem, z, x, [draw], **STEPS)[0]
    np.testing.assert_allclose(record["inner_var"], expected["inner_var"])
    np.testing.assert_allclose(record["outer_var"], expected["outer_var"], rtol=1e-6, atol=1e-8)


def test_bome_multiplier(problem: Problem) -> None:
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


def test_bome_at_the_inner_solution_follows_f() -> None:
    problem = make_quadratic()
    problem.inner.az[:] = np.eye(P)
    problem.inner.b[:] = 0.0
    problem.inner.dz[:] = 0.0
    x = np.ones(D)
    record = bome(problem, np.zeros(P), x, [None], n_inner_steps=T, **STEPS)[0]
    assert record["lam"] == 0.0
    np.testing.assert_allclose(record["outer_var"], x - 0.05 * problem.fx(np.zeros(P), x))


def test_hoag_converges_and_uses_its_rule(problem: Problem) -> None:
    z, x, _ = point(problem)
    history = hoag(problem, z, x, range(150))
    first = problem.solve(x)
    assert history[0]["step"] == pytest.approx(1.0 / np.linalg.norm(first.grad_h))
    ratios = np.array([b["step"] / a["step"] for a, b in pairwise(history)])
    assert np.all(np.isclose(ratios, 1.05) | np.isclose(ratios, 0.5))
    last = problem.solve(history[-1]["outer_var"])
    assert np.linalg.norm(last.grad_h) < 1e-2 * np.linalg.norm(first.grad_h)
    assert exponential(1) == pytest.approx(0.09) and exponential(10_000) == 1e-12


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


# ---------------------------------------------------------------- costs

FULL = {"gz": N, "hv": N, "cr": N, "fz": M, "fx": M}
ONE = {"gz": B, "hv": B, "cr": B, "fz": B, "fx": B}
TWICE = {kind: 2 * B for kind in ONE}


def scaled(**units: int) -> dict[str, int]:
    return {kind: B * count for kind, count in units.items()}


def added(*costs: dict[str, int]) -> dict[str, int]:
    return {kind: sum(c.get(kind, 0) for c in costs) for kind in {k for c in costs for k in c}}


BLOCKS = {"inner_blocks": blocks(N), "outer_blocks": blocks(M)}
LENGTH = 2
HYP2 = scaled(hv=LENGTH, cr=1, fz=1, fx=1)
VRBO_STEP = scaled(gz=2 * (T + 1), hv=2 * (T + 1) * Q, cr=2 * (T + 1), fz=2 * (T + 1), fx=2 * (T + 1))
VRBO_FULL = {"gz": N, "hv": Q * N, "cr": N, "fz": M, "fx": M}
MRBO_ONE = scaled(gz=1, hv=Q, cr=1, fz=1, fx=1)
SUSTAIN_ONE = added(scaled(gz=1), HYP2)
F2SA_OPTIONS = {"delta_0": 0.1, "shared_batch": False}
BOME_STEP = {"gz": (T + 1) * N, "gx": 2 * N, "fz": M, "fx": M}
HOAG_STEP = {"cr": N, "fz": M, "fx": M, "outer_value": M}

# name: (function, options, cost of the first step, cost of the third step)
COSTS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, int], dict[str, int]]] = {
    "srba": (srba, {"period": 5}, FULL, TWICE),
    "srba, full pass": (srba, {"period": 2}, FULL, FULL),
    "spaba": (spaba, {}, FULL, TWICE),
    "soba": (soba, {}, ONE, ONE),
    "ma_soba": (ma_soba, {}, ONE, ONE),
    "saba, zero": (saba, BLOCKS, ONE, ONE),
    "saba, full": (saba, {**BLOCKS, "init": "full"}, added(FULL, ONE), ONE),
    "amigo": (amigo, {}, scaled(gz=T, hv=T, cr=1, fz=1, fx=1), scaled(gz=T, hv=T, cr=1, fz=1, fx=1)),
    "stocbio": (stocbio, {}, scaled(gz=T, hv=Q, cr=1, fz=1, fx=1), scaled(gz=T, hv=Q, cr=1, fz=1, fx=1)),
    "mrbo": (mrbo, {}, MRBO_ONE, added(MRBO_ONE, MRBO_ONE)),
    "sustain": (sustain, {"n_neumann": Q}, SUSTAIN_ONE, added(SUSTAIN_ONE, SUSTAIN_ONE)),
    "vrbo": (vrbo, {"period": 5, "n_inner_steps": T, "n_neumann": Q}, added(VRBO_FULL, VRBO_STEP), VRBO_STEP),
    "vrbo, full pass": (
        vrbo,
        {"period": 2, "n_inner_steps": T, "n_neumann": Q},
        added(VRBO_FULL, VRBO_STEP),
        added(VRBO_FULL, VRBO_STEP),
    ),
    "f2sa": (f2sa, F2SA_OPTIONS, scaled(gz=2 * T, fz=T, gx=2, fx=1), scaled(gz=2 * T, fz=T, gx=2, fx=1)),
    "bsa": (bsa, {"n_neumann": Q}, added(scaled(gz=T), HYP2), added(scaled(gz=T), HYP2)),
    "alset": (alset, {"n_neumann": Q}, added(scaled(gz=T), HYP2), added(scaled(gz=T), HYP2)),
    "ttsa": (ttsa, {"n_neumann": Q}, added(scaled(gz=1), HYP2), added(scaled(gz=1), HYP2)),
    "fsla": (fsla, {}, ONE, scaled(gz=1, hv=1, fz=1, cr=2, fx=2)),
    "bome": (bome, {"n_inner_steps": T}, BOME_STEP, BOME_STEP),
    "pzobo": (pzobo, {}, scaled(gz=(K + 1) * T, fz=1, fx=1), scaled(gz=(K + 1) * T, fz=1, fx=1)),
    "itd": (itd, {}, scaled(gz=T, hv=T - 1, cr=T, fz=1, fx=1), scaled(gz=T, hv=T - 1, cr=T, fz=1, fx=1)),
    "hoag": (hoag, {}, HOAG_STEP, HOAG_STEP),
}

# totals in units of b, as they are written for each algorithm
UNITS = {
    "srba": 10,
    "spaba": 10,
    "soba": 5,
    "ma_soba": 5,
    "saba, zero": 5,
    "amigo": 2 * T + 3,
    "stocbio": T + Q + 3,
    "mrbo": 2 * (Q + 4),
    "sustain": 2 * (LENGTH + 4),
    "vrbo": 2 * (T + 1) * (Q + 4),
    "f2sa": 3 * T + 3,
    "bsa": T + LENGTH + 3,
    "alset": T + LENGTH + 3,
    "ttsa": 1 + LENGTH + 3,
    "fsla": 7,
    "pzobo": (K + 1) * T + 2,
    "itd": 3 * T + 1,
}


def calls_of(name: str, steps: int) -> dict[str, int]:
    """Counts of a run of so many steps from the start."""
    function, options, _, _ = COSTS[name]
    problem = make_quadratic()
    z, x, _ = point(problem)
    rng = np.random.default_rng(9)
    make = make_loop_draw if function is vrbo else make_draw
    draws = [make(problem, rng) for _ in range(steps)]
    history = function(problem, z, x, draws, **options, **({} if function is hoag else STEPS))
    assert len(history) == steps
    for record in history:
        assert record["inner_var"].shape == (P,) and record["outer_var"].shape == (D,)
    return problem.calls


@pytest.mark.parametrize("name", COSTS)
def test_cost_per_step(name: str) -> None:
    _, _, first, later = COSTS[name]
    one, two, three = (calls_of(name, steps) for steps in (1, 2, 3))
    assert {k: c for k, c in one.items() if c} == first
    assert {k: three[k] - two[k] for k in three if three[k] > two[k]} == later
    if name in UNITS:
        assert sum(later.values()) == UNITS[name] * B


def test_cost_of_full_passes() -> None:
    assert sum(FULL.values()) == 3 * N + 2 * M
    assert sum(VRBO_FULL.values()) == (Q + 2) * N + 2 * M
    period, steps = 4, 8
    function, _, first, later = COSTS["srba"]
    problem = make_quadratic()
    z, x, _ = point(problem)
    function(problem, z, x, make_draws(problem, steps), period=period, **STEPS)
    per_period = sum(first.values()) + (period - 1) * sum(later.values())
    assert sum(problem.calls.values()) == steps // period * per_period
    assert per_period == 3 * N + 2 * M + 2 * (3 * B + 2 * B) * (period - 1)


@pytest.mark.parametrize("length", range(Q))
def test_cost_follows_the_random_length(length: int) -> None:
    problem = make_quadratic()
    z, x, _ = point(problem)
    draw = make_draw(problem, np.random.default_rng(4), length)
    for function in (bsa, alset, ttsa, sustain):
        problem.reset()
        function(problem, z, x, [draw], n_neumann=Q, **STEPS)
        assert problem.calls["hv"] == length * B

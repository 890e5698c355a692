"""Transcriptions in cases where their steps are known in closed form or equal those of another method."""

from types import SimpleNamespace

import numpy as np
import pytest

from tests.transcription.draws import (
    ALL,
    ALL_LOOP,
    STEPS,
    Q,
    T,
    assert_same,
    make_draws,
    make_logistic,
    make_quadratic,
    point,
)

from .directions import directions
from .fde_hbo import fd_hypergradient, fd_residual, fde_hbo
from .fsla import fsla
from .lanc_bio import lanc_bio
from .ma_soba import ma_soba
from .mrbo import mrbo
from .neumann import hyp1, n2
from .problems import Problem
from .saba import saba
from .soba import soba
from .spaba import spaba
from .srba import srba
from .sustain import sustain
from .ttsa import ttsa
from .vrbo import vrbo


def test_srba_with_period_one_makes_full_batch_steps(problem: Problem) -> None:
    z, x, _ = point(problem)
    history = srba(problem, z, x, make_draws(problem, 6), period=1, **STEPS)
    v = np.zeros(problem.p)
    for record in history:
        d_z, d_v, d_x = directions(problem, (z, v, x), None, None)
        z, v, x = z - 0.1 * d_z, v - 0.1 * d_v, x - 0.05 * d_x
        for key, value in (("inner_var", z), ("v", v), ("outer_var", x)):
            np.testing.assert_allclose(record[key], value, rtol=1e-12)


def test_the_period_of_srba_has_no_effect_on_full_batches(problem: Problem) -> None:
    z, x, _ = point(problem)
    one = srba(problem, z, x, [ALL] * 7, period=1, v_radius=0.3, **STEPS)
    assert_same(one, srba(problem, z, x, [ALL] * 7, period=3, v_radius=0.3, **STEPS), "inner_var v outer_var")
    assert max(np.linalg.norm(r["v"]) for r in one) == pytest.approx(0.3)


def test_spaba_with_periodic_refreshes_is_srba(problem: Problem) -> None:
    z, x, _ = point(problem)
    draws = make_draws(problem, 8)
    for s, draw in enumerate(draws):
        draw.refresh = s > 0 and s % 3 == 0
    one = spaba(problem, z, x, draws, v_radius=0.5, **STEPS)
    assert_same(one, srba(problem, z, x, draws, period=3, v_radius=0.5, **STEPS), "inner_var v outer_var")


def test_the_second_step_of_srba_equals_its_formula(problem: Problem) -> None:
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
def test_saba_stores_the_weighted_mean_of_its_tables(problem: Problem, init: str) -> None:
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
    """The weighted mean of the next iterate over all pairs of blocks is a step along the full-batch direction."""
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


def test_saba_with_one_block_makes_full_batch_steps(problem: Problem) -> None:
    z, x, _ = point(problem)
    draws = [SimpleNamespace(inner_block=0, outer_block=0)] * 4
    one = [np.arange(problem.n)]
    history = saba(problem, z, x, draws, inner_blocks=one, outer_blocks=[np.arange(problem.m)], **STEPS)
    assert_same(history, srba(problem, z, x, [ALL] * 4, period=1, **STEPS), "inner_var v outer_var")


def test_ma_soba_moves_x_one_step_later_than_soba(problem: Problem) -> None:
    z, x, _ = point(problem)
    draws = make_draws(problem, 3)
    one, two, _ = ma_soba(problem, z, x, draws, **STEPS)
    np.testing.assert_array_equal(one["outer_var"], x)
    d_x = directions(problem, (z, np.zeros(problem.p), x), draws[0].inner, draws[0].outer)[2]
    np.testing.assert_allclose(two["outer_var"], x - 0.05 * 2**-0.5 * d_x)
    soba_one = soba(problem, z, x, draws, **STEPS)[0]
    np.testing.assert_allclose(one["inner_var"], soba_one["inner_var"])
    np.testing.assert_allclose(soba_one["outer_var"], x - 0.05 * d_x)


def test_storm_and_sarah_estimates_are_exact_on_full_batches(problem: Problem) -> None:
    """Without sampling, the recursive estimates equal the gradients at their points."""
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


def test_sustain_with_momentum_one_uses_plain_estimates(problem: Problem) -> None:
    z, x, _ = point(problem)
    draws = make_draws(problem, 4)
    history = sustain(problem, z, x, draws, n_neumann=Q, momentum=1e9, **STEPS)
    for t, (draw, record) in enumerate(zip(draws, history, strict=True), start=1):
        v = n2(problem, z, x, draw.outer, draw.neumann, draw.length, Q, 0.5)
        h = problem.cr(z, x, v, draw.cross) + problem.fx(z, x, draw.outer)
        z, x = z - 0.1 * t ** (-1 / 3) * problem.gz(z, x, draw.inner), x - 0.05 * t ** (-1 / 3) * h
        np.testing.assert_allclose(record["inner_var"], z, rtol=1e-10)
        np.testing.assert_allclose(record["outer_var"], x, rtol=1e-10)


def test_the_third_step_of_mrbo_equals_its_formula(problem: Problem) -> None:
    """At t = 3: the estimate of step 2, the new batch at both points, and a = c 2^(-2/3)."""
    z, x, _ = point(problem)
    draws = make_draws(problem, 3)
    one, two, three = mrbo(problem, z, x, draws, momentum=0.7, **STEPS)
    a = 0.7 * 2 ** (-2 / 3)
    new = problem.gz(two["inner_var"], two["outer_var"], draws[2].inner)
    old = problem.gz(one["inner_var"], one["outer_var"], draws[2].inner)
    np.testing.assert_allclose(three["dz"], new + (1 - a) * (two["dz"] - old), rtol=1e-12)


def test_the_estimates_of_sustain_are_exact_on_full_batches(problem: Problem) -> None:
    z, x, _ = point(problem)
    for record in sustain(problem, z, x, [ALL] * 4, n_neumann=Q, outer_momentum=0.2, **STEPS):
        v = n2(problem, z, x, None, [None] * Q, ALL.length, Q, 0.5)
        np.testing.assert_allclose(record["dz"], problem.gz(z, x), rtol=1e-10)
        np.testing.assert_allclose(record["dh"], problem.cr(z, x, v) + problem.fx(z, x), rtol=1e-10, atol=1e-12)
        z, x = record["inner_var"], record["outer_var"]


def test_the_second_step_of_fsla_equals_its_formula(problem: Problem) -> None:
    """Each variable moves at the newest values of the others; a = c 2^(-1/2), and one batch at both points."""
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


def test_the_error_of_the_differences_of_fde_hbo_is_proportional_to_delta_squared() -> None:
    problem = make_logistic()
    z, x, v = point(problem)

    def errors(delta: float) -> list[float]:
        _, d_v, d_x = directions(problem, (z, v, x), None, None)
        found = (form(problem, z, x, v, ALL, delta) for form in (fd_residual, fd_hypergradient))
        return [float(np.linalg.norm(one - exact)) for one, exact in zip(found, (d_v, d_x), strict=True)]

    coarse, fine = errors(0.02), errors(0.01)
    np.testing.assert_allclose(coarse[0] / fine[0], 4.0, rtol=0.01)
    assert coarse[1] < 1e-12, "∇x G is quadratic in z"


def test_fde_hbo_on_full_batches_of_a_quadratic_moves_along_the_exact_directions() -> None:
    problem = make_quadratic()
    z, x, _ = point(problem)
    v = np.zeros(problem.p)
    for t, record in enumerate(fde_hbo(problem, z, x, [ALL] * 6, delta=0.5, **STEPS), start=1):
        d_z, d_v, d_x = directions(problem, (z, v, x), None, None)
        step = 0.1 * t ** (-1 / 3)
        z, v, x = z - step * d_z, v - step * d_v, x - step / 2 * d_x
        for key, value in (("inner_var", z), ("v", v), ("outer_var", x)):
            np.testing.assert_allclose(record[key], value, rtol=1e-10)


def conjugate_gradients(matrix: np.ndarray, right: np.ndarray, start: np.ndarray, steps: int) -> list[np.ndarray]:
    """Return the iterates 1, …, steps."""
    v, residual = start, right - matrix @ start
    direction, iterates = residual, []
    for _ in range(steps):
        length = residual @ residual / (direction @ matrix @ direction)
        v, last = v + length * direction, residual
        residual = residual - length * matrix @ direction
        direction = residual + residual @ residual / (last @ last) * direction
        iterates.append(v)
    return iterates


def test_lanc_bio_with_fixed_variables_is_restarted_conjugate_gradients() -> None:
    problem = make_quadratic()
    _, x, _ = point(problem)
    z, v, _, _ = problem.solve(x)
    fixed = {"step_size": 0.1, "outer_ratio": 1e30}
    matrix, right = problem.inner.az.mean(axis=0), -problem.fz(z, x)
    history = lanc_bio(problem, z, x, [ALL] * 9, m=3, **fixed)
    expected = [np.zeros_like(z)]
    for _ in range(3):
        expected += conjugate_gradients(matrix, right, expected[-1], 3)
    for record, wanted in zip(history, expected[1:], strict=True):
        np.testing.assert_allclose(record["v"], wanted, rtol=1e-9, atol=1e-12)
    longer = lanc_bio(problem, z, x, [ALL] * 8, m=9, **fixed)
    assert [record["dimension"] for record in longer] == [1, 2, 3, 4, 5, 5, 5, 5]
    for record in longer[4:]:
        np.testing.assert_allclose(record["v"], v, rtol=1e-9)


def test_the_second_steps_of_soba_and_ttsa_equal_their_formulas(problem: Problem) -> None:
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


def test_the_estimate_of_fsla_is_exact_on_full_batches(problem: Problem) -> None:
    z, x, _ = point(problem)
    places = x
    for record in fsla(problem, z, x, [ALL] * 4, **STEPS):
        expected = directions(problem, (record["inner_var"], record["v"], places), None, None)[2]
        np.testing.assert_allclose(record["dh"], expected, rtol=1e-10, atol=1e-12)
        places = record["outer_var"]

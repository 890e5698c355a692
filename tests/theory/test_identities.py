"""Identities in expectation, over all sequences of draws of tiny problems."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevel
from bilevel._core.compilation import arithmetic
from bilevel._core.types import Point, Rows
from bilevel.engine.loop import run_key
from tests import cases
from tests.theory.identities import neumann_mean, recursive_mse, saba_tables, sampled_direction
from tests.theory.sequences import every_sequence, shares

pytestmark = pytest.mark.slow  # many compilations, and float64 in either mode

POINT = Point(np.array([1.0, 0.5]), np.array([1.0, -2.0]), np.array([0.3, 2.0]))


def tiny(dtype="float64"):
    return cases.quadratic(dtype, n_inner=3, n_outer=2, dim_inner=2, dim_outer=2, seed=4)


def uneven():
    """Return a problem whose blocks have 2, 2 and 1 inner rows and 2 and 1 outer rows."""
    return cases.quadratic(n_inner=5, n_outer=3, dim_inner=2, dim_outer=2, seed=3)


def tiny_logistic():
    rng = np.random.default_rng(0)
    train, val = rng.standard_normal((3, 2)), rng.standard_normal((2, 2))
    return bilevel.problems.penalty_selection(
        train, np.array([1, -1, 1]), val, np.array([-1, 1]), dtype="float64", seed=0
    )


def samples(sampling, batch_size=2, n=5):
    with arithmetic("float64"):
        return cases.quadratic(n_inner=n).oracles.inner_samples.with_batches(batch_size, sampling)


def assert_close(sides, tolerance=1e-12):
    scale = max(np.max(np.abs(leaf)) for leaf in jax.tree.leaves(sides.rhs))
    cases.assert_trees_close(*sides, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize(("sampling", "count"), [("iid", 5**4), ("blocks", 9), ("reshuffle", 6)])
def test_every_sequence_contains_all_draws_of_the_library(sampling, count):
    drawn_from = samples(sampling)
    rows, probability = every_sequence(drawn_from, 2)
    assert len(rows) == len(probability) == count
    np.testing.assert_allclose(probability.sum(), 1, rtol=1e-14)
    listed = {sequence.tobytes() for sequence in rows}
    draw = jax.jit(lambda seed: jnp.stack([drawn_from.draw(run_key(seed), jnp.int32(t)) for t in range(2)]))
    seen = {np.asarray(draw(seed)).tobytes() for seed in range(30)}
    assert seen <= listed
    assert len(seen) >= min(5, count - 1)


def test_the_probability_of_a_block_is_proportional_to_its_rows():
    np.testing.assert_allclose(shares(samples("blocks")), [0.4, 0.4, 0.2])
    rows, probability = every_sequence(samples("blocks"), 2)
    np.testing.assert_allclose(probability[np.all(rows == 2, axis=1)], 0.04)


@pytest.mark.parametrize(
    ("sampling", "index"), [("iid", 0), ("blocks", 0), ("blocks", 1), *(("reshuffle", k) for k in range(4))]
)
def test_sampled_directions_are_unbiased(sampling, index):
    assert_close(sampled_direction(uneven(), POINT, 2, sampling, index))


@pytest.mark.parametrize("v_radius", [None, 0.3])
@pytest.mark.parametrize("sampling", ["iid", "blocks"])
def test_the_error_of_the_recursion_is_a_difference_of_squared_moves_under_independent_draws(sampling, v_radius):
    mse = recursive_mse(tiny(), bilevel.SRBA(0.3, 2.0, 1, period=4, sampling=sampling, v_radius=v_radius), 4)
    assert_close(mse)
    assert all(part[0] < 1e-28 and np.all(np.diff(part) > 1e-4) for part in mse.lhs), (
        "the test requires errors that grow"
    )


def test_the_error_of_the_recursion_for_blocks_of_unequal_size():
    assert_close(recursive_mse(uneven(), bilevel.SRBA(0.3, 2.0, 2, period=3), 3))


def test_the_error_of_the_recursion_for_nonlinear_directions():
    mse = recursive_mse(tiny_logistic(), bilevel.SRBA(0.5, 1.0, 1, period=3, sampling="iid"), 3)
    assert_close(mse)
    assert min(mse.lhs.inner_var[-1], mse.lhs.v[-1]) > 1e-5
    assert mse.lhs.outer_var[-1] < 1e-30, "D_x depends only on the penalty, which is the same for all rows"


def test_the_error_of_the_recursion_is_0_at_the_start_of_each_period():
    mse = recursive_mse(tiny("float32"), bilevel.SRBA(0.3, 2.0, 1, period=2, sampling="iid"), 5)
    assert_close(mse)
    for part in mse.lhs:
        assert np.all(part[::2] < 1e-26) and np.all(part[1::2] > 1e-4)


def test_the_error_of_the_recursion_is_different_without_replacement():
    mse = recursive_mse(tiny(), bilevel.SRBA(0.3, 2.0, 1, period=4, sampling="reshuffle"), 4)
    for lhs, rhs in zip(*mse, strict=True):
        np.testing.assert_allclose(lhs[:2], rhs[:2], atol=1e-13, err_msg="a single draw is independent")
        assert lhs[3] < 0.95 * rhs[3]


def test_the_variance_of_a_move_has_a_sign_opposite_to_the_printed_proof():
    """prop:bias_variance_decomp prints E||ΔD - (D(u^(r-1)) - D(u^r))||², too large by 4 ||D(u^r) - D(u^(r-1))||²."""
    problem, solver = tiny(), bilevel.SRBA(0.3, 2.0, 1, period=2, sampling="iid")
    first = cases.trajectory(problem, solver, 1).states[0]
    every_row = (Rows(jnp.array([i], jnp.int32), jnp.array([j], jnp.int32)) for i in range(3) for j in range(2))
    with arithmetic("float64"):
        oracles = problem.oracles.with_batches(1, "iid")
        true = oracles.difference(first.point, first.previous, Rows())
        moves = [oracles.difference(first.point, first.previous, rows) for rows in every_row]
    mse = recursive_mse(problem, solver, 2).lhs
    for part in Point._fields:
        move = np.array([getattr(sampled, part) for sampled in moves])
        exact = np.asarray(getattr(true, part))
        expected = getattr(mse, part)[1]
        np.testing.assert_allclose(np.mean(np.sum((move - exact) ** 2, axis=1)), expected, rtol=1e-12)
        printed = np.mean(np.sum((move + exact) ** 2, axis=1))
        np.testing.assert_allclose(printed, expected + 4 * np.sum(exact**2), rtol=1e-12)
        assert printed > 1.5 * expected


def neumann(name, sampling="iid", **kwargs):
    return getattr(bilevel, name)(0.1, 1.0, 1, n_neumann=3, neumann_step=0.4, sampling=sampling, **kwargs)


TERMS = {"StocBiO": 4, "MRBO": 4, "VRBO": 4, "BSA": 3, "TTSA": 3, "ALSET": 3, "SUSTAIN": 3}


@pytest.mark.parametrize("name", TERMS)
def test_the_mean_of_a_neumann_series_equals_its_closed_form(name):
    problem = tiny()
    inner, outer = problem.exact_solver.inner, problem.exact_solver.outer
    found = neumann_mean(problem, neumann(name), POINT)
    assert_close(found)
    z, x, _ = POINT
    term = outer.a_inner @ z + outer.b.T @ x + outer.linear_inner
    terms = [term]
    for _ in range(TERMS[name] - 1):
        terms.append(terms[-1] - 0.4 * inner.a_inner @ terms[-1])
    v = -0.4 * np.sum(terms, axis=0)
    np.testing.assert_allclose(found.lhs.v, v, rtol=1e-12)
    hypergrad = inner.b @ v + outer.a_outer @ x + outer.b @ z + outer.linear_outer
    np.testing.assert_allclose(found.lhs.outer_var, hypergrad, rtol=1e-12)


def test_each_term_of_a_neumann_series_reduces_its_bias_by_the_same_factor():
    problem, solver = tiny(), neumann("StocBiO")
    hessian = problem.exact_solver.inner.a_inner
    start, modes = problem.start, np.linalg.eigh(hessian)
    outer = problem.exact_solver.outer
    grad = outer.a_inner @ start.inner_var + outer.b.T @ start.outer_var + outer.linear_inner
    solution = -np.linalg.solve(hessian, grad)
    left = (solution - neumann_mean(problem, solver).lhs.v) @ modes[1] / (solution @ modes[1])
    np.testing.assert_allclose(left, (1 - 0.4 * modes[0]) ** 4, rtol=1e-10)


@pytest.mark.parametrize("sampling", ["blocks", "reshuffle"])
def test_neumann_series_require_independent_batches(sampling):
    lhs, rhs = neumann_mean(tiny(), neumann("BSA", sampling))
    error = max(np.max(np.abs(a - b)) for a, b in zip(lhs[1:], rhs[1:], strict=True))
    assert error < 1e-13 if sampling == "blocks" else error > 1e-3


@pytest.mark.parametrize("tables", ["zero", "full"])
def test_saba_stores_the_mean_of_its_tables_and_its_direction_is_unbiased(tables):
    solver = bilevel.SABA(0.2, 1.0, 2, tables=tables, rebuild_every=10**6)
    found = saba_tables(uneven(), solver, 3)
    assert found.mean.lhs.shape == (6**3, 3 * 2 + 2 * 2)
    assert_close(found.mean, 1e-14)
    assert_close(found.direction, 1e-13)
    assert np.ptp(found.direction.rhs.v, axis=0).min() > 0.05, (
        "the test requires sequences that lead to different points"
    )


def test_the_identities_of_saba_hold_with_rebuilds_and_a_projection():
    found = saba_tables(uneven(), bilevel.SABA(0.2, 1.0, 2, v_radius=0.2, rebuild_every=2), 3)
    assert_close(found.mean, 1e-14)
    assert_close(found.direction, 1e-13)


def test_the_means_of_saba_do_not_drift_without_rebuilds():
    result = bilevel.run(uneven(), bilevel.SABA(0.2, 1.0, 2, rebuild_every=10**6), max_steps=4000)
    for memory, share in ((result.state.inner, [0.4, 0.4, 0.2]), (result.state.outer, [2 / 3, 1 / 3])):
        table = np.asarray(memory.table)
        np.testing.assert_allclose(memory.mean, share @ table, atol=1e-13 * np.abs(table).max())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: recursive_mse(tiny(), bilevel.SPABA(0.1, 1.0, 1), 2), r"`solver=SPABA.*must be SRBA"),
        (lambda: saba_tables(tiny(), bilevel.SRBA(0.1, 1.0, 1), 2), r"`solver=SRBA.*must be SABA"),
        (lambda: neumann_mean(tiny(), bilevel.SRBA(0.1, 1.0, 1)), "`solver=SRBA`: has no Neumann series"),
        (lambda: every_sequence(samples("full"), 2), "draws nothing; use 'iid'"),
        (lambda: every_sequence(samples("iid"), 0), "`steps=0`: must be an integer of at least 1"),
        (lambda: every_sequence(samples("iid"), 20), r"there are 9\.09e\+27 sequences of draws.*use fewer steps"),
        (lambda: recursive_mse(cases.quadratic(), bilevel.SRBA(0.1, 1.0, 1), 3), "use fewer steps or fewer rows"),
    ],
)
def test_invalid_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_pairs_of_sequences_are_independent():
    """The mean over both levels equals the mean over all pairs of an inner and an outer row."""
    directions = sampled_direction(tiny(), POINT, 1, "blocks").lhs
    with arithmetic("float64"):
        oracles = tiny().oracles.with_batches(1, "iid")
        pairs = itertools.product(range(3), range(2))
        rows = [Rows(jnp.array([i], jnp.int32), jnp.array([j], jnp.int32)) for i, j in pairs]
        by_hand = [oracles.direction(POINT, pair) for pair in rows]
    mean = jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *by_hand)
    cases.assert_trees_close(directions, mean)

"""The quadratic problem: what it draws, and its closed form."""

import os
import subprocess
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest

import bilevel
from bilevel._core.compilation import arithmetic
from bilevel._core.types import Rows
from bilevel.problems.exact import IterativeExactSolver
from tests import cases


def test_exact_solution_equals_the_dense_transcription():
    problem = cases.quadratic()
    x = np.random.default_rng(0).standard_normal(3)
    solution, plain = problem.exact_solver(x), cases.in_numpy("quadratic", problem).solve(x)
    np.testing.assert_allclose(solution.inner_var, plain.z, rtol=1e-11)
    np.testing.assert_allclose(solution.v, plain.v, rtol=1e-11)
    np.testing.assert_allclose(solution.value, plain.h, rtol=1e-11)
    np.testing.assert_allclose(solution.hypergrad, plain.grad_h, rtol=1e-10)
    assert max(solution.inner_residual, solution.v_residual) < 1e-12


def test_hypergradient_is_the_gradient_of_h():
    exact_solver = cases.quadratic().exact_solver
    x, move = np.random.default_rng(1).standard_normal((2, 3))
    slope = (exact_solver(x + 1e-4 * move).value - exact_solver(x - 1e-4 * move).value) / 2e-4
    np.testing.assert_allclose(exact_solver(x).hypergrad @ move, slope, rtol=1e-8)


def test_minimiser_is_stationary_and_the_gap_is_measured_from_it():
    exact_solver = cases.quadratic().exact_solver
    x = np.random.default_rng(2).standard_normal(3)
    assert np.linalg.norm(exact_solver(exact_solver.minimizer).hypergrad) < 1e-12
    assert exact_solver(exact_solver.minimizer).value_gap == 0
    np.testing.assert_allclose(
        exact_solver(x).value_gap, exact_solver(x).value - exact_solver(exact_solver.minimizer).value, rtol=1e-9
    )


def test_generic_exact_solution_equals_the_closed_form():
    problem = cases.quadratic()
    x = np.array([0.3, -1.0, 2.0])
    generic = IterativeExactSolver(problem.oracles, problem.start)
    for guess in (None, generic(x + 0.1, None)):
        cases.assert_trees_close(generic(x, guess)[:4], problem.exact_solver(x)[:4], rtol=1e-9, atol=1e-11)


def test_means_tend_to_the_prescribed_spectra():
    exact_solver = bilevel.problems.quadratic(60_000, 60_000, 6, 3, seed=0).exact_solver
    for means in (exact_solver.inner, exact_solver.outer):
        np.testing.assert_allclose(np.linalg.eigvalsh(means.a_inner), np.geomspace(0.1, 1, 6), rtol=0.03)
        np.testing.assert_allclose(np.linalg.eigvalsh(means.a_outer), np.geomspace(0.1, 1, 3), rtol=0.03)
        np.testing.assert_allclose(np.linalg.svd(means.b)[1], np.full(3, 0.1), rtol=0.3)


def test_linear_terms_have_unit_variance_and_the_common_shift():
    problem = bilevel.problems.quadratic(20_000, 500, 4, 2, seed=0, common_linear=3.0, dtype="float64")
    linear = np.asarray(problem.oracles.inner_samples.leaves.linear_inner)
    np.testing.assert_allclose(linear.std(axis=0), 1, atol=0.03)
    assert np.linalg.norm(linear.mean(axis=0)) > 0.5


@pytest.mark.parametrize("sampling", ["blocks", "reshuffle"])
def test_linear_terms_of_blocks_are_those_of_their_rows(sampling):
    problem = cases.quadratic()
    kept = problem.oracles.with_batches(cases.BATCH, sampling)  # in the arithmetic of its rows, whatever JAX's is
    with arithmetic("float64"):
        from_rows = replace(kept, inner_linear=None, outer_linear=None)
        for block in (0, 2, 3, 6):  # the last one of the outer level, and of the inner one: both are short
            rows = Rows(np.int32(block), np.int32(min(block, 3)))
            found, expected = (cases.every_kind(oracles, problem.start, rows) for oracles in (kept, from_rows))
            cases.assert_trees_close(found, expected)
    assert kept.inner_linear.grad.shape == (7, 5) and kept.outer_linear.grad_outer.shape == (4, 3)


@pytest.mark.parametrize("sampling", ["iid", "full"])
def test_where_batches_are_no_blocks_there_are_no_linear_terms_of_blocks(sampling):
    with_blocks = cases.quadratic().oracles.with_batches(cases.BATCH, "blocks")
    oracles = with_blocks.with_batches(cases.BATCH, sampling)
    assert oracles.inner_linear is None and oracles.outer_linear is None


def test_start_and_dtype_are_as_specified():
    problem = bilevel.problems.quadratic(64, 64, 5, 2, dtype="float32")
    assert problem.dtype == np.float32
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(problem.start))
    assert np.all(problem.start.inner_var == 0) and np.all(problem.start.outer_var == -2)


def test_a_draw_without_strong_convexity_is_refused():
    with pytest.raises(ValueError, match=r"not strongly convex.*inner problem"):
        bilevel.problems.quadratic(n_inner=4, n_outer=64, dim_inner=5, dim_outer=2)
    with pytest.raises(ValueError, match=r"not strongly convex.*Hessian of h.*seed"):
        bilevel.problems.quadratic(64, 64, 3, 3, coupling=20.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_inner": 0}, "n_inner=0"),
        ({"dim_outer": 2.5}, "dim_outer=2.5"),
        ({"smallest_eigenvalue": 0.0}, "smallest_eigenvalue"),
        ({"smallest_eigenvalue": 2.0}, "smallest_eigenvalue"),
        ({"coupling": np.nan}, "coupling"),
        ({"dtype": "float16"}, "float16"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        bilevel.problems.quadratic(**arguments)


MEMORY_SCRIPT = """
import sys
import bilevel

def peak():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1e3

bilevel.problems.quadratic(n_inner=256, n_outer=256, dtype=sys.argv[1])  # starts JAX's backend
before = peak()
problem = bilevel.problems.quadratic(dtype=sys.argv[1])
print(peak() - before)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads Linux's /proc")
@pytest.mark.parametrize(("dtype", "megabytes"), [("float32", 100), ("float64", 200)])
@pytest.mark.slow
def test_peak_memory_of_the_full_size_problem(dtype, megabytes):
    command = [sys.executable, "-c", MEMORY_SCRIPT, dtype]
    peak = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert 40 < peak < megabytes

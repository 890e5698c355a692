"""Convergence of SRBA, SABA and SOBA on quadratics."""

import numpy as np
import pytest

import bilevel


def tiny(seed):
    return bilevel.problems.quadratic(512, 256, 8, 4, seed=seed, common_linear=0.5, dtype="float64")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_variance_reduced_solvers_converge_and_soba_stalls(seed):
    problem = tiny(seed)

    def final(solver):
        result = bilevel.run(problem, solver, seed=seed, max_calls=1_000_000)
        return result.history["hypergrad_norm_sq"]

    srba, saba = final(bilevel.SRBA(0.2, 1.0, 16)), final(bilevel.SABA(0.2, 1.0, 16))
    soba = [final(bilevel.SOBA(step_size, ratio, 16)) for step_size in (0.05, 0.2, 0.8) for ratio in (0.3, 1.0, 3.0)]
    assert srba[-1] < 1e-25 and saba[-1] < 1e-25
    assert min(path[-1] for path in soba) > 1e-8


@pytest.mark.slow
def test_srba_solves_the_quadratics_of_its_paper_within_120_epochs():
    problem = bilevel.problems.quadratic(32768, 1024, 100, 10, seed=0, dtype="float64")
    epoch = problem.n_inner + problem.n_outer
    result = bilevel.run(problem, bilevel.SRBA(0.1, 1.0, 64, period=epoch // 128), max_calls=120 * epoch, stop=1e-16)
    assert result.status == "converged"
    assert result.history["hypergrad_norm_sq"][-1] <= 1e-16
    assert result.history["epochs"][-1] <= 120


@pytest.mark.parametrize("sampling", ["iid", "reshuffle", "full"])
@pytest.mark.slow
def test_every_sampling_reaches_the_solution(sampling):
    result = bilevel.run(tiny(0), bilevel.SRBA(0.1, 1.0, 16, sampling=sampling), max_steps=20_000, stop=1e-18)
    assert result.status == "converged"


def test_srba_converges_to_the_closed_form():
    problem = tiny(0)
    point = bilevel.run(problem, bilevel.SRBA(0.1, 1.0, 16), max_steps=20_000, stop=1e-26).point
    np.testing.assert_allclose(point.outer_var, problem.exact_solver.minimizer, atol=1e-11)
    exact = problem.exact_solver(problem.exact_solver.minimizer)
    np.testing.assert_allclose(point.inner_var, exact.inner_var, atol=1e-11)
    np.testing.assert_allclose(point.v, exact.v, atol=1e-11)

"""The measurement against condition numbers: its problems, its costs, and its rows."""

import numpy as np
import pytest

import bilevel
from bilevel._core.types import Calls
from paper import condition, convex_chain
from paper.condition import (
    CANDIDATES,
    QUICK,
    Derivatives,
    inner_derivatives,
    make_problem,
    measure_condition,
    measured,
    read_derivatives,
    slope_in_kappa,
)

TINY = QUICK._replace(kappas={"chain in inner": (2.0, 3.0, 4.0)}, solvers=("AccBiO-BG",))


@pytest.mark.parametrize(("name", "mu_y", "mu_x"), [("chain in inner", 1 / 8, 0.1), ("chain in outer", 0.25, 1 / 8)])
def test_kappa_is_the_inverse_of_one_curvature_of_the_chain(name, mu_y, mu_x):
    known = make_problem(name, 8.0).info
    np.testing.assert_allclose([known["mu_G"], known["mu_h"]], [mu_y, mu_x], rtol=0.05)


def test_kappa_is_the_condition_number_of_both_levels_of_quadratics():
    for kappa in condition.FULL.kappas["quadratic"]:
        problem = make_problem("quadratic", kappa)
        of_g = problem.oracles.largest_curvature / problem.info["mu_G"]
        of_h = problem.info["L_h"] / problem.info["mu_h"]
        assert kappa / 2 < of_g < 2 * kappa and kappa / 2 < of_h < 2 * kappa


def test_epsilon_and_the_bound_of_the_delayed_chain_are_its_own(monkeypatch):
    problem = make_problem("delayed chain", 16.0)
    monkeypatch.setattr(condition, "first_passage", lambda problem, solver, epsilons, *_: ({epsilons[0]: 2.0}, 1.0))
    (row,) = condition._take(condition._Run("delayed chain", "full batch", 16.0, 1.0, 1.0, 1, 0))
    assert row.epsilon == problem.info["epsilon"] == condition.STATIONARY
    assert row.bound == problem.info["derivative_bound"] and problem.info["mu_G"] == 1 / 16


def test_the_bound_is_inversely_proportional_to_the_distance_of_q_from_1():
    """The exponents of κ in the bound are those of (1 - q)^-1."""
    for name, exponent in (("chain in inner", 1.0), ("chain in outer", 0.5)):
        problems = {kappa: make_problem(name, kappa) for kappa in (8.0, 32.0)}
        bounds = [
            convex_chain.required_derivatives(problem, 1e-6 * convex_chain.gradient_floors(problem)[0])
            for problem in problems.values()
        ]
        np.testing.assert_allclose(np.log(bounds[1] / bounds[0]) / np.log(4), exponent, atol=0.1)


def test_derivatives_of_g_count_and_those_of_f_do_not():
    assert inner_derivatives(Calls(1, 10, 100, 1000, 7, 7, 7, 7)) == 1111


def test_steps_are_multiples_of_the_inverse_smoothness(monkeypatch):
    problem, given = make_problem("quadratic", 8.0), []
    monkeypatch.setattr(
        condition,
        "first_passage",
        lambda problem, solver, epsilons, *_: given.append(solver) or ({epsilons[0]: 1.0}, 0.5),
    )
    (row,) = condition._take(condition._Run("quadratic", "AccBiO-BG", 8.0, 1.0, 0.5, 4, 0))
    (solver,) = given
    assert isinstance(solver, bilevel.AccBiO) and solver.n_inner_steps == solver.n_v_steps == 4
    np.testing.assert_allclose(solver.step_size, 1 / problem.oracles.largest_curvature)
    np.testing.assert_allclose(solver.step_size / solver.outer_ratio, 0.5 / problem.info["L_h"])
    assert row.cost == 1 and np.isnan(row.bound)


@pytest.mark.slow
def test_a_measurement_is_resumed_and_no_run_is_below_the_bound(tmp_path):
    path = tmp_path / "rows.csv"
    rows = measure_condition(TINY, path=path)
    assert len(rows) == 3 * (3 + 1), "three settings and the best of them at each κ"
    assert read_derivatives(path) == rows
    assert measure_condition(TINY, path=path, progress=lambda *_: pytest.fail("nothing is due")) == rows
    assert all(row.bound < row.cost < 40 * row.bound for row in rows)
    for row in measured(rows, "chain in inner", "AccBiO-BG"):
        grid = [other.cost for other in rows if other.kappa == row.kappa and other.seed >= 100]
        assert row.cost == min(grid) < 10 * row.bound


def test_slopes_are_those_of_power_laws():
    rows = [
        Derivatives("chain in inner", "AmIGO", kappa, 1.0, 1.0, 1, 0, 1e-6, 3 * kappa, 5 * kappa**2, 1e-7)
        for kappa in (4.0, 8.0, 16.0)
    ]
    np.testing.assert_allclose(slope_in_kappa(rows, "chain in inner", "AmIGO").value, 2)
    np.testing.assert_allclose(slope_in_kappa(rows, "chain in inner", "bound").value, 1)


def test_sampling_methods_are_not_measured_where_there_is_one_row(monkeypatch):
    seen = []
    monkeypatch.setattr(condition, "measure", lambda places, *_: seen.extend(places))
    measure_condition()
    assert {name for name, _, solver in seen if solver == "SRBA"} == {"quadratic"}
    assert {solver for name, _, solver in seen if name == "delayed chain"} == {"AmIGO", "full batch"}
    assert {solver for name, _, solver in seen if name == "quadratic"} == set(CANDIDATES)

"""Convex terms of x: steps of each solver, and minimizers compared with those of NumPy and SciPy."""

from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.optimize import minimize

import bilevel
from bilevel.oracles import OuterTerm
from tests import cases

STEP, RATIO, STRENGTH = 0.05, 5.0, 0.3
L1, SIMPLEX = bilevel.L1(STRENGTH), bilevel.Simplex()
INSIDE = np.array([0.2, 0.5, 0.3])
SEED = 3  # of a quadratic whose minimizers have one 0, with the l1 term and in the simplex
TAKING = [name for name, one in cases.SOLVERS.items() if one.takes_outer_term and name != "AutoSRBA"]
# The steps of the others are of size STEP / RATIO at first, times the scale of their directions.
OF_OWN_SIZE = ("STFBO", "AdaBiO", "F2SAp", "AccBO")
SCALES = {"VPBGD": 1 / 10, "GPBGD": 1 / 100, "MEHA": 1 / 2}  # 1 / penalty


def start_at(x, **kwargs):
    problem = cases.quadratic(seed=SEED, **kwargs)
    return replace(problem, start=problem.start._replace(outer_var=np.asarray(x, problem.dtype)))


def first_x(problem, name):
    changes = {"AccBO": {"warm_up": 0}, "MEHA": {"c_0": 2.0}}.get(name, {})
    solver = cases.short(type(cases.SOLVERS[name]), STEP, RATIO, cases.BATCH, **changes)
    return np.asarray(cases.trajectory(problem, solver, 1).states[-1].point.outer_var)


def soft(x, least):
    return np.sign(x) * np.maximum(np.abs(x) - least, 0)


@pytest.mark.parametrize("name", cases.marked(TAKING))
def test_the_first_step_of_x_is_a_soft_threshold_of_the_plain_step(name):
    problem = start_at([-1.0, 0.7, 1e-4])
    plain, moved = first_x(problem, name), first_x(problem.with_outer_term(L1), name)
    least = STRENGTH * STEP / RATIO * SCALES.get(name, 1.0)
    if name in OF_OWN_SIZE:
        least = abs(plain[0]) - abs(moved[0])
        assert least > 1e-9
    np.testing.assert_allclose(moved, soft(plain, least), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", cases.marked(TAKING))
def test_the_first_step_of_x_in_the_simplex_is_the_mirror_step_of_the_entropy(name):
    problem = start_at(INSIDE)
    plain, moved = first_x(problem, name), first_x(problem.with_outer_term(SIMPLEX), name)
    weights = INSIDE * np.exp(plain - INSIDE)
    np.testing.assert_allclose(moved, weights / weights.sum(), rtol=1e-10)
    assert np.abs(moved - INSIDE).max() > 1e-7 or name == "MASOBA", "the average of MASOBA is 0 in the first step"


# Minimizers

QUADRATIC = cases.quadratic(seed=SEED)


def hypergrad(x):
    return np.asarray(QUADRATIC.exact_solver(np.asarray(x, float), None).hypergrad)


def hessian_and_slope():
    slope = hypergrad(np.zeros(3))
    return np.stack([hypergrad(unit) - slope for unit in np.eye(3)], axis=1), slope


def minimize_with_l1(strength, lower=-np.inf):
    """Minimize x'Qx/2 + c'x + strength |x| over x >= lower, one coordinate at a time."""
    matrix, slope = hessian_and_slope()
    x = np.zeros(3)
    for _ in range(3000):
        for i in range(3):
            target = matrix[i, i] * x[i] - matrix[i] @ x - slope[i]
            x[i] = max(soft(target, strength) / matrix[i, i], lower)
    return x


def minimize_in_simplex():
    matrix, slope = hessian_and_slope()
    found = minimize(
        lambda x: x @ matrix @ x / 2 + slope @ x,
        INSIDE,
        jac=lambda x: matrix @ x + slope,
        method="SLSQP",
        bounds=[(0, 1)] * 3,
        constraints={"type": "eq", "fun": lambda x: x.sum() - 1, "jac": np.ones_like},
        options={"ftol": 1e-15, "maxiter": 500},
    )
    return found.x


SPARSE = 0.6 * float(np.abs(hypergrad(np.zeros(3))).max())
DETERMINISTIC = {
    "HOAG": bilevel.HOAG(),
    "SHINE": bilevel.SHINE(refine=True),
    "DTFBO": bilevel.DTFBO(inner_tolerance=1e-14),
    "MAID": bilevel.MAID(),
    "SRBA": bilevel.SRBA(0.5, 5.0, sampling="full", period=1),
    "AmIGO": bilevel.AmIGO(0.5, 2.0, sampling="full"),
    "AIDCG": bilevel.AIDCG(0.5, 2.0, sampling="full"),
}


@pytest.mark.parametrize("name", cases.marked(DETERMINISTIC, quick=["HOAG"]))
@pytest.mark.parametrize("kind", ["l1", "simplex"])
def test_solvers_find_the_minimizer(name, kind):
    term, x, best = (
        (bilevel.L1(SPARSE), [-1.0, 0.7, 0.4], minimize_with_l1(SPARSE))
        if kind == "l1"
        else (SIMPLEX, INSIDE, minimize_in_simplex())
    )
    problem = start_at(x).with_outer_term(term)
    steps = 300 if name in ("HOAG", "SHINE") else 3000
    found = bilevel.run(problem, DETERMINISTIC[name], max_steps=steps, eval_every=steps)
    # MAID ends at an h + R that no step improves by more than its rounding errors.
    np.testing.assert_allclose(found.point.outer_var, best, atol=2e-5 if name == "MAID" else 1e-6)
    if kind == "l1":
        assert 0 < np.sum(best == 0) < 3, "the test requires zeros and other numbers"
        np.testing.assert_array_equal(found.point.outer_var == 0, best == 0)
    reached = 1e-10 if name == "MAID" else 1e-12
    assert found.history["hypergrad_norm_sq"][-1] < reached < found.history["hypergrad_norm_sq"][0]


# Metrics

ONE_STEP = bilevel.SOBA(STEP, RATIO, cases.BATCH)


@pytest.mark.parametrize("kind", ["l1", "l1 with a bound", "simplex"])
def test_metrics_are_those_of_the_objective_with_the_term(kind):
    x, term = np.array([-1.0, 0.7, 0.4]), bilevel.L1(SPARSE)
    if kind == "simplex":
        x, term = INSIDE, SIMPLEX
    problem, exact = start_at(x), QUADRATIC.exact_solver(x, None)
    if kind == "l1 with a bound":
        bounds = np.full(3, -1.0), np.full(3, 0.5)
        problem = replace(problem, oracles=replace(problem.oracles, outer_bounds=bounds))
    row = bilevel.run(problem.with_outer_term(term), ONE_STEP, max_steps=1).history
    plain = bilevel.run(problem, ONE_STEP, max_steps=1).history
    gradient, added = np.asarray(exact.hypergrad), 0.0 if kind == "simplex" else SPARSE * np.abs(x).sum()
    ahead = soft(x - gradient, SPARSE)
    if kind == "l1 with a bound":
        ahead = np.clip(ahead, *bounds)
    if kind == "simplex":
        ahead = minimize(
            lambda y: np.sum((y - x + gradient) ** 2),
            x,
            method="SLSQP",
            bounds=[(0, 1)] * 3,
            constraints={"type": "eq", "fun": lambda y: y.sum() - 1},
            options={"ftol": 1e-15},
        ).x
    assert row["value"][0] == pytest.approx(exact.value + added, rel=1e-12)
    assert row["outer_value"][0] == pytest.approx(plain["outer_value"][0] + added, rel=1e-12)
    assert row["hypergrad_norm_sq"][0] == pytest.approx(np.sum((x - ahead) ** 2), rel=1e-6)
    assert "value_gap" in plain and "value_gap" not in row


def test_the_metric_is_zero_at_the_minimizer_and_only_there():
    best = minimize_with_l1(SPARSE)
    for x, is_best in ((best, True), (best + np.array([0, 0, 0.01]), False)):
        row = bilevel.run(start_at(x).with_outer_term(bilevel.L1(SPARSE)), ONE_STEP, max_steps=1).history
        assert (row["hypergrad_norm_sq"][0] < 1e-20) == is_best


@pytest.mark.slow
def test_certificates_bound_the_metric():
    problem = cases.logistic_selection().with_outer_term(bilevel.L1(0.01))
    found = bilevel.run(problem, bilevel.SOBA(0.1, 1.0, cases.BATCH), max_steps=20)
    bound = problem.certifier()(found.point).hypergrad_norm_bound
    assert np.sqrt(found.history["hypergrad_norm_sq"][-1]) <= bound


@pytest.mark.slow
def test_bounds_of_the_problem_hold_after_the_soft_threshold():
    bounds = np.full(3, -0.2), np.full(3, 0.1)
    problem = start_at(np.zeros(3))
    problem = replace(problem, oracles=replace(problem.oracles, outer_bounds=bounds)).with_outer_term(L1)
    found = bilevel.run(problem, replace(DETERMINISTIC["SRBA"], step_size=0.2), max_steps=2000, eval_every=2000)
    matrix, slope = hessian_and_slope()
    x = np.asarray(found.point.outer_var)
    np.testing.assert_allclose(x, np.clip(soft(x - matrix @ x - slope, STRENGTH), *bounds), atol=1e-8)
    assert np.any(x == -0.2) or np.any(x == 0.1)


# Runs


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Nonnegative(OuterTerm):
    """The indicator of x >= 0, as a user may write it."""

    def prox(self, x, step):
        return jax.tree.map(lambda leaf: jnp.maximum(leaf, 0), x)


@pytest.mark.slow
def test_an_own_term_gives_the_iterates_of_the_bounds_that_it_stands_for():
    problem = start_at([0.5, 0.5, 0.5])
    bounded = replace(problem, oracles=replace(problem.oracles, outer_bounds=(np.zeros(3), np.full(3, np.inf))))
    solver = cases.short(bilevel.SRBA, 0.2, 1.0, cases.BATCH)
    found, expected = (
        bilevel.run(one, solver, max_steps=100, eval_every=100)
        for one in (problem.with_outer_term(Nonnegative()), bounded)
    )
    cases.assert_trees_close(found.point, expected.point)
    assert np.any(found.point.outer_var == 0) and np.any(found.point.outer_var > 0)


def test_runs_resume_and_compute_in_float32(tmp_path):
    problem = start_at(INSIDE, dtype="float32").with_outer_term(SIMPLEX)
    solver = bilevel.SRBA(STEP, RATIO, cases.BATCH, period=5)
    found = bilevel.run(problem, solver, max_steps=40, eval_every=20)
    assert found.point.outer_var.dtype == np.float32 and abs(found.point.outer_var.sum() - 1) < 1e-6
    bilevel.run(problem, solver, max_steps=20, eval_every=20).save(tmp_path / "run.npz")
    resumed = bilevel.resume(tmp_path / "run.npz", problem, max_steps=40, eval_every=20)
    cases.assert_trees_equal(resumed.state, found.state)
    with pytest.raises(ValueError, match="problem"):
        bilevel.resume(tmp_path / "run.npz", start_at(INSIDE, dtype="float32"), max_steps=40)


@pytest.mark.parametrize(
    ("solver", "option"),
    [
        (bilevel.AutoSRBA(), r"\(outer_optimizer=…\)"),
        (bilevel.SOBA(outer_optimizer=optax.sgd(0.1)), r"\(outer_optimizer=…\)"),
        (bilevel.SOBA(outer_bounds=(-1, 1)), r"\(outer_bounds=…\)"),
        (bilevel.Exact(), ""),
    ],
)
def test_solvers_that_would_move_x_otherwise_are_refused(solver, option):
    with pytest.raises(ValueError, match=rf"`{type(solver).__name__}{option}`: it would not take the step of x that"):
        bilevel.run(start_at(INSIDE).with_outer_term(L1), solver, max_steps=1)


def test_the_page_on_runs_lists_the_solvers_that_take_no_term():
    page = (Path(bilevel.__file__).parents[1] / "docs" / "runs.md").read_text()
    sentence = page.partition("Three solvers refuse a term: ")[2].partition(". Settings")[0]
    refusing = {"AutoSRBA"} | {name for name, one in bilevel.SOLVERS.items() if not one.takes_outer_term}
    assert len(refusing) == 3 and all(f"{name}, whose" in " ".join(sentence.split()) for name in refusing)


def test_terms_that_do_not_fit_are_refused():
    for term in (0.1, None, bilevel.L1):
        with pytest.raises(ValueError, match=r"must be an OuterTerm such as bilevel\.L1"):
            start_at(INSIDE).with_outer_term(term)
    for strength in (-1.0, np.inf, np.nan, "x", True):
        with pytest.raises(ValueError, match="give a finite number of at least 0"):
            start_at(INSIDE).with_outer_term(bilevel.L1(strength))
    for x in ([0.5, 0.5, 0.5], [1.0, 0.0, 0.0], [1.5, -0.25, -0.25]):
        with pytest.raises(ValueError, match="start at positive numbers that sum to 1"):
            start_at(x).with_outer_term(SIMPLEX)
    bounded = cases.logistic_selection(outer_var=np.full(4, 0.25), outer_bounds=(0.0, 1.0))
    with pytest.raises(ValueError, match="without bounds"):
        bounded.with_outer_term(SIMPLEX)

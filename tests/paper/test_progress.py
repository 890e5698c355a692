"""Runs on the worst case and the lower bound. The problem itself is tested in test_worst_case.py."""

from dataclasses import replace

import numpy as np
import pytest

import bilevel
from bilevel._core.types import Point
from bilevel.solvers import Solver
from bilevel.solvers.neumann import LoopDraw
from paper.progress import OUTSIDE, gradient_floor, measure_progress, n_completed, reach
from paper.worst_case import worst_case
from tests import cases
from tests.paper.zero_chain import zero_chain

pytestmark = pytest.mark.slow  # many compilations, and float64 in either mode

M, EPSILON = 4, 7e-7
BOTH = pytest.mark.parametrize("normalization", ["individual", "mean_squared"])
# AutoSRBA makes only full-batch passes on so few rows, and its first passes exceed the bound.
LINEAR = [
    name for name, cls in bilevel.SOLVERS.items() if issubclass(cls, Solver) and name not in (*OUTSIDE, "AutoSRBA")
]


def hard(normalization="individual", **kwargs):
    return worst_case(M, EPSILON, **({"normalization": normalization, "dtype": "float64"} | kwargs))


def quick(name, **kwargs):
    """Return a solver with large steps and batches of one row, which progresses as far as its queries permit."""
    return cases.short(getattr(bilevel, name), 0.5, 0.5, 1, **kwargs)


def test_reach_is_the_index_of_the_last_nonzero_coordinate():
    problem = hard()
    length = int(problem.info["T"]) + 1
    z, x, v = np.zeros((3, M, length))
    z[0, [0, 2]], x[1, length - 2], v[2, length - 1] = 1.0, -1e-300, 5.0
    point = Point(z.ravel(), x.ravel(), v.ravel())
    cases.assert_trees_equal(
        reach(point, problem),
        Point(np.array([3, 0, 0, 0]), np.array([0, length - 1, 0, 0]), np.array([0, 0, length, 0])),
    )
    assert n_completed(point, problem) == 1, "a chain is complete if one of the last two coordinates of x is nonzero"
    assert n_completed(problem.start, problem) == 0


@BOTH
def test_the_gradient_floor_is_proportional_to_the_number_of_incomplete_chains(normalization):
    problem = hard(normalization)
    np.testing.assert_allclose(gradient_floor(problem, M // 2), EPSILON, rtol=1e-12)
    np.testing.assert_allclose(gradient_floor(problem, 0), 2 * EPSILON, rtol=1e-12)
    np.testing.assert_allclose(gradient_floor(problem, np.array([1, M])), [1.5 * EPSILON, 0], rtol=1e-12)
    rotated = hard(normalization, rotation="random")
    assert gradient_floor(rotated, 0) == gradient_floor(problem, 0)


@pytest.mark.parametrize(("order", "steps_per_coordinate"), [("together", 3), ("in_turn", 1)])
def test_a_coordinate_enters_v_then_x_then_z(order, steps_per_coordinate):
    path = zero_chain(np.ones((12, 2)), 100, order)
    t = np.arange(13)
    lag = 1 if order == "together" else 0
    np.testing.assert_array_equal(path.v[:, 0], -(-t // steps_per_coordinate))
    np.testing.assert_array_equal(path.outer_var[:, 0], -(-np.maximum(t - lag, 0) // steps_per_coordinate))
    np.testing.assert_array_equal(path.inner_var[:, 0], -(-np.maximum(t - lag - 1, 0) // steps_per_coordinate))


@pytest.mark.parametrize("order", ["together", "in_turn"])
def test_the_reach_is_at_most_the_number_of_queries_for_any_order_of_rows(order):
    rng = np.random.default_rng(0)
    for rate in (0.1, 0.3, 0.9):
        queried = rng.random((60, M)) < rate
        path = zero_chain(queried, 16, order)
        counts = np.vstack([np.zeros(M, int), np.cumsum(queried, axis=0)])
        assert all(np.all(part <= np.minimum(counts, 16)) for part in path)
        assert np.all(path.inner_var <= path.outer_var) and np.all(path.outer_var <= path.v)
        assert np.all(np.sum(path.outer_var >= 15, axis=1) <= counts.sum(1) / 15), "completed chains"


ORDERS = {"SRBA": "together", "SABA": "together", "SOBA": "together", "SPABA": "together", "AmIGO": "in_turn"}


def rows_of_f(run, steps):
    """Return how often each step reads each row of F, from the draws; refreshes of SRBA and SPABA read all rows."""
    reads_all = type(run.solver).__name__ in ("SRBA", "SPABA")
    refreshes = np.asarray(run.page.refreshes)[:steps] if reads_all else np.zeros(steps, bool)
    outer = [draw.neumann.outer if isinstance(draw, LoopDraw) else draw.outer for draw in run.draws]
    drawn = [np.bincount(cases.indices(run.oracles.outer_samples, rows), minlength=M) for rows in outer]
    return np.where(refreshes[:, None], 1, drawn)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", cases.marked(ORDERS))
def test_solvers_reach_exactly_the_coordinates_that_their_rows_and_order_of_moves_permit(name, seed):
    problem, steps = hard(), 60
    run = cases.trajectory(problem, quick(name), steps, seed)
    allowed = zero_chain(rows_of_f(run, steps), int(problem.info["T"]) + 1, ORDERS[name])
    for t, state in enumerate(run.states, start=1):
        cases.assert_trees_equal(reach(state.point, problem), Point(*(part[t] for part in allowed)))
    assert allowed.v[-1].max() > 3


def test_the_printed_induction_would_permit_all_chains_to_be_complete_within_the_bound():
    """The proof counts "at most m t vectors", t per row; the bound requires one per query of that row."""
    problem = hard()
    length, queries = int(problem.info["T"]), int(problem.info["T"])
    assert queries < problem.info["query_bound"]
    in_turn = np.eye(M)[np.arange(queries) % M]
    printed = np.where(in_turn.sum(0) > 0, queries, 0)
    assert np.all(printed >= length), "the set I would be empty"
    path = zero_chain(in_turn, length + 1, "in_turn")
    assert path.outer_var[-1].sum() == queries
    assert np.sum(path.outer_var[-1] >= length) == 0


def test_bome_attains_the_largest_permitted_reach():
    """BOME moves z along ∇F directly, so that each query adds a coordinate."""
    meter = measure_progress(hard(), quick("BOME"), max_calls=600)
    assert meter.is_within
    assert meter.allowed[3] == 12 and meter.allowed[-1] == 64
    np.testing.assert_array_equal(meter.reached, meter.allowed)


@pytest.mark.parametrize("name", cases.marked(LINEAR))
def test_no_solver_with_linear_steps_beats_the_lower_bound(name):
    assert_within_bound(name, "individual")


@pytest.mark.parametrize("name", ["SRBA", pytest.param("AmIGO", marks=pytest.mark.slow)])
def test_no_solver_beats_the_lower_bound_with_the_other_normalization(name):
    assert_within_bound(name, "mean_squared")


def assert_within_bound(name, normalization):
    problem = hard(normalization)
    bound = problem.info["query_bound"]
    for seed in range(2):
        calls = 12_000 if name == "ForwardMode" else 1500  # a step computes a tangent for each coordinate of x
        meter = measure_progress(problem, quick(name), seed=seed, max_calls=calls)
        assert meter.is_within
        early = meter.queries <= bound
        assert np.all(meter.hypergrad_norm_sq[early] > EPSILON)
        assert np.all(M - meter.completed[early] >= M / 2), "the proof prints |I| <= m/2"
        assert meter.queries_to(EPSILON) > bound
        assert np.sum(early) > 3 and meter.queries[-1] > bound, "the test requires more evaluations or a longer run"
        assert meter.reached[-1] > problem.info["T"]


def test_a_run_becomes_stationary_only_beyond_the_bound():
    problem = hard()
    meter = measure_progress(problem, quick("SABA"), max_calls=10_000, every=20)
    assert meter.is_within
    assert problem.info["query_bound"] < meter.queries_to(EPSILON) < np.inf
    assert meter.completed[-1] == M and meter.floor[-1] == 0


def test_random_directions_leave_the_span_and_are_detected():
    assert list(OUTSIDE) == ["PZOBO"]
    meter = measure_progress(hard(), quick("PZOBO"), max_calls=60)
    assert not meter.is_within
    assert meter.reached[1] == 64 > meter.allowed[1] == 1


def test_a_start_at_the_solution_is_detected():
    problem = hard()
    solution = np.full_like(problem.start.outer_var, problem.info["beta"])
    ahead = replace(problem, start=problem.start._replace(outer_var=solution))
    meter = measure_progress(ahead, quick("SOBA"), max_calls=60)
    assert not meter.is_within
    assert meter.completed[0] == M > meter.completed_allowed[0] == 0
    assert meter.queries_to(EPSILON) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: measure_progress(cases.quadratic(), quick("SOBA"), max_calls=10),
            "must be made by paper.worst_case.worst_case",
        ),
        (lambda: reach(hard().start, hard(rotation="random")), "random basis.*rotation='coordinates'"),
        (lambda: gradient_floor(hard(), M + 1), "`completed=5`: must lie between 0 and the 4 chains"),
        (
            lambda: zero_chain(np.ones((3, 2)), 5, "backwards"),
            "`order='backwards'`: must be one of 'together', 'in_turn'",
        ),
        (lambda: zero_chain(np.ones(3), 5), r"`queried`: must be counts of shape"),
    ],
)
def test_invalid_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()

"""Valleys: closed forms against automatic and finite differences, and how slowly gradient flow empties them."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import solve_ivp

from bilevel._core.compilation import arithmetic
from bilevel._core.types import Point, Rows
from bilevel.oracles import AutodiffOracles
from paper.valleys import SHARPEST, pseudo_huber, pseudo_huber_slope, valleys
from tests import cases

DIM = 4


def small(**kwargs):
    return valleys(24, 16, DIM, seed=1, **({"dtype": "float64"} | kwargs))


def rows_in_numpy(problem):
    return [level.leaves._asdict() for level in (problem.oracles.inner_samples, problem.oracles.outer_samples)]


def written_out(problem, z, x):
    """G and F as sums over rows, in NumPy."""
    a, r = np.asarray(problem.oracles.curvatures), np.asarray(problem.oracles.widths)
    ripples = [
        np.mean([h * np.cos(w @ z + e @ x + t) for h, w, e, t in zip(*map(np.asarray, rows.values()), strict=True)])
        for rows in rows_in_numpy(problem)
    ]
    return np.sum(a * (z - x) ** 2) / 2 + ripples[0], np.sum(np.sqrt(1 + (z / r) ** 2) - 1) + ripples[1]


def random_point(seed=0):
    return Point(*np.random.default_rng(seed).standard_normal((3, DIM)))


def by_autodiff(oracles):
    a, r = oracles.curvatures, oracles.widths

    def ripple(z, x, row):
        return row.height * jnp.cos(row.inner @ z + row.outer @ x + row.phase)

    return AutodiffOracles(
        inner_samples=oracles.inner_samples,
        outer_samples=oracles.outer_samples,
        inner_loss=lambda z, x, row: jnp.sum(a * (z - x) ** 2) / 2 + ripple(z, x, row),
        outer_loss=lambda z, x, row: jnp.sum(jnp.sqrt(1 + (z / r) ** 2) - 1) + ripple(z, x, row),
    )


@pytest.mark.parametrize("rows", [Rows(), Rows(jnp.int32(2), jnp.int32(1))], ids=["all", "a block"])
def test_every_kind_equals_autodiff(rows):
    with arithmetic("float64"):
        closed = small().oracles.with_batches(5, "blocks")
        found, expected = (cases.every_kind(one, random_point(), rows) for one in (closed, by_autodiff(closed)))
        cases.assert_trees_close(found, expected, rtol=1e-12, atol=1e-13)


def test_finite_differences_agree_with_every_derivative():
    assert max(small().check().values()) < 1e-6


def test_ripples_differ_by_row_and_cancel_in_the_mean():
    problem, (z, x, _) = small(), random_point()
    inner, outer = written_out(problem, z, x)
    solution = problem.exact_solver(z)
    np.testing.assert_allclose(outer, solution.value, rtol=1e-12)
    np.testing.assert_allclose(inner, np.sum(np.asarray(problem.oracles.curvatures) * (z - x) ** 2) / 2, rtol=1e-12)
    assert np.ptp(np.asarray(problem.oracles.outer_samples.leaves.height)) == 2.0


def test_exact_solution_agrees_with_finite_differences_of_h():
    problem, x = small(), random_point().outer_var
    solution = problem.exact_solver(x)

    def h(x):
        return written_out(problem, x, x)[1]  # z*(x) = x: the test above finds G least there

    numeric = [(h(x + step) - h(x - step)) / 2e-6 for step in 1e-6 * np.eye(DIM)]
    np.testing.assert_allclose(solution.hypergrad, numeric, rtol=1e-7, atol=1e-9)
    with arithmetic("float64"):
        direction = problem.oracles.direction(Point(solution.inner_var, x, solution.v))
        np.testing.assert_allclose(direction.inner_var, 0, atol=1e-15)
        np.testing.assert_allclose(direction.v, 0, atol=1e-15)
        np.testing.assert_allclose(direction.outer_var, solution.hypergrad, rtol=1e-12)


def test_h_and_its_solution_do_not_depend_on_the_number_of_rows():
    small_one, large = (valleys(n, n, DIM, dtype="float64") for n in (8, 64))
    x = random_point().outer_var
    cases.assert_trees_equal(small_one.exact_solver(x), large.exact_solver(x))
    cases.assert_trees_equal(small_one.start, large.start)


def test_the_curvature_of_h_vanishes_far_out_but_not_its_slope():
    x, step = np.full(DIM, 1e4), np.eye(DIM)[0]
    slopes = [small().exact_solver(at).hypergrad for at in (x, x + step)]
    assert abs(slopes[1] - slopes[0]).max() < 1e-11 and slopes[0][0] > 0.99


def test_a_point_beyond_all_bounds_is_not_stationary():
    solution = small().exact_solver(np.full(DIM, 1e200))
    assert np.linalg.norm(solution.hypergrad) > 1 and solution.value > 1e200


def test_gradient_flow_lowers_the_squared_gradient_like_one_over_time():
    problem = valleys(2, 2, dtype="float64")
    times = np.geomspace(10, 1000, 9)
    flow = solve_ivp(
        lambda _, x: -problem.exact_solver(x).hypergrad,
        (0, times[-1]),
        problem.start.outer_var,
        t_eval=times,
        method="LSODA",
        rtol=1e-8,
    )
    norms = [np.sum(problem.exact_solver(x).hypergrad ** 2) for x in flow.y.T]
    assert -1.15 < np.polyfit(np.log(times), np.log(norms), 1)[0] < -0.85


def test_constants_are_the_maxima_over_a_grid():
    t, step = np.linspace(-4, 4, 80_001, retstep=True)
    slope = pseudo_huber_slope(t)
    np.testing.assert_allclose(np.gradient(pseudo_huber(t), step)[1:-1], slope[1:-1], atol=1e-6)
    assert 0.9 < np.max(abs(slope)) < 1 and np.max(np.gradient(slope, step)) == pytest.approx(1, rel=1e-6)
    third = np.gradient(np.gradient(slope, step), step)[2:-2]
    np.testing.assert_allclose(SHARPEST, np.max(abs(third)), rtol=1e-4)


def test_constants_hold_between_random_points_of_single_rows():
    problem = small()
    known, rng = problem.constants(), np.random.default_rng(0)
    assert (known.mu_G, known.L_z_star, known.L_h) == (0.5, 1.0, pytest.approx(1.0))
    assert known.R == known.L0_F / 0.5
    with arithmetic("float64"):
        oracles = problem.oracles.with_batches(1, "blocks")
        points = [Point(*(10 ** rng.uniform(-2, 2) * rng.standard_normal((3, DIM)))) for _ in range(20)]
        rows = Rows(jnp.int32(3), jnp.int32(3))
        slopes = [cases.every_kind(oracles, point, rows) for point in points]
    outer = np.array([np.concatenate([one["outer_grad"], one["outer_grad_outer"]]) for one in slopes])
    places = np.array([np.concatenate(point[:2]) for point in points])
    assert np.all(np.linalg.norm(outer, axis=1) <= known.L0_F)
    gaps = np.linalg.norm(places[:, None] - places, axis=2)
    assert np.all(np.linalg.norm(outer[:, None] - outer, axis=2) <= known.L1_F * gaps)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_inner": 3}, "`n_inner=3`.*even"),
        ({"flattest": 0.0}, "`flattest=0.0`: must be above 0"),
        ({"inner_ripple": 0.5}, "`inner_ripple=0.5`.*below `inner_curvature`"),
        ({"outer_ripple": -1.0}, "`outer_ripple=-1.0`"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        valleys(**arguments)

"""Constants from constants: closed forms in few numbers."""

from math import sqrt
from types import SimpleNamespace

import numpy as np
import pytest

from bilevel._core.types import Point
from bilevel.problems.certificate import (
    ASSUMED,
    DERIVED,
    Constants,
    Moments,
    Region,
    box_around,
    implied,
    largest_on_circle,
    radius_with_start,
)
from bilevel.problems.quadratic import Factors, _hessian_norms
from tests.problems.sampling import random_points


def test_what_the_assumptions_imply_is_as_stated():
    """μ = 2, L1_G = 4, so L_z* = 2; L0_F = 6, so R = 3; L1_F + L2_G R = 5 + 0.5 · 3 = 6.5; 1 + L_z*² = 5."""
    found = implied(2.0, 6.0, 5.0, 4.0, 0.5)
    assert found == {"R": 3.0, "L_z_star": 2.0, "L_v_star": pytest.approx(sqrt(5) * 6.5 / 2), "L_h": 5 * 6.5}


def test_without_a_bounded_gradient_only_constant_hessians_leave_finite_constants():
    assert implied(2.0, None, 5.0, 4.0, 0.5) == {"R": None, "L_z_star": 2.0, "L_v_star": None, "L_h": None}
    flat = implied(2.0, None, 5.0, 4.0, 0.0)
    assert flat == {"R": None, "L_z_star": 2.0, "L_v_star": pytest.approx(sqrt(5) * 5 / 2), "L_h": 25.0}


def test_the_implied_constants_are_attained_by_a_scalar_quadratic():
    """G = z²/2 - 3 x z, so z* = 3x; F = (z² + x²)/2 with the Hessian I: h = 5 x², v* = -3x, and L_1^G bounds |-3|."""
    found = implied(1.0, None, 1.0, 3.0, 0.0)
    assert (found["L_z_star"], found["L_h"]) == (3.0, 10.0)
    assert found["L_v_star"] >= 3


def test_a_ball_holds_the_start():
    problem = SimpleNamespace(start=Point({"a": np.array([3.0]), "b": np.array([[4.0]])}, None, None))
    assert radius_with_start(problem, 1.0) == 5 and radius_with_start(problem, 7.0) == 7


def boxed(bounds):
    return SimpleNamespace(start=Point(None, np.array([1.0, -2.0]), None), oracles=SimpleNamespace(outer_bounds=bounds))


@pytest.mark.parametrize(
    ("bounds", "box", "lower", "upper"),
    [
        (None, None, [0, -3], [2, -1]),
        (None, (-7.0, None), [-7, -7], [2, -1]),
        ((np.array([-np.inf, -5.0]), np.array([4.0, np.inf])), None, [0, -5], [4, -1]),
        ((np.array([0.5, -5.0]), np.array([4.0, 3.0])), (-9.0, [9.0, 8.0]), [-9, -9], [9, 8]),
    ],
)
def test_the_box_is_the_given_one_or_that_of_the_problem_or_one_around_the_start(bounds, box, lower, upper):
    found = box_around(boxed(bounds), box)
    assert [np.broadcast_to(side, 2).tolist() for side in found] == [lower, upper]


@pytest.mark.parametrize(
    ("box", "message"),
    [
        (([0.0, 1.0], [1.0, 0.0]), "a lower limit exceeds its upper one"),
        (([0.0, np.nan], 9.0), "or one is NaN"),
        ((np.zeros(3), None), "a limit has 3 numbers; give 1, or 2 like the outer variable"),
    ],
)
def test_a_box_that_is_none_is_refused(box, message):
    with pytest.raises(ValueError, match=message):
        box_around(boxed(None), box)


def test_the_farthest_x_of_a_region_is_at_its_farthest_corner():
    region = Region(2.0, np.array([-3.0, 1.0]), np.array([1.0, 4.0]))
    assert region.outer_radius == 5 and str(region) == "||z|| <= 2, x from -3 to 4"
    assert Region(2.0).outer_radius == np.inf and str(Region()) == "all z, all x"


def test_moments_are_those_of_the_rows():
    found = Moments.of(np.array([[3.0, 4.0], [0.0, 1.0], [0.0, -1.0]]))
    second = np.linalg.eigvalsh(np.array([[9.0, 12.0], [12.0, 18.0]]) / 3)[-1]
    third = np.linalg.eigvalsh(np.array([[45.0, 60.0], [60.0, 82.0]]) / 3)[-1]
    np.testing.assert_allclose(found, (second, third, 5.0, 3))


def test_the_largest_value_on_the_circle_is_bounded_closely():
    """Of degree 2 it is the largest eigenvalue; a² b² is at most 1/4, a³ b at most √27/16."""
    rng = np.random.default_rng(0)
    for t in rng.uniform(0, 5, (20, 3)):
        exact = np.linalg.eigvalsh(np.array([[t[0], t[1] / 2], [t[1] / 2, t[2]]]))[-1]
        assert exact <= largest_on_circle(t) <= (1 + 3e-6) * exact
    for terms, exact in (([0, 0, 1, 0, 0], 1 / 4), ([0, 1, 0, 0, 0], sqrt(27) / 16), ([0, 0, 0, 2], 2.0)):
        assert exact <= largest_on_circle(np.array(terms, float)) <= (1 + 3e-6) * exact
    coarse = largest_on_circle(np.array([1.0, 7.0, 2.0]), points=4)
    assert coarse >= np.linalg.eigvalsh(np.array([[1.0, 3.5], [3.5, 2.0]]))[-1], "a coarse grid must not lose the top"


def test_points_of_a_search_lie_in_the_region_half_of_them_on_its_edge():
    region = Region(3.0, np.array([-1.0, 2.0]), np.array([-0.5, 7.0]))
    found = random_points(Point(np.zeros(4), np.zeros(2), None), region, np.random.default_rng(0), 1000)
    radii, x = np.linalg.norm(found[:, :4], axis=1), found[:, 4:]
    assert np.all(radii <= 3 * (1 + 1e-12)) and 0.4 < np.mean(radii > 3 * (1 - 1e-12)) < 0.6 and radii.min() < 0.1
    assert np.all((region.lower <= x) & (x <= region.upper)) and np.ptp(x[:, 1]) > 4.5


def test_norms_of_rank_one_hessians_are_those_of_dense_matrices():
    rng = np.random.default_rng(0)
    rows = Factors(*(rng.standard_normal((6, size)) for size in (4, 3, 3, 4, 4, 3)))
    pieces = zip(*rows[:4], strict=True)
    blocks = [np.block([[np.outer(a, a), np.outer(f, e)], [np.outer(e, f), np.outer(c, c)]]) for a, c, e, f in pieces]
    np.testing.assert_allclose(_hessian_norms(rows), [np.linalg.norm(block, 2) for block in blocks], rtol=1e-10)


def test_constants_print_as_a_table():
    names = ASSUMED + DERIVED
    numbers = dict.fromkeys(names, 1.0) | {"L_h": 9.0, "L0_F": None}
    text = str(Constants(**numbers, how=dict.fromkeys(names, "bound"), region=Region()))
    assert "L_h                9  bound\n" in text and "L0_F            none  bound\n" in text
    assert text.endswith("on all z, all x") and text.count("\n") == len(names)

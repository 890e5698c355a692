"""Reversed inner steps recover their start in exact arithmetic, and give the gradient of ITD with momentum."""

from types import SimpleNamespace

import numpy as np
import pytest

from tests.transcription.draws import B, point

from .itd import itd_gradient
from .problems import Problem
from .reversible import Exact, Rounded, reversible_gradient

LONG = 100


def loop(problem: Problem, steps: int) -> SimpleNamespace:
    rng = np.random.default_rng(4)
    batches = [rng.integers(problem.n, size=B) for _ in range(steps)]
    return SimpleNamespace(inner_loop=batches, outer=rng.integers(problem.m, size=B))


def test_the_start_of_a_long_loop_is_recovered_exactly_and_only_in_exact_arithmetic(problem: Problem) -> None:
    z, x, _ = point(problem)
    draw = loop(problem, LONG)
    exact = Exact(z, 0.6)
    start = exact.state()[0]
    np.testing.assert_allclose(start, z, atol=1e-15)
    recovered = reversible_gradient(problem, exact, x, draw.inner_loop, draw.outer, 0.1)[2]
    np.testing.assert_array_equal(recovered, start)
    assert not np.any(exact.state()[1]) and not np.any(exact.lost), "the velocity of the start is 0"
    errors = []
    for steps in (15, 50, LONG):
        found = reversible_gradient(problem, Rounded(z, 0.6), x, draw.inner_loop[:steps], draw.outer, 0.1)[2]
        errors.append(np.linalg.norm(found - z))
    assert errors[0] < 1e-11 < errors[1] < 1e-3 < errors[2]


@pytest.mark.parametrize(("radix", "error"), [(2**52, 1e-9), (2**68, 1e-13)])
@pytest.mark.parametrize("momentum", [0.6, 0.95])
def test_the_gradient_of_reversed_steps_is_that_of_itd_with_momentum(
    problem: Problem, momentum: float, radix: int, error: float
) -> None:
    z, x, _ = point(problem)
    draw, numbers = loop(problem, LONG), Exact(z, momentum, radix)
    problem.reset()
    end, gradient, _ = reversible_gradient(problem, numbers, x, draw.inner_loop, draw.outer, 0.1)
    assert {kind: problem.calls[kind] // B for kind in ("gz", "hv", "cr")} == {"gz": 2 * LONG, "hv": LONG, "cr": LONG}
    expected_end, expected = itd_gradient(problem, z, x, draw, 0.1, numbers.momentum)
    np.testing.assert_allclose(end, expected_end, rtol=error, atol=error)
    np.testing.assert_allclose(gradient, expected, rtol=error, atol=error)


def test_what_is_kept_per_step_is_the_binary_logarithm_of_the_inverse_momentum(problem: Problem) -> None:
    z, x, _ = point(problem)
    numbers, steps = Exact(z, 0.9), 400
    for rows in loop(problem, steps).inner_loop:
        numbers.advance(problem.gz(numbers.state()[0], x, rows), 0.1)
    assert numbers.bits_per_coordinate() / steps == pytest.approx(np.log2(1 / 0.9), rel=0.05)

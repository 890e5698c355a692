"""Checks of derivatives against finite differences."""

import jax
import jax.numpy as jnp
import pytest

from tests.problems.networks import network_problem, relu


def test_check_passes_networks_with_kinks():
    assert max(network_problem(relu, width=64, n=400).check().values()) < 1e-5


def in_float32(scores):
    return relu(scores.astype(jnp.float32)).astype(scores.dtype)


@pytest.mark.slow
def test_check_passes_networks_with_kinks_that_round_to_float32():
    problem = network_problem(in_float32, width=64, n=400)
    assert 1e-7 < max(problem.check().values()) < 1e-2
    with pytest.raises(ValueError, match=r"differs from finite differences.*`check\(tolerance=…\)` accepts larger"):
        problem.check(tolerance=1e-9)


def test_check_refuses_a_wrong_second_derivative():
    @jax.custom_jvp
    def slope(score):
        return jnp.cos(score)

    slope.defjvps(lambda tangent, _, score: -1.1 * jnp.sin(score) * tangent)

    @jax.custom_jvp
    def sine(score):
        return jnp.sin(score)

    sine.defjvps(lambda tangent, _, score: slope(score) * tangent)
    with pytest.raises(ValueError, match=r"`(hvp|cross)` differs from finite differences"):
        network_problem(sine).check()


def test_a_problem_is_shown_in_one_line():
    shown = "<BilevelProblem 'custom': 30 + 15 rows, z of 16 and x of 3 numbers, float64>"
    assert repr(network_problem()) == shown

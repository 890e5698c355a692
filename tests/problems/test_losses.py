import jax
import jax.numpy as jnp
import numpy as np

from bilevel.problems.penalized_linear import logistic, sigmoid

MARGINS = np.linspace(-40, 40, 161, dtype=np.float32)


def test_the_logistic_loss_equals_logaddexp_and_its_derivatives_the_closed_forms():
    margins = jnp.asarray(MARGINS)
    wide = MARGINS.astype(np.float64)
    s = 1 / (1 + np.exp(wide))
    np.testing.assert_allclose(logistic(margins), np.logaddexp(0, -wide), rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(jax.grad(logistic))(margins), -s, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(jax.grad(jax.grad(logistic)))(margins), s * (1 - s), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(sigmoid(-margins), s, rtol=1e-6)


def test_no_overflow_at_infinity():
    ends = jnp.array([-jnp.inf, -1e30, 1e30], jnp.float32)
    np.testing.assert_array_equal(logistic(-ends), np.array([0, 0, 1e30], np.float32))
    np.testing.assert_array_equal(sigmoid(ends), [0, 0, 1])

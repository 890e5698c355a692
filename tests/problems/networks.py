"""A small network at the inner level."""

import jax.numpy as jnp
import numpy as np

import bilevel


def relu(scores):
    return jnp.maximum(scores, 0)


def network_problem(activation=jnp.tanh, second_derivatives=True, width=4, n=30, dtype="float64"):
    rng = np.random.default_rng(3)
    z = {"first": rng.normal(size=(3, width)) / 2, "last": rng.normal(size=width)}
    x = {"log_decay": np.array([-4.0, -3.0]), "shift": np.array(0.3)}

    def score(z, row):
        return activation(row @ z["first"]) @ z["last"]

    def inner_loss(z, x, sample):
        row, target = sample
        decays = jnp.exp(x["log_decay"]) * jnp.stack([jnp.sum(z["first"] ** 2), jnp.sum(z["last"] ** 2)])
        return (score(z, row) - target - x["shift"]) ** 2 / 2 + jnp.sum(decays) / 2

    def outer_loss(z, x, sample):
        row, target = sample
        return (score(z, row) - target) ** 2 / 2

    def rows(n):
        row = rng.normal(size=(n, 3))
        return row, np.sin(row @ np.ones(3))

    given = inner_loss, outer_loss, rows(n), rows(n // 2), z, x
    differentiation = bilevel.Differentiation(second_derivatives=second_derivatives)
    return bilevel.BilevelProblem.from_losses(*given, differentiation=differentiation, dtype=dtype)

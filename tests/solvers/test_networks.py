"""Networks: a tree of weights and a tree of hyperparameters give the same steps as their flat vectors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import bilevel
from bilevel._core import trees
from bilevel._core.compilation import arithmetic
from tests import cases

LEARN = ["NeumannAID", "FdeHBO", "LancBiO", "AIDCG", "DARTS", "SAMA", "VPBGD", "MEHA"]
NOT_COMPILED = ["DTFBO", "SHINE"]


def network(weights, row):
    hidden = jnp.tanh(row @ weights["first"]["matrix"] + weights["first"]["bias"])
    return hidden @ weights["last"]


def inner_loss(weights, log_decays, sample):
    """One penalty per weight: the number of hyperparameters equals the number of weights."""
    decays = jax.tree.map(lambda w, x: jnp.sum(jnp.exp(x) * w**2), weights, log_decays)
    return (network(weights, sample["row"]) - sample["target"]) ** 2 / 2 + sum(jax.tree.leaves(decays)) / 2


def outer_loss(weights, log_decays, sample):
    return (network(weights, sample["row"]) - sample["target"]) ** 2 / 2


def pieces():
    """Return the start of both variables, as trees, and the rows of both levels."""
    rng = np.random.default_rng(0)
    first = {"matrix": rng.normal(size=(3, 4)) / 2, "bias": np.zeros(4)}
    z = {"first": first, "last": rng.normal(size=4) / 2}
    x = jax.tree.map(lambda leaf: np.full_like(leaf, -3.0), z)

    def rows(n):
        row = rng.normal(size=(n, 3))
        return {"row": row, "target": np.sin(row @ np.ones(3))}

    return z, x, rows(40), rows(30)


def flat_losses():
    """Return the losses of both levels as functions of flat vectors."""
    with arithmetic("float64"):
        tree_of = ravel_pytree(pieces()[0])[1]
    return [lambda z, x, sample, loss=loss: loss(tree_of(z), tree_of(x), sample) for loss in (inner_loss, outer_loss)]


def problems():
    """Return the problem with trees as variables, and the same problem with flat vectors."""
    z, x, *data = pieces()
    build = bilevel.BilevelProblem.from_losses
    flat = build(*flat_losses(), *data, trees.flat(z), trees.flat(x), dtype="float64")
    return build(inner_loss, outer_loss, *data, z, x, dtype="float64"), flat


@pytest.mark.slow
@pytest.mark.parametrize("name", NOT_COMPILED)  # for compiled solvers see test_options.py
def test_trees_give_the_same_steps_as_flat_vectors(name):
    solver = cases.short(bilevel.SOLVERS[name], 0.1, 0.5, cases.BATCH)
    tree, flat = (bilevel.run(problem, solver, max_steps=20, eval_every=20) for problem in problems())
    for part in ("inner_var", "outer_var", "v"):
        found = trees.flat(getattr(tree.point, part))
        np.testing.assert_allclose(found, getattr(flat.point, part), rtol=1e-9, atol=1e-12)
    assert tree.calls == flat.calls


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARN)
def test_learned_penalties_lower_the_outer_loss_of_a_network(name):
    solver = cases.short(bilevel.SOLVERS[name], 0.1, 0.5, cases.BATCH)
    result = bilevel.run(problems()[0], solver, max_steps=400, eval_every=400)
    assert result.status == "out_of_budget"
    assert result.history["outer_value"][-1] < result.history["outer_value"][0] / 2

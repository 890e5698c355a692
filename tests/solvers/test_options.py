"""Options of a problem do not change the steps of any compiled solver, even if they are combined.

A network with flat vectors as variables and losses of one sample is compared with the same network with trees as
variables, losses of a batch, and batches that are processed in parts. The tests of each option alone are elsewhere.
"""

import jax
import numpy as np
import pytest

import bilevel
from bilevel._core import trees
from tests import cases
from tests.solvers.test_networks import flat_losses, inner_loss, outer_loss, pieces

OUTER = 4


def batch_loss(loss):
    return bilevel.BatchLoss(jax.vmap(loss, in_axes=(None, None, 0)))


def with_options():
    z, x, *data = pieces()
    losses = batch_loss(inner_loss), batch_loss(outer_loss)
    in_parts = bilevel.Differentiation(accumulate=2)
    return bilevel.BilevelProblem.from_losses(*losses, *data, z, x, differentiation=in_parts, dtype="float64")


def without_options():
    z, x, *data = pieces()
    return bilevel.BilevelProblem.from_losses(*flat_losses(), *data, trees.flat(z), trees.flat(x), dtype="float64")


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in cases.SOLVERS if name != "SRBA"]


@pytest.mark.parametrize("name", ["SRBA", *SLOW])
def test_trees_batch_losses_accumulation_and_two_batch_sizes_change_no_step(name):
    tolerance = 1e-4 if name == "PZOBO" else 1e-9  # differences of inner loops amplify rounding errors
    solver = cases.short(type(cases.SOLVERS[name]), 0.05, 20.0, cases.BATCH, outer_batch_size=OUTER)
    plain, given = (
        bilevel.run(made(), solver, max_steps=20, eval_every=20) for made in (without_options, with_options)
    )
    assert plain.status == given.status == "out_of_budget"
    for part in ("inner_var", "outer_var", "v"):
        expected = getattr(plain.point, part)
        np.testing.assert_allclose(trees.flat(getattr(given.point, part)), expected, rtol=tolerance, atol=1e-12)
    assert plain.calls == given.calls
    assert np.abs(trees.flat(given.point.inner_var) - trees.flat(pieces()[0])).max() > 1e-3

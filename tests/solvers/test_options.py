"""Options of a problem together, with every compiled solver: none of them changes a step.

On one side a network of flat vectors, with losses of one sample. On the other its variables are trees, its losses are
those of a batch, and batches are read in parts. A solver for which any of these options fails, fails here; what each
does by itself is tested beside its code.
"""

import jax
import numpy as np
import pytest

import bilevel
from bilevel import _tree as trees
from tests import cases
from tests.solvers.test_networks import flat_losses, inner_loss, outer_loss, pieces

OUTER = 4


def batch_loss(loss):
    return jax.vmap(loss, in_axes=(None, None, 0))


def with_options():
    z, x, *data = pieces()
    losses = {"inner_batch_loss": batch_loss(inner_loss), "outer_batch_loss": batch_loss(outer_loss)}
    build = bilevel.BilevelProblem.from_losses
    return build(None, None, *data, z, x, **losses, accumulate=2, dtype="float64")


def without():
    z, x, *data = pieces()
    return bilevel.BilevelProblem.from_losses(*flat_losses(), *data, trees.flat(z), trees.flat(x), dtype="float64")


@pytest.mark.parametrize("name", cases.marked(cases.SOLVERS, quick=("SRBA",)))
def test_trees_losses_of_batches_parts_and_two_sizes_change_no_step(name):
    tolerance = 1e-4 if name == "PZOBO" else 1e-9  # its differences of inner loops make roundings large
    solver = cases.short(type(cases.SOLVERS[name]), 0.05, 20.0, cases.BATCH, outer_batch_size=OUTER)
    plain, given = (bilevel.run(made(), solver, max_steps=20, eval_every=20) for made in (without, with_options))
    assert plain.status == given.status == "out_of_budget"
    for part in ("inner_var", "outer_var", "v"):
        expected = getattr(plain.point, part)
        np.testing.assert_allclose(trees.flat(getattr(given.point, part)), expected, rtol=tolerance, atol=1e-12)
    assert plain.calls == given.calls
    assert np.abs(trees.flat(given.point.inner_var) - trees.flat(pieces()[0])).max() > 1e-3

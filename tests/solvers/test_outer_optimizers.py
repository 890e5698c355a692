"""Steps of x by an optax transformation: every compiled solver takes one, or gives the reason why it does not."""

from dataclasses import replace

import numpy as np
import optax
import pytest

import bilevel
from tests import cases
from tests.solvers.auto.problems import adam_of_the_library

# The plain steps of x decrease like t to minus these powers.
DECAYS = {"SOBA": 1 / 2, "MASOBA": 1 / 2, "FSLA": 1 / 2, "BSA": 1 / 2, "ALSET": 1 / 2, "FdeHBO": 1 / 3, "MRBO": 1 / 3}
DECAYS |= {"SUSTAIN": 1 / 3, "TTSA": 3 / 5, "F2SA": 5 / 7}
# AutoSRBA has no plain steps of x to compare with.
ADMITTED = [name for name, one in cases.SOLVERS.items() if one.needs_plain_outer_step is None and name != "AutoSRBA"]
REFUSED = [name for name, one in cases.SOLVERS.items() if one.needs_plain_outer_step is not None]
STEP, RATIO = 0.05, 5.0


def plain(name, **changes):
    changes |= {"normalized": False} if name == "F2SAp" else {}
    return cases.short(type(cases.SOLVERS[name]), STEP, RATIO, cases.BATCH, **changes)


@pytest.mark.parametrize("name", cases.marked(ADMITTED))
def test_gradient_descent_on_x_by_optax_equals_the_plain_step(name, tmp_path):
    problem, solver = cases.quadratic(), plain(name)
    rates = optax.sgd(lambda count: STEP / RATIO * (count + 1.0) ** -DECAYS.get(name, 0.0))
    given = replace(solver, outer_optimizer=rates)
    expected = bilevel.run(problem, solver, max_steps=30, eval_every=30)
    found = bilevel.run(problem, given, max_steps=30, eval_every=30)
    cases.assert_trees_close(found.point, expected.point, rtol=1e-9, atol=1e-11)
    assert found.calls == expected.calls
    bilevel.run(problem, given, max_steps=11, eval_every=11).save(tmp_path / "run.npz")
    resumed = bilevel.resume(tmp_path / "run.npz", problem, solver=given, max_steps=30, eval_every=30)
    cases.assert_trees_equal(resumed.state, found.state)


@pytest.mark.parametrize("name", cases.marked(ADMITTED))
def test_adam_moves_x_by_the_direction_of_the_plain_step(name):
    problem, solver, x = cases.quadratic(), plain(name), cases.quadratic().start.outer_var
    first, second = (
        [np.asarray(state.point.outer_var) for state in cases.trajectory(problem, one, 2).states]
        for one in (solver, replace(solver, outer_optimizer="adam"))
    )
    # The average of MASOBA is 0 in the first step, so x moves from the second on.
    steps = range(2) if name == "MASOBA" else range(1)
    adam, start = adam_of_the_library(), x
    for t in steps:
        direction = (start - first[t]) * RATIO / STEP * (t + 1) ** DECAYS.get(name, 0.0)
        np.testing.assert_allclose(second[t], start + adam.update(direction), rtol=1e-9)
        start = first[t]
    assert np.abs(second[steps[-1]] - x).max() > 1e-3


@pytest.mark.parametrize("name", REFUSED)
def test_solvers_whose_step_of_x_is_their_method_refuse_a_transformation(name):
    with pytest.raises(ValueError, match=rf"`{name}\(outer_optimizer=…\)`: .*; leave it out, or use a solver such as"):
        plain(name, outer_optimizer="adam")


def test_the_refusals_are_as_expected():
    assert {"BOME", "STFBO", "AdaBiO", "AccBiO", "AccBO"} <= set(REFUSED)
    with pytest.raises(ValueError, match=r"`F2SAp\(outer_optimizer=…\)`: .* set normalized=False, or leave it out"):
        bilevel.F2SAp(outer_optimizer="adam")

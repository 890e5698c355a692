"""Moves: optax transformations and bounds of the outer variable, compared with plain steps and with NumPy."""

from dataclasses import replace

import numpy as np
import optax
import pytest

import bilevel
from bilevel.engine.driver import sweep
from tests import cases
from tests.solvers.auto.problems import BATCH, BOUNDED, PLAIN, adam_of_the_library, selection

SLOW = [pytest.param(cls, marks=pytest.mark.slow) for cls in (bilevel.SABA, bilevel.SPABA)]


@pytest.mark.parametrize("cls", [bilevel.SRBA, *SLOW])  # solvers with constant steps
def test_the_optax_form_of_a_plain_step_gives_the_same_iterates(cls):
    problem = cases.quadratic()
    plain = cases.short(cls, 0.2, 2.0, BATCH)
    by_optax = replace(plain, outer_optimizer=optax.sgd(0.1))
    ends = [cases.trajectory(problem, one, 40).states[-1].point for one in (plain, by_optax)]
    cases.assert_trees_close(*ends, rtol=1e-11)


@pytest.mark.parametrize("cls", [bilevel.SRBA, bilevel.SOBA, *SLOW])
def test_adam_moves_x_along_the_same_direction(cls):
    problem, method = selection(), cls(0.1, 1.0, BATCH, outer_optimizer="adam")
    moved = cases.trajectory(problem, method, 1).states[0].point
    plain = cases.trajectory(problem, replace(method, outer_optimizer=None), 1).states[0].point
    np.testing.assert_array_equal(moved.inner_var, plain.inner_var)
    gradient = (problem.start.outer_var - np.asarray(plain.outer_var)) / 0.1
    update = adam_of_the_library().update(gradient)
    np.testing.assert_allclose(moved.outer_var, problem.start.outer_var + update, rtol=1e-9)


# Bounds


@pytest.mark.parametrize("method", [BOUNDED, PLAIN, bilevel.SABA(0.1, 0.01, BATCH), bilevel.SOBA(0.1, 0.01, BATCH)])
def test_the_outer_variable_stays_inside_its_bounds(method):
    if type(method) is bilevel.SRBA:
        method = replace(method, outer_ratio=0.01)
    point = bilevel.run(selection(), replace(method, outer_bounds=(-0.3, -0.1)), max_steps=300).point
    assert np.all((point.outer_var >= -0.3) & (point.outer_var <= -0.1))
    assert np.any((point.outer_var == -0.3) | (point.outer_var == -0.1)), "the test requires active bounds"


def test_bounds_of_the_problem_and_of_the_solver_both_hold():
    problem = selection(outer_bounds=(-0.25, None))
    found = bilevel.run(problem, replace(BOUNDED, outer_bounds=(-5, -0.15)), max_steps=300).point.outer_var
    assert found.min() == -0.25 and found.max() == -0.15


def test_bounds_may_be_trees_or_strings():
    lower = np.array([-0.3, -0.25, -0.2, -0.5])
    tree = bilevel.run(selection(), replace(BOUNDED, outer_bounds=(lower, 0.0)), max_steps=200).point.outer_var
    assert np.all(tree >= lower) and np.any(tree == lower)
    assert bilevel.SRBA(outer_bounds="(-3, 2)") == bilevel.SRBA(outer_bounds=[-3, 2.0])
    open_above = bilevel.SRBA(outer_bounds=(-3, None))
    assert open_above.parameters()["outer_bounds"] == "(-3.0, None)"
    assert bilevel.SRBA(**open_above.parameters()) == open_above


# Invalid arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"outer_optimizer": "sgd"}, r"outer_optimizer='sgd'.*must be None, 'adam' or an optax GradientTransformation"),
        ({"outer_optimizer": 3}, "must be None, 'adam' or an optax GradientTransformation"),
        ({"outer_bounds": (1.0, -1.0)}, r"outer_bounds=\(1.0, -1.0\)\)`: the lower bound exceeds the upper"),
        ({"outer_bounds": 3.0}, r"outer_bounds=3.0.*must be None or a pair \(lower, upper\)"),
        ({"outer_bounds": (1.0, 2.0, 3.0)}, r"a pair \(lower, upper\)"),
        ({"outer_bounds": "wide"}, r"outer_bounds='wide'.*a pair"),
        ({"outer_bounds": (np.nan, 1.0)}, "none NaN"),
        ({"outer_bounds": (1, "x")}, "real numbers"),
        ({"step_size": "fast"}, r"`SRBA\(step_size='fast'\)`: must be a finite number above 0\."),
    ],
)
def test_invalid_parameters_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        bilevel.SRBA(**arguments)


def test_an_unknown_preconditioner_is_named():
    with pytest.raises(ValueError, match=r"`AutoSRBA\(preconditioner='full'\)`: must be one of None, 'diagonal'"):
        bilevel.AutoSRBA(preconditioner="full")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"outer_bounds": (0.0, 1.0)}, r"`SRBA\(outer_bounds=\(0.0, 1.0\)\)`: the outer variable starts outside"),
        ({"outer_bounds": (np.full(3, -1.0), 1.0)}, "outer_bounds=.*does not have the shape of the outer variable"),
        ({"outer_bounds": ({"a": -1.0}, 1.0)}, "outer_bounds=.*does not have the shape of the outer variable"),
        ({"outer_bounds": (np.full(4, 1.0), np.full(4, -1.0))}, "a lower bound exceeds its upper bound"),
        ({"outer_optimizer": optax.polyak_sgd()}, "outer_optimizer=….*requires more than.*value"),
    ],
)
def test_parameters_that_do_not_fit_the_start_are_refused(arguments, message):
    method = replace(PLAIN, **arguments)
    with pytest.raises(ValueError, match=message):
        bilevel.run(selection(), method, max_steps=3)
    with pytest.raises(ValueError, match=message):
        sweep(selection(), [method], [0], 5000)


# Text representations


def test_a_transformation_is_shown_as_the_function_that_made_it():
    method = replace(PLAIN, outer_optimizer=optax.adam(1e-2))
    assert method.parameters()["outer_optimizer"] == "optax chain"
    assert "outer_optimizer=optax chain" in bilevel.run(selection(), method, max_steps=2).summary()
    assert hash(method.outer_optimizer) == hash(method.outer_optimizer)
    assert method == replace(method)


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        ({"outer_optimizer": optax.adam(1e-2)}, "with a transformation of optax; pass it as `solver=`"),
        ({"outer_bounds": (np.full(4, -3.0), 3.0)}, "with `outer_bounds` that are arrays; pass it as `solver=`"),
    ],
)
def test_resuming_a_run_whose_solver_is_not_in_the_file_requires_it(parameter, message, tmp_path):
    method = replace(PLAIN, **parameter)
    bilevel.run(selection(), method, max_steps=3).save(tmp_path / "run.npz")
    with pytest.raises(ValueError, match=message):
        bilevel.resume(tmp_path / "run.npz", selection(), max_steps=5)
    assert bilevel.resume(tmp_path / "run.npz", selection(), solver=method, max_steps=5).history["step"][-1] == 5

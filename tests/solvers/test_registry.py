"""Solvers register themselves, and say what their parameters mean."""

import dataclasses
import inspect
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import bilevel
from bilevel.solvers import Solver, SolverBase, solver
from bilevel.solvers.fields import parse_descriptions
from tests import cases


def test_each_solver_of_the_folder_is_an_attribute_of_the_package():
    files = [path.read_text() for path in Path(inspect.getfile(bilevel.solvers)).parent.rglob("*.py")]
    assert sum(text.count("\n@solver\n") for text in files) == len(bilevel.SOLVERS) >= 20
    for name, cls in bilevel.SOLVERS.items():
        assert getattr(bilevel, name) is cls is getattr(bilevel.solvers, name)
        assert name in bilevel.__all__ and name in bilevel.solvers.__all__


def test_tables_begin_with_the_untuned_solver_and_srba():
    assert list(bilevel.SOLVERS)[:2] == ["AutoSRBA", "SRBA"]


@pytest.mark.parametrize("name", bilevel.SOLVERS)
def test_the_docstring_explains_every_parameter_in_the_order_of_the_signature(name):
    cls = bilevel.SOLVERS[name]
    meanings = parse_descriptions(cls.__doc__)
    assert list(meanings) == list(inspect.signature(cls).parameters)
    assert {field.name for field in dataclasses.fields(cls)} == set(meanings)


def test_a_parameter_means_what_its_base_says_unless_the_class_says_more():
    shared = parse_descriptions(SolverBase.__doc__)
    assert parse_descriptions(bilevel.StocBiO.__doc__)["outer_ratio"] == shared["outer_ratio"]
    assert parse_descriptions(bilevel.TTSA.__doc__)["outer_ratio"] != shared["outer_ratio"]


def test_a_solver_of_ones_own_runs_and_is_not_registered():
    @solver
    class Mine(bilevel.SOBA):
        """SOBA under another name.

        Parameters
        ----------
        factor : of nothing
        """

        factor: float = 1.0

    assert "Mine" not in bilevel.SOLVERS
    assert parse_descriptions(Mine.__doc__) == parse_descriptions(bilevel.SOBA.__doc__) | {"factor": "of nothing"}
    mine, soba = (
        bilevel.run(cases.quadratic(), cls(0.05, 20.0, cases.BATCH), max_steps=3) for cls in (Mine, bilevel.SOBA)
    )
    cases.assert_trees_equal(mine.point, soba.point)


def test_the_name_of_a_solver_of_the_package_is_refused():
    with pytest.raises(ValueError, match=r"`SOBA` is the name of bilevel\.solvers\.soba\.SOBA; rename your solver"):
        solver(type("SOBA", (Solver,), {"__module__": __name__}))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: bilevel.SRBA(period=2**31),
            "`SRBA(period=2147483648)`: must be below 2**31",
        ),
        (lambda: bilevel.StocBiO(n_inner_steps=2**63), "must be below 2**31."),
        (lambda: bilevel.SRBA(step_size=np.array([0.1, 0.2])), "must be a finite number above 0."),
        (lambda: bilevel.ITD(step_size=10**400), "must be a finite number above 0."),
        (lambda: bilevel.F2SA(schedule=np.array(["printed"])), "must be one of 'corrected', 'printed'."),
    ],
)
def test_parameters_that_no_step_could_use_are_refused(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_real_numbers_of_any_kind_become_floats():
    solver = bilevel.PZOBO(step_size=Fraction(1, 4), smoothing=np.float32(0.5), outer_ratio=2)
    assert [type(value) for value in (solver.step_size, solver.smoothing, solver.outer_ratio)] == [float] * 3


def test_integers_of_numpy_become_integers_of_python():
    assert type(bilevel.SRBA(batch_size=np.uint64(7)).batch_size) is int

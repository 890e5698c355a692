"""Solvers register themselves and describe their parameters."""

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


def test_every_solver_file_is_exported_by_the_package():
    files = [path.read_text() for path in Path(inspect.getfile(bilevel.solvers)).parent.rglob("*.py")]
    assert sum(text.count("\n@solver\n") for text in files) == len(bilevel.SOLVERS) >= 20
    for name, cls in bilevel.SOLVERS.items():
        assert getattr(bilevel, name) is cls is getattr(bilevel.solvers, name)
        assert name in bilevel.__all__


def test_the_list_of_solvers_starts_with_the_default_solver_and_srba():
    assert list(bilevel.SOLVERS)[:2] == ["AutoSRBA", "SRBA"]


@pytest.mark.parametrize("name", bilevel.SOLVERS)
def test_the_docstring_explains_every_parameter_in_the_order_of_the_signature(name):
    cls = bilevel.SOLVERS[name]
    meanings = parse_descriptions(cls.__doc__)
    assert list(meanings) == list(inspect.signature(cls).parameters)
    assert {field.name for field in dataclasses.fields(cls)} == set(meanings)


def test_descriptions_are_inherited_unless_the_class_has_its_own():
    shared = parse_descriptions(SolverBase.__doc__)
    assert parse_descriptions(bilevel.StocBiO.__doc__)["outer_ratio"] == shared["outer_ratio"]
    assert parse_descriptions(bilevel.TTSA.__doc__)["outer_ratio"] != shared["outer_ratio"]


def test_a_user_defined_solver_runs_and_is_not_registered():
    @solver
    class Mine(bilevel.SOBA):
        """SOBA under another name.

        Parameters
        ----------
        factor : has no effect
        """

        factor: float = 1.0

    assert "Mine" not in bilevel.SOLVERS
    assert parse_descriptions(Mine.__doc__) == parse_descriptions(bilevel.SOBA.__doc__) | {"factor": "has no effect"}
    mine, soba = (
        bilevel.run(cases.quadratic(), cls(0.05, 20.0, cases.BATCH), max_steps=3) for cls in (Mine, bilevel.SOBA)
    )
    cases.assert_trees_equal(mine.point, soba.point)


def test_a_name_that_is_already_used_by_the_package_is_refused():
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
        (lambda: bilevel.F2SA(schedule=np.array(["printed"])), "must be one of 'corrected', 'printed', 'constant'."),
    ],
)
def test_values_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_real_numbers_of_any_kind_become_floats():
    solver = bilevel.PZOBO(step_size=Fraction(1, 4), smoothing=np.float32(0.5), outer_ratio=2)
    assert [type(value) for value in (solver.step_size, solver.smoothing, solver.outer_ratio)] == [float] * 3


def test_integers_of_numpy_become_integers_of_python():
    assert type(bilevel.SRBA(batch_size=np.uint64(7)).batch_size) is int

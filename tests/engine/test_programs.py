"""Compiled programs are let go when there are many, so that a process may run on any number of problems."""

import jax
import numpy as np
import pytest

import bilevel
from bilevel import _programs
from bilevel.engine import steps
from tests import cases


@pytest.fixture
def program(monkeypatch):
    monkeypatch.setattr(_programs, "_kinds", set())
    monkeypatch.setattr(_programs, "MOST_KINDS", 3)
    return jax.jit(lambda x: x + 1)


def count(program, sizes):
    counts = []
    for size in sizes:
        _programs.keep_few({"rows": np.zeros(size, np.float32)})
        program(np.zeros(size, np.float32))
        counts.append(program._cache_size())
    return counts


def test_programs_of_many_kinds_are_let_go_and_those_of_few_are_kept(program):
    assert count(program, range(1, 8)) == [1, 2, 3, 1, 2, 3, 1]
    assert count(program, [7, 7, 6, 7, 5, 7]) == [1, 1, 2, 2, 3, 3]


def test_structure_shape_and_type_make_a_kind(program):
    for tree in (np.zeros(2, np.int32), np.zeros(2, np.float32), [np.zeros(2, np.float32)], [np.ones(2, np.float32)]):
        _programs.keep_few(tree)
    assert len(_programs._kinds) == 3


def test_a_run_counts_once_whatever_its_step_size(monkeypatch):
    monkeypatch.setattr(_programs, "_kinds", set())
    for step_size in (0.1, 0.2):
        steps.prepare(cases.quadratic("float32"), bilevel.SRBA(step_size, 1.0, cases.BATCH))
    assert len(_programs._kinds) == 1
    steps.prepare(cases.quadratic("float64"), bilevel.SRBA(0.1, 1.0, cases.BATCH))
    steps.prepare(cases.quadratic("float32"), bilevel.SOBA(0.1, 1.0, cases.BATCH))
    assert len(_programs._kinds) == 3


def test_a_run_whose_programs_are_let_go_goes_on_bit_for_bit():
    problem, solver = cases.quadratic("float32"), cases.SOLVERS["SRBA"]
    run = bilevel.Run(problem, solver)
    run.advance(20)
    jax.clear_caches()
    run.advance(20)
    cases.assert_trees_equal(run.point, bilevel.run(problem, solver, max_steps=40).point)

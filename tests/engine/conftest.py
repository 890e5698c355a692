"""Fixtures: the path of a log, and a saved run."""

import pytest

import bilevel
from tests import cases

SRBA = cases.SOLVERS["SRBA"]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "logs" / "run.csv"


@pytest.fixture
def saved(tmp_path, path):
    """Return the path of a saved run of 50 steps, which was logged, and its problem."""
    problem = cases.quadratic("float32")
    run = bilevel.run(problem, SRBA, max_steps=50, eval_every=10, log=bilevel.CSVLog(path))
    run.save(tmp_path / "run.npz")
    return tmp_path / "run.npz", problem

"""Stochastic bilevel optimisation on JAX."""

from bilevel import problems
from bilevel.problems import BilevelProblem
from bilevel.result import RunResult, Status
from bilevel.run import resume, run
from bilevel.solvers import SABA, SOBA, SOLVERS, SRBA
from bilevel.types import Point

__all__ = [
    "SABA",
    "SOBA",
    "SOLVERS",
    "SRBA",
    "BilevelProblem",
    "Point",
    "RunResult",
    "Status",
    "problems",
    "resume",
    "run",
]
__version__ = "0.1.0"

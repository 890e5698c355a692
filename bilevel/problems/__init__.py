"""Problems: oracles, a start, and an exact reference."""

from bilevel.problems.base import BilevelProblem
from bilevel.problems.logistic_selection import logistic_selection
from bilevel.problems.quadratic import quadratic
from bilevel.problems.reference import Reference

__all__ = ["BilevelProblem", "Reference", "logistic_selection", "quadratic"]

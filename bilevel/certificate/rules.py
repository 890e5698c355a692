"""Which certificate a problem has."""

from collections.abc import Callable
from math import inf
from typing import Any, Protocol

import jax
import numpy as np

from bilevel import trees
from bilevel.certificate.base import NOTHING, Bounds, Certificate
from bilevel.certificate.cleaning import CleaningBounds
from bilevel.certificate.estimates import EstimatedBounds
from bilevel.certificate.linear import LinearBounds
from bilevel.certificate.quadratic import QuadraticBounds, WorstCaseBounds
from bilevel.certificate.softmax_selection import SoftmaxSelectionBounds
from bilevel.oracles import (
    CleaningOracles,
    LogisticOracles,
    Oracles,
    QuadraticOracles,
    RidgeOracles,
    ShardedOracles,
    SoftmaxSelectionOracles,
    WorstCaseOracles,
)
from bilevel.precision import arithmetic
from bilevel.problems import BilevelProblem
from bilevel.problems.stationarity import stationarity
from bilevel.types import Point


class Rule(Protocol):
    """From a point and D there, in NumPy and float64, to the numbers of the proof."""

    why: str

    def __call__(self, point: Point, direction: Point) -> Bounds:
        """Return them."""


_PROVED: dict[Any, Callable[[BilevelProblem], Rule]] = {
    QuadraticOracles: QuadraticBounds,
    WorstCaseOracles: WorstCaseBounds,
    LogisticOracles: LinearBounds,
    RidgeOracles: LinearBounds,
    SoftmaxSelectionOracles: SoftmaxSelectionBounds,
    CleaningOracles: CleaningBounds,
}


_SHARDED = "The rows lie on several devices; ask for a certificate with the problem before `sharded`."
_UNKNOWN = "The inner loss is not known to be strongly convex; where it is, `strongly_convex=True` gives estimates."
_TOO_FAR = "From the residuals and the curvature at this point no finite bound follows in float64."


class Certifier:
    """Certificates of one problem.

    Attributes
    ----------
    certified : whether its certificates are proved
    why : where the constants come from, or why there are none
    """

    def __init__(self, problem: BilevelProblem) -> None:
        self._problem = problem
        with arithmetic(np.float64):
            self._oracles = problem.oracles.widened()
            self._rule, self.certified, self.why = _rule(problem)

    def __call__(self, point: Point) -> Certificate:
        """Return the certificate of a point; it takes a few passes over all rows, and no solve."""
        if self._rule is None:
            return Certificate.of(NOTHING, inf, False, self.why)
        with arithmetic(np.float64), np.errstate(all="ignore"):
            return self._certificate(self._rule, trees.to_numpy(point, np.float64))

    def _certificate(self, rule: Rule, point: Point) -> Certificate:
        direction = trees.to_numpy(_direction(self._oracles, point))
        norm = float(np.sqrt(stationarity(self._problem.oracles, point.outer_var, direction.outer_var)))
        try:
            bounds = rule(point, direction)
        except np.linalg.LinAlgError:
            bounds = NOTHING  # numbers that are not finite, or too far apart for float64
        if not np.isfinite(norm + bounds.error):
            return Certificate.of(NOTHING, inf, False, _TOO_FAR)
        return Certificate.of(bounds, norm, self.certified, self.why)


def _rule(problem: BilevelProblem) -> tuple[Rule | None, bool, str]:
    for kind, rule in _PROVED.items():
        if isinstance(problem.oracles, kind):
            found = rule(problem)
            return found, True, found.why
    if isinstance(problem.oracles, ShardedOracles):
        return None, False, _SHARDED
    if problem.referee is None:
        return None, False, _UNKNOWN
    return EstimatedBounds(problem), False, EstimatedBounds.why


@jax.jit
def _direction(oracles: Oracles, point: Point) -> Point:
    return oracles.direction(point)

"""Which rule finds the constants of a problem."""

from collections.abc import Callable
from math import inf
from typing import Any

from bilevel.constants.base import Constants, Found, completed
from bilevel.constants.cleaning import cleaning
from bilevel.constants.estimates import estimates
from bilevel.constants.logistic import logistic
from bilevel.constants.quadratic import quadratic
from bilevel.constants.worst_case import worst_case
from bilevel.oracles import CleaningOracles, LogisticOracles, Oracles, QuadraticOracles, WorstCaseOracles
from bilevel.problems import BilevelProblem

_RULES: dict[Any, Callable[..., Found]] = {
    QuadraticOracles: quadratic,
    WorstCaseOracles: worst_case,
    LogisticOracles: logistic,
    CleaningOracles: cleaning,
}


def constants(
    problem: BilevelProblem, *, radius: float | None = None, box: tuple[Any, Any] | None = None, seed: int = 0
) -> Constants:
    """Return the constants of ass:regul_F and ass:regul_G of a problem.

    Quadratics and the worst case: exact everywhere; L0_F, which is infinite, is bounded on a region where ``radius``
    is given. Logistic selection and data cleaning: proved on a region. Other problems: sampled in a region.

    Parameters
    ----------
    problem : with a strongly convex inner level
    radius : of the ball of z. By default one that z*(x) cannot leave, as G(z*) <= G(0), and that holds the start; for
        sampled problems 1 + ||z_0||
    box : (lower, upper) for x, numbers or like x; by default the bounds of the problem where they are finite, else
        1 around the start. Data cleaning needs none
    seed : of the samples, where the constants are sampled

    Raises
    ------
    ValueError
        When the problem does not say that its inner level is strongly convex, or the region makes no sense.
    """
    if problem.referee is None:
        raise ValueError(
            "`problem` has no exact solution, so its inner level may not be strongly convex and mu_G not exist; "
            "build it with `strongly_convex=True` if it is."
        )
    if radius is not None and not 0 < radius < inf:
        raise ValueError(f"`radius={radius!r}`: must be above 0 and finite, or None.")
    found = _rule(problem.oracles)(problem, radius, box, seed)
    return completed(*found)


def _rule(oracles: Oracles) -> Callable[..., Found]:
    for kind, rule in _RULES.items():
        if isinstance(oracles, kind):
            return rule
    return estimates

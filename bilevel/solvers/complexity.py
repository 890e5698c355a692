"""What is proved of a solver: table 1 of the SRBA paper."""

from typing import NamedTuple


class Complexity(NamedTuple):
    """Calls that suffice for ||∇h||² <= ε, and under which assumptions.

    C^{p,k} means p times differentiable with Lipschitz derivatives up to order k; Õ hides a factor log(1/ε). G is
    strongly convex in every case.
    """

    calls: str
    setting: str
    outer: str
    inner: str

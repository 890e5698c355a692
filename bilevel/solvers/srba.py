"""SRBA: stochastic recursive bilevel algorithm.

Dagréou, Moreau, Vaiter, Ablin. A Lower Bound and a Near-Optimal Algorithm for Bilevel Empirical Risk
Minimization. AISTATS 2024.

With u = (z, v, x), steps ρ for z and v and γ for x, the projection P of v onto a ball, each q steps

    D ← D(u) on all rows;                                   u ← P(u - step · D)
    q - 1 times:  draw B, C;  D ← D + D_{B,C}(u) - D_{B,C}(u_previous);  u ← P(u - step · D)

The moves are in :mod:`bilevel.solvers.recursive`. Cost per period: 3n + 2m + 10 b (q - 1). Memory: 6p + 3d, no tables.
"""

from dataclasses import replace
from typing import Self

from bilevel.oracles import Oracles
from bilevel.solvers.base import solver
from bilevel.solvers.complexity import Complexity
from bilevel.solvers.fields import whole
from bilevel.solvers.recursive import RecursiveSolver
from bilevel.types import Array, Rows


@solver
class SRBA(RecursiveSolver):
    """Stochastic recursive bilevel algorithm.

    Parameters
    ----------
    step_size : ρ, the step of the inner variable and of v
    outer_ratio : the outer variable moves with γ = step_size / outer_ratio
    batch_size : rows per batch, on both levels
    period : q, steps from one all-rows pass to the next; None means max(1, (n + m) // (2 batch_size))
    v_radius : radius R of the ball v is kept in; None means no projection
    sampling : "blocks", "iid", "reshuffle" or "full"
    """

    period: int | None = whole(default=None, optional=True, hint="; use None for the default")

    complexity = Complexity("O((n+m)^1/2 ε^-1)", "finite sum", "C^{2,2}", "C^{3,3}")

    def resolve(self, oracles: Oracles) -> Self:
        """Fill in the default period."""
        if self.period is not None:
            return self
        return replace(self, period=max(1, (oracles.n_inner + oracles.n_outer) // (2 * self.batch_size)))

    def refreshes(self, index: Array, draw: Rows) -> Array:
        """Take an all-rows pass each ``period`` steps."""
        assert self.period is not None, "resolve() fills it in"
        return index % self.period == 0

"""SRBA: stochastic recursive bilevel algorithm.

Dagréou, Moreau, Vaiter, Ablin. A Lower Bound and a Near-Optimal Algorithm for Bilevel Empirical Risk
Minimization. AISTATS 2024.

With u = (z, v, x), steps ρ for z and v and γ for x, the projection P of v onto a ball, each q steps

    D ← D(u), a full-batch pass;                            u ← P(u - step · D)
    q - 1 times:  draw B, C;  D ← D + D_{B,C}(u) - D_{B,C}(u_previous);  u ← P(u - step · D)

The moves are in :mod:`bilevel.solvers.recursive`. Cost per period: 3n + 2m + 10 b (q - 1). Memory: 6p + 3d, no tables.
"""

from dataclasses import replace
from typing import Self

from bilevel.oracles import Oracles
from bilevel.solvers.base import Complexity, solver
from bilevel.solvers.parameters import positive
from bilevel.solvers.recursive import RecursiveSolver

AUTO = "auto"
_AUTO_STEP = 0.1  # of the diagonal
_AUTO_PERIOD = 300  # the diagonal must not grow old: penalties move by up to 1e-2 a step


@solver
class SRBA(RecursiveSolver):
    """Stochastic recursive bilevel algorithm.

    Parameters
    ----------
    step_size : ρ, the step of the inner variable and of v; "auto" stands for a setting that needs no tuning: step 0.1
        in the metric of the diagonal, Adam, wide bounds where the problem knows any, and a period of
        (n + m) // batch_size, at most 300
    period : q, steps from one full-batch pass to the next; None means max(1, (n + m) // (2 batch_size))
    """

    step_size: float | str = positive(default=0.1, word=AUTO)  # type: ignore[assignment]
    table_order = 1
    complexity = Complexity("O((n+m)^1/2 ε^-1)", "finite sum", "C^{2,2}", "C^{3,3}")

    def resolve(self, oracles: Oracles) -> Self:
        rows = oracles.n_inner + oracles.n_outer
        if self.step_size == AUTO:
            return replace(
                self,
                step_size=_AUTO_STEP,
                preconditioner=self.preconditioner or "diagonal",
                outer_optimizer="adam" if self.outer_optimizer is None else self.outer_optimizer,
                outer_bounds=oracles.wide_bounds if self.outer_bounds is None else self.outer_bounds,
                period=self.period or max(1, min(_AUTO_PERIOD, rows // self.batch_size)),
            )
        return replace(self, period=self.period or max(1, rows // (2 * self.batch_size)))

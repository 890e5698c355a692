"""SRBA: stochastic recursive bilevel algorithm.

Dagréou, Moreau, Vaiter, Ablin. A Lower Bound and a Near-Optimal Algorithm for Bilevel Empirical Risk Minimization.
AISTATS 2024. Confidence: high; the paper's text was compared.

With u = (z, v, x), steps ρ for z and v and γ for x, the projection P of v onto a ball, each q steps

    D ← D(u), a full-batch pass;                            u ← P(u - step · D)
    q - 1 times:  draw B, C;  D ← D + D_{B,C}(u) - D_{B,C}(u_previous);  u ← P(u - step · D)

The moves are in :mod:`bilevel.solvers.recursive`. Cost per period: 3n + 2m + 10 b (q - 1). Memory: 6p + 3d, no tables.
Adaptive: nothing, or with `step_size="auto"` the steps and their metric.
"""

from dataclasses import replace
from typing import Self

from bilevel._types import Point
from bilevel.oracles import Oracles
from bilevel.solvers.base import Complexity, solver
from bilevel.solvers.curvature import has_negative_curvature
from bilevel.solvers.parameters import positive
from bilevel.solvers.recursive import LOW_RANK, NORM, RecursiveSolver

AUTO = "auto"
_AUTO_STEP = 0.1  # of the diagonal
_AUTO_PROGRESS = 3e-5  # a gap that falls as t^-½ is then 3e-4 of h
_AUTO_STEPS = 300_000  # the most where no budget is given
_LEAST_PERIOD = 20  # a pass is dearer than a step, for the metric's products
_FEW_ROWS = 1024  # cost a step hardly more than a batch of 64
_AUTO_PERIOD = 300  # the diagonal must not grow old: penalties move by up to 1e-2 a step


@solver
class SRBA(RecursiveSolver):
    """Stochastic recursive bilevel algorithm.

    Parameters
    ----------
    step_size : ρ, the step of the inner variable and of v; "auto" stands for a setting that needs no tuning: step 0.1
        in the metric "low_rank", Adam, wide bounds where the problem knows any, a period of (n + m) // batch_size
        between 20 and 300, an end where h no longer falls, and all rows or fewer in a batch where there are few; where
        the inner level has negative curvature at the start, as in a network, the metric "norm", Adam for z, and no end
    period : q, steps from one full-batch pass to the next; None means max(1, (n + m) // (2 batch_size))
    """

    step_size: float | str = positive(default=0.1, word=AUTO)  # type: ignore[assignment]
    table_order = 1
    complexity = Complexity("O((n+m)^1/2 ε^-1)", "finite sum", "C^{2,2}", "C^{3,3}")

    def fit_rows(self, n_inner: int, n_outer: int) -> Self:
        inner, outer = self.batches()
        if self.step_size != AUTO or self.sampling == "full" or (inner <= n_inner and outer <= n_outer):
            return self
        if n_inner + n_outer <= _FEW_ROWS:
            return replace(self, sampling="full")
        if self.outer_batch_size is None:
            return replace(self, batch_size=min(n_inner, n_outer))
        return replace(self, batch_size=min(inner, n_inner), outer_batch_size=min(outer, n_outer))

    def fit_start(self, oracles: Oracles, start: Point) -> Self:
        chosen = self.step_size != AUTO or self.preconditioner is not None or oracles.diagonal_passes == 1
        if chosen or not has_negative_curvature(oracles, start):
            return self
        return replace(self, preconditioner=NORM, inner_optimizer=self.inner_optimizer or "adam")

    def own_max_steps(self) -> int | None:
        resolved = self.step_size == _AUTO_STEP and self.preconditioner is not None  # as a saved run has it
        return _AUTO_STEPS if self.step_size == AUTO or resolved else None

    def resolve(self, oracles: Oracles) -> Self:
        rows = oracles.n_inner + oracles.n_outer
        if self.step_size == AUTO:
            preconditioner = self.preconditioner or LOW_RANK
            return replace(
                self,
                step_size=_AUTO_STEP,
                preconditioner=preconditioner,
                outer_optimizer="adam" if self.outer_optimizer is None else self.outer_optimizer,
                outer_bounds=oracles.wide_bounds if self.outer_bounds is None else self.outer_bounds,
                period=self.period or max(_LEAST_PERIOD, min(_AUTO_PERIOD, 2 * rows // sum(self.batches()))),
                least_progress=self.least_progress or (_AUTO_PROGRESS if preconditioner == LOW_RANK else None),
            )
        return replace(self, period=self.period or max(1, rows // sum(self.batches())))

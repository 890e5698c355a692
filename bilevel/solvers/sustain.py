"""SUSTAIN: single-timescale double-momentum stochastic approximation.

Khanduri, Zeng, Hong, Wai, Wang, Yang. A Near-Optimal Algorithm for Stochastic Bilevel Optimization via Double-Momentum.
NeurIPS 2021, arXiv 2102.07367. Confidence: medium; the paper's text was not compared. The estimates are those of an
implementation by the authors of MRBO, and a later paper (BiO-BreD) attributes the random length P < Q to this one.

MRBO (:mod:`bilevel.solvers.mrbo`) with a Neumann series of random length P (:mod:`bilevel.solvers.neumann`): STORM
estimates of ∇z G and of the hypergradient, with the same P and batches at both points; z and x move together.

With other estimates and constant steps, this is the loop of Huang, Li, Gao, Huang. Enhanced Bilevel Optimization via
Bregman Distance. NeurIPS 2022, arXiv 2107.12301, whose text was read. With g_S = (∇z G, hypergradient) on a sample S,

    SBiO-BreD, "sgd":       d = g_S(u)
    ASBiO-BreD, "spider":   every q steps d = g(u) on all rows;   otherwise d ← d + g_S(u) - g_S(u_previous)
    z ← z - α d_z;   x ← argmin over y of d_x'y + R(y) + (r/α) D(y, x),  D a Bregman distance, both at the old point

The last step is that of an outer term R (`BilevelProblem.with_outer_term`), and x ← x - (α/r) d_x without one.
Cost 2(P + 4) b with P of mean (Q - 1)/2, half at the first step and for "sgd"; (P + 2) n + 2m every q steps of
"spider". Memory 3p + 3d. Adaptive: nothing.
"""

from dataclasses import replace
from typing import Self

from bilevel._core.types import Array, Calls
from bilevel.oracles import Oracles
from bilevel.problems import BilevelProblem
from bilevel.solvers.base import Complexity, solver
from bilevel.solvers.fields import given, one_of, whole
from bilevel.solvers.moves import draw_below, split
from bilevel.solvers.mrbo import StormDraw, StormSolver, StormState
from bilevel.solvers.neumann import NeumannDraw


@solver
class SUSTAIN(StormSolver):
    """Single-timescale double-momentum stochastic approximation.

    Parameters
    ----------
    step_size : first step of the inner variable; steps decrease like t^-1/3, or are constant for "sgd" and "spider"
    momentum : c; the share of the new sample in an estimate of "storm" is min(1, c (t - 1)^-2/3)
    n_neumann : Q; the Neumann series takes P products, uniform in 0, …, Q - 1
    estimator : "storm"; "sgd" for the last sample alone; or "spider" for a recursion with full-batch passes
    period : q, steps from one full-batch pass of "spider" to the next; None means max(1, (n + m) // (2 batch_size))
    """

    estimator: str = one_of(("storm", "sgd", "spider"), default="storm")
    period: int | None = whole(default=None, optional=True, hint="; use None for the default")
    complexity = Complexity("Õ(ε^-3/2)", "general expectation", "C^{1,1}", "C^{2,2}")

    def configure(self, problem: BilevelProblem) -> Self:
        super().configure(problem)
        rows = problem.n_inner + problem.n_outer
        return replace(self, period=self.period or max(1, rows // sum(self.batches())))

    def draw(self, oracles: Oracles, key: Array, index: Array) -> StormDraw:
        rows, length = oracles.draw_inner(key, index, self.n_neumann + 1), draw_below(key, index, self.n_neumann)
        inner, products, cross = split(rows, None, self.n_neumann - 1, None)
        return StormDraw(inner, NeumannDraw(products, cross, oracles.draw_outer(key, index), length))

    def refreshes(self, index: Array, draw: StormDraw) -> Array | None:
        if self.estimator == "sgd":
            return None
        return index == 0 if self.estimator == "storm" else index % given(self.period) == 0

    def refresh(self, oracles: Oracles, state: StormState, index: Array, draw: StormDraw) -> StormState:
        return super().refresh(oracles, state, index, self._refreshed(draw))

    def calls(self, oracles: Oracles, draw: StormDraw, refresh: bool) -> Calls:
        return super().calls(oracles, self._refreshed(draw) if refresh else draw, refresh)

    def _refreshed(self, draw: StormDraw) -> StormDraw:
        """Return what a refresh evaluates: all rows for "spider", with the drawn length of the series."""
        return (
            StormDraw(None, NeumannDraw(None, None, None, draw.neumann.length)) if self.estimator == "spider" else draw
        )

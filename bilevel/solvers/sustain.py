"""SUSTAIN: single-timescale double-momentum stochastic approximation.

Khanduri, Zeng, Hong, Wai, Wang, Yang. A Near-Optimal Algorithm for Stochastic Bilevel Optimization via
Double-Momentum. NeurIPS 2021, arXiv 2102.07367.

STORM estimates of ∇z G and of the hypergradient with a Neumann series of random length P, the same P and batches at
both points; z and x move together: see :mod:`bilevel.solvers.storm` and :mod:`bilevel.solvers.neumann`.

Cost 2(P + 4) b with P of mean (Q - 1)/2, half at the first step. Memory 3p + 3d.
"""

from bilevel._types import Array
from bilevel.oracles import Oracles
from bilevel.solvers import neumann
from bilevel.solvers.base import solver
from bilevel.solvers.directions import split
from bilevel.solvers.storm import StormDraw, StormSolver


@solver
class SUSTAIN(StormSolver):
    """Single-timescale double-momentum stochastic approximation.

    Parameters
    ----------
    step_size : first step of the inner variable; steps decrease like t^-1/3
    outer_ratio : the outer variable moves with the inner step divided by this
    batch_size : rows per batch, on both levels
    n_neumann : Q; the Neumann series takes P products, uniform in 0, …, Q - 1
    neumann_step : η, its step; below 2/L of the batches' Hessians
    momentum : c; the share of the new sample in an estimate is min(1, c (t - 1)^-2/3)
    sampling : "blocks", "iid", "reshuffle" or "full"
    """

    def draw(self, oracles: Oracles, key: Array, index: Array) -> StormDraw:
        """Draw the length, Q + 1 inner batches and one outer."""
        inner, rest = split(oracles.draw_inner(key, index, self.n_neumann + 1), None, self.n_neumann)
        series = neumann.drawn(rest, oracles.draw_outer(key, index), self.n_neumann - 1)
        return StormDraw(inner, series._replace(length=neumann.random_length(key, index, self.n_neumann)))

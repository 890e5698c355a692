"""MRBO: momentum-based recursive bilevel optimizer.

Yang, Ji, Liang. Provably Faster Algorithms for Bilevel Optimization. NeurIPS 2021, arXiv 2106.04692.

STORM estimates of ∇z G and of the hypergradient with a truncated Neumann series; z and x move together:
see :mod:`bilevel.solvers.storm` and :mod:`bilevel.solvers.neumann`.

Cost 2(Q + 4) b, half at the first step. Memory 3p + 3d.
"""

from bilevel._types import Array
from bilevel.oracles import Oracles
from bilevel.solvers import neumann
from bilevel.solvers.base import Complexity, solver
from bilevel.solvers.directions import split
from bilevel.solvers.storm import StormDraw, StormSolver


@solver
class MRBO(StormSolver):
    """Momentum-based recursive bilevel optimizer.

    Parameters
    ----------
    step_size : first step of the inner variable; steps decrease like t^-1/3
    outer_ratio : the outer variable moves with the inner step divided by this
    batch_size : rows per batch, on both levels
    n_neumann : Q, products of the Neumann series
    neumann_step : η, its step; below 2/L of the batches' Hessians
    momentum : c; the share of the new sample in an estimate is min(1, c (t - 1)^-2/3)
    sampling : "blocks", "iid", "reshuffle" or "full"
    """

    complexity = Complexity("Õ(ε^-3/2)", "general expectation", "C^{1,1}", "C^{2,2}")

    def draw(self, oracles: Oracles, key: Array, index: Array) -> StormDraw:
        """Draw Q + 2 inner batches and one outer."""
        inner, rest = split(oracles.draw_inner(key, index, self.n_neumann + 2), None, self.n_neumann + 1)
        return StormDraw(inner, neumann.drawn(rest, oracles.draw_outer(key, index), self.n_neumann))

"""SUSTAIN: single-timescale double-momentum stochastic approximation.

Khanduri, Zeng, Hong, Wai, Wang, Yang. A Near-Optimal Algorithm for Stochastic Bilevel Optimization via Double-Momentum.
NeurIPS 2021, arXiv 2102.07367. Confidence: medium; the method is well known, the paper's text was not compared.

MRBO (:mod:`bilevel.solvers.mrbo`) with a Neumann series of random length P (:mod:`bilevel.solvers.neumann`): STORM
estimates of ∇z G and of the hypergradient, with the same P and batches at both points; z and x move together.
Cost 2(P + 4) b with P of mean (Q - 1)/2, half at the first step. Memory 3p + 3d. Adaptive: nothing.
"""

from bilevel._core.types import Array
from bilevel.oracles import Oracles
from bilevel.solvers.base import Complexity, solver
from bilevel.solvers.moves import draw_below, split
from bilevel.solvers.mrbo import StormDraw, StormSolver
from bilevel.solvers.neumann import NeumannDraw


@solver
class SUSTAIN(StormSolver):
    """Single-timescale double-momentum stochastic approximation.

    Parameters
    ----------
    n_neumann : Q; the Neumann series takes P products, uniform in 0, …, Q - 1
    """

    complexity = Complexity("Õ(ε^-3/2)", "general expectation", "C^{1,1}", "C^{2,2}")

    def draw(self, oracles: Oracles, key: Array, index: Array) -> StormDraw:
        rows, length = oracles.draw_inner(key, index, self.n_neumann + 1), draw_below(key, index, self.n_neumann)
        inner, products, cross = split(rows, None, self.n_neumann - 1, None)
        return StormDraw(inner, NeumannDraw(products, cross, oracles.draw_outer(key, index), length))

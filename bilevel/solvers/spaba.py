"""SPABA: single-loop probabilistic stochastic bilevel algorithm, SRBA with a coin.

Chu, Xu, Yao, Zhang. SPABA: A Single-Loop and Probabilistic Stochastic Bilevel Algorithm Achieving Optimal Sample
Complexity. ICML 2024, arXiv 2405.18777.

At first, and then with probability 1/q, D ← D(u) by a full-batch pass; else D ← D + D_{B,C}(u) - D_{B,C}(u_previous);
then u ← P(u - step · D). One coin serves z, v and x. The moves are in :mod:`bilevel.solvers.recursive`.
Cost 3n + 2m with probability 1/q, else 10 b. Memory 6p + 3d.
"""

from dataclasses import replace
from typing import Any, NamedTuple, Self

from bilevel._types import Array
from bilevel.oracles import Oracles
from bilevel.solvers.base import solver
from bilevel.solvers.directions import draw_below
from bilevel.solvers.recursive import RecursiveSolver


class SPABADraw(NamedTuple):
    """A batch on each level, and the coin."""

    inner: Any
    outer: Any
    coin: Array


@solver
class SPABA(RecursiveSolver):
    """Single-loop probabilistic stochastic bilevel algorithm.

    Parameters
    ----------
    period : q, mean number of steps from one full-batch pass to the next; None means 1 + (n + m) // batch_size
    """

    table_order = 20

    def resolve(self, oracles: Oracles) -> Self:
        return replace(self, period=self.period or 1 + (oracles.n_inner + oracles.n_outer) // self.batch_size)

    def draw(self, oracles: Oracles, key: Array, index: Array) -> SPABADraw:
        assert self.period is not None, "resolve() fills it in"
        return SPABADraw(*oracles.draw(key, index), draw_below(key, index, self.period) == 0)

    def refreshes(self, index: Array, draw: SPABADraw) -> Array:
        return (index == 0) | draw.coin

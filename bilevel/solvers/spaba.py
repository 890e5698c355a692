"""SPABA: single-loop probabilistic stochastic bilevel algorithm, SRBA with a coin.

Chu, Xu, Yao, Zhang. SPABA: A Single-Loop and Probabilistic Stochastic Bilevel Algorithm Achieving Optimal Sample
Complexity. ICML 2024, arXiv 2405.18777.

At first, and then with probability 1/q, D ← D(u) by a full-batch pass; else D ← D + D_{B,C}(u) - D_{B,C}(u_previous);
then u ← P(u - step · D). One coin serves z, v and x. The moves are in :mod:`bilevel.solvers.recursive`.

Confidence: medium; of the text only the abstract could be had. PAGE, which it adapts, is taken as in its own paper: a
full-batch pass at first, 1/q = b/(b + n + m), constant steps. Three codes of the authors differ from that and from one
another. None begins with a full-batch pass but by chance. One refreshes with probability 0.1; two toss one coin when
the step is compiled and take its branch in all steps. Two clip each coordinate of v to [-1, 1], which moves the
solution where v is larger; here P is the projection onto a ball (``v_radius``), or nothing. All give v a step of its
own: for that take `PnPBO` with "page" for all variables and a ``v_ratio``.
Cost 3n + 2m with probability 1/q, else 10 b. Memory 6p + 3d. Adaptive: nothing.
"""

from dataclasses import replace
from typing import Any, NamedTuple, Self

from bilevel._types import Array
from bilevel.oracles import Oracles
from bilevel.solvers.base import Complexity, solver
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
    complexity = Complexity("O((n+m)^1/2 ε^-1)", "finite sum")

    def resolve(self, oracles: Oracles) -> Self:
        return replace(self, period=self.period or 1 + 2 * (oracles.n_inner + oracles.n_outer) // sum(self.batches()))

    def draw(self, oracles: Oracles, key: Array, index: Array) -> SPABADraw:
        assert self.period is not None, "resolve() fills it in"
        return SPABADraw(*oracles.draw(key, index), draw_below(key, index, self.period) == 0)

    def refreshes(self, index: Array, draw: SPABADraw) -> Array:
        return (index == 0) | draw.coin

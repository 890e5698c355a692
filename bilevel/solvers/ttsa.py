"""TTSA: two-timescale stochastic approximation.

Hong, Wai, Wang, Yang. A Two-Timescale Stochastic Algorithm Framework for Bilevel Optimization: Complexity Analysis and
Application to Actor-Critic. SIAM J. Optim. 33(1), 2023, arXiv 2007.05170. Confidence: medium; the paper's
text was not compared. A later paper (BiO-BreD) attributes the random length P in {0, …, Q-1} to it.

    draw B;  z ← z - α t^-2/5 ∇z G_B
    x ← x - (α/r) t^-3/5 ((∇²xz G_B') v + ∇x F_C)   at the new z,   v by a Neumann series of random length

In the paper Q grows like log t; here it is constant.
Cost (4 + P) b, P of mean (Q - 1)/2. Memory p + d. Adaptive: nothing.
"""

from bilevel.solvers.alset import AlternatingSolver
from bilevel.solvers.base import Complexity, solver


@solver
class TTSA(AlternatingSolver):
    """Two-timescale stochastic approximation.

    Parameters
    ----------
    step_size : first step of the inner variable; steps decrease like t^-2/5
    outer_ratio : the outer variable moves with ``step_size / outer_ratio``, decreasing like t^-3/5
    """

    inner_power, outer_power = 2 / 5, 3 / 5
    complexity = Complexity("Õ(ε^-5/2)", "general expectation", "C^{1,1}", "C^{2,2}")

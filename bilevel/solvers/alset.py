"""ALSET: alternating stochastic gradient descent.

Chen, Sun, Yin. Closing the Gap: Tighter Analysis of Alternating Stochastic Gradient Methods for Bilevel Problems.
NeurIPS 2021. Confidence: high; the paper's text was compared.

    T times:  draw B;  z ← z - α t^-½ ∇z G_B
    x ← x - (α/r) t^-½ ((∇²xz G_B') v + ∇x F_C),   v by a Neumann series of random length P in {0, …, Q-1}

The paper prints P in {1, …, Q}, which biases v by a factor I - η H. BSA with a warm start is the same algorithm.
Cost (T + P + 3) b, P of mean (Q - 1)/2. Memory p + d. Adaptive: nothing.
"""

from bilevel.solvers.base import Complexity, solver
from bilevel.solvers.fields import whole
from bilevel.solvers.neumann import AlternatingSolver


@solver
class ALSET(AlternatingSolver):
    """Alternating stochastic gradient descent.

    Parameters
    ----------
    step_size : first step of the inner variable; steps decrease like t^-1/2
    n_inner_steps : T, inner steps per outer step; the theory holds for T = 1
    """

    n_inner_steps: int = whole(default=10)
    complexity = Complexity("Õ(ε^-2)", "general expectation", "C^{1,1}", "C^{2,2}")

"""MEHA: Moreau envelope based Hessian-free algorithm, for inner problems that are not convex.

Liu, Liu, Yao, Zeng, Zhang. Moreau Envelope for Nonconvex Bi-Level Optimization: A Single-loop and Hessian-free Solution
Strategy. ICML 2024, arXiv 2405.09927. Confidence: medium; the authors' code and a later paper that prints the algorithm
were read, the paper's text was not.

It minimizes F + c (G - E) over z and x, where E(z, x) = min_y G(y, x) + ||y - z||²/(2γ) is the Moreau envelope of G. y
tracks the proximal point. With c = c_0 t^q,

    draw B;  y ← y - η (∇z G_B(y, x) + (y - z)/γ)
    draw B', C;  x ← x - (α/r)(∇x F_C(z, x)/c + ∇x G_B'(z, x) - ∇x G_B'(y, x)),   at the new y and the old z
    draw B'', C';  z ← z - α (∇z F_C'(z, x)/c + ∇z G_B''(z, x) - (z - y)/γ),      at the new y and the new x

By default all batches are full, as published; otherwise each variable has its own. G may be nonconvex, if
G + ||z||²/(4γ) is convex in z. A direction of curvature μ has the penalty c γμ/(1 + γμ) instead of c, so a small γ is a
weak penalty. The order of the moves is that of the printed algorithm; the code moves z before x and multiplies F by c
instead of dividing by it. The code's soft thresholds, for an inner problem with an l1 term, are not provided.
Metrics are evaluated at (y, x): z minimizes the penalized problem and not G, and along a direction of curvature μ, y is
nearer to the minimizer of G by the factor 1/(1 + γμ).
Cost 4n + 2m, or 6b with batches, no second derivatives. Memory 2p + d. Adaptive: nothing. The bias falls like 1/c.
"""

from typing import Any, NamedTuple

from bilevel._core import trees
from bilevel._core.types import Array, Calls, Point, PyTree
from bilevel.oracles import SAMPLINGS, Oracles
from bilevel.solvers.base import Complexity, Monitor, Solver, solver
from bilevel.solvers.fields import fraction, one_of, positive
from bilevel.solvers.moves import MovesState, decay, move, split


class MEHAState(NamedTuple):
    """The iterate, y, and the states of transformations."""

    point: Point
    y: PyTree
    moves: MovesState


class MEHADraw(NamedTuple):
    """Batches of the moves of y, x and z."""

    y_inner: Any
    x_inner: Any
    z_inner: Any
    x_outer: Any
    z_outer: Any


class AtY(Monitor):
    """Metrics are evaluated at y."""

    def evaluation_point(self, state: MEHAState) -> Point:
        return state.point._replace(inner_var=state.y)


@solver
class MEHA(Solver[MEHAState, MEHADraw]):
    """Moreau envelope based Hessian-free algorithm.

    Parameters
    ----------
    step_size : α, step of z
    gamma : γ of the Moreau envelope; larger values are a stronger penalty, and the theory requires less than 1/(2ρ) if
        the smallest curvature of G is -ρ
    c_0 : first c, the weight of the penalty
    c_power : q; c grows like t^q, and the theory requires q < 1/2. 0 keeps c constant
    y_step_size : η, step of y; None means `step_size`
    sampling : "full", for which it is designed, or "blocks", "iid", "reshuffle"
    """

    sampling: str = one_of(SAMPLINGS, default="full", kw_only=True)
    gamma: float = positive(default=10.0)
    c_0: float = positive(default=1.0)
    c_power: float = fraction(default=0.48, off=True)
    y_step_size: float | None = positive(default=None, optional=True)
    complexity = Complexity("O((n+m) ε^-1/(1-2q))", "full batches; of the penalized problem, G weakly convex")

    @property
    def monitor(self) -> Monitor:
        return AtY()

    def init(self, oracles: Oracles, start: Point) -> MEHAState:
        return MEHAState(start, start.inner_var, self.moves.init(start))

    def draw(self, oracles: Oracles, key: Array, index: Array) -> MEHADraw:
        y_inner, x_inner, z_inner = split(oracles.draw_inner(key, index, 3), None, None, None)
        return MEHADraw(y_inner, x_inner, z_inner, *split(oracles.draw_outer(key, index, 2), None, None))

    def step(self, oracles: Oracles, state: MEHAState, index: Array, draw: MEHADraw) -> MEHAState:
        weight = decay(1 / self.c_0, index, self.c_power)  # of F
        point, at_y = state.point, state.point._replace(inner_var=state.y)
        pull = trees.scale(1 / self.gamma, trees.subtract(state.y, point.inner_var))
        y_step = self.step_size if self.y_step_size is None else self.y_step_size
        at_y = at_y._replace(inner_var=move(state.y, trees.add(oracles.inner_grad(at_y, draw.y_inner), pull), y_step))
        change = trees.subtract(
            oracles.inner_grad_outer(point, draw.x_inner), oracles.inner_grad_outer(at_y, draw.x_inner)
        )
        grad_x = trees.add(trees.scale(weight, oracles.outer_grad_outer(point, draw.x_outer)), change)
        step = self.step_size / self.outer_ratio
        point, moves = self.moves.outer(oracles, point, state.moves, grad_x, step, weight)
        pull = trees.scale(1 / self.gamma, trees.subtract(at_y.inner_var, point.inner_var))
        grad_z = trees.add(oracles.inner_grad(point, draw.z_inner), pull)
        grad_z = trees.add(trees.scale(weight, oracles.outer_grad(point, draw.z_outer)), grad_z)
        z = move(point.inner_var, grad_z, self.step_size)
        return MEHAState(point._replace(inner_var=z), at_y.inner_var, moves)

    def calls(self, oracles: Oracles, draw: MEHADraw, refresh: bool) -> Calls:
        return Calls(
            inner_grad=oracles.count_inner(draw.y_inner) + oracles.count_inner(draw.z_inner),
            inner_grad_outer=2 * oracles.count_inner(draw.x_inner),
            outer_grad=oracles.count_outer(draw.z_outer),
            outer_grad_outer=oracles.count_outer(draw.x_outer),
        )

"""V-PBGD: penalty-based gradient descent, whose penalty is the gap between G and its minimum.

Shen, Chen. On Penalty-based Bilevel Gradient Descent Method. ICML 2023, arXiv 2302.05185. Confidence: high; the paper
and the authors' code were compared.

It minimizes F + γ (G - min_w G(w, x)) over z and x together. With s = min(1/γ, 1) and full batches,

    T times:  w ← w - β ∇z G(w, x)
    x ← x - (α/r) s (∇x F(z, x) + γ (∇x G(z, x) - ∇x G(w, x)));   z ← z - α s (∇z F(z, x) + γ ∇z G(z, x)),  old (z, x)

G need not be strongly convex: the theory requires the Polyak-Łojasiewicz inequality in z. Metrics are evaluated at
(w, x), because z minimizes F + γ G and not G. The paper has s = 1; s is from the authors' code, in which w also
continues from its last value, as here by default, and γ grows linearly (``ramp``). ``warm_start=False`` restarts w from
z as published, which adds a bias of the order of (1 - β mu_G)^T. V-PBSGD, the stochastic form of the paper's appendix,
has batches and steps β t^-½ of w (``w_decay=True``): T batches for w, one for the gradients of G, and one for F. The
paper reports a random w of the loop; here it is the last one.
Cost (T + 1) n + 2n + 2m, or (T + 5) b with batches. Memory 3p + d. Adaptive: nothing. The bias is of the order of 1/γ.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bilevel._core import trees
from bilevel._core.types import Array, Calls, Point, PyTree, Scalar
from bilevel.oracles import SAMPLINGS, Oracles
from bilevel.solvers.base import Complexity, Draw, Monitor, Solver, State, solver
from bilevel.solvers.fields import flag, one_of, positive, whole
from bilevel.solvers.moves import MovesState, batch, decay, move, split


class VPBGDState(NamedTuple):
    """The iterate, whose z minimizes the penalized problem; w, which minimizes G; and the states of transformations."""

    point: Point
    w: PyTree
    moves: MovesState


class VPBGDDraw(NamedTuple):
    """Batches of the loop over w, of the gradients of G, and of those of F."""

    inner_loop: Any
    inner: Any
    outer: Any


class AtW(Monitor):
    """Metrics are evaluated at w."""

    def evaluation_point(self, state: VPBGDState) -> Point:
        return state.point._replace(inner_var=state.w)


@dataclass(frozen=True)
class PenaltySolver(Solver[State, Draw]):
    """The penalty of V-PBGD and G-PBGD, and its schedule.

    Parameters
    ----------
    penalty : γ; the bias is of the order of 1/γ, and larger values slow the outer variable down
    ramp : steps in which γ grows linearly from 0; 0 keeps it constant
    scaled : multiply the moves of z and x by min(1/γ, 1), so that `step_size` need not be changed with γ
    sampling : "full", for which it is designed, or "blocks", "iid", "reshuffle"
    """

    sampling: str = one_of(SAMPLINGS, default="full", kw_only=True)
    penalty: float = positive(default=10.0)
    ramp: int = whole(default=0, least=0)
    scaled: bool = flag(default=True)

    def weights(self, index: Array) -> tuple[Scalar, Scalar]:
        """Return the weights of the gradients of F and of the penalty."""
        gamma: Scalar = self.penalty
        if self.ramp:
            gamma = gamma * jnp.minimum(index.astype(jnp.result_type(gamma)) / self.ramp, 1)
        weight = 1 / jnp.maximum(gamma, 1) if self.scaled else jnp.ones_like(gamma)
        return weight, weight * gamma


@solver
class VPBGD(PenaltySolver[VPBGDState, VPBGDDraw]):
    """Penalty-based bilevel gradient descent with the gap of G, and its stochastic form.

    Parameters
    ----------
    step_size : α, step of z
    n_inner_steps : T, steps of w per outer step
    w_step_size : β, step of w; None means `step_size`
    w_decay : divide the steps of w by √t within each loop, as V-PBSGD does
    warm_start : continue from the last w; False restarts from z, as published, with a bias that falls with T
    """

    n_inner_steps: int = whole(default=10)
    w_step_size: float | None = positive(default=None, optional=True)
    w_decay: bool = flag(default=False)
    warm_start: bool = flag(default=True)
    complexity = Complexity("Õ((n+m) ε^-3/2)", "full batches; of the penalized problem, G Polyak-Łojasiewicz")

    @property
    def monitor(self) -> Monitor:
        return AtW()

    def init(self, oracles: Oracles, start: Point) -> VPBGDState:
        return VPBGDState(start, start.inner_var, self.moves.init(start))

    def draw(self, oracles: Oracles, key: Array, index: Array) -> VPBGDDraw:
        inner_loop, inner = split(oracles.draw_inner(key, index, self.n_inner_steps + 1), self.n_inner_steps, None)
        return VPBGDDraw(inner_loop, inner, oracles.draw_outer(key, index))

    def step(self, oracles: Oracles, state: VPBGDState, index: Array, draw: VPBGDDraw) -> VPBGDState:
        point, (weight, inner_weight) = state.point, self.weights(index)
        at_w = self._descend(oracles, point._replace(inner_var=state.w) if self.warm_start else point, draw)
        outer = oracles.outer(point, draw.outer)
        change = trees.subtract(oracles.inner_grad_outer(point, draw.inner), oracles.inner_grad_outer(at_w, draw.inner))
        grad_x = trees.add(trees.scale(weight, outer.grad_outer), trees.scale(inner_weight, change))
        grad_z = trees.scale(inner_weight, oracles.inner_grad(point, draw.inner))
        grad_z = trees.add(trees.scale(weight, outer.grad), grad_z)
        point = point._replace(inner_var=move(point.inner_var, grad_z, self.step_size))
        step = self.step_size / self.outer_ratio
        point, moves = self.moves.outer(oracles, point, state.moves, grad_x, step, weight)
        return VPBGDState(point, at_w.inner_var, moves)

    def _descend(self, oracles: Oracles, at_w: Point, draw: VPBGDDraw) -> Point:
        """Return the point after the steps of w."""
        step = self.step_size if self.w_step_size is None else self.w_step_size

        def update(i: Array, at_w: Point) -> Point:
            grad = oracles.inner_grad(at_w, batch(draw.inner_loop, i))
            size = decay(step, i, 0.5) if self.w_decay else step
            return at_w._replace(inner_var=move(at_w.inner_var, grad, size))

        return jax.lax.fori_loop(0, self.n_inner_steps, update, at_w)

    def calls(self, oracles: Oracles, draw: VPBGDDraw, refresh: bool) -> Calls:
        inner, outer = oracles.count_inner(draw.inner), oracles.count_outer(draw.outer)
        loop = oracles.count_inner(draw.inner_loop, self.n_inner_steps)
        return Calls(inner_grad=loop + inner, inner_grad_outer=2 * inner, outer_grad=outer, outer_grad_outer=outer)

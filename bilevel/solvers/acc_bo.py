"""AccBO: accelerated bilevel optimization, for outer losses of unbounded smoothness.

Gong, Hao, Liu. An Accelerated Algorithm for Stochastic Bilevel Optimization under Unbounded Smoothness. NeurIPS 2024,
arXiv 2409.19212. Confidence: medium; the authors' code and the abstract were read.

z takes stochastic steps with Nesterov's momentum, ẑ averages it, and x moves by a fixed length along a STORM estimate m
of the hypergradient, which is computed by a truncated Neumann series (:mod:`bilevel.solvers.neumann`):

    draw B;  e = z + γ (z - z_previous);   z ← e - α ∇z G_B(e, x);   ẑ ← (1 - τ) ẑ + τ z
    draw a sample S of the series;  m ← g_S(ẑ, x) + (1 - c)(m - g_S(ẑ_previous, x_previous));   x ← x - (α/r) m/||m||

In the first step m = g_S. ``warm_up`` steps z ← z - α ∇z G_B(z, x) come before it, as in the authors' code. Three parts
of that code are not copied: it subtracts the last g, which has another sample, so that noise is added instead of
cancelled; its Neumann series picks one term without the factor Q; and its averages of groups of steps have no effect.
Cost (2Q + 7) b, or b in the warm-up. Memory 4p + 3d. Adaptive: nothing. Moves of x have constant length, so x stops
within a distance of the order of α/r.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bilevel._core import trees
from bilevel._core.types import Array, Calls, Point, PyTree
from bilevel.oracles import Oracles
from bilevel.solvers.base import Complexity, solver
from bilevel.solvers.fields import fraction, whole
from bilevel.solvers.moves import move, move_outer, split, storm
from bilevel.solvers.neumann import NeumannDraw, NeumannSolver, hypergradient, hypergradient_calls


class AccBOState(NamedTuple):
    """The iterate, the z before it, the average ẑ, (ẑ, x) of the last hypergradient, and m."""

    point: Point
    last_z: PyTree
    average: PyTree
    previous: Point
    estimate: PyTree


class AccBODraw(NamedTuple):
    """A batch for ∇z G, and the batches of a hypergradient."""

    inner: Any
    neumann: NeumannDraw


@solver
class AccBO(NeumannSolver[AccBOState, AccBODraw]):
    """Accelerated bilevel optimization under unbounded smoothness.

    Parameters
    ----------
    outer_ratio : every move of the outer variable has length ``step_size / outer_ratio``
    extrapolation : γ, the weight of Nesterov's momentum; 0 turns it off
    averaging : τ, the share of the new z in its average; 1 turns the average off
    momentum : c, the share of the new sample in the estimate of the hypergradient
    warm_up : steps of z alone before the first move of the outer variable
    """

    extrapolation: float = fraction(default=0.5, off=True)
    averaging: float = fraction(default=0.5)
    momentum: float = fraction(default=0.1)
    warm_up: int = whole(default=0, least=0)
    needs_plain_step = "its momentum is defined for plain steps of z"
    needs_plain_outer_step = "its moves of x have a fixed length"
    complexity = Complexity("Õ(ε^-3/2)", "general expectation, with almost sure bounds; F of unbounded smoothness")

    def init(self, oracles: Oracles, start: Point) -> AccBOState:
        return AccBOState(start, start.inner_var, start.inner_var, start, trees.zeros_like(start.outer_var))

    def draw(self, oracles: Oracles, key: Array, index: Array) -> AccBODraw:
        inner, products, cross = split(oracles.draw_inner(key, index, self.n_neumann + 2), None, self.n_neumann, None)
        return AccBODraw(inner, NeumannDraw(products, cross, oracles.draw_outer(key, index)))

    def refreshes(self, index: Array, draw: AccBODraw) -> Array | None:
        return index < self.warm_up if self.warm_up else None

    def refresh(self, oracles: Oracles, state: AccBOState, index: Array, draw: AccBODraw) -> AccBOState:
        """Take a step of the warm-up."""
        z = move(state.point.inner_var, oracles.inner_grad(state.point, draw.inner), self.step_size)
        return state._replace(point=state.point._replace(inner_var=z), last_z=z, average=z)

    def step(self, oracles: Oracles, state: AccBOState, index: Array, draw: AccBODraw) -> AccBOState:
        point, z = state.point, state.point.inner_var
        ahead = point._replace(inner_var=move(z, trees.subtract(z, state.last_z), -self.extrapolation))
        new_z = move(ahead.inner_var, oracles.inner_grad(ahead, draw.inner), self.step_size)
        share = self.averaging
        average = jax.tree.map(lambda old, new: (1 - share) * old + share * new, state.average, new_z)
        current = point._replace(inner_var=average)
        new, old = (
            hypergradient(oracles, at, draw.neumann, self.n_neumann, self.neumann_step)
            for at in (current, state.previous)
        )
        momentum = jnp.where(index == self.warm_up, 1, self.momentum)
        estimate = storm(momentum, new.outer_var, state.estimate, old.outer_var)
        norm = trees.norm(estimate)
        scale = 1 / jnp.where(norm > 0, norm, 1)
        point = point._replace(inner_var=new_z, v=new.v)
        step = self.step_size / self.outer_ratio
        point = move_outer(oracles, point, trees.scale(scale, estimate), step, scale)
        return AccBOState(point, z, average, current, estimate)

    def calls(self, oracles: Oracles, draw: AccBODraw, refresh: bool) -> Calls:
        inner = Calls(inner_grad=oracles.count_inner(draw.inner))
        if refresh:
            return inner
        hyper = hypergradient_calls(oracles, draw.neumann, self.n_neumann)
        return trees.add(inner, trees.scale(2, hyper))

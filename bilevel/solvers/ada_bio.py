"""Ada-BiO: normalized steps of x with a momentum that measures the noise, AdaGrad's steps of z.

Gong, Hao, Liu. Adaptive Algorithms with Sharp Convergence Rates for Stochastic Hierarchical Optimization. NeurIPS 2025,
arXiv 2509.15399. Confidence: medium. The text was read without its displayed formulas; two of the three below are from
a note on the paper, and the step of x is printed in its text.

With g, g' two hypergradients on independent batches, Neumann series of Q products as in StocBiO, and sums to step t,

    s = Σ ||g - g'||²;   w = Σ ||∇z G_B||²;   θ = a/√(a² + s), at first 1;   m ← (1 - θ) m + θ g
    x ← x - (α/r) t^-½ (a/√(a² + s + w))^½ m/||m||;   z ← z - α ∇z G_B/√(c² + w),   both at the old point

The paper's series needs its step 1/L and a length like log t; which of its kinds is not in what could be read, and here
it is one running product. The authors' experiments take the g of the last step as g'.
Cost (2Q + 7) b. Memory p + 2d. Adaptive: all steps, by sums of squared norms and of the noise; the momentum.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bilevel import _tree as trees
from bilevel._types import Array, Calls, Point, PyTree
from bilevel.oracles import Oracles
from bilevel.solvers.base import Complexity, solver
from bilevel.solvers.fields import positive
from bilevel.solvers.moves import decay, move, move_outer, split
from bilevel.solvers.neumann import NeumannDraw, NeumannSolver, hypergradient, hypergradient_calls


class AdaBiOState(NamedTuple):
    """The iterate, m, s and w."""

    point: Point
    average: PyTree
    noise: Array
    slopes: Array


class AdaBiODraw(NamedTuple):
    """A batch for z, and those of both hypergradients."""

    inner: Any
    first: NeumannDraw
    second: NeumannDraw


@solver
class AdaBiO(NeumannSolver[AdaBiOState, AdaBiODraw]):
    """Adaptive bilevel optimizer: normalized steps with momentum.

    Parameters
    ----------
    step_size : scale of the steps of z, which are AdaGrad's
    outer_ratio : the outer variable moves by at most ``step_size / outer_ratio`` t^-1/2
    noise_scale : a, below which noise leaves momentum and outer step as they are
    slope_scale : c, what the sum of squared gradients starts from, as a root
    """

    step_size: float = positive(default=1.0)
    noise_scale: float = positive(default=1.0)
    slope_scale: float = positive(default=1.0)
    needs_plain_step = "its steps of z adapt by themselves"
    complexity = Complexity("Õ(ε^-2); without noise Õ(ε^-1)", "general expectation")

    def init(self, oracles: Oracles, start: Point) -> AdaBiOState:
        zero = jnp.zeros_like(self.step_size)
        return AdaBiOState(start, trees.zeros_like(start.outer_var), zero, zero)

    def draw(self, oracles: Oracles, key: Array, index: Array) -> AdaBiODraw:
        rows = oracles.draw_inner(key, index, 2 * self.n_neumann + 3)
        inner, *series = split(rows, None, self.n_neumann, None, self.n_neumann, None)
        outer = split(oracles.draw_outer(key, index, 2), None, None)
        return AdaBiODraw(inner, *(NeumannDraw(series[2 * i], series[2 * i + 1], outer[i]) for i in range(2)))

    def step(self, oracles: Oracles, state: AdaBiOState, index: Array, draw: AdaBiODraw) -> AdaBiOState:
        point, scale_sq = state.point, self.noise_scale**2
        series = self.n_neumann, self.neumann_step
        _, grad, v = hypergradient(oracles, point, draw.first, *series)
        other = hypergradient(oracles, point, draw.second, *series).outer_var
        slope = oracles.inner_grad(point, draw.inner)
        noise = state.noise + trees.norm_sq(trees.subtract(grad, other))
        slopes = state.slopes + trees.norm_sq(slope)
        share = jnp.where(index == 0, 1, self.noise_scale / jnp.sqrt(scale_sq + noise))
        average = jax.tree.map(lambda old, new: (1 - share) * old + share * new, state.average, grad)
        norm = jnp.maximum(jnp.sqrt(trees.norm_sq(average)), jnp.finfo(share.dtype).tiny)
        damped = jnp.sqrt(self.noise_scale / jnp.sqrt(scale_sq + noise + slopes))
        z = move(point.inner_var, slope, self.step_size / jnp.sqrt(self.slope_scale**2 + slopes))
        step = decay(self.step_size / self.outer_ratio, index, 0.5) * damped / norm
        point = move_outer(oracles, Point(z, point.outer_var, v), average, step)
        return AdaBiOState(point, average, noise, slopes)

    def calls(self, oracles: Oracles, draw: AdaBiODraw, refresh: bool) -> Calls:
        both = (hypergradient_calls(oracles, series, self.n_neumann) for series in (draw.first, draw.second))
        return trees.add(*both)._replace(inner_grad=oracles.count_inner(draw.inner))

"""Ada-BiO: normalized steps of x with a momentum adapted to the measured noise, and AdaGrad steps of z.

Gong, Hao, Liu. Adaptive Algorithms with Sharp Convergence Rates for Stochastic Hierarchical Optimization. NeurIPS 2025,
arXiv 2509.15399. Confidence: medium; the text was read without its displayed formulas. The step of x is printed in the
text; the other two formulas below are taken from a note on the paper.

Let g and g' be two hypergradients on independent batches, by Neumann series of Q products as in StocBiO. All sums run
over the steps 1, …, t.

    s = Σ ||g - g'||²;   w = Σ ||∇z G_B||²;   θ = a/√(a² + s), and 1 in the first step;   m ← (1 - θ) m + θ g
    x ← x - (α/r) t^-½ (a/√(a² + s + w))^½ m/||m||;   z ← z - α ∇z G_B/√(c² + w),   both at the old point

The paper's series requires the step 1/L and a length that grows like log t. The available text does not state which
kind of series it is; here it is the truncated one. The authors' experiments use the g of the previous step as g'.
Cost (2Q + 7) b. Memory p + 2d. Adaptive: all steps, by sums of squared norms and of the noise; the momentum.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bilevel._core import trees
from bilevel._core.types import Array, Calls, Point, PyTree
from bilevel.oracles import Oracles
from bilevel.solvers.base import Complexity, solver
from bilevel.solvers.fields import positive
from bilevel.solvers.moves import decay, move, move_outer, split
from bilevel.solvers.neumann import NeumannDraw, NeumannSolver, hypergradient, hypergradient_calls


class AdaBiOState(NamedTuple):
    """The iterate, the average m, and the sums s and w."""

    point: Point
    average: PyTree
    noise: Array
    squares: Array


class AdaBiODraw(NamedTuple):
    """A batch for the step of z, and the batches of both hypergradients."""

    inner: Any
    first: NeumannDraw
    second: NeumannDraw


@solver
class AdaBiO(NeumannSolver[AdaBiOState, AdaBiODraw]):
    """Adaptive bilevel optimizer: normalized steps with momentum.

    Parameters
    ----------
    step_size : α, scale of the AdaGrad steps of z
    outer_ratio : the outer variable moves by at most ``step_size / outer_ratio`` t^-1/2
    noise_scale : a; noise well below a changes neither the momentum nor the outer step
    slope_scale : c; the sum of squared gradients starts at c²
    """

    step_size: float = positive(default=1.0)
    noise_scale: float = positive(default=1.0)
    slope_scale: float = positive(default=1.0)
    needs_plain_step = "its steps of z are adaptive"
    needs_plain_outer_step = "its steps of x are adaptive"
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
        inner_grad = oracles.inner_grad(point, draw.inner)
        noise = state.noise + trees.norm_sq(trees.subtract(grad, other))
        squares = state.squares + trees.norm_sq(inner_grad)
        share = jnp.where(index == 0, 1, self.noise_scale / jnp.sqrt(scale_sq + noise))
        average = jax.tree.map(lambda old, new: (1 - share) * old + share * new, state.average, grad)
        norm = jnp.maximum(jnp.sqrt(trees.norm_sq(average)), jnp.finfo(share.dtype).tiny)
        damping = jnp.sqrt(self.noise_scale / jnp.sqrt(scale_sq + noise + squares))
        z = move(point.inner_var, inner_grad, self.step_size / jnp.sqrt(self.slope_scale**2 + squares))
        step = decay(self.step_size / self.outer_ratio, index, 0.5) * damping / norm
        point = move_outer(oracles, Point(z, point.outer_var, v), average, step)
        return AdaBiOState(point, average, noise, squares)

    def calls(self, oracles: Oracles, draw: AdaBiODraw, refresh: bool) -> Calls:
        both = (hypergradient_calls(oracles, series, self.n_neumann) for series in (draw.first, draw.second))
        return trees.add(*both)._replace(inner_grad=oracles.count_inner(draw.inner))

"""D-TFBO: the double-loop tuning-free method, whose steps are divided by the norm of all gradients so far.

Yang, Ban, Huang, Ma, Ji. Tuning-Free Bilevel Optimization: New Algorithms and Convergence Analysis. ICLR 2025, arXiv
2410.05140. Confidence: medium; only the abstract of the text was available. The algorithm is taken from a later paper
that extends it to manifolds and prints it (AdaRHD, Algorithm 1 with gradient descent), in the case of a flat space.

All derivatives are full-batch. Both loops continue from the last z and v. At the start of each loop b = c = 1/α, and at
the start of the run a = r/α.

    while ||∇z G||² > ε:   b² ← b² + ||∇z G||²;   z ← z - ∇z G / b
    while ||D_v||² > ε:    c² ← c² + ||D_v||²;    v ← v - D_v / c
    a² ← a² + ||D_x||²;    x ← x - D_x / a

In the paper ε is 1/K, where K is the planned number of steps; the bias of ||∇h||² is of the order of ε. If the first
steps of a loop are too long for G, the gradient grows until b is large enough, and then falls in the same loop. The
authors' code takes 10 steps in each loop regardless of the gradients, and does not reset b and c between loops.
Cost: n per gradient of G and per product, where a loop of k steps takes k + 1 of them; n for the cross product; m for
each gradient of F. Memory 2p + d. Adaptive: all steps, by sums of squared norms; the length of both loops.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bilevel._core import trees
from bilevel._core.compilation import Compiled, compiled
from bilevel._core.types import Array, OuterPass, Point, PyTree
from bilevel.oracles import Oracles
from bilevel.solvers.base import Complexity, solver
from bilevel.solvers.fields import positive, whole
from bilevel.solvers.host import FullBatch, HostSolver
from bilevel.solvers.moves import move, move_outer

_CHUNK = 100  # steps of a loop between two checks of the time limit
_VARIABLES = {"inner_grad": "inner_var", "hvp": "v"}  # the variable that descends along each kind of derivative


class DTFBOState(NamedTuple):
    """The iterate, the sum a², and the oracle calls."""

    point: Point
    outer_sum: np.ndarray
    calls: np.ndarray


@solver
class DTFBO(HostSolver[DTFBOState]):
    """Double-loop tuning-free bilevel optimizer.

    It takes full-batch passes in float64, whatever the dtype of the problem; `batch_size` has no effect. The cost of a
    step is known only after the step, so a run ends with the first step that reaches `max_calls`.

    Parameters
    ----------
    step_size : α, upper bound of the steps of z and v
    outer_ratio : the steps of the outer variable are below ``step_size / outer_ratio``
    inner_tolerance : ε; a loop ends when its squared gradient is at most ε. The paper uses 1 / (planned steps)
    max_inner_steps : largest number of steps of each loop
    """

    step_size: float = positive(default=1.0)
    inner_tolerance: float = positive(default=1e-3)
    max_inner_steps: int = whole(default=10_000)
    takes_outer_term = True
    complexity = Complexity("O((n+m) ε^-2)", "full batches")

    def init(self, oracles: Oracles, start: Point) -> DTFBOState:
        outer_sum = np.array(float(self.outer_ratio / self.step_size) ** 2)
        return DTFBOState(start, outer_sum, FullBatch(oracles, start).calls)

    def warm_up(self, oracles: Oracles, start: Point) -> None:
        short = replace(self, inner_tolerance=1e-300, max_inner_steps=1)
        short.step(oracles, short.init(oracles, start), 0)

    def step(self, oracles: Oracles, state: DTFBOState, index: int) -> DTFBOState:
        full = FullBatch(oracles, state.point, state.calls)
        point = self._descend(full, state.point, "inner_grad", jax.tree.map(np.zeros_like, state.point.inner_var))
        for kind in ("outer_grad", "outer_grad_outer", "cross"):
            full.count(kind)
        outer = _outer(oracles, point)
        point = self._descend(full, point, "hvp", outer.grad)
        moved, outer_sum = trees.to_numpy(_move(oracles, point, outer.grad_outer, jnp.asarray(state.outer_sum)))
        return DTFBOState(moved, outer_sum, full.calls)

    def _descend(self, full: FullBatch, point: Point, kind: str, shift: PyTree) -> Point:
        """Run one loop: descend along a kind of derivative plus a constant ``shift`` until their sum is small."""
        loop = _Loop(point, _gradient(full.oracles, point, kind, shift), jnp.asarray(float(self.step_size) ** -2))
        full.count(kind)
        left, tolerance = self.max_inner_steps, np.array(float(self.inner_tolerance))
        while left > 0 and _norm_sq(loop.grad) > tolerance:
            loop, taken = _advance(full.oracles, loop, kind, shift, tolerance, min(left, _CHUNK))
            full.count(kind, times=int(taken))
            left -= int(taken)
        if np.isfinite(_norm_sq(loop.grad)):
            return loop.point
        return trees.scale(np.nan, loop.point)  # ends the run


class _Loop(NamedTuple):
    """The point that a loop has reached, the gradient there, and the sum of squares so far."""

    point: Point
    grad: PyTree
    total: Array


@compiled("kind")
def _gradient(oracles: Oracles, point: Point, kind: str, shift: PyTree) -> PyTree:
    return trees.add(getattr(oracles, kind)(point), shift)


@compiled("kind")
def _advance(
    oracles: Oracles, loop: _Loop, kind: str, shift: PyTree, tolerance: Array, limit: int
) -> tuple[_Loop, Array]:
    """Take at most ``limit`` steps, until the gradient is small, and return their number as well."""

    def continues(state: tuple[_Loop, Array]) -> Array:
        return (trees.norm_sq(state[0].grad) > tolerance) & (state[1] < limit)

    def step(state: tuple[_Loop, Array]) -> tuple[_Loop, Array]:
        (point, grad, total), taken = state
        total, name = total + trees.norm_sq(grad), _VARIABLES[kind]
        point = point._replace(**{name: move(getattr(point, name), grad, 1 / jnp.sqrt(total))})
        return _Loop(point, _gradient(oracles, point, kind, shift), total), taken + 1

    return jax.lax.while_loop(continues, step, (loop, jnp.int32(0)))


@Compiled
def _norm_sq(grad: PyTree) -> Array:
    return trees.norm_sq(grad)


@Compiled
def _outer(oracles: Oracles, point: Point) -> OuterPass:
    return oracles.outer(point)


@Compiled
def _move(oracles: Oracles, point: Point, outer_grad: PyTree, outer_sum: Array) -> tuple[Point, Array]:
    grad = trees.add(oracles.cross(point), outer_grad)
    outer_sum = outer_sum + trees.norm_sq(grad)
    return move_outer(oracles, point, grad, 1 / jnp.sqrt(outer_sum)), outer_sum

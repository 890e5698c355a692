"""D-TFBO: the double-loop tuning-free method, steps divided by the norms of all gradients so far.

Yang, Ban, Huang, Ma, Ji. Tuning-Free Bilevel Optimization: New Algorithms and Convergence Analysis. ICLR 2025, arXiv
2410.05140. Confidence: medium. Of the text only the abstract could be had; the algorithm is that of a later paper which
carries it over to manifolds and prints it (AdaRHD, Algorithm 1 with gradient descent), on a flat space.

By full-batch passes, from the last z and v, with b = c = 1/α at the start of each loop and a = r/α at that of the run,

    while ||∇z G||² > ε:   b² ← b² + ||∇z G||²;   z ← z - ∇z G / b
    while ||D_v||² > ε:    c² ← c² + ||D_v||²;    v ← v - D_v / c
    a² ← a² + ||D_x||²;    x ← x - D_x / a

ε is 1/K for K steps planned; the bias of ||∇h||² is of the order of ε. The first step of a loop may be too long for G:
then the gradient grows until b has, and falls in the same loop. The authors' code takes 10 steps in each loop, however
large the gradients are, and lets b and c go on through the run.
Cost: n per gradient of G and per product, each loop one more than it has steps, n cross products, m of each gradient of
F. Memory 2p + d. Adaptive: all steps, by sums of squared norms; the length of both loops.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bilevel import _tree as trees
from bilevel._programs import Compiled, compiled
from bilevel._types import Array, OuterPass, Point, PyTree
from bilevel.oracles import Oracles
from bilevel.solvers.base import Complexity, solver
from bilevel.solvers.fields import positive, whole
from bilevel.solvers.host import FullBatch, HostSolver
from bilevel.solvers.moves import move, move_outer

_PIECE = 100  # steps of a loop between two looks at the clock
_PARTS = {"inner_grad": "inner_var", "hvp": "v"}  # what descends along which kind of derivative


class DTFBOState(NamedTuple):
    """The iterate, the sum a², and the oracle calls."""

    point: Point
    outer_sum: np.ndarray
    calls: np.ndarray


@solver
class DTFBO(HostSolver[DTFBOState]):
    """Double-loop tuning-free bilevel optimizer.

    It works in float64 whatever the dtype of the problem, by full-batch passes; `batch_size` has no effect. What a step
    costs is known only once it is taken, so a run ends with the first step that reaches `max_calls`.

    Parameters
    ----------
    step_size : the steps of z and v are below it, in each loop from its start
    outer_ratio : the steps of the outer variable are below ``step_size / outer_ratio``
    inner_tolerance : ε, loops end when a squared gradient is below it; in the paper 1 / (steps planned)
    max_inner_steps : of each loop
    """

    step_size: float = positive(default=1.0)
    inner_tolerance: float = positive(default=1e-3)
    max_inner_steps: int = whole(default=10_000)
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
        """Go down to a small gradient: that of a kind and a shift."""
        walk = _Walk(point, _slope(full.oracles, point, kind, shift), jnp.asarray(float(self.step_size) ** -2))
        full.count(kind)
        left, tolerance = self.max_inner_steps, np.array(float(self.inner_tolerance))
        while left > 0 and _square(walk.slope) > tolerance:
            walk, taken = _walk(full.oracles, walk, kind, shift, tolerance, min(left, _PIECE))
            full.count(kind, times=int(taken))
            left -= int(taken)
        if np.isfinite(_square(walk.slope)):
            return walk.point
        return trees.scale(np.nan, walk.point)  # a loop that went nowhere ends the run


class _Walk(NamedTuple):
    """Where a loop is, the gradient there, and the sum of squares so far."""

    point: Point
    slope: PyTree
    total: Array


@compiled("kind")
def _slope(oracles: Oracles, point: Point, kind: str, shift: PyTree) -> PyTree:
    return trees.add(getattr(oracles, kind)(point), shift)


@compiled("kind")
def _walk(oracles: Oracles, walk: _Walk, kind: str, shift: PyTree, tolerance: Array, limit: int) -> tuple[_Walk, Array]:
    """Take steps until the gradient is small, so many at most; return how many, too."""

    def goes_on(state: tuple[_Walk, Array]) -> Array:
        return (trees.norm_sq(state[0].slope) > tolerance) & (state[1] < limit)

    def once(state: tuple[_Walk, Array]) -> tuple[_Walk, Array]:
        (point, slope, total), taken = state
        total = total + trees.norm_sq(slope)
        point = point._replace(**{_PARTS[kind]: move(getattr(point, _PARTS[kind]), slope, 1 / jnp.sqrt(total))})
        return _Walk(point, _slope(oracles, point, kind, shift), total), taken + 1

    return jax.lax.while_loop(goes_on, once, (walk, jnp.int32(0)))


@Compiled
def _square(slope: PyTree) -> Array:
    return trees.norm_sq(slope)


@Compiled
def _outer(oracles: Oracles, point: Point) -> OuterPass:
    return oracles.outer(point)


@Compiled
def _move(oracles: Oracles, point: Point, outer_grad: PyTree, outer_sum: Array) -> tuple[Point, Array]:
    grad = trees.add(oracles.cross(point), outer_grad)
    outer_sum = outer_sum + trees.norm_sq(grad)
    return move_outer(oracles, point, grad, 1 / jnp.sqrt(outer_sum)), outer_sum

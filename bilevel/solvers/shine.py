"""SHINE: v by the inverse Hessian that the quasi-Newton solver of the inner problem has learned.

Ramzi, Mannel, Bai, Starck, Ciuciu, Moreau. SHINE: SHaring the INverse Estimate from the forward pass for bi-level
optimization and implicit models. ICLR 2022, arXiv 2106.00553. Confidence: medium. Of the text only the abstract could
be had; the steps are those of the authors' code for bilevel problems.

With H of L-BFGS, from α I and the last M pairs, which go on from step to step, and ε_k = max(10⁻¹², 10⁻³ c^{k-1}), step
k = 1, 2, … is, by full-batch passes,

    z : t = 1, ½, …;  z ← z - t H ∇z G;  H learns (move of z, change of ∇z G);  until ||∇z G|| <= ε_k ||first ∇z G||
    OPA : e = ℓ H ∇z F / ||H ∇z F||;  H learns (e, ∇z G(z + e) - ∇z G(z));  in every q-th of these and at their end
    v = -H ∇z F;  refined: conjugate gradients from there, ⌊0.01/√ε_k⌋ at most, until the residual is ε_k ||∇z F||
    x ← x - s ((∇²xz G) v + ∇x F),  s by the rule of HOAG

ℓ is the length of the last move in this step, as in the code, but 10⁻⁶ (1 + ||z||) at least, since shorter differences
are rounding. Steps t are halved until G falls by 10⁻⁴ t of its slope, or until the slope is flat where G is level to
rounding; the code asks for Wolfe's conditions. It adds pairs of OPA within the solve alone: few, once z is near. Its
other bilevel variant is v = -∇z F without any inverse; to fall back on that where v is large is for equilibrium models
only. α is 1 in the code, whose losses are sums; for means it should be larger.
Without OPA or refinement v is biased, and s dies where F stops falling; OPA makes the bias small, refinement ends it.
Cost: n per gradient and per value of G, n per product of a refinement, n cross products, m of each gradient of F and m
values, and m of ∇z F per pair of OPA but the last. Memory (2M + 3) p + d. Adaptive: the steps
of z and x, the accuracy of z.
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple, Self

import jax
import numpy as np

from bilevel._programs import Compiled
from bilevel._tree import flat, to_numpy
from bilevel._types import AnyArray, Array, Point
from bilevel.oracles import Oracles
from bilevel.problems import BilevelProblem
from bilevel.solvers.base import Complexity, solver
from bilevel.solvers.fields import flag, fraction, positive, whole
from bilevel.solvers.hoag import adapt_step, first_step
from bilevel.solvers.host import OUTER, UNUSED, FullBatch, HostSolver
from bilevel.solvers.quasi_newton import InverseHessian, Pairs, no_pairs, push

_INNER = ("inner_value", "inner_grad")
_FIRST_TOLERANCE, _SMALLEST_TOLERANCE = 1e-3, 1e-12
_INNER_STEPS, _HALVINGS, _DECREASE = 1000, 30, 1e-4
_SHORTEST, _ROUNDING = 1e-6, 10 * float(np.finfo(np.float64).eps)


class SHINEState(NamedTuple):
    """The iterate, the pairs, the first ||∇z G||, the last step of x, F and move of x, C so far, and oracle calls."""

    point: Point
    pairs: Pairs
    first_norm: np.ndarray
    step: np.ndarray
    value: np.ndarray
    move: np.ndarray
    lipschitz: np.ndarray
    calls: np.ndarray


@solver
class SHINE(HostSolver[SHINEState]):
    """Sharing the inverse estimate of the inner solver.

    It works in float64 whatever the dtype of the problem, by full-batch passes; `outer_ratio` and `batch_size` have no
    effect. What a step costs is known only once it is taken, so a run ends with the first step that reaches
    `max_calls`.

    Parameters
    ----------
    step_size : α, the inverse Hessian before the first pair; the code has 1
    n_pairs : M, pairs kept
    tolerance_decay : c, how the tolerance of inner solves falls from step to step
    opa_period : q, inner steps between two pairs along v, and one in each step; None adds none
    refine : go on from v by conjugate gradients, more of them as the tolerance falls
    decrease : the step of x grows while h falls by this times D²/s, as in HOAG
    """

    step_size: float = positive(default=1.0)
    n_pairs: int = whole(default=30)
    tolerance_decay: float = fraction(default=0.78)
    opa_period: int | None = whole(default=None, optional=True, hint="; use None for no pairs along v")
    refine: bool = flag(default=False)
    decrease: float = fraction(default=0.5)
    asks = _INNER, ("inner_grad",), ("outer_grad",), ("hvp",), OUTER, ("cross",)
    complexity = Complexity("converges, no rate", "full batches")

    def configure(self, problem: BilevelProblem) -> Self:
        return replace(self, **UNUSED | {"step_size": self.step_size})  # settings that do the same are one

    def init(self, oracles: Oracles, start: Point) -> SHINEState:
        full, unknown = FullBatch(oracles, start), np.array(np.nan)
        shapes = jax.eval_shape(partial(no_pairs, self.n_pairs), flat(start.inner_var))
        pairs = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
        return SHINEState(start, pairs, unknown, unknown, unknown, unknown, np.array(0.0), full.calls)

    def warm_up(self, oracles: Oracles, start: Point) -> None:
        super().warm_up(oracles, start)
        z = flat(start.inner_var)
        inverse = _Inverse(self, self.init(oracles, start).pairs)
        inverse.learn(z, inverse.product(np.ones_like(z)), z)

    @np.errstate(all="ignore")  # a step that overflows ends the run by its result
    def step(self, oracles: Oracles, state: SHINEState, index: int) -> SHINEState:
        full, inverse = FullBatch(oracles, state.point, state.calls), _Inverse(self, state.pairs)
        z, x, v = full.vectors()
        tolerance = self._tolerance(index)
        z, grad, first_norm = self._solve_inner(full, inverse, z, x, float(state.first_norm), tolerance)
        value, outer_grad, outer_grad_outer = full.ask(OUTER, z, x)
        if not np.all(np.isfinite(np.r_[grad, outer_grad])):
            return state._replace(point=full.point(z, np.full_like(x, np.nan), v), calls=full.calls)
        if self.opa_period is not None:
            inverse.look_along(full, z, x, grad, outer_grad)
        v = -inverse.product(outer_grad)
        if self.refine:
            limit = int(0.01 / np.sqrt(tolerance))
            v = full.conjugate_gradients(z, x, -outer_grad, v, rtol=tolerance, atol=0.0, limit=limit) if limit else v
        hypergrad = full.ask(("cross",), z, x, v)[0] + outer_grad_outer
        size = float(np.hypot(np.linalg.norm(outer_grad), np.linalg.norm(outer_grad_outer)))
        lipschitz = max(float(state.lipschitz), size)
        step = first_step(hypergrad) if index == 0 else self._adapt(state, index, value.item(), lipschitz)
        moved = flat(oracles.project(full.point(z, x - step * hypergrad, v).outer_var))
        last = np.array(step), np.array(value.item()), np.array(np.linalg.norm(moved - x)), np.array(lipschitz)
        return SHINEState(full.point(z, moved, v), inverse.pairs, np.array(first_norm), *last, full.calls)

    def _tolerance(self, index: int) -> float:
        return max(_SMALLEST_TOLERANCE, _FIRST_TOLERANCE * float(self.tolerance_decay) ** index)

    def _adapt(self, state: SHINEState, index: int, value: float, lipschitz: float) -> float:
        last = float(state.step), float(state.value), float(state.move)
        tolerances = self._tolerance(index), self._tolerance(index - 1)
        return adapt_step(last, value, lipschitz, *tolerances, float(self.decrease))

    def _solve_inner(
        self, full: FullBatch, inverse: "_Inverse", z: np.ndarray, x: np.ndarray, first_norm: float, tolerance: float
    ) -> tuple[np.ndarray, np.ndarray, float]:
        """Return z with a small ∇z G, as far as rounding lets it, that gradient, and the first norm of the run."""
        value, grad = full.ask(_INNER, z, x)
        first_norm = float(np.linalg.norm(grad)) if np.isnan(first_norm) else first_norm
        for taken in range(_INNER_STEPS):
            if not np.linalg.norm(grad) > tolerance * first_norm:
                break
            if self.opa_period is not None and taken > 0 and taken % self.opa_period == 0:
                inverse.look_along(full, z, x, grad, full.ask(("outer_grad",), z, x)[0])
            found = _search(full, z, x, -inverse.product(grad), value.item(), grad)
            if found is None:
                break
            inverse.learn(z, found[0] - z, found[2] - grad)
            z, value, grad = found
        return z, grad, first_norm


class _Inverse:
    """The inverse Hessian so far, and the length of the last move."""

    def __init__(self, solver: SHINE, pairs: Pairs) -> None:
        self.scale, self.pairs, self.length = np.array(float(solver.step_size)), pairs, 0.0

    def product(self, vector: np.ndarray) -> np.ndarray:
        return np.asarray(_product(self.pairs, self.scale, vector))

    def learn(self, begin: np.ndarray, move: np.ndarray, change: np.ndarray) -> None:
        self.pairs, self.length = to_numpy(_learn(self.pairs, begin, move, change)), float(np.linalg.norm(move))

    def look_along(
        self, full: FullBatch, z: np.ndarray, x: np.ndarray, grad: np.ndarray, outer_grad: np.ndarray
    ) -> None:
        """Learn the pair of a move along H ∇z F."""
        v = self.product(outer_grad)
        if not np.any(v):
            return
        length = max(self.length, _SHORTEST * (1 + float(np.linalg.norm(z))))
        move = length / np.linalg.norm(v) * v
        self.learn(z, move, full.ask(("inner_grad",), z + move, x)[0] - grad)


def _search(
    full: FullBatch, z: np.ndarray, x: np.ndarray, direction: np.ndarray, value: float, grad: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Return z, G and ∇z G where G has fallen enough along a direction, or None."""
    slope, length = float(grad @ direction), 1.0
    for _ in range(_HALVINGS):
        trial = z + length * direction
        trial_value, trial_grad = full.ask(_INNER, trial, x)
        falls = trial_value.item() <= value + _DECREASE * length * slope
        level = trial_value.item() <= value + _ROUNDING * abs(value)
        if falls or (level and trial_grad @ direction <= (2 * _DECREASE - 1) * slope):
            return trial, trial_value, trial_grad
        length /= 2
        if length * np.linalg.norm(direction) <= _ROUNDING * np.linalg.norm(z):
            break
    return None


@Compiled
def _product(pairs: Pairs, scale: AnyArray, vector: AnyArray) -> Array:
    return InverseHessian("bfgs", scale).product(pairs, vector)


@Compiled
def _learn(pairs: Pairs, begin: AnyArray, move: AnyArray, change: AnyArray) -> Pairs:
    return push(pairs, InverseHessian("bfgs", 1.0).pair(pairs, begin, move, change))

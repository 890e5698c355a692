"""SHINE: v from the inverse Hessian that the quasi-Newton solver of the inner problem has built.

Ramzi, Mannel, Bai, Starck, Ciuciu, Moreau. SHINE: SHaring the INverse Estimate from the forward pass for bi-level
optimization and implicit models. ICLR 2022, arXiv 2106.00553. Confidence: medium; only the abstract of the text was
available, and the steps are those of the authors' code for bilevel problems.

H is the L-BFGS matrix from α I and the last M pairs, which are kept from step to step; ε_k = max(10⁻¹², 10⁻³ c^{k-1}).
Step k = 1, 2, … makes full-batch passes:

    z : z ← z - t H ∇z G, t = 1, ½, …;  add the pair (move of z, change of ∇z G);  until ||∇z G|| <= ε_k ||first ∇z G||
    OPA : e = ℓ H ∇z F / ||H ∇z F||;  add the pair (e, ∇z G(z + e) - ∇z G(z));  in every q-th step of z and at the end
    v = -H ∇z F;  refined by at most ⌊0.01/√ε_k⌋ conjugate gradient steps, until the residual is ε_k ||∇z F||
    x ← x - s ((∇²xz G) v + ∇x F),  s by the rule of HOAG

ℓ is the length of the last move in this step, as in the code, but at least 10⁻⁶ (1 + ||z||), since shorter differences
are dominated by rounding. t is halved until G falls by 10⁻⁴ t times its slope, or, if G is constant to rounding, until
the slope is flat; the code uses the Wolfe conditions. The code adds OPA pairs only within the solve of z, so there are
few of them once z is close to its solution. The code's other bilevel variant is v = -∇z F without an inverse; its
fallback to that variant if v is large is for equilibrium models only. α is 1 in the code, whose losses are sums; for
means it should be larger.
Without OPA or refinement v is biased, and s tends to 0 when F stops falling. OPA makes the bias small, and refinement
removes it.
Cost: n per gradient and per value of G, n per product of a refinement, n for the cross product, m for each gradient of
F and for its value, and m per OPA pair, except the last of a step. Memory (2M + 3) p + d. Adaptive: the steps of z and
x, the accuracy of z.
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from bilevel._core.compilation import Compiled
from bilevel._core.trees import flat, to_numpy
from bilevel._core.types import AnyArray, Array, Point
from bilevel.oracles import Oracles
from bilevel.problems import BilevelProblem
from bilevel.solvers.base import Complexity, solver
from bilevel.solvers.fields import flag, fraction, positive, whole
from bilevel.solvers.hoag import OuterStep
from bilevel.solvers.host import OUTER, UNUSED, FullBatch, HostSolver
from bilevel.solvers.qnbo import InverseHessian, Pairs, no_pairs

_INNER = ("inner_value", "inner_grad")
_FIRST_TOLERANCE, _SMALLEST_TOLERANCE = 1e-3, 1e-12
_INNER_STEPS, _HALVINGS, _DECREASE = 1000, 30, 1e-4
_SHORTEST, _ROUNDING = 1e-6, 10 * float(np.finfo(np.float64).eps)


class SHINEState(NamedTuple):
    """The iterate, the pairs, ||∇z G|| at the start of the run, the last step of x, and the oracle calls."""

    point: Point
    pairs: Pairs
    first_norm: np.ndarray
    outer: OuterStep
    calls: np.ndarray


@solver
class SHINE(HostSolver[SHINEState]):
    """Sharing the inverse estimate of the inner solver.

    It takes full-batch passes in float64, whatever the dtype of the problem; `outer_ratio` and `batch_size` have no
    effect. The cost of a step is known only after the step, so a run ends with the first step that reaches `max_calls`.

    Parameters
    ----------
    step_size : α; the inverse Hessian before the first pair is α I. The authors' code uses 1
    n_pairs : M, number of pairs kept
    tolerance_decay : c, factor by which the tolerance of inner solves falls in each step
    opa_period : q, a pair along v is added after every q inner steps and at the end of each solve; None adds no pairs
    refine : improve v by conjugate gradients, taking more iterations as the tolerance falls
    decrease : the step of x grows if h falls by this times D²/s, as in HOAG
    """

    step_size: float = positive(default=1.0)
    n_pairs: int = whole(default=30)
    tolerance_decay: float = fraction(default=0.78)
    opa_period: int | None = whole(default=None, optional=True, hint="; use None for no pairs along v")
    refine: bool = flag(default=False)
    decrease: float = fraction(default=0.5)
    takes_outer_term = True
    derivative_groups = _INNER, ("inner_grad",), ("outer_grad",), ("hvp",), OUTER, ("cross",)
    complexity = Complexity("converges, no rate", "full batches")

    def configure(self, problem: BilevelProblem) -> Self:
        return replace(self, **UNUSED | {"step_size": self.step_size})

    def init(self, oracles: Oracles, start: Point) -> SHINEState:
        shapes = jax.eval_shape(partial(no_pairs, self.n_pairs), flat(start.inner_var))
        pairs = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
        return SHINEState(start, pairs, np.array(np.nan), OuterStep.unknown(), FullBatch(oracles, start).calls)

    def warm_up(self, oracles: Oracles, start: Point) -> None:
        super().warm_up(oracles, start)
        z = flat(start.inner_var)
        inverse = _Inverse(self, self.init(oracles, start).pairs)
        inverse.add_pair(z, inverse.product(np.ones_like(z)), z)

    @np.errstate(all="ignore")  # an overflow ends the run, because the result is not finite
    def step(self, oracles: Oracles, state: SHINEState, index: int) -> SHINEState:
        full, inverse = FullBatch(oracles, state.point, state.calls), _Inverse(self, state.pairs)
        z, x, v = full.vectors()
        tolerance = self._tolerance(index)
        z, grad, first_norm = self._solve_inner(full, inverse, z, x, float(state.first_norm), tolerance)
        value, outer_grad, outer_grad_outer = full.evaluate(OUTER, z, x)
        if not np.all(np.isfinite(np.r_[grad, outer_grad])):
            return state._replace(point=full.point(z, np.full_like(x, np.nan), v), calls=full.calls)
        if self.opa_period is not None:
            inverse.add_outer_pair(full, z, x, grad, outer_grad)
        v = -inverse.product(outer_grad)
        if self.refine:
            limit = int(0.01 / np.sqrt(tolerance))
            v = full.conjugate_gradients(z, x, -outer_grad, v, rtol=tolerance, atol=0.0, limit=limit) if limit else v
        hypergrad = full.evaluate(("cross",), z, x, v)[0] + outer_grad_outer
        tolerances = tolerance, self._tolerance(index - 1)
        outer = state.outer.observe(outer_grad, outer_grad_outer)
        x_new, outer = outer.move(full, x, hypergrad, value.item(), tolerances, float(self.decrease))
        return SHINEState(full.point(z, x_new, v), inverse.pairs, np.array(first_norm), outer, full.calls)

    def _tolerance(self, index: int) -> float:
        return max(_SMALLEST_TOLERANCE, _FIRST_TOLERANCE * float(self.tolerance_decay) ** index)

    def _solve_inner(
        self, full: FullBatch, inverse: "_Inverse", z: np.ndarray, x: np.ndarray, first_norm: float, tolerance: float
    ) -> tuple[np.ndarray, np.ndarray, float]:
        """Return z with ||∇z G|| <= tolerance * first_norm, or as close as rounding permits; ∇z G; and first_norm."""
        value, grad = full.evaluate(_INNER, z, x)
        first_norm = float(np.linalg.norm(grad)) if np.isnan(first_norm) else first_norm
        for taken in range(_INNER_STEPS):
            if not np.linalg.norm(grad) > tolerance * first_norm:
                break
            if self.opa_period is not None and taken > 0 and taken % self.opa_period == 0:
                inverse.add_outer_pair(full, z, x, grad, full.evaluate(("outer_grad",), z, x)[0])
            found = _backtrack(full, z, x, -inverse.product(grad), value.item(), grad)
            if found is None:
                break
            inverse.add_pair(z, found[0] - z, found[2] - grad)
            z, value, grad = found
        return z, grad, first_norm


class _Inverse:
    """The inverse Hessian, which grows by pairs, and the length of the last move."""

    def __init__(self, solver: SHINE, pairs: Pairs) -> None:
        self.scale, self.pairs, self.length = np.array(float(solver.step_size)), pairs, 0.0

    def product(self, vector: np.ndarray) -> np.ndarray:
        return np.asarray(_product(self.pairs, self.scale, vector))

    def add_pair(self, z: np.ndarray, move: np.ndarray, change: np.ndarray) -> None:
        self.pairs, self.length = to_numpy(_add_pair(self.pairs, z, move, change)), float(np.linalg.norm(move))

    def add_outer_pair(
        self, full: FullBatch, z: np.ndarray, x: np.ndarray, grad: np.ndarray, outer_grad: np.ndarray
    ) -> None:
        """Add the pair of a move along H ∇z F."""
        v = self.product(outer_grad)
        if not np.any(v):
            return
        length = max(self.length, _SHORTEST * (1 + float(np.linalg.norm(z))))
        move = length / np.linalg.norm(v) * v
        self.add_pair(z, move, full.evaluate(("inner_grad",), z + move, x)[0] - grad)


def _backtrack(
    full: FullBatch, z: np.ndarray, x: np.ndarray, direction: np.ndarray, value: float, grad: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Return z, G and ∇z G at the first step along a direction at which G has fallen enough, or None."""
    slope, length = float(grad @ direction), 1.0
    for _ in range(_HALVINGS):
        trial = z + length * direction
        trial_value, trial_grad = full.evaluate(_INNER, trial, x)
        decreases = trial_value.item() <= value + _DECREASE * length * slope
        is_level = trial_value.item() <= value + _ROUNDING * abs(value)
        if decreases or (is_level and trial_grad @ direction <= (2 * _DECREASE - 1) * slope):
            return trial, trial_value, trial_grad
        length /= 2
        if length * np.linalg.norm(direction) <= _ROUNDING * np.linalg.norm(z):
            break
    return None


@Compiled
def _product(pairs: Pairs, scale: AnyArray, vector: AnyArray) -> Array:
    return InverseHessian("bfgs", scale).product(pairs, vector)


@Compiled
def _add_pair(pairs: Pairs, z: AnyArray, move: AnyArray, change: AnyArray) -> Pairs:
    """Return the pairs without the oldest and with a new one; a rejected pair changes nothing."""
    pair = InverseHessian("bfgs", 1.0).pair(pairs, z, move, change)
    accepted = pair.weights != 0
    return jax.tree.map(
        lambda rows, new: jnp.where(accepted, jnp.concatenate([rows[1:], new[None]]), rows), pairs, pair
    )

"""HOAG: hyperparameter optimization with approximate gradients.

Pedregosa. Hyperparameter optimization with approximate gradient. ICML 2016, arXiv 1602.02355. Confidence: high; the
paper's text was compared.

With tolerances ε_k that can be summed, a constant C, D = ||last move of x||, step k = 1, 2, … is, by full-batch passes,

    z : L-BFGS from the last z until ||∇z G|| <= μ ε_k, and Newton steps where rounding blinds it before
    v : conjugate gradients from the last v until ||(∇²zz G) v + ∇z F|| <= ε_k;   g = (∇²xz G) v + ∇x F
    s = 1/||g|| at first;  then s ← 1.05 s if F <= last F + C ε_k + (C + 1) ε_{k-1} D - D²/(2s), else s ← s/2
    x ← x - s g

The paper prints D²/s, which asks for more than a gradient step gives: s dies once the tolerances are small.
Cost: n per gradient and per value of G, n per product (conjugate gradients, and Lanczos where μ is not given), n cross
products, m of each gradient of F and m values. Memory: 2p + d and the 10 pairs of L-BFGS. Adaptive: the step of x, the
accuracy of both solves.
"""

from dataclasses import replace
from typing import Any, NamedTuple, Self

import numpy as np

from bilevel._tree import flat
from bilevel._types import Point
from bilevel.oracles import Oracles
from bilevel.problems import BilevelProblem
from bilevel.problems.exact import lbfgs
from bilevel.solvers.base import Complexity, solver
from bilevel.solvers.fields import fraction, one_of, positive
from bilevel.solvers.host import OUTER, UNUSED, FullBatch, HostSolver

_SEQUENCES = {"exponential": lambda k: 0.1 * 0.9**k, "quadratic": lambda k: 0.1 / k**2, "cubic": lambda k: 0.1 / k**3}
_INNER = ("inner_value", "inner_grad")
_SMALLEST_TOLERANCE, _NEWTON_STEPS = 1e-12, 20
_SLACK, _GROWTH, _SHRINKAGE = 1.0, 1.05, 0.5  # the slack is M of the paper


class HOAGState(NamedTuple):
    """The iterate, the step s, F and the length of the move of x in the last step, C so far, and the oracle calls."""

    point: Point
    step: np.ndarray
    value: np.ndarray
    move: np.ndarray
    lipschitz: np.ndarray
    calls: np.ndarray


@solver
class HOAG(HostSolver[HOAGState]):
    """Hyperparameter optimization with approximate gradients.

    It works in float64 whatever the dtype of the problem, by full-batch passes, and finds its own step: `step_size`,
    `outer_ratio` and `batch_size` have no effect. What a step costs is known only once it is taken, so a run ends with
    the first step that reaches `max_calls`.

    Parameters
    ----------
    tolerances : of both solves in step k, from 1e-12 up: "exponential" 0.1 · 0.9^k, "quadratic" 0.1/k², "cubic" 0.1/k³
    decrease : the step grows while h falls by this times D²/s; the paper prints 1
    lipschitz : C, the Lipschitz constant of F; None means the largest gradient of F seen
    strong_convexity : μ of G; None means the smallest eigenvalue of ∇²zz G, by Lanczos in each step. Where that is
        not positive, inner problems are solved as far as rounding lets them
    """

    tolerances: str = one_of(tuple(_SEQUENCES), default="exponential")
    decrease: float = fraction(default=0.5)
    lipschitz: float | None = positive(default=None, optional=True, hint="; use None to estimate it")
    strong_convexity: float | None = positive(default=None, optional=True, hint="; use None to estimate it")
    asks = _INNER, ("inner_grad",), ("hvp",), OUTER, ("cross",)
    complexity = Complexity("converges, no rate", "full batches, summable tolerances", "C^{1,1}", "C^{2,2}")

    def configure(self, problem: BilevelProblem) -> Self:
        return replace(self, **UNUSED)  # settings that do the same are one

    def init(self, oracles: Oracles, start: Point) -> HOAGState:
        unknown, lipschitz = np.array(np.nan), np.array(0.0 if self.lipschitz is None else float(self.lipschitz))
        return HOAGState(start, unknown, unknown, unknown, lipschitz, FullBatch(oracles, start).calls)

    @np.errstate(all="ignore")  # a step that overflows ends the run by its result
    def step(self, oracles: Oracles, state: HOAGState, index: int) -> HOAGState:
        full = FullBatch(oracles, state.point, state.calls)
        z, x, v = full.vectors()
        tolerance = self._tolerance(index + 1)
        z = self._solve_inner(full, z, x, tolerance)
        value, outer_grad, outer_grad_outer = full.ask(OUTER, z, x)
        if not np.all(np.isfinite(outer_grad)):
            return state._replace(point=full.point(z, np.full_like(x, np.nan), v), calls=full.calls)
        v = full.conjugate_gradients(z, x, -outer_grad, v, rtol=0.0, atol=tolerance)
        grad = full.ask(("cross",), z, x, v)[0] + outer_grad_outer
        lipschitz = float(state.lipschitz)
        if self.lipschitz is None:
            lipschitz = max(lipschitz, float(np.hypot(np.linalg.norm(outer_grad), np.linalg.norm(outer_grad_outer))))
        step = self._adapt(state, index + 1, value.item(), lipschitz, grad)
        moved = flat(oracles.project(full.point(z, x - step * grad, v).outer_var))
        numbers = np.array(step), np.array(value.item()), np.array(np.linalg.norm(moved - x)), np.array(lipschitz)
        return HOAGState(full.point(z, moved, v), *numbers, full.calls)

    def _tolerance(self, k: int) -> float:
        return max(_SMALLEST_TOLERANCE, _SEQUENCES[self.tolerances](k))

    def _adapt(self, state: HOAGState, k: int, value: float, lipschitz: float, grad: np.ndarray) -> float:
        """Return the step of x in step k."""
        if k == 1:
            return first_step(grad)
        last = float(state.step), float(state.value), float(state.move)
        return adapt_step(last, value, lipschitz, self._tolerance(k), self._tolerance(k - 1), float(self.decrease))

    def _solve_inner(self, full: FullBatch, z: np.ndarray, x: np.ndarray, tolerance: float) -> np.ndarray:
        """Return z with ||∇z G|| <= μ tolerance, as far as rounding lets it."""
        inner = _Inner(full, x)
        if not np.all(np.isfinite(inner(z)[1])):
            return np.full_like(z, np.nan)
        given = self.strong_convexity
        convexity = max(0.0, full.smallest_eigenvalue(z, x)) if given is None else float(given)
        z, grad = _solve_by_lbfgs(inner, z, convexity, tolerance)
        return _refine_by_newton(full, z, x, grad, convexity * tolerance)


def first_step(grad: np.ndarray) -> float:
    """Return the step of x with which it moves by 1."""
    norm = float(np.linalg.norm(grad))
    return 1 / norm if norm > 0 else 1.0


def adapt_step(
    last: tuple[float, float, float], value: float, lipschitz: float, tolerance: float, before: float, decrease: float
) -> float:
    """Return the step of x from the last (step, F, length of the move), F now, and the tolerances now and before."""
    step, last_value, move = last
    errors = lipschitz * tolerance + before * (lipschitz + _SLACK) * move
    return step * (_GROWTH if value <= last_value + errors - decrease * move**2 / step else _SHRINKAGE)


class _Inner:
    """G and its gradient in z; the last answer is remembered."""

    def __init__(self, full: FullBatch, x: np.ndarray) -> None:
        self.full, self.x = full, x
        self.last_z, self.last = np.array([]), (np.nan, np.array([]))

    def __call__(self, z: np.ndarray) -> tuple[float, np.ndarray]:
        if not np.array_equal(z, self.last_z):
            value, grad = self.full.ask(_INNER, z, self.x)
            self.last_z, self.last = z.copy(), (value.item(), grad)
        return self.last


def _solve_by_lbfgs(inner: _Inner, z: np.ndarray, convexity: float, tolerance: float) -> tuple[np.ndarray, np.ndarray]:
    """Return z and ∇z G there, small enough or too small for L-BFGS."""

    def enough(z: np.ndarray) -> bool:
        value, grad = inner(z)
        norm = np.linalg.norm(grad)
        # G can still fall by ||∇z G||²/(2μ) at most, which must be more than the rounding of its values.
        visible = norm**2 > 20 * convexity * np.finfo(np.float64).eps * abs(value)
        return bool(norm <= convexity * tolerance or not visible)

    def stop(intermediate_result: Any) -> None:
        if enough(intermediate_result.x):
            raise StopIteration

    if enough(z):
        return z, inner(z)[1]
    found = lbfgs(inner, z, stop, gtol=0.0, maxiter=10_000, maxfun=100_000)
    return found.x, found.jac


def _refine_by_newton(full: FullBatch, z: np.ndarray, x: np.ndarray, grad: np.ndarray, bound: float) -> np.ndarray:
    """Go on to ||∇z G|| <= bound by Newton steps, while they halve the gradient."""
    # Not by `newton`, which goes to rounding and would ask for other derivatives.
    for _ in range(_NEWTON_STEPS):
        if np.linalg.norm(grad) <= bound:
            break
        trial = z - full.conjugate_gradients(z, x, grad, np.zeros_like(z), rtol=1e-12, atol=bound / 2)
        (trial_grad,) = full.ask(("inner_grad",), trial, x)
        if not np.linalg.norm(trial_grad) < 0.5 * np.linalg.norm(grad):
            break
        z, grad = trial, trial_grad
    return z

"""HOAG: hyperparameter optimization with approximate gradients.

Pedregosa. Hyperparameter optimization with approximate gradient. ICML 2016, arXiv 1602.02355. Confidence: high; the
paper's text was compared. It says that this rule for the step has no analysis.

Given summable tolerances ε_k, a constant C and D = ||last move of x||, step k = 1, 2, … makes full-batch passes:

    z : L-BFGS from the last z until ||∇z G|| <= μ ε_k, then Newton steps if rounding stops L-BFGS earlier
    v : conjugate gradients from the last v until ||(∇²zz G) v + ∇z F|| <= ε_k;   g = (∇²xz G) v + ∇x F
    s = 1/||g|| in the first step;  then s ← 1.05 s if F <= last F + C ε_k + (C + 1) ε_{k-1} D - D²/(2s), else s ← s/2
    x ← x - s g

The paper prints D²/s, which is a larger decrease than a gradient step achieves: s tends to 0 once the tolerances are
small.
Cost: n per gradient and per value of G, n per product (conjugate gradients, and Lanczos if μ is not given), n for the
cross product, m for each gradient of F and for its value. Memory: 2p + d and the 10 pairs of L-BFGS. Adaptive: the step
of x, the accuracy of both solves.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np

from bilevel._core.types import Point
from bilevel.oracles import Oracles
from bilevel.problems import BilevelProblem
from bilevel.solvers.base import Complexity, solver
from bilevel.solvers.fields import fraction, one_of, positive
from bilevel.solvers.host import OUTER, UNUSED, FullBatch, HostSolver, remember_last

_SEQUENCES = {"exponential": lambda k: 0.1 * 0.9**k, "quadratic": lambda k: 0.1 / k**2, "cubic": lambda k: 0.1 / k**3}
INNER = ("inner_value", "inner_grad")
_SMALLEST_TOLERANCE, _NEWTON_STEPS = 1e-12, 20
_SLACK, _GROWTH, _SHRINKAGE = 1.0, 1.05, 0.5  # the slack is M of the paper


class OuterStep(NamedTuple):
    """The step s of x, F and the length of the move of x in the last step, NaN before the first one; and C."""

    size: np.ndarray
    value: np.ndarray
    length: np.ndarray
    lipschitz: np.ndarray

    @classmethod
    def unknown(cls, lipschitz: float = 0.0) -> Self:
        """Return the record before the first step."""
        nan = np.array(np.nan)
        return cls(nan, nan, nan, np.array(lipschitz))

    def observe(self, outer_grad: np.ndarray, outer_grad_outer: np.ndarray) -> Self:
        """Return the record with C at least the norm of this gradient of F."""
        norm = float(np.hypot(np.linalg.norm(outer_grad), np.linalg.norm(outer_grad_outer)))
        return self._replace(lipschitz=np.array(max(float(self.lipschitz), norm)))

    def move(
        self,
        full: FullBatch,
        x: np.ndarray,
        grad: np.ndarray,
        value: float,
        tolerances: tuple[float, float],
        ratio: float,
    ) -> tuple[np.ndarray, Self]:
        """Return x after the step s, and the new record, from F and the tolerances of this and the last step."""
        value = float(full.oracles.objective(value, full.like.outer_var))
        size = self._next_size(value, grad, tolerances, ratio)
        x_new = full.move_outer(x, grad, size)
        length = np.array(np.linalg.norm(x_new - x))
        return x_new, self._replace(size=np.array(size), value=np.array(value), length=length)

    def _next_size(self, value: float, grad: np.ndarray, tolerances: tuple[float, float], ratio: float) -> float:
        size, last_value, length, lipschitz = map(float, self)
        if np.isnan(size):
            norm = float(np.linalg.norm(grad))
            return 1 / norm if norm > 0 else 1.0
        errors = lipschitz * tolerances[0] + tolerances[1] * (lipschitz + _SLACK) * length
        return size * (_GROWTH if value <= last_value + errors - ratio * length**2 / size else _SHRINKAGE)


class HOAGState(NamedTuple):
    """The iterate, the last step of x, and the oracle calls."""

    point: Point
    outer: OuterStep
    calls: np.ndarray


@solver
class HOAG(HostSolver[HOAGState]):
    """Hyperparameter optimization with approximate gradients.

    It takes full-batch passes in float64, whatever the dtype of the problem, and chooses its own steps: `step_size`,
    `outer_ratio` and `batch_size` have no effect. The cost of a step is known only after the step, so a run ends with
    the first step that reaches `max_calls`.

    Parameters
    ----------
    tolerances : ε_k of both solves, at least 1e-12: "exponential" 0.1 · 0.9^k, "quadratic" 0.1/k², "cubic" 0.1/k³
    decrease : the step of x grows if h falls by this times D²/s; the paper prints 1
    lipschitz : C, the Lipschitz constant of F; None means the largest gradient of F so far
    strong_convexity : μ of G; None means the smallest eigenvalue of ∇²zz G, by Lanczos in each step. If it is not
        positive, inner problems are solved until rounding errors prevent further progress
    """

    tolerances: str = one_of(tuple(_SEQUENCES), default="exponential")
    decrease: float = fraction(default=0.5)
    lipschitz: float | None = positive(default=None, optional=True, hint="; use None to estimate it")
    strong_convexity: float | None = positive(default=None, optional=True, hint="; use None to estimate it")
    takes_outer_term = True
    derivative_groups = INNER, ("inner_grad",), ("hvp",), OUTER, ("cross",)
    complexity = Complexity("converges, no rate", "full batches, summable tolerances", "C^{1,1}", "C^{2,2}")

    def configure(self, problem: BilevelProblem) -> Self:
        return replace(self, **UNUSED)

    def init(self, oracles: Oracles, start: Point) -> HOAGState:
        outer = OuterStep.unknown(0.0 if self.lipschitz is None else float(self.lipschitz))
        return HOAGState(start, outer, FullBatch(oracles, start).calls)

    @np.errstate(all="ignore")  # an overflow ends the run, because the result is not finite
    def step(self, oracles: Oracles, state: HOAGState, index: int) -> HOAGState:
        full = FullBatch(oracles, state.point, state.calls)
        z, x, v = full.vectors()
        tolerances = self._tolerance(index + 1), self._tolerance(max(index, 1))
        z, _ = solve_inner(full, z, x, partial(self._convexity, full, z, x), tolerances[0])
        value, outer_grad, outer_grad_outer = full.evaluate(OUTER, z, x)
        if not np.all(np.isfinite(outer_grad)):
            return state._replace(point=full.point(z, np.full_like(x, np.nan), v), calls=full.calls)
        v = full.conjugate_gradients(z, x, -outer_grad, v, rtol=0.0, atol=tolerances[0])
        grad = full.evaluate(("cross",), z, x, v)[0] + outer_grad_outer
        outer = state.outer if self.lipschitz is not None else state.outer.observe(outer_grad, outer_grad_outer)
        x_new, outer = outer.move(full, x, grad, value.item(), tolerances, float(self.decrease))
        return HOAGState(full.point(z, x_new, v), outer, full.calls)

    def _tolerance(self, k: int) -> float:
        return max(_SMALLEST_TOLERANCE, _SEQUENCES[self.tolerances](k))

    def _convexity(self, full: FullBatch, z: np.ndarray, x: np.ndarray) -> float:
        given = self.strong_convexity
        return max(0.0, _smallest_eigenvalue(full, z, x)) if given is None else float(given)


def solve_inner(
    full: FullBatch, z: np.ndarray, x: np.ndarray, convexity: Callable[[], float], tolerance: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return z with ||∇z G|| <= μ tolerance, or as close to it as rounding permits, and ∇z G there.

    ``convexity`` returns μ. It is called only if ∇z G is finite at the start; otherwise z and ∇z G are NaN.
    """
    evaluate = remember_last(lambda z: full.evaluate(INNER, z, x))
    if not np.all(np.isfinite(evaluate(z)[1])):
        return np.full_like(z, np.nan), np.full_like(z, np.nan)
    mu = convexity()
    z, grad = _solve_by_lbfgs(evaluate, z, mu, tolerance)
    return _refine_by_newton(full, z, x, grad, mu * tolerance)


def _smallest_eigenvalue(full: FullBatch, z: np.ndarray, x: np.ndarray) -> float:
    """Return the smallest eigenvalue of ∇²zz G with 1% accuracy, by Lanczos' method; 0 if that fails."""
    from scipy.sparse.linalg import ArpackError, eigsh

    if z.size == 1:
        return full.product(z, x, np.ones(1)).item()
    start = np.random.default_rng(0).standard_normal(z.size)  # SciPy's default is random
    try:
        values = eigsh(full.operator(z, x), k=1, which="SA", v0=start, tol=1e-2, return_eigenvectors=False)
    except ArpackError:
        return 0.0
    return values.item()


def lbfgs(value_and_grad: Callable, start: np.ndarray, callback: Callable | None = None, **options: Any) -> Any:
    """Minimize a function of a flat vector by SciPy's L-BFGS until its gradient is small, whatever its values are."""
    from scipy.optimize import minimize

    options = {"ftol": 0.0} | options
    return minimize(value_and_grad, start, jac=True, method="L-BFGS-B", callback=callback, options=options)


def _solve_by_lbfgs(
    evaluate: Callable[[np.ndarray], list], z: np.ndarray, convexity: float, tolerance: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return z with a small ∇z G, and that gradient; it may be larger if rounding stops L-BFGS."""

    def is_solved(z: np.ndarray) -> bool:
        value, grad = evaluate(z)
        norm = np.linalg.norm(grad)
        # G can still fall by at most ||∇z G||²/(2μ), which must exceed the rounding errors of its values.
        visible = norm**2 > 20 * convexity * np.finfo(np.float64).eps * abs(value.item())
        return bool(norm <= convexity * tolerance or not visible)

    def stop(intermediate_result: Any) -> None:
        if is_solved(intermediate_result.x):
            raise StopIteration

    def value_and_grad(z: np.ndarray) -> tuple[float, np.ndarray]:
        value, grad = evaluate(z)
        return value.item(), grad

    if is_solved(z):
        return z, evaluate(z)[1]
    found = lbfgs(value_and_grad, z, stop, gtol=0.0, maxiter=10_000, maxfun=100_000)
    return found.x, found.jac


def _refine_by_newton(
    full: FullBatch, z: np.ndarray, x: np.ndarray, grad: np.ndarray, bound: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return z and ∇z G after Newton steps, taken until ||∇z G|| <= bound or a step does not halve the gradient."""
    # `problems.exact.newton` would continue to rounding level, and request other derivatives.
    for _ in range(_NEWTON_STEPS):
        if np.linalg.norm(grad) <= bound:
            break
        trial = z - full.conjugate_gradients(z, x, grad, np.zeros_like(z), rtol=1e-12, atol=bound / 2)
        (trial_grad,) = full.evaluate(("inner_grad",), trial, x)
        if not np.linalg.norm(trial_grad) < 0.5 * np.linalg.norm(grad):
            break
        z, grad = trial, trial_grad
    return z, grad

"""MAID: method of adaptive inexact descent, whose accepted steps are proved to decrease h.

Salehi, Mukherjee, Roberts, Ehrhardt. An adaptively inexact first-order method for bilevel optimization with application
to hyperparameter learning. SIAM Journal on Mathematics of Data Science, 2025, arXiv 2308.10098. Confidence: high; the
authors' code was read, and a second implementation that quotes the theorems, whose constants are used.

Given the accuracy ε, the step s, and the number e(z, x), a proved bound of |F(z, x) - h(x)|, for j = 20, 21, …:

    until ω <= ½ ||g||, with ε ← ε/2 after each failure:
        z : until ||∇z G|| <= μ ε;   v : conjugate gradients until ||(∇²zz G) v + ∇z F|| <= ε;   g = (∇²xz G) v + ∇x F
        ω = the bound of ||g - ∇h(x)|| of the certificate
    for at most j trials, with s ← s/2 after each failure:
        x' = x - s g;   z' : from z until ||∇z G(., x')|| <= μ ε
        accept if F(z', x') + e(z', x') - (F(z, x) - e(z, x)) + ||x' - x||²/(10 s) <= 0
    accepted: x ← x', z ← z', s ← 1.2 s, ε ← 1.1 ε;  otherwise: ε ← ε/2, and s as before the trials

As h(x') <= F(z', x') + e(z', x') and h(x) >= F(z, x) - e(z, x), an accepted step decreases h by ||x' - x||²/(10 s) or
more, whatever ω is. The certificate (:mod:`bilevel.problems.certificate`) gives

    e = ||∇z F||' δ + b δ²/2 + rounding errors,   δ >= ||z - z*(x)||

and μ, which is 1 before the first certificate. The paper has constants of the whole space instead, adds no rounding
errors, and has the accuracy 1.1 ε in e(z', x'). With bounds, x' is projected, and ||g|| is the length of the projected
step, divided by s. With an outer term R, x' is its step, R is added to F in the test, and h + R decreases as proved:
the paper has no such term, but the two inequalities hold for any x'. The run ends if ε falls below 10⁻¹⁴, or if steps
that are short enough to be accepted gain less than the rounding errors. The steps that are tried begin at 4 r/||g||² if
s is shorter, where r are those errors.
Cost: n per gradient and per value of G, n per product, n for the cross product, m for each gradient of F and for its
value, per accuracy that is tried; n per gradient and per value of G, m for ∇z F and for F, per trial. Certificates take
passes over the rows that are not oracle calls. Memory: 2p + d and the 10 pairs of L-BFGS; certificates p² up to p =
1024. Adaptive: the accuracy of z and v, the step of x.
"""

from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from bilevel._core import trees
from bilevel._core.compilation import Compiled
from bilevel._core.types import Array, Point
from bilevel.oracles import Oracles
from bilevel.problems import BilevelProblem
from bilevel.problems.certificate import Bounds, Certifier
from bilevel.solvers.base import Complexity, Monitor, solver
from bilevel.solvers.fields import given, positive
from bilevel.solvers.hoag import INNER, solve_inner
from bilevel.solvers.host import OUTER, UNUSED, FullBatch, HostSolver

_SHRINKAGE, _GROWTH = 0.5, 1.2  # of the step
_TIGHTENING, _LOOSENING = 0.5, 1.1  # of the accuracy
_PRECISION, _DECREASE, _TRIALS, _FLOOR = 0.5, 0.1, 20, 1e-14
# A sum of n terms has a rounding error of up to 8 √n u times the sum of their sizes, except with a tiny probability
# (Higham, Mary. A new approach to probabilistic rounding error analysis. 2019).
_ROUNDING = 4 * float(np.finfo(np.float64).eps)
_MARGIN = 1 + 1e-6  # for the rounding errors of the numbers of a certificate, which are relative
_ROWS_AT_ONCE = 256


class MAIDState(NamedTuple):
    """The iterate, the next step of x (0 after the end), the accuracy, μ, a proved bound of h(x), and the calls."""

    point: Point
    outer_step: np.ndarray
    accuracy: np.ndarray
    convexity: np.ndarray
    value_bound: np.ndarray
    calls: np.ndarray


class _Value(NamedTuple):
    """F(z, x), and the two parts of a bound of its distance from h(x). ``error`` tends to 0 with the accuracy."""

    value: float
    error: float
    rounding: float

    @property
    def lower(self) -> float:
        return self.value - self.error - self.rounding

    @property
    def upper(self) -> float:
        return self.value + self.error + self.rounding


class _Inexact(NamedTuple):
    """z and v at x, the direction g with the bound ω of its error, h(x) within bounds, and μ."""

    z: np.ndarray
    v: np.ndarray
    grad: np.ndarray
    grad_error: float
    h: _Value
    convexity: float


@solver
class MAID(HostSolver[MAIDState]):
    """Descent with certified steps: each of them is proved to decrease the exact h.

    It takes full-batch passes in float64, whatever the dtype of the problem, and adapts its steps and accuracies:
    `step_size`, `outer_ratio` and `batch_size` have no effect. The problem must have certificates. The run ends by
    itself if no further decrease can be proved in float64. The cost of a step is known only after the step, so a run
    ends with the first step that reaches `max_calls`. The history has the columns `value_bound`, a proved upper bound
    of h (with an outer term of h + R), `outer_step`, the next step of x, and `accuracy`.

    Parameters
    ----------
    outer_step : s of the first step. Later ones grow by at most 20 % per step, so give a larger one if x barely moves
    accuracy : ε of the first step
    mu_G, L1_F, L1_G, L2_G : constants that hold for all z at every x that is visited: the strong convexity of G in z,
        the Lipschitz constant of ∇F in z, the bound of ||∇²xz G||, and the Lipschitz constant of ∇²zz G and ∇²xz G in
        z. Give all of them for losses of your own, which have no certificates. They are not checked
    """

    outer_step: float = positive(default=0.1)
    accuracy: float = positive(default=0.1)
    mu_G: float | None = positive(default=None, optional=True)
    L1_F: float | None = positive(default=None, optional=True, off=True)
    L1_G: float | None = positive(default=None, optional=True, off=True)
    L2_G: float | None = positive(default=None, optional=True, off=True)
    takes_outer_term = True
    derivative_groups = INNER, ("inner_grad",), OUTER, OUTER[:2], ("hvp",), ("hvp", "cross")
    complexity = Complexity("converges, no rate", "full batches, certified errors", "C^{1,1}", "C^{2,2}")
    _certifier: ClassVar[Certifier | None] = None  # of a configured solver

    def configure(self, problem: BilevelProblem) -> Self:
        if None not in self.constants:
            problem = replace(problem, certificate_bounds=lambda _: _Declared(self))
        certifier = problem.certifier()
        if not certifier.certified or 0 < self.constants.count(None) < 4:
            way = "give all of `mu_G`, `L1_F`, `L1_G` and `L2_G`, or none of them if the problem has certificates"
            raise ValueError(f"`MAID` proves its steps by certificates: {way}. {certifier.why}")
        configured = replace(self, **UNUSED)
        object.__setattr__(configured, "_certifier", certifier)
        return configured

    @property
    def constants(self) -> tuple[float | None, ...]:
        """The constants that were given."""
        return self.mu_G, self.L1_F, self.L1_G, self.L2_G

    @property
    def monitor(self) -> "MAIDMonitor":
        return MAIDMonitor()

    def init(self, oracles: Oracles, start: Point) -> MAIDState:
        numbers = map(np.array, (float(self.outer_step), float(self.accuracy), 1.0, np.nan))
        return MAIDState._make([start, *numbers, FullBatch(oracles, start).calls])

    def warm_up(self, oracles: Oracles, start: Point) -> None:
        super().warm_up(oracles, start)
        self._bound(start, start, 0.0, trees.flat(start.inner_var))

    @np.errstate(all="ignore")  # an overflow rejects a trial, or ends the run because the result is not finite
    def step(self, oracles: Oracles, state: MAIDState, index: int) -> MAIDState:
        if state.outer_step == 0:
            return state
        full, trials = FullBatch(oracles, state.point, state.calls), _TRIALS
        step, accuracy, convexity = map(float, state[1:4])
        z, x, v = full.vectors()
        while accuracy >= _FLOOR:
            here = self._evaluate(full, z, x, v, accuracy, convexity)
            z, v, convexity = here.z, here.v, here.convexity
            if not np.all(np.isfinite(here.grad)):
                return state._replace(point=full.point(z, np.full_like(x, np.nan), v), calls=full.calls)
            slope = float(np.linalg.norm(full.move_outer(x, here.grad, step) - x)) / step
            if slope > 0 and here.grad_error <= (1 - _PRECISION) * slope:
                shortest = here.h.rounding / slope**2  # shorter steps gain less than the rounding errors
                sizes = max(step, 4 * shortest) * _SHRINKAGE ** np.arange(trials)
                for size in sizes[sizes > shortest].tolist():
                    found = self._try(full, here, x, size, accuracy)
                    if found is not None:
                        point, value_bound, convexity = found
                        numbers = size * _GROWTH, accuracy * _LOOSENING, convexity, value_bound
                        return MAIDState._make([point, *map(np.array, numbers), full.calls])
                if sizes[-1] <= shortest and here.h.error <= here.h.rounding:
                    break
                trials += 1
            accuracy *= _TIGHTENING
        return state._replace(point=full.point(z, x, v), outer_step=np.array(0.0), calls=full.calls)

    def _evaluate(
        self, full: FullBatch, z: np.ndarray, x: np.ndarray, v: np.ndarray, accuracy: float, convexity: float
    ) -> _Inexact:
        z, residual = solve_inner(full, z, x, lambda: convexity, accuracy)
        value, outer_grad, outer_grad_outer = full.evaluate(OUTER, z, x)
        if not np.all(np.isfinite(outer_grad)):
            return _Inexact(z, v, np.full_like(x, np.nan), np.nan, _Value(np.nan, np.nan, np.nan), convexity)
        v = full.conjugate_gradients(z, x, -outer_grad, v, rtol=0.0, atol=accuracy)
        product, cross = full.evaluate(("hvp", "cross"), z, x, v)
        grad = cross + outer_grad_outer
        direction = full.point(residual, grad, product + outer_grad)
        h, bounds = self._bound(full.point(z, x, v), direction, value.item(), outer_grad)
        return _Inexact(z, v, grad, bounds.error, h, bounds.mu * bounds.metric.least)

    def _try(
        self, full: FullBatch, here: _Inexact, x: np.ndarray, size: float, accuracy: float
    ) -> tuple[Point, float, float] | None:
        """Return the point after a step of this size, a bound of h there and μ, if h is proved to decrease enough."""
        x_new = full.move_outer(x, here.grad, size)
        z, residual = solve_inner(full, here.z, x_new, lambda: here.convexity, accuracy)
        value, outer_grad = full.evaluate(OUTER[:2], z, x_new)
        nothing = np.zeros_like(z)  # v has no effect on the bound of h
        direction = full.point(residual, np.zeros_like(x), nothing)
        h, bounds = self._bound(full.point(z, x_new, nothing), direction, value.item(), outer_grad)
        required = _DECREASE * float(np.sum((x_new - x) ** 2)) / size
        if not h.upper - here.h.lower + required <= 0:
            return None
        return full.point(z, x_new, here.v), h.upper, bounds.mu * bounds.metric.least

    def _bound(self, point: Point, direction: Point, value: float, outer_grad: np.ndarray) -> tuple[_Value, Bounds]:
        """Return h or h + R within bounds, from F and ∇z F, and the numbers of the certificate."""
        assert self._certifier is not None, "call `configure` before the first step"
        oracles, bounds = self._certifier.oracles, self._certifier.bounds(point, direction)
        grad_size, value_size = map(float, _row_sizes(oracles, point))
        of_grad, of_value = (_ROUNDING * np.sqrt(n + outer_grad.size) for n in (oracles.n_inner, oracles.n_outer))
        delta = bounds.delta + of_grad * grad_size / (bounds.mu * np.sqrt(bounds.metric.least))
        objective = float(oracles.objective(value, point.outer_var))
        rounding = of_value * value_size + _ROUNDING * trees.flat(point.outer_var).size ** 0.5 * abs(objective - value)
        error, with_rounding = (
            _MARGIN * (bounds.metric.dual_norm(outer_grad) * distance + bounds.b * distance**2 / 2)
            for distance in (bounds.delta, delta)
        )
        return _Value(objective, error, with_rounding - error + rounding), bounds


class MAIDMonitor(Monitor):
    """The proved bound of h, the step and the accuracy, and the end of runs."""

    def diagnostics(self, state: MAIDState) -> dict[str, Any]:
        return {name: getattr(state, name) for name in ("value_bound", "outer_step", "accuracy")}

    def end(self, row: dict[str, Any]) -> str | None:
        if row["outer_step"] != 0:
            return None
        return "No further decrease of h can be proved in float64: a step gains less than the rounding errors."


class _Declared:
    """Bounds with M = I, from the constants that the user has given."""

    why = "The constants are those that were given."

    def __init__(self, solver: MAID) -> None:
        self.mu, self.L1_F, self.L1_G, self.L2_G = map(float, map(given, solver.constants))

    def __call__(self, point: Point, direction: Point) -> Bounds:
        parts = direction.inner_var, direction.v, point.v
        residual, v_residual, v = (float(np.linalg.norm(trees.flat(part))) for part in parts)
        a = self.L2_G * v
        return Bounds(residual / self.mu, self.mu, v_residual, a, self.L1_F, a + self.L1_F, self.L1_G)


@Compiled
def _row_sizes(oracles: Oracles, point: Point) -> tuple[Array, Array]:
    """Return the means over all rows of ||∇z G_i|| and of |F_j|."""
    alone = oracles.with_batches(1, "iid")

    def mean(derivative: Any, n: int) -> Array:
        rows = jnp.arange(n, dtype=jnp.int32)[:, None]
        return jnp.mean(jax.lax.map(lambda row: trees.norm(derivative(point, row)), rows, batch_size=_ROWS_AT_ONCE))

    return mean(alone.inner_grad, oracles.n_inner), mean(alone.outer_value, oracles.n_outer)

"""Exact: quasi-Newton steps on h with exact hypergradients, the baseline without sampling.

Liu, Nocedal. On the limited memory BFGS method for large scale optimization. Mathematical Programming, 1989.
Confidence: high; it is not a transcription, and its results are compared with closed forms.

One evaluation of h at x, from the last z:

    z* : z ← z - t w,  w = (∇²zz G)⁻¹ ∇z G,  until w'∇z G <= 1e-24 z'(∇²zz G) z
    v* = -(∇²zz G)⁻¹ ∇z F;   h = F;   ∇h = (∇²xz G) v* + ∇x F

One step: x ← x - t B ∇h, with B from the last 10 moves, and t by the strong Wolfe conditions. If x has bounds, with
projection P, coordinates that ∇h pushes against a bound are fixed, B is that of the free coordinates, and
x ← P(x - t B ∇h), with t by the weak Wolfe conditions along this projected path.
Cost: n per trial of a Newton step, p n products per matrix (one at each Newton iterate), and per evaluation n for the
cross product, m for each gradient of F and m for its value. Above p = 2000 conjugate gradients solve the systems, for n
per product. Memory: p² + 20 d. Adaptive: the steps of all variables.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Self

import numpy as np

from bilevel._core.trees import flat
from bilevel._core.types import Point
from bilevel.oracles import Oracles
from bilevel.problems import BilevelProblem
from bilevel.problems.exact import System, newton, solve_adjoint
from bilevel.solvers.base import Complexity, solver
from bilevel.solvers.host import OUTER, UNUSED, FullBatch, HostSolver, remember_last

_PAIRS, _LARGEST_MATRIX = 10, 2000
_SMALL, _ROUNDING = 1e-12, float(np.finfo(np.float64).eps)
_SEARCH_STEPS = 20
_DECREASE, _CURVATURE = 1e-4, 0.9  # constants of the Wolfe conditions


class ExactState(NamedTuple):
    """(z*, x, v*), h and ∇h there, pairs of a move of x and the change of ∇h (newest last), and the oracle calls."""

    point: Point
    value: np.ndarray
    grad: np.ndarray
    pairs: np.ndarray
    calls: np.ndarray


class Evaluation(NamedTuple):
    """h and ∇h at x, with the z* and v* that they were computed from."""

    x: np.ndarray
    z: np.ndarray
    v: np.ndarray
    value: float
    grad: np.ndarray


@solver
class Exact(HostSolver[ExactState]):
    """L-BFGS with exact hypergradients.

    It takes full-batch passes in float64, whatever the dtype of the problem: `step_size`, `outer_ratio` and
    `batch_size` have no effect. A step is one iteration with its line search. Its cost is known only after the step, so
    a run ends with the first step that reaches `max_calls`. In the history, `inner_residual_sq` and `v_residual_sq` are
    the squared residuals of z* and v*. If rounding errors prevent any further decrease of h, x does not move.
    """

    derivative_groups = ("inner_grad",), OUTER, ("cross",)
    complexity = Complexity("none")

    def configure(self, problem: BilevelProblem) -> Self:
        if problem.exact_solver is None:
            raise ValueError(
                "`Exact` needs a strongly convex inner level; if the inner loss is, build the problem with "
                "`strongly_convex=True`."
            )
        return replace(self, **UNUSED)

    def init(self, oracles: Oracles, start: Point) -> ExactState:
        d = flat(start.outer_var).size
        calls = FullBatch(oracles, start).calls
        return ExactState(start, np.array(np.nan), np.full(d, np.nan), np.zeros((_PAIRS, 2, d)), calls)

    def warm_up(self, oracles: Oracles, start: Point) -> None:
        super().warm_up(oracles, start)
        full = FullBatch(oracles, start)
        z, x, v = full.vectors()
        full.product(z, x, v) if z.size > _LARGEST_MATRIX else full.hessian(z, x)

    @np.errstate(all="ignore")  # an overflow is detected in the result
    def step(self, oracles: Oracles, state: ExactState, index: int) -> ExactState:
        full = FullBatch(oracles, state.point, state.calls)
        evaluate = _ValueFunction(full)
        h, (z, x, v) = remember_last(evaluate), full.vectors()
        here = h(x) if index == 0 else Evaluation(x, z, v, float(state.value), np.asarray(state.grad))
        box = (-np.inf, np.inf) if oracles.outer_bounds is None else tuple(map(flat, oracles.outer_bounds))
        free, pairs = _free(here, box), np.asarray(state.pairs)
        curved = [pair for pair in pairs * free if _is_curved(*pair)]  # unused rows of `pairs` are 0
        direction = np.where(free, _direction(here.grad * free, curved), 0.0)
        search = _search_line if oracles.outer_bounds is None else partial(_search_projected, box)
        found = search(h, here, direction) if here.grad @ direction < 0 else None
        if found is None:
            found, pairs = evaluate(x), np.zeros_like(pairs)
        elif _is_curved(found.x - here.x, found.grad - here.grad):
            pairs = np.concatenate([pairs[1:], [[found.x - here.x, found.grad - here.grad]]])
        point = full.point(found.z, found.x, found.v)
        return ExactState(point, np.array(found.value), found.grad, pairs, full.calls)


def _is_curved(move: np.ndarray, change: np.ndarray) -> bool:
    """Return True if a pair has positive curvature, as a descent direction requires."""
    return bool(move @ change > _ROUNDING * (change @ change))


def _direction(grad: np.ndarray, pairs: list[np.ndarray]) -> np.ndarray:
    """Return -B ∇h by the two-loop recursion of L-BFGS; without pairs, a gradient step of length at most 1."""
    if not pairs:
        return -grad / max(1.0, float(np.linalg.norm(grad)))
    ahead, weights = grad, []
    for move, change in reversed(pairs):
        weights.append(move @ ahead / (move @ change))
        ahead = ahead - weights[-1] * change
    move, change = pairs[-1]
    ahead = move @ change / (change @ change) * ahead
    for move, change in pairs:
        ahead = ahead + (weights.pop() - change @ ahead / (move @ change)) * move
    return -ahead


def _free(here: Evaluation, box: tuple) -> np.ndarray:
    """Return the coordinates that ∇h does not push against a bound."""
    low, high = here.x <= box[0], here.x >= box[1]
    return ~((low & (here.grad > 0)) | (high & (here.grad < 0)))


def _is_level(ahead: Evaluation, here: Evaluation) -> bool:
    """Return True if two values are equal to rounding; a search then compares gradients instead."""
    return bool(abs(ahead.value - here.value) <= 10 * _ROUNDING * abs(here.value))


def _search_projected(
    box: tuple, h: Callable[[np.ndarray], Evaluation], here: Evaluation, direction: np.ndarray
) -> Evaluation | None:
    """Return a better point on the projected ray, or None; steps that are too short are doubled, others halved."""
    best: Evaluation | None = None
    length, halved = 1.0, False
    for _ in range(_SEARCH_STEPS):
        ahead = h(np.clip(here.x + length * direction, *box))
        if _is_level(ahead, here):
            norm, norm_here = (np.linalg.norm(at.grad[_free(at, box)]) for at in (ahead, here))
            return ahead if norm < norm_here else best
        enough = ahead.value <= here.value + _DECREASE * (here.grad @ (ahead.x - here.x))
        if enough and (best is None or ahead.value < best.value):
            best = ahead
            if halved or ahead.grad @ (direction * _free(ahead, box)) >= _CURVATURE * (here.grad @ direction):
                break
            length = 2 * length
        elif best is None:
            length, halved = length / 2, True
        else:
            break
    return best


def _search_line(h: Callable[[np.ndarray], Evaluation], here: Evaluation, direction: np.ndarray) -> Evaluation | None:
    """Return a better point on the ray, or None."""
    from scipy.optimize import line_search

    ahead = h(here.x + direction)
    if _is_level(ahead, here):
        return ahead if np.linalg.norm(ahead.grad) < np.linalg.norm(here.grad) else None
    value, grad, start = lambda x: h(x).value, lambda x: h(x).grad, (here.x, direction, here.grad, here.value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a failed search also returns None
        length = line_search(value, grad, *start, maxiter=_SEARCH_STEPS)[0]
    return None if length is None else h(here.x + length * direction)


class _ValueFunction:
    """h and ∇h. Each evaluation starts at the z and v of the previous one; h is inf if the inner solve fails."""

    def __init__(self, full: FullBatch) -> None:
        self.full = full
        self.z, _, self.v = full.vectors()

    def __call__(self, x: np.ndarray) -> Evaluation:
        try:
            found = newton(
                lambda z: self.full.evaluate(("inner_grad",), z, x)[0], partial(self._system, x), self.z, _SMALL
            )
            z = found.z
            value, outer_grad, outer_grad_outer = self.full.evaluate(OUTER, z, x)
            v, _ = solve_adjoint(found, value.item(), outer_grad, self.v)
        except (np.linalg.LinAlgError, ValueError):
            unsolved = np.full_like(self.z, np.nan)
            return Evaluation(x, unsolved, unsolved, np.inf, np.full_like(x, np.nan))
        (cross,) = self.full.evaluate(("cross",), z, x, v)
        self.z, self.v = z, v
        return Evaluation(x, z, v, value.item(), cross + outer_grad_outer)

    def _system(self, x: np.ndarray, z: np.ndarray) -> System:
        """Return ∇²zz G, as a matrix if it is small enough, otherwise by its products."""
        if z.size <= _LARGEST_MATRIX:
            return System.dense(self.full.hessian(z, x))

        def solve(right_side: np.ndarray, accuracy: float) -> np.ndarray:
            guess = np.zeros_like(right_side)
            return self.full.conjugate_gradients(z, x, right_side, guess, rtol=accuracy, atol=0.0)

        return System(solve, partial(self.full.product, z, x))

"""Exact: quasi-Newton steps on h with exact hypergradients, the baseline without any sampling.

Liu, Nocedal. On the limited memory BFGS method for large scale optimization. Mathematical Programming, 1989.

    z* : z ← z - t (∇²zz G)⁻¹ ∇z G until ||∇z G|| <= 1e-12 ||(∇²zz G) z||      from the last z
    v* = -(∇²zz G)⁻¹ ∇z F;   h = F;   ∇h = (∇²xz G) v* + ∇x F                 one evaluation
    x ← x - t B ∇h,   B from the last 10 moves, t by the strong Wolfe conditions   one step

Within bounds, where P projects: coordinates that ∇h pushes against a bound stay, B is that of the others, and
x ← P(x - t B ∇h), t by the weak Wolfe conditions along this bent path.

Cost: n ∇z G per trial of a Newton step, p n products per matrix (one at each Newton iterate), and per evaluation
n cross products, m of each gradient of F and m values. Above p = 2000 conjugate gradients solve the systems to
1e-12, for n per product. Memory: p² + 20 d.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from bilevel._tree import flat
from bilevel._types import Calls, Point
from bilevel.oracles import Oracles
from bilevel.solvers.base import solver
from bilevel.solvers.host import AllRows, HostSolver
from bilevel.solvers.parameters import one_of

_OUTER = ("outer_value", "outer_grad", "outer_grad_outer")
_PAIRS = 10
_LARGEST_MATRIX = 2000
_SMALL = 1e-12
_ROUNDING = float(np.finfo(np.float64).eps)
_NEWTON_STEPS, _HALVINGS, _SEARCH_STEPS = 100, 30, 20
_DECREASE, _CURVATURE = 1e-4, 0.9  # of Wolfe's conditions

Pairs = list[tuple[np.ndarray, np.ndarray]]  # moves of x and changes of ∇h, oldest first
Solve = Callable[[np.ndarray, np.ndarray], np.ndarray]  # from a right side and a guess


class ExactState(NamedTuple):
    """(z*, x, v*) with h and ∇h there, the last moves of x and changes of ∇h (newest last), and the ledger."""

    point: Point
    value: np.ndarray
    grad: np.ndarray
    moves: np.ndarray
    changes: np.ndarray
    n_pairs: np.ndarray
    calls: np.ndarray


class Evaluation(NamedTuple):
    """h and ∇h at x, with what gave them."""

    x: np.ndarray
    z: np.ndarray
    v: np.ndarray
    value: float
    grad: np.ndarray


@solver
class Exact(HostSolver):
    """L-BFGS with exact hypergradients.

    It works in float64 whatever the dtype of the problem, and on all rows: `step_size`, `outer_ratio` and
    `batch_size` have no effect. A step is one iteration with its line search. What it costs is known only once
    it is taken, so a run ends with the first step that reaches `max_calls`. In the history, `inner_residual_sq`
    and `v_residual_sq` are the squared residuals of z* and v*. At the floor of its arithmetic it stays where it
    is.

    Parameters
    ----------
    sampling : "full" only
    """

    sampling: str = one_of(("full",), default="full", kw_only=True)

    def init(self, oracles: Oracles, start: Point) -> ExactState:
        """Start where the problem starts; h is first evaluated by the first step."""
        d = flat(start.outer_var).size
        return ExactState(
            point=start,
            value=np.array(np.nan),
            grad=np.full(d, np.nan),
            moves=np.zeros((_PAIRS, d)),
            changes=np.zeros((_PAIRS, d)),
            n_pairs=np.array(0),
            calls=np.zeros(len(Calls._fields), np.int64),
        )

    def warm_up(self, oracles: Oracles, start: Point) -> None:
        """Ask once for everything that an evaluation asks for."""
        import scipy.optimize  # noqa: F401

        rows = AllRows(oracles, start, np.zeros(len(Calls._fields)))
        z, x, v = (flat(part) for part in start)
        for kinds in (("inner_grad",), _OUTER, ("cross",)):
            rows.ask(kinds, z, x, v)
        rows.product(z, x, v) if z.size > _LARGEST_MATRIX else rows.hessian(z, x)

    @np.errstate(all="ignore")  # what overflows is seen in the result
    def step(self, oracles: Oracles, state: ExactState, index: int) -> ExactState:
        """Move along the quasi-Newton direction; where no point on it is better, forget the pairs."""
        rows = AllRows(oracles, state.point, state.calls)
        h = _ValueFunction(rows)
        x = flat(state.point.outer_var)
        known = Evaluation(x, h.z, h.v, float(state.value), np.asarray(state.grad))
        here = h(x) if index == 0 else known
        pairs, box = _pairs(state), _Box(oracles, x)
        free = box.free(here)
        direction = np.where(free, _direction(here.grad * free, _among(pairs, free)), 0.0)
        found = _searched(h, here, direction) if box.is_everything else _searched_inside(h, here, direction, box)
        if found is None:
            return _state(h.anew(x), [], rows)
        move, change = found.x - here.x, found.grad - here.grad
        # A pair without positive curvature would spoil the descent.
        if move @ change > _ROUNDING * (change @ change):
            pairs = [*pairs, (move, change)][-_PAIRS:]
        return _state(found, pairs, rows)


def _pairs(state: ExactState) -> Pairs:
    oldest = _PAIRS - int(state.n_pairs)
    return list(zip(np.asarray(state.moves)[oldest:], np.asarray(state.changes)[oldest:], strict=True))


def _state(here: Evaluation, pairs: Pairs, rows: AllRows) -> ExactState:
    memory = np.zeros((2, _PAIRS, here.x.size))
    for place, pair in enumerate(pairs, start=_PAIRS - len(pairs)):
        memory[:, place] = pair
    return ExactState(
        point=rows.point(here.z, here.x, here.v),
        value=np.array(here.value),
        grad=here.grad,
        moves=memory[0],
        changes=memory[1],
        n_pairs=np.array(len(pairs)),
        calls=rows.calls,
    )


def _direction(grad: np.ndarray, pairs: Pairs) -> np.ndarray:
    """Return -B ∇h by the two loops of L-BFGS; without a pair, a gradient step of length at most 1."""
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


def _among(pairs: Pairs, free: np.ndarray) -> Pairs:
    """Return the pairs of some coordinates, where they have positive curvature among themselves."""
    if free.all():
        return pairs
    parts = [(move * free, change * free) for move, change in pairs]
    return [(move, change) for move, change in parts if move @ change > _ROUNDING * (change @ change)]


class _Box:
    """The bounds of x, infinite where there are none."""

    def __init__(self, oracles: Oracles, x: np.ndarray) -> None:
        self.is_everything = oracles.outer_bounds is None
        bounds = (-np.inf, np.inf) if oracles.outer_bounds is None else map(flat, oracles.outer_bounds)
        self.lower, self.upper = (np.broadcast_to(bound, x.shape) for bound in bounds)

    def clipped(self, x: np.ndarray) -> np.ndarray:
        """Return the nearest point inside."""
        return np.clip(x, self.lower, self.upper)

    def free(self, here: Evaluation) -> np.ndarray:
        """Return the coordinates that ∇h does not push against a bound."""
        low, high = here.x <= self.lower, here.x >= self.upper
        return ~((low & (here.grad > 0)) | (high & (here.grad < 0)))

    def norm(self, here: Evaluation) -> float:
        """Return ||∇h|| among the free coordinates."""
        return float(np.linalg.norm(here.grad[self.free(here)]))


def _searched_inside(h: "_ValueFunction", here: Evaluation, direction: np.ndarray, box: _Box) -> Evaluation | None:
    """Return a better point on the ray bent by the bounds, or None; too short a step is doubled, too long halved."""
    slope = here.grad @ direction
    if not slope < 0:
        return None
    best: Evaluation | None = None
    length, halved = 1.0, False
    for _ in range(_SEARCH_STEPS):
        ahead = h(box.clipped(here.x + length * direction))
        if abs(ahead.value - here.value) <= 10 * _ROUNDING * abs(here.value):
            return ahead if box.norm(ahead) < box.norm(here) else best
        enough = ahead.value <= here.value + _DECREASE * (here.grad @ (ahead.x - here.x))
        if enough and (best is None or ahead.value < best.value):
            best = ahead
            if halved or ahead.grad @ (direction * box.free(ahead)) >= _CURVATURE * slope:
                break
            length = 2 * length
        elif best is None:
            length, halved = length / 2, True
        else:
            break
    return best


def _searched(h: "_ValueFunction", here: Evaluation, direction: np.ndarray) -> Evaluation | None:
    """Return a better point on the ray, or None."""
    from scipy.optimize import line_search

    if not here.grad @ direction < 0:
        return None
    ahead = h(here.x + direction)
    # Values that rounding makes equal cannot guide a search; gradients still can.
    if abs(ahead.value - here.value) <= 10 * _ROUNDING * abs(here.value):
        return ahead if np.linalg.norm(ahead.grad) < np.linalg.norm(here.grad) else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a search that fails says so by its result as well
        length = line_search(
            lambda x: h(x).value,
            lambda x: h(x).grad,
            here.x,
            direction,
            here.grad,
            here.value,
            maxiter=_SEARCH_STEPS,
        )[0]
    return None if length is None else h(here.x + length * direction)


class _ValueFunction:
    """h and ∇h; an evaluation starts from z and v of the one before it, and the last one is remembered."""

    def __init__(self, rows: AllRows) -> None:
        self.rows = rows
        self.z, self.v = flat(rows.like.inner_var), flat(rows.like.v)
        self.last: Evaluation | None = None

    def __call__(self, x: np.ndarray) -> Evaluation:
        """Return the evaluation at x."""
        if self.last is None or not np.array_equal(x, self.last.x):
            self.last = self.anew(x)
        return self.last

    def anew(self, x: np.ndarray) -> Evaluation:
        """Evaluate; h is infinite where the inner problem cannot be solved."""
        try:
            return self._evaluated(x)
        except (np.linalg.LinAlgError, ValueError):
            nothing = np.full_like(self.z, np.nan)
            return Evaluation(x, nothing, nothing, np.inf, np.full_like(x, np.nan))

    def _evaluated(self, x: np.ndarray) -> Evaluation:
        z, solve = self._minimizer(x)
        value, outer_grad, outer_grad_outer = self.rows.ask(_OUTER, z, x)
        v = -solve(outer_grad, -self.v)
        (cross,) = self.rows.ask(("cross",), z, x, v)
        self.z, self.v = z, v
        return Evaluation(x, z, v, value.item(), cross + outer_grad_outer)

    def _minimizer(self, x: np.ndarray) -> tuple[np.ndarray, Solve]:
        """Return z* and how to solve systems there, by Newton steps until rounding stops them."""
        z = self.z
        (grad,) = self.rows.ask(("inner_grad",), z, x)
        for _ in range(_NEWTON_STEPS):
            product, solve = self._system(z, x)
            if np.linalg.norm(grad) <= _SMALL * np.linalg.norm(product(z)):
                return z, solve
            if not np.all(np.isfinite(grad)):
                break
            move = solve(grad, np.zeros_like(z))
            trial = self._damped(z, x, grad, move)
            if trial is None:
                return z, solve
            z, grad = trial
        raise np.linalg.LinAlgError("Newton's method did not reach the inner solution.")

    def _damped(
        self, z: np.ndarray, x: np.ndarray, grad: np.ndarray, move: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Halve the step until the gradient falls; None where only rounding is left of the step."""
        for _ in range(_HALVINGS):
            if np.linalg.norm(move) <= 4 * _ROUNDING * np.linalg.norm(z):
                return None
            (trial_grad,) = self.rows.ask(("inner_grad",), z - move, x)
            if np.linalg.norm(trial_grad) < np.linalg.norm(grad):
                return z - move, trial_grad
            move = move / 2
        return None

    def _system(self, z: np.ndarray, x: np.ndarray) -> tuple[Callable[[np.ndarray], np.ndarray], Solve]:
        """Return products with ∇²zz G and solutions of its systems."""
        if z.size > _LARGEST_MATRIX:
            return partial(self.rows.product, z, x), partial(self.rows.conjugate_gradients, z, x, rtol=_SMALL, atol=0.0)
        from scipy.linalg import cho_factor, cho_solve

        hessian = self.rows.hessian(z, x)
        factor = cho_factor(hessian)
        return partial(np.matmul, hessian), lambda right_side, guess: cho_solve(factor, right_side)

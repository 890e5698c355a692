"""Strengths of absolute values and of squares, learned over folds: coarse paths, then L-BFGS-B from the best point.

The held-out loss is continuous in the strengths, but its derivative jumps where a coefficient becomes zero. A line
search may end at such a place: the best point that was evaluated counts, wherever the search ended.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize

from bilevel.estimators.comparison import OUTER_FOLDS, Comparison, Race, join_losses
from bilevel.estimators.selection import Fits, Folds, Learned, Objective, Structure
from bilevel.estimators.sparse_models import OutOfWork, SparseModel

RATIOS = {0.3: 0, 1e-2: -1, 10.0: 1}  # an elastic net, nearly the lasso, nearly ridge; points from the best to begin at
_PATH = 0.5 ** np.arange(0.5, 13)  # parts of the strength that leaves no coefficient
_ROWS = 500  # that are held out along a path; a path is there for a start alone
_RISES, _CLEAR = 2, 5.0  # a path ends after so many rises in a row, or so many nats above its best value
_AHEAD = 2.0  # nats by which a path must be ahead of the first, for each row that no fold holds out beside one that is
_ROUGH, _FINE = 5e-2, 1e-4  # tolerance of fits along a path, and where derivatives are taken
_ENDLESS = 300.0  # the logarithm of a strength beside which no loss counts
_FIRST_STEP, _REACH = 0.5, 1.5  # of a log strength: how far the first step goes, and how far a round of L-BFGS-B
_FACTORS = np.log([[1e-5, 1.5], [1e-6, 1e3]])  # bounds of both strengths in their units
_MOST_NONZERO = 1500  # coefficients; strengths that leave more of them are not searched
_LEAST_WORK, _PASSES = 4e11, 300  # multiplications that a search may take in any case, and passes over X per iteration


class StrengthStructure(Structure):
    """Both kinds of strengths, half of the free variables each; each half may spread around its own mean."""

    @classmethod
    def tie(cls, name: str, norms: np.ndarray, squares: np.ndarray, prior_scale: float = np.inf) -> "StrengthStructure":
        """Join the groups of the strengths of either kind, both from 0 on."""
        return cls(name, np.concatenate([norms, norms.max() + 1 + squares]), prior_scale)

    def prior(self, log_penalties: np.ndarray) -> tuple[float, np.ndarray]:
        halves = log_penalties.reshape(2, -1)
        centered = (halves - halves.mean(axis=1, keepdims=True)).ravel()
        return float(centered @ centered) / (2 * self.prior_scale**2), centered / self.prior_scale**2


class Units(NamedTuple):
    """The least strength of absolute values that leaves no coefficient, and the mean curvature of the loss; or 1."""

    norms: float
    squares: float
    empty: Fits
    slope: float  # at zero

    def bounds(self) -> np.ndarray:
        """Return the least and the largest log strength of either kind."""
        return np.log([[self.norms], [self.squares]]) + _FACTORS


def measure_units(model: SparseModel, weights: np.ndarray) -> Units:
    """Fit intercepts alone, and take gradients and curvatures there."""
    empty = model.fit(weights, np.full(model.n_penalties, _ENDLESS))
    gradients = [solved.loss.gradient(solved.solution.eta)[0] for solved in empty.state.solved]
    bend = np.mean(weights[..., None] * model.loss.curvature(model.y, empty.predictor), axis=(0, 2))
    slope = max(model.largest_slope(gradient) for gradient in gradients)
    return Units(slope or 1.0, model.columns.mean_squares(bend) or 1.0, empty, slope)


class _Tracked:
    """J in units in which the first step is short, less its first value; the best point is kept.

    Where all variables are bounded, L-BFGS-B first goes as far as the gradient, which may be hundreds of nats.
    """

    def __init__(self, objective: Objective, start: np.ndarray) -> None:
        self.objective = objective
        self.first, slope = objective(start)
        self.scale = max(np.abs(slope).max() / _FIRST_STEP, 1e-12)
        assert objective.fits is not None
        self.best = start, self.first, objective.fits

    def __call__(self, log_strengths: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = self.objective(log_strengths)
        if value < self.best[1]:
            assert self.objective.fits is not None
            self.best = log_strengths.copy(), value, self.objective.fits
        return (value - self.first) / self.scale, gradient / self.scale


class StrengthSearch:
    """The search for strengths of one model on some folds.

    Parameters
    ----------
    tol : stop where an iteration gains less than this, in nats
    max_iter : most iterations of L-BFGS-B; the work of a search is limited to `_PASSES` passes over X per iteration

    Attributes
    ----------
    out_of_work : whether a search ended at that limit, with the best point until then
    """

    def __init__(self, model: SparseModel, folds: Folds, *, tol: float, max_iter: int) -> None:
        self.model, self.folds, self.tol, self.max_iter = model, folds, tol, max_iter
        self._most_work, self.out_of_work = _LEAST_WORK + _PASSES * max_iter * model.X.size * model.outputs, False
        squares = len(model.penalized)
        self.single = StrengthStructure.tie(
            "single", np.zeros(model.n_penalties - squares, int), np.zeros(squares, int)
        )
        self.units = measure_units(model, folds.fitted)
        self.bounds, self._too_many = self.units.bounds(), False
        held_out = np.cumsum((folds.held_out > 0).sum(axis=1))
        self._some = folds.only(np.flatnonzero(np.append(0, held_out[:-1]) < _ROWS))

    def learn_single(self) -> Learned:
        """Follow paths from strong strengths to weak ones, and refine the best point."""
        empty = Learned(self.single, np.log(self.units[:2]), np.inf, self.units.empty, [np.inf], True)
        if not self.units.slope:  # no strengths, however weak, let a coefficient leave zero
            return empty._replace(value=0.0, values=[0.0])
        found: list[Learned] = []
        with self._limit_work(self._most_work / 2):
            for ratio in RATIOS:
                found += self._follow_path(ratio, found[0] if found else None)
                if len(found) > 1 and found[-1].value < found[0].value - _CLEAR:
                    break  # where weaker squares help, stronger ones would not
        rows, some = (np.count_nonzero(part.held_out.any(axis=0)) for part in (self.folds, self._some))
        lead = _AHEAD * (rows / some - 1)
        best = min(found, key=lambda path: path.value + lead * (path is not found[0]), default=empty)
        if self._too_many:  # further down than the next step of the path, coefficients would be too many
            self.bounds[0, 0] = max(self.bounds[0, 0], best.log_penalties[0] - np.log(2))
        return self.learn(self.single, best.log_penalties, best)

    def _follow_path(self, ratio: float, near: Learned | None) -> list[Learned]:
        """Return the best point, if work is left for any, with each fit started from the last."""
        objective, rises, best = Objective(self.model, self._some, self.single, near and near.fits), 0, None
        place = near.log_penalties[0] - np.log(_PATH * self.units.norms) if near else np.zeros(1)
        first = np.clip(np.argmin(np.abs(place)) + RATIOS[ratio], 0, len(_PATH) - 1)
        with self._up_to(_ROUGH):
            for factor in _PATH[first:]:
                log_strengths = np.log([factor * self.units.norms, factor * ratio * self.units.squares])
                try:
                    value = objective.value(log_strengths)
                except OutOfWork:
                    self.out_of_work = True
                    break
                assert objective.fits is not None
                if best and max(solved.solution.size for solved in objective.fits.state.solved) > _MOST_NONZERO:
                    self._too_many = True
                    break
                if best is None or value < best.value:
                    best = Learned(self.single, log_strengths, value, objective.fits, objective.values, True)
                rises = rises + 1 if value > min(objective.values[-2:]) else 0
                if rises == _RISES or value > best.value + _CLEAR:
                    break
        return [best] if best else []

    @contextmanager
    def _limit_work(self, most: float) -> Iterator[None]:
        """Limit the work of fits for a while; fits that would take more of it end the block."""
        self.model.work_left = most
        try:
            yield
        except OutOfWork:
            self.out_of_work = True
        finally:
            self.model.work_left = np.inf

    @contextmanager
    def _up_to(self, tol: float) -> Iterator[None]:
        """Let fits be less exact meanwhile."""
        before, self.model.tol = self.model.tol, tol
        try:
            yield
        finally:
            self.model.tol = before

    def learn(self, structure: Structure, start: np.ndarray, before: Learned, folds: Folds | None = None) -> Learned:
        """Minimize J by L-BFGS-B, and return the best point of all."""
        objective = Objective(self.model, folds or self.folds, structure, before.fits)
        bounds = np.repeat(self.bounds, len(start) // 2, axis=0).T
        with self._up_to(_FINE):
            tracked, last, converged = _Tracked(objective, np.clip(start, *bounds)), np.inf, True
            options = {"maxiter": self.max_iter, "ftol": self.tol / tracked.scale, "gtol": self.tol / tracked.scale}
            with self._limit_work(self._most_work / (2 * OUTER_FOLDS if folds else 2)):
                while tracked.best[1] < last - self.tol:  # a step too long costs more than all others
                    point, last = tracked.best[:2]
                    box = np.clip(point + np.array([[-_REACH], [_REACH]]), *bounds[:, None])
                    found = minimize(tracked, point, jac=True, method="L-BFGS-B", bounds=box.T, options=options)
                    converged = found.status != 1
                    if np.all((tracked.best[0] > box[0]) & (tracked.best[0] < box[1])):
                        break
        return Learned(structure, *tracked.best, objective.values, converged)

    def learn_structure(self, structure: Structure, single: Learned, folds: Folds | None = None) -> Learned:
        """Learn a structure from the strengths that all features share."""
        return self.learn(structure, np.repeat(single.log_penalties, structure.size // 2), single, folds)

    def compare(self, structures: Sequence[Structure], single: Learned) -> Comparison | None:
        """Compare structures with shared strengths on rows that neither were learned by; None with too few folds."""
        race = Race([self.single, *structures], self.model.loss)
        for folds in self.folds.by_shuffle():
            pairs = folds.nested(OUTER_FOLDS)
            if pairs and not race.decided:
                losses = [
                    self._nested_losses(*pair, [race.structures[k] for k in race.open.tolist()], single)
                    for pair in pairs
                ]
                race.add(*join_losses(losses, [outer.held_out[0] for _, outer in pairs]))
        return race.result("nested folds") if pairs else None

    def _nested_losses(self, inner: Folds, outer: Folds, structures: Sequence[Structure], near: Learned) -> np.ndarray:
        shared = self.learn(self.single, near.log_penalties, near, inner)
        found = [shared, *(self.learn_structure(structure, shared, inner) for structure in structures[1:])]
        return np.array([self._row_losses(learned, outer.fitted) for learned in found])

    def _row_losses(self, learned: Learned, weights: np.ndarray) -> np.ndarray:
        fits = self.model.fit(weights, learned.log_penalties[learned.structure.groups], learned.fits)
        return self.model.loss.value(self.model.y, fits.predictor)[0]

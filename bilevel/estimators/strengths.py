"""Strengths of absolute values and of squares, learned over folds: coarse paths, then L-BFGS-B from the best point.

The held-out loss is continuous in the strengths, but its derivative jumps where a coefficient becomes zero. A line
search may end at such a place: the best point that was evaluated counts, wherever the search ended.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize

from bilevel.estimators.choice import Comparison, compare
from bilevel.estimators.selection import Fits, Folds, Learned, Objective, Structure
from bilevel.estimators.sparse_models import SparseModel

RATIOS = 0.3, 1e-2, 10.0  # of both strengths in their units: an elastic net, nearly the lasso, nearly ridge
_PATH = 0.5 ** np.arange(0.5, 13)  # parts of the strength that leaves no coefficient
_RISES, _CLEAR = 2, 5.0  # a path ends after so many rises in a row, or so many nats above its best value
_ROUGH, _FINE = 1e-3, 1e-6  # tolerance of fits along a path, and where derivatives are taken
_ENDLESS = 300.0  # the logarithm of a strength beside which no loss counts
_FIRST_STEP = 0.5  # of a log strength
_FACTORS = np.log([1e-5, 1.5]), np.log([1e-6, 1e3])  # bounds of both strengths in their units


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
    """The least strength of absolute values that leaves no coefficient, and the mean curvature of the loss."""

    norms: float
    squares: float
    empty: Fits

    def bounds(self, size: int) -> list[tuple[float, float]]:
        """Return the bounds of log strengths, half of each kind."""
        ends = [np.log(unit) + factors for unit, factors in zip(self[:2], _FACTORS, strict=True)]
        return [(low, high) for low, high in ends for _ in range(size // 2)]


def measure_units(model: SparseModel, weights: np.ndarray) -> Units:
    """Fit intercepts alone, and take gradients and curvatures there."""
    empty = model.fit(weights, np.full(model.n_penalties, _ENDLESS))
    gradients = [solved.loss.gradient(solved.solution.eta)[0] for solved in empty.state.solved]
    bend = np.mean(weights[..., None] * model.loss.curvature(model.y, empty.predictor), axis=(0, 2))
    norms = max(model.largest_slope(gradient) for gradient in gradients)
    return Units(norms or 1.0, float(model.columns.mean_squares(bend)) or 1.0, empty)


class StrengthSearch:
    """The search for strengths of one model on some folds.

    Parameters
    ----------
    tol : stop where an iteration gains less than this, in nats
    """

    def __init__(self, model: SparseModel, folds: Folds, *, tol: float, max_iter: int) -> None:
        self.model, self.folds, self.tol, self.max_iter = model, folds, tol, max_iter
        squares = len(model.penalized)
        self.single = StrengthStructure.tie(
            "single", np.zeros(model.n_penalties - squares, int), np.zeros(squares, int)
        )
        self.units = measure_units(model, folds.fitted)

    def learn_single(self) -> Learned:
        """Follow paths from strong strengths to weak ones, and refine the best point."""
        found: list[Learned] = []
        for ratio in RATIOS:
            found.append(self._follow_path(ratio))
            if len(found) > 1 and found[-1].value < found[0].value - _CLEAR:
                break  # where weaker squares help, stronger ones would not
        best = min(found, key=lambda path: path.value)
        return self.learn(self.single, best.log_penalties, best)

    def _follow_path(self, ratio: float) -> Learned:
        """Return the best point, with each fit started from the last."""
        objective, rises, best = Objective(self.model, self.folds, self.single, self.units.empty), 0, None
        with self._up_to(_ROUGH):
            for factor in _PATH:
                log_strengths = np.log([factor * self.units.norms, factor * ratio * self.units.squares])
                value = objective.value(log_strengths)
                assert objective.fits is not None
                if best is None or value < best.value:
                    best = Learned(self.single, log_strengths, value, objective.fits, objective.values, True)
                rises = rises + 1 if value > min(objective.values[-2:]) else 0
                if rises == _RISES or value > best.value + _CLEAR:
                    break
        assert best is not None
        return best

    @contextmanager
    def _up_to(self, tol: float) -> Iterator[None]:
        """Let fits be less exact meanwhile."""
        before, self.model.tol = self.model.tol, tol
        yield
        self.model.tol = before

    def learn(self, structure: Structure, start: np.ndarray, before: Learned, folds: Folds | None = None) -> Learned:
        """Minimize J by L-BFGS-B, and return the best point of all."""
        objective = Objective(self.model, folds or self.folds, structure, before.fits)
        # Where all variables are bounded, the first step is as long as the gradient, which may be hundreds of nats.
        first, slope = objective(start)
        assert objective.fits is not None
        best, scale = (first, start, objective.fits), max(np.abs(slope).max() / _FIRST_STEP, 1e-12)

        def evaluate(log_strengths: np.ndarray) -> tuple[float, np.ndarray]:
            nonlocal best
            value, gradient = objective(log_strengths)
            if value < best[0]:
                assert objective.fits is not None
                best = value, log_strengths.copy(), objective.fits
            return (value - first) / scale, gradient / scale

        options = {"maxiter": self.max_iter, "ftol": self.tol / scale, "gtol": self.tol / scale}
        bounds = self.units.bounds(len(start))
        with self._up_to(_FINE):
            found = minimize(evaluate, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
        value, log_strengths, fits = best
        return Learned(structure, log_strengths, value, fits, objective.values, found.status != 1)

    def learn_structure(self, structure: Structure, single: Learned, folds: Folds | None = None) -> Learned:
        """Learn a structure from the strengths that all features share."""
        return self.learn(structure, np.repeat(single.log_penalties, structure.size // 2), single, folds)

    def compare(self, structures: Sequence[Structure], single: Learned) -> Comparison:
        """Compare structures with shared strengths on rows that neither were learned by."""
        losses, weights = [], []
        for fold in range(len(self.folds.fitted)):
            inner, outer = self.folds.without(np.array([fold])), self.folds.join(np.array([fold]))
            rows = outer.held_out[0]
            if len(inner.fitted) and outer.fitted.any():
                shared = self.learn(self.single, single.log_penalties, single, inner)
                found = [shared, *(self.learn_structure(structure, shared, inner) for structure in structures)]
                losses.append([self._row_losses(learned, outer.fitted)[rows > 0] for learned in found])
                weights.append(rows[rows > 0])
        together = np.concatenate(losses, axis=1), np.concatenate(weights)
        return compare([self.single, *structures], "nested folds", *together, self.model.loss.has_scale)

    def _row_losses(self, learned: Learned, weights: np.ndarray) -> np.ndarray:
        fits = self.model.fit(weights, learned.log_penalties[learned.structure.groups], learned.fits)
        return self.model.loss.value(self.model.y, fits.predictor)[0]

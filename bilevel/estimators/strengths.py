"""Strengths of absolute values and of squares, learned over folds: coarse paths, then L-BFGS-B from the best point.

The held-out loss is continuous in the strengths, but its derivative jumps where a coefficient becomes zero. A line
search may end at such a place: the best point that was evaluated counts, wherever the search ended.
"""

from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize

from bilevel.estimators.selection import Fits, Folds, Learned, Objective, Structure, held_out_loss
from bilevel.estimators.sparse_models import SparseModel

RATIOS = 1e-2, 0.3, 10.0  # of both strengths in their units: nearly the lasso, an elastic net, nearly ridge
_PATH = 0.5 ** np.arange(0.5, 13)  # parts of the strength that leaves no coefficient
_RISES = 2  # steps in a row that end a path
_ENDLESS = 300.0  # the logarithm of a strength beside which no loss counts
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
    _, losses, solutions = empty.state
    gradients = [loss.gradient(solution.eta)[0] for loss, solution in zip(losses, solutions, strict=True)]
    bend = np.mean(weights[..., None] * model.loss.curvature(model.y, empty.predictor), axis=(0, 2))
    norms = max(model.largest_slope(gradient) for gradient in gradients)
    return Units(norms or 1.0, float(model.columns.mean_squares(bend)) or 1.0, empty)


class Searched(NamedTuple):
    """The best point of a search so far."""

    log_strengths: np.ndarray
    value: float
    fits: Fits


def follow_paths(model: SparseModel, folds: Folds, single: Structure, units: Units) -> Searched:
    """Return the best point of some paths from strong penalties to weak ones, each fit started from the last."""
    paths = [_follow_path(model, folds, single, units, ratio) for ratio in RATIOS]
    return min(paths, key=lambda found: found.value)


def _follow_path(model: SparseModel, folds: Folds, single: Structure, units: Units, ratio: float) -> Searched:
    best, fits, rises, last = None, units.empty, 0, np.inf
    for factor in _PATH:
        log_strengths = np.log([factor * units.norms, factor * ratio * units.squares])
        fits = model.fit(folds.fitted, log_strengths[single.groups], fits)
        value, _ = held_out_loss(model.loss, model.y, folds.held_out, fits.predictor)
        if best is None or value < best.value:
            best = Searched(log_strengths, value, fits)
        rises, last = rises + 1 if value > last else 0, value
        if rises == _RISES:
            break
    assert best is not None
    return best


def learn_strengths(
    model: SparseModel,
    folds: Folds,
    structure: Structure,
    start: Searched,
    bounds: list[tuple[float, float]],
    *,
    tol: float,
    max_iter: int,
) -> Learned:
    """Minimize J by L-BFGS-B until an iteration gains less than `tol` nats, and return the best point of all."""
    objective, best = Objective(model, folds, structure, start.fits), start

    def evaluate(log_strengths: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal best
        value, gradient = objective(log_strengths)
        if value < best.value:
            assert objective.fits is not None
            best = Searched(log_strengths.copy(), value, objective.fits)
        return value, gradient

    options = {"maxiter": max_iter, "ftol": tol / max(1.0, abs(start.value)), "gtol": tol}
    found = minimize(evaluate, start.log_strengths, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    return Learned(structure, best.log_strengths, best.value, best.fits, objective.values, found.status != 1)

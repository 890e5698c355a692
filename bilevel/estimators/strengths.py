"""Strengths of absolute values and of squares, learned over folds: coarse paths, then L-BFGS-B from the best point.

The held-out loss is continuous in the strengths, but its derivative jumps where a coefficient becomes zero. A line
search may end at such a place: the best point that was evaluated counts, wherever the search ended.
"""

from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize

from bilevel.estimators.selection import Fits, Folds, Learned, Objective, Structure, held_out_loss
from bilevel.estimators.sparse_models import SparseModel

RATIOS = 0.3, 1e-2, 10.0  # of both strengths in their units: an elastic net, nearly the lasso, nearly ridge
_PATH = 0.5 ** np.arange(0.5, 13)  # parts of the strength that leaves no coefficient
_RISES, _CLEAR = 2, 5.0  # a path ends after so many rises in a row, or so many nats above its best value
_ROUGH = 1e-4  # tolerance of fits along a path
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
    found: list[Searched] = []
    for ratio in RATIOS:
        found.append(_follow_path(model, folds, single, units, ratio))
        if len(found) > 1 and found[-1].value < found[0].value - _CLEAR:
            break  # where weaker squares help, stronger ones would not
    return min(found, key=lambda path: path.value)


def _follow_path(model: SparseModel, folds: Folds, single: Structure, units: Units, ratio: float) -> Searched:
    best, fits, rises, last = None, units.empty, 0, np.inf
    for factor in _PATH:
        log_strengths = np.log([factor * units.norms, factor * ratio * units.squares])
        fits = model.fit(folds.fitted, log_strengths[single.groups], fits, tol=_ROUGH)
        value, _ = held_out_loss(model.loss, model.y, folds.held_out, fits.predictor)
        if best is None or value < best.value:
            best = Searched(log_strengths, value, fits)
        rises, last = rises + 1 if value > last else 0, value
        if rises == _RISES or value > best.value + _CLEAR:
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
    # Where all variables are bounded, the first step is as long as the gradient, which may be hundreds of nats.
    slope = np.abs(objective(start.log_strengths)[1]).max()
    scale = max(slope / _FIRST_STEP, 1e-12)

    def evaluate(log_strengths: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal best
        value, gradient = objective(log_strengths)
        if value < best.value:
            assert objective.fits is not None
            best = Searched(log_strengths.copy(), value, objective.fits)
        return (value - start.value) / scale, gradient / scale

    options = {"maxiter": max_iter, "ftol": tol / scale, "gtol": tol / scale}
    found = minimize(evaluate, start.log_strengths, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    return Learned(structure, best.log_strengths, best.value, best.fits, objective.values, found.status != 1)

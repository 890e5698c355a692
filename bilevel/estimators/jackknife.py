"""Structures compared without learning them again: each fold at the penalties that the others would choose.

The others' minimizer is one Newton step away from the common one, with Gauss-Newton matrices of the held-out loss.
"""

from collections.abc import Callable, Sequence

import numpy as np

from bilevel.estimators.selection import Arena, Fits, Folds, Learned, held_out_loss


def jackknife_losses(
    arena: Arena,
    rows: Folds,
    path: Sequence[Learned],
    bounds: tuple[float, float],
    row_losses: Callable[[Fits, Folds], np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    """Return the losses of rows, (structures, rows), at penalties chosen about without them, and their weights."""
    held = [np.flatnonzero(weights) for weights in rows.held_out]
    losses = []
    for learned in path:
        moved = np.clip(leave_out(arena, learned), *bounds)
        each = []
        for k, log_penalties in enumerate(moved):
            fits = arena.model.fit(arena.folds.fitted[k : k + 1], log_penalties[learned.structure.groups])
            each.append(row_losses(fits, rows.take(np.array([k])))[held[k]])
        losses.append(np.concatenate(each))
    return np.array(losses), np.concatenate([weights[of] for weights, of in zip(rows.held_out, held, strict=True)])


def leave_out(arena: Arena, learned: Learned) -> np.ndarray:
    """Return the log penalties that all folds but one would choose, about, (folds, penalties of the structure)."""
    structure, model, folds = learned.structure, arena.model, arena.folds
    _, cotangent = held_out_loss(model.loss, model.y, folds, learned.fits.predictor)
    gradients = structure.gather(model.pull_back(learned.fits, cotangent))
    matrices = gauss_newton(arena, learned)
    spread = np.eye(structure.size) - 1 / structure.size
    total = matrices.sum(axis=0) + spread / structure.prior_scale**2
    ridge = 1e-6 * max(np.trace(total) / structure.size, 1e-6) * np.eye(structure.size)
    steps = [np.linalg.solve(total - own + ridge, g) for own, g in zip(matrices, gradients, strict=True)]
    return learned.log_penalties + np.array(steps)


def gauss_newton(arena: Arena, learned: Learned) -> np.ndarray:
    """Return the Gauss-Newton matrix of the held-out loss of each fold, (folds, penalties, penalties)."""
    structure, model, folds = learned.structure, arena.model, arena.folds
    moves = [
        model.push_forward(learned.fits, (structure.groups == group).astype(float)) for group in range(structure.size)
    ]
    bend = model.loss.held_out_bender(model.y, learned.fits.predictor, folds.fitted, folds.held_out)
    bent = [_nats(arena, folds, learned) * bend(move) for move in moves]
    return np.einsum("gfrc,hfrc->fgh", np.array(moves), np.array(bent), optimize=True)


def _nats(arena: Arena, folds: Folds, learned: Learned) -> float:
    """Return what a unit of the loss is in nats."""
    loss = arena.model.loss
    if not loss.has_scale:
        return 1.0
    losses, _ = loss.held_out(arena.model.y, learned.fits.predictor, folds.fitted, folds.held_out)
    total = np.sum(folds.held_out * losses)
    size = folds.sizes.sum() * loss.count(arena.model.y)
    return float(1 / max(2 * total / size, loss.least_scale))

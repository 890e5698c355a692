"""How many penalties: one is searched for, then structures are learned without a fold and compared on it."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bilevel.estimators.glm import RidgeGLM
from bilevel.estimators.jackknife import jackknife_losses
from bilevel.estimators.losses import Loss, Squared
from bilevel.estimators.selection import Arena, Fits, Folds, InnerModel, Learned, Objective, Structure, learn
from bilevel.estimators.surrogate import can_compress, compress

_OUTER_FOLDS = 5
_TELLING = 0.1  # a penalty per row that tells features apart
_MARGIN = 0.5  # standard errors by which many penalties must be ahead of one
_LEAST_GAIN = 2.0  # nats by which they must be ahead at least
_DOUBT = 1.0  # of all labels, how many may be wrong: what was told apart by chance is no merit
_ROUNDS = 2
_MISMATCH = 1.0  # nats by which few rows may mistake the loss of many
_DECADE = float(np.log(10.0))
_GIVE_UP = 3.0  # nats above the best penalty so far, where a search goes no further
_WORK = 5e10  # multiplications that a comparison may take, about
_QUICK = 2e9
_EVALUATIONS = 10  # that a structure takes, about
_MOST_MOVES = 30  # penalties of a structure that the jackknife can tell from chance


class Search:
    """The search for penalties of one model on some folds."""

    def __init__(
        self, model: InnerModel, folds: Folds, bounds: tuple[float, float], *, tol: float, max_iter: int
    ) -> None:
        self.model, self.folds, self.bounds, self.tol, self.max_iter = model, folds, bounds, tol, max_iter
        self.telling = float(np.log(_TELLING * max(1.0, folds.sizes.sum())))
        self.single = Structure("single", np.zeros(model.n_penalties, int))
        self.compresses = can_compress(model, folds)
        self._whole: Fits | None = None
        self.arena, self._mismatch = self._exact_arena(), 0.0
        self._targets = model.loss.soften(model.y, _DOUBT / max(1.0, folds.sizes.sum()))

    def _exact_arena(self) -> Arena:
        return Arena(self.model, self.folds, lambda fits: fits.predictor)

    def _move(self, log_penalties: np.ndarray) -> None:
        """Let the arena be that of these penalties: where rows are many, they are replaced by few."""
        if not isinstance(self.model, RidgeGLM) or not self.compresses:
            return
        if self._whole is not None and isinstance(self.model.loss, Squared):
            return
        weights = np.maximum(self.folds.fitted.max(axis=0), self.folds.held_out.max(axis=0))[None]
        self._whole = self.model.fit(weights, log_penalties, self._whole)
        self.arena = compress(self.model, self.folds, self._whole)

    def _objective(self, structure: Structure, start: Fits | None = None) -> Objective:
        return Objective(self.arena.model, self.arena.folds, structure, start)

    def learn_single(self, start: float) -> Learned:
        """Walk by decades, down or else up, as long as that may help, and refine the best of them."""
        values: dict[int, float] = {}
        fits: Fits | None = None
        for step in (-1, 1):
            decade, worse = max(step, 0), 0
            while worse < 2 and self.bounds[0] <= start + decade * _DECADE <= self.bounds[1]:
                self._move(np.full(self.model.n_penalties, start + decade * _DECADE))
                objective = self._objective(self.single, None if self.compresses else fits)
                values[decade] = objective.value(np.array([start + decade * _DECADE]))
                fits, best = objective.fits, min(values.values())
                worse = 0 if values[decade] == best else worse + 1 + (values[decade] > best + _GIVE_UP)
                decade += step
            if values[0] > best:
                break
        found = self.polish(self.single, np.array([start + min(values, key=values.__getitem__) * _DECADE]))
        if self.compresses and abs(self._mismatch) > _MISMATCH:
            self.compresses, self.arena = False, self._exact_arena()
            if self.model.work(len(self.folds.fitted)) * _EVALUATIONS <= _QUICK:
                return self.polish(self.single, found.log_penalties)
        return found

    def polish(self, structure: Structure, start: np.ndarray) -> Learned:
        """Learn a structure; where few rows stand about for many, that is made exact to first order and repeated."""
        about = self.compresses and not isinstance(self.model.loss, Squared)
        exact = Objective(self.model, self.folds, structure)
        for _ in range(_ROUNDS if about else 1):
            self._move(start[structure.groups])
            exact.fits = exact.fits or self._whole
            objective = self._objective(structure)
            if about:
                self._mismatch = objective.correct(start, *exact(start))
            found = self._learn(objective, start)
            start = found.log_penalties
        return found

    def _learn(self, objective: Objective, start: np.ndarray) -> Learned:
        """Minimize from a start; a single penalty stays near it."""
        low, high = self.bounds
        if objective.structure.size == 1:
            low, high = max(low, start[0] - _DECADE), min(high, start[0] + _DECADE)
        return learn(objective, start, (low, high), tol=self.tol, max_iter=self.max_iter)

    def learn_path(self, folds: Folds, structures: Sequence[Structure], start: float) -> list[Learned]:
        """Learn the single penalty near the start, then each structure, after the one of the same name before it.

        The first of a name starts at the single penalty, and once more above it, where penalties tell features that
        help from others: weak ones hardly differ from none.
        """
        single = self._learn(Objective(self.arena.model, folds, self.single), np.array([start]))
        found = [single]
        for structure in structures:
            level, last = np.full(structure.size, single.log_penalties[0]), found[-1]
            starts = [(level, single), (np.maximum(level, self.telling), single)]
            if last.structure.name == structure.name:
                starts = [(last.log_penalties, last)]
            runs = [self._learn(Objective(self.arena.model, folds, structure, near.fits), at) for at, near in starts]
            found.append(min(runs, key=lambda run: run.value))
        return found

    def nested_losses(self, structures: Sequence[Structure], start: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the losses of rows, (structures, rows), under penalties learned without them, and their weights."""
        losses, weights = [], []
        for held in self._outer_folds():
            inner, outer = self.arena.folds.without(held), self.arena.folds.join(held)
            rows = self.folds.join(held).held_out[0]
            path = self.learn_path(inner, structures, start)
            fits = [self.arena.model.fit(outer.fitted, item.log_penalties[item.structure.groups]) for item in path]
            losses.append([self._row_losses(fit)[rows > 0] for fit in fits])
            weights.append(rows[rows > 0])
        return np.concatenate(losses, axis=1), np.concatenate(weights)

    def _outer_folds(self) -> list[np.ndarray]:
        """Return numbers of folds to leave out together, as long as that leaves rows to fit on."""
        n_folds = len(self.folds.fitted)
        parts = np.array_split(np.arange(n_folds), min(_OUTER_FOLDS, n_folds))
        return [held for held in parts if len(self.folds.without(held).fitted) and self.folds.join(held).fitted.any()]

    def _row_losses(self, fits: Fits) -> np.ndarray:
        return self.model.loss.value(self._targets, self.arena.predict(fits))[0]

    def _affordable(self, structures: Sequence[Structure]) -> tuple[str, Sequence[Structure]]:
        """Return how to compare, and those of the structures for which that is not too much work."""
        work = self.arena.model.work(len(self.folds.fitted)) * _EVALUATIONS
        if work * _OUTER_FOLDS * len(structures) <= _WORK and self._outer_folds():
            return "nested folds", structures
        within = [item for item in structures if item.size <= _MOST_MOVES]
        return "jackknife", [item for item in within if work * (1 + item.size / _EVALUATIONS) <= _WORK]

    def compare(self, structures: Sequence[Structure], start: float, *, against_single: bool) -> "Comparison":
        """Compare structures with each other, or with a single penalty, which then comes first."""
        how, affordable = self._affordable(structures)
        if not affordable:
            return Comparison([self.single], "too much work", np.full(1, np.nan), np.zeros(1), np.zeros(1), 0)
        if how == "nested folds":
            losses, weights = self.nested_losses(affordable, start)
        else:
            path = self.learn_path(self.arena.folds, affordable, start)
            losses, weights = jackknife_losses(self.arena, self.folds, path, self.bounds, self._row_losses)
        candidates = [self.single, *affordable]
        if not against_single:
            candidates, losses = candidates[1:], losses[1:]
        return compare(candidates, how, losses, weights, self.model.loss)


class Comparison(NamedTuple):
    """Structures, their summed losses, differences from the first with standard errors, and which one to take."""

    structures: Sequence[Structure]
    how: str
    losses: np.ndarray
    differences: np.ndarray
    standard_errors: np.ndarray
    chosen: int


def compare(
    structures: Sequence[Structure], how: str, losses: np.ndarray, weights: np.ndarray, loss: Loss
) -> Comparison:
    """Compare the losses of rows in nats; the first structure is kept unless another is ahead by the margin."""
    if loss.has_scale:
        losses = losses / max(2 * np.average(losses[0], weights=weights), loss.least_scale)
    differences = losses - losses[0]
    sums = differences @ weights
    spread = np.sqrt(((differences - (sums / weights.sum())[:, None]) ** 2) @ weights)
    ahead = np.flatnonzero(sums < -np.maximum(_MARGIN * spread, _LEAST_GAIN))
    chosen = int(ahead[np.argmin(sums[ahead])]) if len(ahead) else 0
    return Comparison(structures, how, losses @ weights, sums, spread, chosen)

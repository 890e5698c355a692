"""How many penalties: one is searched for, then structures are learned without a fold and compared on it."""

from collections.abc import Callable, Sequence

import numpy as np

from bilevel.estimators.comparison import OUTER_FOLDS, Comparison, Race, join_losses
from bilevel.estimators.glm import RidgeGLM
from bilevel.estimators.losses import Squared
from bilevel.estimators.selection import (
    Arena,
    Fits,
    Folds,
    InnerModel,
    Learned,
    Objective,
    Structure,
    held_out_loss,
    learn,
)
from bilevel.estimators.surrogate import can_compress, compress

_TELLING = 0.1  # a penalty per row that tells features apart
_DOUBT = 1.0  # of all labels, how many may be wrong: what was told apart by chance is no merit
_ROUNDS = 2
_MISMATCH = 1.0  # nats by which few rows may mistake the loss of many
_DECADE = float(np.log(10.0))
_GIVE_UP = 3.0  # nats above the best penalty so far, where a search goes no further
_WORK = 1e10  # multiplications that a comparison may take, about
_QUICK = 2e9
_EVALUATIONS = 6  # that a structure takes, about
_ROUGH = 10.0  # times the tolerance, for penalties that are only compared: nats are what matters there
_MANY_ROWS = 5  # for each coefficient, where the jackknife is not too hopeful
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
        """Walk by decades, down and up, as long as that may help, and refine the best of them."""
        values: dict[int, float] = {}
        fits: Fits | None = None
        first = near = fits
        for step in (-1, 1):
            decade, worse, fits = max(step, 0), 0, first
            while worse < 2 and self.bounds[0] <= start + decade * _DECADE <= self.bounds[1]:
                self._move(np.full(self.model.n_penalties, start + decade * _DECADE))
                objective = self._objective(self.single, None if self.compresses else fits)
                values[decade] = objective.value(np.array([start + decade * _DECADE]))
                fits, best = objective.fits, min(values.values())
                first, near = first or fits, fits if values[decade] == best else near
                worse = 0 if values[decade] == best else worse + 1 + (values[decade] > best + _GIVE_UP)
                decade += step
        found = self.polish(self.single, np.array([start + min(values, key=values.__getitem__) * _DECADE]), near)
        if self.compresses and abs(self._mismatch) > _MISMATCH:
            self.compresses, self.arena = False, self._exact_arena()
            if self.model.work(len(self.folds.fitted)) * _EVALUATIONS <= _QUICK:
                return self.polish(self.single, found.log_penalties)
        return found

    def polish(self, structure: Structure, start: np.ndarray, near: Fits | None = None) -> Learned:
        """Learn a structure, with fits near the start where there are some.

        Where few rows stand about for many, that is made exact to first order and repeated.
        """
        about = self.compresses and not isinstance(self.model.loss, Squared)
        exact = Objective(self.model, self.folds, structure)
        for _ in range(_ROUNDS if about else 1):
            self._move(start[structure.groups])
            exact.fits = exact.fits or self._whole
            objective = self._objective(structure, None if self.compresses else near)
            if about:
                self._mismatch = objective.correct(start, *exact(start))
            found = self._learn(objective, start)
            start = found.log_penalties
        return found

    def _learn(self, objective: Objective, start: np.ndarray, *, rough: float = 1.0) -> Learned:
        """Minimize from a start; a single penalty stays near it."""
        low, high = self.bounds
        if objective.structure.size == 1:
            low, high = max(low, start[0] - _DECADE), min(high, start[0] + _DECADE)
        return learn(objective, start, (low, high), tol=rough * self.tol, max_iter=self.max_iter)

    def learn_path(self, folds: Folds, structures: Sequence[Structure], start: float) -> list[Learned]:
        """Learn the single penalty near the start, then each structure, after the one of the same name before it.

        The first of a name starts at the single penalty, and once more above it, where penalties tell features that
        help from others: weak ones hardly differ from none.
        """
        single = self._learn(Objective(self.arena.model, folds, self.single), np.array([start]))
        found = [single]
        for structure in structures:
            level, last = single.log_penalties[0], found[-1]
            starts = [np.full(structure.size, at) for at in sorted({level, max(level, self.telling)})]
            if last.structure.name == structure.name:
                starts = [last.log_penalties]
            runs = [self._learn(Objective(self.arena.model, folds, structure, last.fits), at) for at in starts]
            found.append(min(runs, key=lambda run: run.value))
        return found

    def _nested_losses(self, folds: Folds, rows: Folds, path: Sequence[Learned]) -> tuple[np.ndarray, np.ndarray]:
        """Return the losses of rows, (structures, rows), under penalties learned without them, and their weights.

        Each is learned anew from what was learned with them: a start decides nothing but the time.
        """
        losses, model, whole = [], self.arena.model, [outer for _, outer in rows.nested(OUTER_FOLDS)]
        for (inner, outer), rows_outer in zip(folds.nested(OUTER_FOLDS), whole, strict=True):
            found = [
                self._learn(objective, item.log_penalties, rough=_ROUGH)
                for item in path
                for objective in [Objective(model, inner, item.structure, item.fits)]
            ]
            fits = [model.fit(outer.fitted, item.log_penalties[item.structure.groups], item.fits) for item in found]
            losses.append(np.array([self._row_losses(fit, rows_outer) for fit in fits]))
        return join_losses(losses, [outer.held_out[0] for outer in whole])

    def _row_losses(self, fits: Fits, fold: Folds) -> np.ndarray:
        """Return the losses of all rows that the fit without a fold gives them; those that it holds out count."""
        predictor = self.arena.predict(fits)
        return self.model.loss.held_out(self._targets, predictor, fold.fitted, fold.held_out)[0][0]

    def _affordable(self, structures: Sequence[Structure]) -> tuple[str, Sequence[Structure], int]:
        """Return how to compare, those of the structures for which that is not too much work, and on how many shuffles.

        Where not all are affordable, those with the strictest prior are tried, and last the simplest of them.
        """
        first = self.folds.by_shuffle()[0]
        work = self.arena.model.work(len(first.fitted)) * _EVALUATIONS
        strictest = list({item.name: item for item in structures}.values())
        for tried in (structures, strictest, strictest[:1]) if first.nested(OUTER_FOLDS) else ():
            most = _WORK / (work * OUTER_FOLDS * len(tried))
            if most >= 1:
                return "nested folds", tried, int(most)
        if len(self.model.y) < _MANY_ROWS * self.model.n_penalties * self.model.y.shape[1]:
            return "too much work", [], 0
        within = [item for item in structures if item.size <= _MOST_MOVES]
        return "jackknife", [item for item in within if work * (1 + item.size / _EVALUATIONS) <= _WORK], 1

    def compare(
        self, structures: Sequence[Structure], start: float, *, against_single: bool
    ) -> tuple[Comparison, Learned | None]:
        """Compare structures with each other, or with a single penalty, which then comes first.

        Return the one to take too, as it was learned on the first shuffle.
        """
        how, affordable, most = self._affordable(structures)
        if not affordable:
            return Comparison([self.single], "too much work", np.full(1, np.nan), np.zeros(1), np.zeros(1), 0), None
        shuffles = list(zip(self.arena.folds.by_shuffle(), self.folds.by_shuffle(), strict=True))
        path = self.learn_path(shuffles[0][0], affordable, start)[0 if against_single else 1 :]
        race = Race([item.structure for item in path], self.model.loss)
        for folds, rows in shuffles[:most]:
            if how == "jackknife":
                arena = self.arena._replace(folds=folds)
                race.add(*jackknife_losses(arena, rows, path, self.bounds, self._row_losses))
            elif not race.decided:
                race.add(*self._nested_losses(folds, rows, [path[k] for k in race.open]))
        result = race.result(how)
        return result, path[result.chosen]


def jackknife_losses(
    arena: Arena,
    rows: Folds,
    path: Sequence[Learned],
    bounds: tuple[float, float],
    row_losses: Callable[[Fits, Folds], np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    """Compare structures without learning them again: return the losses of rows, (structures, rows), and their weights.

    Each fold is fitted at the penalties that the other folds would choose, which are one Newton step away from the
    common ones, with Gauss-Newton matrices of the held-out loss.
    """
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

"""Choose penalties by the loss of held-out rows: folds, the objective and its minimizer, and comparisons of structures.

Penalties are exp(l). With w_f(l) the fit without fold f, the objective is

    J(l) = sum over folds f of the loss of w_f(l) on the rows held out of f + sum_k (l_k - mean l)^2 / (2 prior_scale^2)

`Objective` evaluates J and its exact gradient, `minimize_objective` minimizes it, and `Search` chooses how many of the
penalties are free (`Structure`), on rows on which they were not learned.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from scipy.optimize import OptimizeResult, minimize
from sklearn.model_selection import KFold, StratifiedKFold, check_cv
from sklearn.utils import check_random_state
from sklearn.utils.sparsefuncs import mean_variance_axis

from bilevel.estimators.losses import Array, Loss

_SINGLE_SPLIT_PARTS = 5  # the held-out rows of a single split are divided into this many folds
_SHUFFLE_UNTIL, _MAX_SHUFFLES = 1000, 5  # fewer rows than this are shuffled into folds several times
OUTER_FOLDS = 5
# Expected number of wrong labels among all held-out rows. With zero, penalties of perfectly separable classes would
# decrease until a hypothetical misclassified row cost more than all other rows together.
_WRONG_LABELS = 0.25
_WRONG_LABELS_IN_COMPARISON = 1.0  # structures get no credit for rows that are separated by chance
_MAX_UNIT = 2.0  # of the variables of L-BFGS-B
_GRADIENT_TOL = 0.1
_MARGIN = 1.0  # standard errors by which many penalties must be better than one
_MIN_GAIN = 2.0  # nats by which they must be better
_DECADE = float(np.log(10.0))
_HOPELESS = 3.0  # nats above the best penalty so far at which the search in that direction ends
# Of columns of deviation 1, per row: smaller penalties have no effect, and larger ones leave the feature out.
_WEAKEST, _STRONGEST = 1e-6, 1e3
_STRONG = 0.1  # penalty per row from which a second search starts; weak penalties have tiny gradients
_ROUNDS = 2  # of minimizations around a new surrogate
_MAX_MISMATCH = 1.0  # nats between a surrogate and the exact loss; beyond, exact fits are used
_MAX_FLOPS = 1e10  # of a comparison
_QUICK_FLOPS = 2e9
_EVALUATIONS = 6  # typical number of evaluations for learning one structure
_LOOSE = 10.0  # factor of the tolerance for penalties that are only compared
_MANY_ROWS, _FEW_PENALTIES = 5, 30  # rows per coefficient from which, and penalties up to which, few outer folds do


class Fits(NamedTuple):
    """Models fitted to the same rows with several weightings of them."""

    coef: Array  # (fits, features, outputs)
    intercept: Array  # (fits, outputs)
    predictor: Any  # (fits, rows, outputs), of all rows, fitted or held out
    state: Any = None  # what the model stores for derivatives and warm starts


class InnerModel(ABC):
    """A model whose coefficients minimize sum weight_i loss_i plus penalties, with derivatives in the penalties.

    Attributes
    ----------
    n_penalties : number of log penalties
    y : (rows, outputs), targets as the loss takes them
    loss : the loss of the rows
    """

    n_penalties: int
    y: Array
    loss: Loss

    @abstractmethod
    def fit(self, weights: Array, log_penalties: Array, start: Fits | None = None) -> Fits:
        """Fit once for each row of `weights`, (fits, rows), from the fits at other penalties if they are given."""

    def refit(self, weights: Array, log_penalties: Array, start: Fits | None = None) -> tuple[Array, Array]:
        """Fit all rows for the final model; return coefficients, (features, outputs), and intercepts."""
        fits = self.fit(weights[None], log_penalties, start)
        return fits.coef[0], fits.intercept[0]

    @abstractmethod
    def vjp(self, fits: Fits, cotangent: Array) -> Array:
        """Return derivatives in the log penalties, (fits, n_penalties), by implicit differentiation.

        The cotangent, (fits, rows, outputs), is the derivative of a function of the predictors.
        """

    def estimate_flops(self, n_fits: int) -> float:
        """Return roughly the number of multiplications of one evaluation of the objective, or 0 for no limit."""
        return 0.0

    def can_compress(self, folds: "Folds") -> bool:
        """Return True if a model of fewer rows approximates this one well and is much smaller."""
        return False

    def compress(self, folds: "Folds", fits: Fits) -> "SelectionProblem":
        """Return the same problem with fewer rows, exact to second order around the mean of some fits."""
        raise NotImplementedError


class Scaling(NamedTuple):
    """The mean that is subtracted from each column, and the number that it is divided by."""

    mean: Array
    scale: Array

    @classmethod
    def fit(cls, X: Any, weights: Array, *, center: bool, divide: bool) -> "Scaling":
        """Compute weighted means and deviations. Constant columns are not divided, sparse columns not centered."""
        if sp.issparse(X):
            mean, variance = mean_variance_axis(X, axis=0, weights=weights)
        else:
            mean = np.average(X, axis=0, weights=weights)
            variance = np.average((X - mean) ** 2, axis=0, weights=weights)
        constant = variance <= (10 * np.finfo(float).eps * np.abs(mean)) ** 2
        scale = np.where(constant | (not divide), 1.0, np.sqrt(np.where(constant, 1.0, variance)))
        return cls(mean if center and not sp.issparse(X) else np.zeros_like(mean), scale)

    def transform(self, X: Any) -> Any:
        return X @ sp.diags_array(1 / self.scale) if sp.issparse(X) else (X - self.mean) / self.scale

    def unscale(self, coef: Array, intercept: Array) -> tuple[Array, Array]:
        """Return coefficients, (outputs, features), and intercepts for the unscaled columns."""
        coef = coef / self.scale
        return coef, intercept - coef @ self.mean


class Folds(NamedTuple):
    """Weights of rows in each fit and in the held-out loss, both (folds, rows).

    `sizes` is the weight that each fold holds out, also if a row of the model represents several rows of the data. If
    rows were shuffled into folds several times, `shuffles` is the number of the shuffle of each fold.
    """

    fitted: Array
    held_out: Array
    sizes: Array
    shuffles: Array

    @classmethod
    def of_rows(cls, fitted: Array, held_out: Array, shuffles: Array | None = None) -> "Folds":
        shuffles = np.zeros(len(fitted), int) if shuffles is None else shuffles
        return cls(fitted, held_out, held_out.sum(axis=1), shuffles)

    def take_rows(self, rows: Array) -> "Folds":
        """Return the folds for some of the rows, or for all in another order."""
        return self._replace(fitted=self.fitted[:, rows], held_out=self.held_out[:, rows])

    def take(self, folds: Array) -> "Folds":
        """Return some of the folds."""
        return Folds(*(part[folds] for part in self))

    def rescaled(self, folds: Array) -> "Folds":
        """Return some of the folds, with the total weight of all folds."""
        part = self.take(folds)
        factor = self.sizes.sum() / part.sizes.sum()
        return part._replace(held_out=factor * part.held_out, sizes=factor * part.sizes)

    def by_shuffle(self) -> list["Folds"]:
        """Return the folds of each shuffle."""
        return [self.rescaled(np.flatnonzero(self.shuffles == number)) for number in np.unique(self.shuffles)]

    def without(self, folds: Array) -> "Folds":
        """Return the other folds, without the rows that these folds hold out."""
        held_out, rest = self.held_out[folds].any(axis=0), self.take(np.setdiff1d(np.arange(len(self.fitted)), folds))
        rest = rest._replace(fitted=rest.fitted * ~held_out, held_out=rest.held_out * ~held_out)
        return rest.take(np.flatnonzero(rest.held_out.any(axis=1) & rest.fitted.any(axis=1)))

    def join(self, folds: Array) -> "Folds":
        """Return one fold that holds out the rows that any of these folds holds out."""
        held_out = self.held_out[folds].max(axis=0)
        fitted = self.fitted[folds].min(axis=0) * (held_out == 0)
        return Folds(fitted[None], held_out[None], self.sizes[folds].sum(keepdims=True), self.shuffles[folds[:1]])

    def nested(self) -> list[tuple["Folds", "Folds"]]:
        """Return pairs of inner folds and one outer fold, which joins several folds if there are more than a few."""
        parts = np.array_split(np.arange(len(self.fitted)), min(OUTER_FOLDS, len(self.fitted)))
        found = [(self.without(held), self.join(held)) for held in parts]
        return [(inner, outer) for inner, outer in found if len(inner.fitted) and outer.fitted.any()]


def split(
    cv: Any, X: Any, y: Array, groups: Any, random_state: Any, *, classes: bool, shuffles: int = 1
) -> list[tuple[Array, Array]]:
    """Return pairs of training and test rows for an int, a splitter of scikit-learn, or an iterable of such pairs.

    For an int, rows are shuffled into folds `shuffles` times, stratified if y has classes.
    """
    if isinstance(cv, int | np.integer) and not isinstance(cv, bool):
        if cv < 2:
            raise ValueError(f"`cv={cv}`: must be at least 2, a splitter of scikit-learn, or an iterable of splits.")
        most = np.unique(y, return_counts=True)[1].max() if classes else len(y)
        if most < 2:
            raise ValueError("Every class in y has only one row, and folds need two rows of some class; add rows.")
        kind, rng = StratifiedKFold if classes else KFold, check_random_state(random_state)
        folds = kind(min(int(cv), int(most)), shuffle=True, random_state=rng)
        with warnings.catch_warnings():
            pairs = list(folds.split(y, y))
            warnings.filterwarnings("ignore", "The least populated class", UserWarning)  # warn once only
            return pairs + [pair for _ in range(shuffles - 1) for pair in folds.split(y, y)]
    try:
        pairs = list(check_cv(cv).split(X, y, groups))
    except (TypeError, ValueError) as error:
        if groups is not None or "group" not in f"{type(cv).__name__} {error}".lower():
            raise
        message = f"`cv={cv!r}` needs the group of each row; pass it to `fit` as `cv_groups`"
        raise ValueError(f"{message}. (The parameter `groups` is about columns.)") from error
    if not pairs:
        raise ValueError(f"`cv={cv!r}` has no splits; give an int, a splitter of scikit-learn, or some splits.")
    return [(_check_row_numbers(train), _check_row_numbers(test)) for train, test in pairs]


def _check_row_numbers(numbers: Any) -> Array:
    rows = np.asarray(numbers, int)
    if rows.ndim != 1:
        raise ValueError(f"`cv` must hold pairs of arrays of row numbers. Got {numbers!r} instead of an array.")
    return rows


def count_shuffles(n_rows: int) -> int:
    """Return how often rows are shuffled into folds: with few rows, the choice depends much on the assignment."""
    return int(np.clip(np.ceil(_SHUFFLE_UNTIL / max(1, n_rows)), 1, _MAX_SHUFFLES))


def make_folds(splits: list[tuple[Array, Array]], weights: Array) -> Folds:
    """Return the weights of rows in each fold. The weight of a row is shared by all folds that hold it out.

    The test rows of a single split are divided into several folds.
    """
    if len(splits) == 1:
        train, test = splits[0]
        n_parts = min(_SINGLE_SPLIT_PARTS, len(test))
        splits = [(train, test[k::_SINGLE_SPLIT_PARTS]) for k in range(n_parts)] or splits
    fitted, held_out = np.zeros((2, len(splits), len(weights)))
    for k, (train, test) in enumerate(splits):
        fitted[k, train], held_out[k, test] = weights[train], weights[test]
    used = fitted.any(axis=1) & held_out.any(axis=1)
    if not used.any():
        raise ValueError("`cv` leaves no fold with rows to fit on and rows to hold out; give more rows or other folds.")
    fitted, held_out = fitted[used], held_out[used]
    times = np.count_nonzero(held_out, axis=0)
    return Folds.of_rows(fitted, held_out / np.maximum(1, times), find_shuffles(held_out > 0))


def find_shuffles(held_out: Array) -> Array:
    """Return the number of the shuffle of each fold, or zeros if folds are not repeated partitions of the same rows."""
    numbers, seen = np.zeros(len(held_out), int), [np.zeros_like(held_out[0])]
    for k, rows in enumerate(held_out):
        if (seen[-1] & rows).any():
            seen.append(np.zeros_like(rows))
        seen[-1] = seen[-1] | rows
        numbers[k] = len(seen) - 1
    return numbers if (np.array(seen) == seen[0]).all() else np.zeros_like(numbers)


class Structure(NamedTuple):
    """Which penalties of a model are equal, and how much the others may spread around their mean.

    Penalties may be of several kinds, of the same number, with a mean of their own.
    """

    name: str
    groups: Array  # (n_penalties,), numbers from 0
    prior_scale: float = np.inf
    n_kinds: int = 1

    @property
    def size(self) -> int:
        return int(self.groups.max()) + 1

    def sum_groups(self, gradient: Array) -> Array:
        """Sum derivatives in the penalties of the model, (n_penalties,), within groups."""
        return np.bincount(self.groups, gradient, self.size)

    def prior(self, log_penalties: Array) -> tuple[float, Array]:
        """Return sum (l_g - mean l)^2 / (2 prior_scale^2) and its gradient."""
        kinds = log_penalties.reshape(self.n_kinds, -1)
        centered = (kinds - kinds.mean(axis=1, keepdims=True)).ravel()
        return float(centered @ centered) / (2 * self.prior_scale**2), centered / self.prior_scale**2


class SelectionProblem(NamedTuple):
    """A model and folds on which structures are compared, and the function that predicts the original rows."""

    model: InnerModel
    folds: Folds
    predict: Callable[[Fits], Array]  # returns (fits, rows, outputs)


class Learned(NamedTuple):
    """Log penalties of a structure, the objective and the fits there, and its values at all evaluations."""

    structure: Structure
    log_penalties: Array
    value: float
    fits: Fits
    values: Sequence[float]
    converged: bool

    @property
    def of_model(self) -> Array:
        """The log penalties of the model."""
        return self.log_penalties[self.structure.groups]


def held_out_loss(loss: Loss, y: Array, folds: Folds, predictor: Array) -> tuple[float, Array]:
    """Return the loss of held-out rows in nats, and its derivative in the predictors.

    If the dispersion is unknown, this is n/2 times the logarithm of its estimate, twice the mean loss.
    """
    losses, cotangent = loss.held_out(y, predictor, folds.fitted, folds.held_out)
    total, size = float(np.sum(folds.held_out * losses)), float(folds.sizes.sum()) * loss.count(y)
    if not loss.unknown_dispersion:
        return total, cotangent
    dispersion = loss.dispersion(total / size)
    return size / 2 * float(np.log(dispersion) - 1) + total / dispersion, cotangent / dispersion


class Objective:
    """J(l) and its gradient, and the best point so far. Each fit starts from the previous one."""

    def __init__(self, model: InnerModel, folds: Folds, structure: Structure, start: Fits | None = None) -> None:
        self.model, self.folds, self.structure, self.fits = model, folds, structure, start
        self.values: list[float] = []
        self.best: Learned | None = None
        self._constant, self._slope = 0.0, np.zeros(structure.size)
        self._last: tuple[Array, float, Array] | None = None
        wrong = _WRONG_LABELS if np.isfinite(structure.prior_scale) else 0.0
        self._targets = model.loss.smooth_labels(model.y, wrong / max(1.0, folds.sizes.sum()))

    def value(self, log_penalties: Array) -> float:
        """Return J without its gradient."""
        self._evaluate(log_penalties)
        return self.values[-1]

    def __call__(self, log_penalties: Array) -> tuple[float, Array]:
        if self._last is None or not np.array_equal(self._last[0], log_penalties):
            fits, cotangent = self._evaluate(log_penalties)
            gradient = self.structure.sum_groups(self.model.vjp(fits, cotangent).sum(axis=0))
            gradient += self.structure.prior(log_penalties)[1] + self._slope
            self._last = log_penalties.copy(), self.values[-1], gradient
        return self._last[1:]

    def correct(self, log_penalties: Array, value: float, gradient: Array) -> float:
        """Add a linear function such that value and gradient are these; return by how much the value was too low."""
        uncorrected, slope = self(log_penalties)
        self._slope = gradient - slope
        self._constant = value - uncorrected - float(self._slope @ log_penalties)
        self._last, self.best, self.values = None, None, []
        return value - uncorrected

    def _evaluate(self, log_penalties: Array) -> tuple[Fits, Array]:
        model, folds = self.model, self.folds
        self.fits = model.fit(folds.fitted, log_penalties[self.structure.groups], self.fits)
        loss, cotangent = held_out_loss(model.loss, self._targets, folds, self.fits.predictor)
        prior = self.structure.prior(log_penalties)[0]
        value = loss + prior + self._constant + float(self._slope @ log_penalties)
        self.values.append(value)
        if self.best is None or value < self.best.value:
            self.best = Learned(self.structure, log_penalties.copy(), value, self.fits, self.values, True)
        return self.fits, cotangent


def run_lbfgs(
    function: Callable[[Array], tuple[float, Array]],
    start: Array,
    *,
    max_iter: int,
    ftol: float,
    gtol: float,
    bounds: Any = None,
) -> OptimizeResult:
    """Minimize a function that returns its value and gradient, by L-BFGS-B of SciPy."""
    options = {"maxiter": max_iter, "ftol": ftol, "gtol": gtol}
    return minimize(function, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)


def minimize_objective(
    objective: Objective, start: Array, bounds: tuple[float, float], *, tol: float, max_iter: int
) -> Learned:
    """Minimize J by L-BFGS-B until an iteration gains less than `tol` nats.

    The variables are log penalties in units of the prior scale, so that a first step along the gradient is similar to a
    Newton step.
    """
    unit = min(objective.structure.prior_scale, _MAX_UNIT)
    start = np.clip(start, *bounds) / unit

    def scaled(x: Array) -> tuple[float, Array]:
        value, gradient = objective(np.clip(unit * x, *bounds))
        return value, unit * gradient

    ftol, box = tol / max(1.0, abs(scaled(start)[0])), [(bounds[0] / unit, bounds[1] / unit)] * len(start)
    found = run_lbfgs(scaled, start, max_iter=max_iter, ftol=ftol, gtol=_GRADIENT_TOL * tol, bounds=box)
    best = np.clip(unit * found.x, *bounds)
    objective(best)
    assert objective.fits is not None
    return Learned(objective.structure, best, float(found.fun), objective.fits, objective.values, found.status != 1)


class Comparison(NamedTuple):
    """Structures, their summed losses, differences from the first with standard errors, and the chosen one."""

    structures: Sequence[Structure]
    losses: Array
    differences: Array
    standard_errors: Array
    chosen: int


class SequentialComparison:
    """Compare structures with the first one, shuffle by shuffle.

    A structure that is worse by more than a standard error is not evaluated on further shuffles.
    """

    def __init__(self, structures: Sequence[Structure], loss: Loss) -> None:
        self.structures, self.loss = structures, loss
        self.open = np.arange(len(structures))
        self._first: list[float] = []
        self._weights = np.zeros(0)
        self._sums, self._counts = np.zeros((len(structures), 0)), np.zeros(len(structures))

    @property
    def decided(self) -> bool:
        return len(self.open) == 1

    def add(self, losses: Array, weights: Array) -> None:
        """Add the losses of the open structures on one shuffle, (structures, rows), and the weights of the rows."""
        if self.loss.unknown_dispersion:
            losses = losses / self.loss.dispersion(np.average(losses[0], weights=weights))
        if not self._first:
            self._weights, self._sums = weights, np.zeros((len(self.structures), len(weights)))
        self._first.append(float(losses[0] @ weights))
        self._sums[self.open] += losses - losses[0]
        self._counts[self.open] += 1
        differences, errors = self._differences()
        self.open = self.open[(differences <= errors)[self.open]]

    def _differences(self) -> tuple[Array, Array]:
        """Return the differences from the first structure, in nats, and their standard errors."""
        each = self._sums / self._counts[:, None]
        sums = each @ self._weights
        deviations = each - (sums / self._weights.sum())[:, None]
        return sums, np.sqrt(deviations**2 @ self._weights)

    def result(self) -> Comparison:
        """Choose the first structure unless another one is better by the margin."""
        sums, errors = self._differences()
        better = np.flatnonzero(sums < -np.maximum(_MARGIN * errors, _MIN_GAIN))
        chosen = int(better[np.argmin(sums[better])]) if len(better) else 0
        return Comparison(self.structures, np.mean(self._first) + sums, sums, errors, chosen)


class Search(ABC):
    """The search for the penalties of a model over folds, by the steps that all kinds of penalties share.

    Parameters
    ----------
    single : the structure in which all penalties of a kind are equal
    tol : stop if an iteration gains less than this, in nats
    max_iter : maximum number of iterations of L-BFGS-B, for each set of penalties that is learned
    """

    def __init__(self, model: InnerModel, folds: Folds, single: Structure, *, tol: float, max_iter: int) -> None:
        self.model, self.folds, self.single, self.tol, self.max_iter = model, folds, single, tol, max_iter
        self.problem = SelectionProblem(model, folds, lambda fits: fits.predictor)
        self._targets = model.loss.smooth_labels(model.y, _WRONG_LABELS_IN_COMPARISON / max(1.0, folds.sizes.sum()))

    @abstractmethod
    def find_single(self) -> Learned:
        """Find the best penalties of the structure `single`."""

    @abstractmethod
    def refine(self, structure: Structure, start: Array, fits: Fits | None = None) -> Learned:
        """Learn the penalties of a structure on all folds, from fits near the start if there are any."""

    @abstractmethod
    def follow_path(self, folds: Folds, structures: Sequence[Structure], single: Learned) -> list[Learned]:
        """Return a single penalty of each kind, and penalties of each structure from which to refine or relearn it."""

    @abstractmethod
    def relearn(self, folds: Folds, path: Sequence[Learned]) -> list[Learned]:
        """Learn the penalties of several structures on some folds, from those learned on others."""

    def find_start(self, structures: Sequence[Structure], single: Learned) -> Learned:
        """Return penalties of the last structure from which to refine it, without a comparison."""
        return self.follow_path(self.problem.folds, structures, single)[-1]

    def compare(self, candidates: Sequence[Structure], single: Learned) -> tuple[Comparison | None, Learned]:
        """Compare structures on rows on which their penalties were not learned; the first is preferred.

        Return also penalties of the chosen structure from which to refine it. Without a comparison, because folds are
        too few or the work is too much, a single penalty is the safest, and otherwise the strictest prior.
        """
        structures = [item for item in candidates if item is not self.single]
        first = int(len(structures) == len(candidates))  # 1 without a single penalty
        affordable, n_outer = self._choose_affordable(structures)
        if not affordable:
            return None, self.find_start(structures, single) if first else single
        shuffles = list(zip(self.problem.folds.by_shuffle(), self.folds.by_shuffle(), strict=True))
        path = self.follow_path(shuffles[0][0], affordable, single)[first:]
        comparison = SequentialComparison([item.structure for item in path], self.model.loss)
        for folds, rows in shuffles[: max(1, n_outer // OUTER_FOLDS)]:
            if not comparison.decided:
                comparison.add(*self._nested_losses(folds, rows, n_outer, [path[k] for k in comparison.open]))
        result = comparison.result()
        return result, path[result.chosen]

    def _choose_affordable(self, structures: Sequence[Structure]) -> tuple[Sequence[Structure], int]:
        """Return the structures that can be compared within the work limit, and for how many outer folds."""
        first = self.folds.by_shuffle()[0]
        if not first.nested():
            return [], 0
        flops = self.problem.model.estimate_flops(len(first.fitted)) * _EVALUATIONS
        strictest = list({item.name: item for item in structures}.values())  # the simplest one first
        for tried in (structures, strictest, strictest[:1]):
            n_outer = int(_MAX_FLOPS / max(1.0, flops * len(tried)))
            if n_outer >= OUTER_FOLDS:
                return tried, n_outer
        many_rows = len(self.model.y) >= _MANY_ROWS * self.model.n_penalties * self.model.y.shape[1]
        return (tried, n_outer) if n_outer and many_rows and tried[0].size <= _FEW_PENALTIES else ([], 0)

    def _nested_losses(self, folds: Folds, rows: Folds, n_outer: int, path: Sequence[Learned]) -> tuple[Array, Array]:
        """Return the losses of rows, (structures, rows), and their weights, with penalties learned on other rows."""
        sums, total = np.zeros((len(path), len(self.model.y))), np.zeros(len(self.model.y))
        for (inner, outer), (_, held_out) in list(zip(folds.nested(), rows.nested(), strict=True))[:n_outer]:
            found, weight = self.relearn(inner, path), held_out.held_out[0]
            fits = [self.problem.model.fit(outer.fitted, item.of_model, item.fits) for item in found]
            predictors = [self.problem.predict(fit) for fit in fits]
            parts = held_out.fitted, held_out.held_out
            sums += weight * [self.model.loss.held_out(self._targets, each, *parts)[0][0] for each in predictors]
            total += weight
        return sums / np.where(total > 0, total, 1.0), total


class PenaltySearch(Search):
    """The search for squared penalties.

    If rows are many compared with coefficients, most evaluations use a model of fewer rows (`InnerModel.compress`).

    Parameters
    ----------
    total_weight : of all rows; the first penalty to try, and the center of the range of penalties
    """

    def __init__(self, model: InnerModel, folds: Folds, total_weight: float, *, tol: float, max_iter: int) -> None:
        super().__init__(
            model, folds, Structure("single", np.zeros(model.n_penalties, int)), tol=tol, max_iter=max_iter
        )
        self._start = float(np.log(total_weight))
        self.bounds = self._start + np.log(_WEAKEST), self._start + np.log(_STRONGEST)
        self.compresses, self._mismatch = model.can_compress(folds), 0.0
        self._all_rows: Fits | None = None

    def _update_surrogate(self, log_penalties: Array) -> None:
        """If the problem is compressed, compress it around the fit to all rows at these penalties."""
        if not self.compresses or (self._all_rows is not None and self.model.loss.is_quadratic):
            return
        weights = np.maximum(self.folds.fitted.max(axis=0), self.folds.held_out.max(axis=0))[None]
        self._all_rows = self.model.fit(weights, log_penalties, self._all_rows)
        self.problem = self.model.compress(self.folds, self._all_rows)

    def _objective(self, structure: Structure, start: Fits | None) -> Objective:
        return Objective(self.problem.model, self.problem.folds, structure, None if self.compresses else start)

    def find_single(self) -> Learned:
        """Find the best single penalty: try decades below and above the start, and refine the best of them."""
        start, exact = self._start, self.problem
        values: dict[int, float] = {}
        fits: Fits | None = None
        first = best_fits = fits
        for step in (-1, 1):
            decade, worse, fits = max(step, 0), 0, first
            while worse < 2 and self.bounds[0] <= start + decade * _DECADE <= self.bounds[1]:
                self._update_surrogate(np.full(self.model.n_penalties, start + decade * _DECADE))
                objective = self._objective(self.single, fits)
                values[decade] = objective.value(np.array([start + decade * _DECADE]))
                fits, best = objective.fits, min(values.values())
                first, best_fits = first or fits, fits if values[decade] == best else best_fits
                worse = 0 if values[decade] == best else worse + 1 + (values[decade] > best + _HOPELESS)
                decade += step
        found = self.refine(self.single, np.array([start + min(values, key=values.__getitem__) * _DECADE]), best_fits)
        if self.compresses and abs(self._mismatch) > _MAX_MISMATCH:
            self.compresses, self.problem = False, exact
            if self.model.estimate_flops(len(self.folds.fitted)) * _EVALUATIONS <= _QUICK_FLOPS:
                return self.refine(self.single, found.log_penalties)
        return found

    def refine(self, structure: Structure, start: Array, fits: Fits | None = None) -> Learned:
        """Learn a structure; a surrogate that is not exact is corrected to first order, and renewed at the result."""
        approximate = self.compresses and not self.model.loss.is_quadratic
        exact = Objective(self.model, self.folds, structure)
        for _ in range(_ROUNDS if approximate else 1):
            self._update_surrogate(start[structure.groups])
            exact.fits = exact.fits or self._all_rows
            objective = self._objective(structure, fits)
            if approximate:
                self._mismatch = objective.correct(start, *exact(start))
            found = self._minimize(objective, start)
            start = found.log_penalties
        return found

    def _minimize(self, objective: Objective, start: Array, *, factor: float = 1.0) -> Learned:
        """Minimize from a start, with a multiple of the tolerance. A single penalty stays within a decade."""
        low, high = self.bounds
        if objective.structure.size == 1:
            low, high = max(low, start[0] - _DECADE), min(high, start[0] + _DECADE)
        return minimize_objective(objective, start, (low, high), tol=factor * self.tol, max_iter=self.max_iter)

    def follow_path(self, folds: Folds, structures: Sequence[Structure], single: Learned) -> list[Learned]:
        """Learn a single penalty, then each structure from the one of the same name before it."""
        strong = float(np.log(_STRONG * max(1.0, self.folds.sizes.sum())))
        single = self._minimize(Objective(self.problem.model, folds, self.single), single.log_penalties)
        found = [single]
        for structure in structures:
            level, last = single.log_penalties[0], found[-1]
            # also from strong penalties, because the gradient is almost zero if they are too weak
            starts = [np.full(structure.size, at) for at in sorted({level, max(level, strong)})]
            if last.structure.name == structure.name:
                starts = [last.log_penalties]
            runs = [self._minimize(Objective(self.problem.model, folds, structure, last.fits), at) for at in starts]
            found.append(min(runs, key=lambda run: run.value))
        return found

    def relearn(self, folds: Folds, path: Sequence[Learned]) -> list[Learned]:
        objectives = [Objective(self.problem.model, folds, item.structure, item.fits) for item in path]
        starts = [item.log_penalties for item in path]
        return [self._minimize(*pair, factor=_LOOSE) for pair in zip(objectives, starts, strict=True)]

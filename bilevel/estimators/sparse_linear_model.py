"""Sparse linear models whose strengths of absolute values and of squares are learned: the search, and the estimators.

The search follows coarse paths of strengths first, and runs L-BFGS-B from the best point. The held-out loss is a
continuous function of the strengths, but its derivative jumps where a coefficient becomes zero. Line searches may end
at such points, so that the best point of all evaluations is returned.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from sklearn.exceptions import ConvergenceWarning

from bilevel.estimators.base import Groups, document, reject, warn
from bilevel.estimators.linear_model import BilevelLogisticRegression, LeastSquares, PenaltySelector, TrainingData
from bilevel.estimators.losses import Array
from bilevel.estimators.selection import (
    OUTER_FOLDS,
    Comparison,
    Fits,
    Folds,
    InnerModel,
    Learned,
    Objective,
    Search,
    SequentialComparison,
    Structure,
    run_lbfgs,
)
from bilevel.estimators.sparse import SparseModel, WorkLimitReached

SPARSITIES = ("features", "groups")
_PRIOR_SCALE = 0.5
# Strengths of squares relative to those of absolute values: an elastic net, almost the lasso, almost ridge. The numbers
# are those of the first points of their paths, counted from the best point of the first path.
_RATIOS = {0.3: 0, 1e-2: -1, 10.0: 1}
_PATH = 0.5 ** np.arange(0.5, 13)  # fractions of the smallest strength for which all coefficients are zero
_PATH_ROWS = 500  # held-out rows along a path, which only provides a start
_MAX_RISES, _HOPELESS = 2, 5.0  # a path ends after this many increases in a row, or this many nats above its best value
# Nats by which another path must be better than the first, times the number of held-out rows that paths ignore,
# relative to those that they use.
_MIN_LEAD = 2.0
_PATH_TOL, _GRADIENT_TOL = 5e-2, 1e-4  # tolerances of fits along a path, and for derivatives
_INFINITE = 300.0  # logarithm of a strength for which all coefficients are zero
_FIRST_STEP, _MAX_STEP = 0.5, 1.5  # changes of a log strength in the first step and in one run of L-BFGS-B
_LOG_BOUNDS = np.log([[1e-5, 1.5], [1e-6, 1e3]])  # of both strengths in their units
_MAX_NONZERO = 1500  # coefficients; strengths that leave more are not searched
_MIN_FLOPS, _PASSES = 4e11, 300  # work limit of a search: a constant, plus passes over X per iteration
_WORK_LIMIT_REACHED = (
    "{} stopped the search for its penalties at the limit of work that max_iter={} sets, at the best of those that it "
    "evaluated; weaker penalties, which leave more nonzero coefficients, may be better. Increase max_iter, or give "
    "fewer columns."
)


class StrengthStructure(Structure):
    """Strengths of norms and of squares, which are each half of the free variables and have means of their own."""

    @classmethod
    def join(cls, name: str, norms: Array, squares: Array, prior_scale: float = np.inf) -> "StrengthStructure":
        """Join the groups of both kinds of strengths, both numbered from 0."""
        return cls(name, np.concatenate([norms, norms.max() + 1 + squares]), prior_scale)

    def prior(self, log_penalties: Array) -> tuple[float, Array]:
        halves = log_penalties.reshape(2, -1)
        return self._quadratic((halves - halves.mean(axis=1, keepdims=True)).ravel())


class _BestPoint:
    """The objective less its first value, scaled such that a first gradient step is short; keeps the best point.

    The first step of L-BFGS-B has the length of the gradient, which may be hundreds of nats.
    """

    def __init__(self, objective: Objective, start: Array) -> None:
        self.objective = objective
        self.first, slope = objective(start)
        self.scale = max(np.abs(slope).max() / _FIRST_STEP, 1e-12)
        self.best = start, self.first, objective.fits

    def __call__(self, log_strengths: Array) -> tuple[float, Array]:
        value, gradient = self.objective(log_strengths)
        if value < self.best[1]:
            self.best = log_strengths.copy(), value, self.objective.fits
        return (value - self.first) / self.scale, gradient / self.scale


class StrengthSearch(Search):
    """The search for strengths of one model over folds.

    Parameters
    ----------
    tol : stop if an iteration gains less than this, in nats
    max_iter : maximum number of iterations of L-BFGS-B; the work of a search is limited to `_PASSES` passes over X per
        iteration

    Attributes
    ----------
    out_of_work : whether a search ended at that limit, with the best point until then
    """

    def __init__(self, model: SparseModel, folds: Folds, *, tol: float, max_iter: int) -> None:
        self.model, self.folds, self.tol, self.max_iter = model, folds, tol, max_iter
        self._max_flops, self.out_of_work = _MIN_FLOPS + _PASSES * max_iter * model.X.size * model.outputs, False
        norms, squares = np.zeros(model.n_norms, int), np.zeros(len(model.penalized), int)
        self.single = StrengthStructure.join("single", norms, squares)
        self._empty, self._constant, self.units = self._measure_units()
        self.bounds = np.log(self.units)[:, None] + _LOG_BOUNDS
        self._too_many = False
        held_out = np.cumsum((folds.held_out > 0).sum(axis=1))
        self._path_folds = folds.rescaled(np.flatnonzero(np.append(0, held_out[:-1]) < _PATH_ROWS))

    def _measure_units(self) -> tuple[Fits, bool, Array]:
        """Return fits of intercepts alone, whether there is no better model, and the units of both strengths.

        The units are the smallest strength of norms for which all coefficients are zero, and the mean second derivative
        of the loss in a coefficient; numbers that are zero are replaced by 1.
        """
        model, weights = self.model, self.folds.fitted
        empty = model.fit(weights, np.full(model.n_penalties, _INFINITE))
        gradients = [solved.loss.gradient(solved.solution.eta)[0] for solved in empty.state.solved]
        curvature = np.mean(weights[..., None] * model.loss.curvature(model.y, empty.predictor), axis=(0, 2))
        strength = max(model.max_strength(gradient) for gradient in gradients)
        return empty, not strength, np.array([strength or 1.0, model.columns.mean_squares(curvature) or 1.0])

    def find_single(self) -> Learned:
        """Follow paths from strong strengths to weak ones, and refine the best point."""
        empty = Learned(self.single, np.log(self.units), np.inf, self._empty, [np.inf], True)
        if self._constant:
            return empty._replace(value=0.0, values=[0.0])
        found: list[Learned] = []
        with self._limit_work(self._max_flops / 2):
            for ratio in _RATIOS:
                found += self._follow_path(ratio, found[0] if found else None)
                if len(found) > 1 and found[-1].value < found[0].value - _HOPELESS:
                    break  # if weaker squares are better, stronger ones are not
        rows, used = (np.count_nonzero(part.held_out.any(axis=0)) for part in (self.folds, self._path_folds))
        lead = _MIN_LEAD * (rows / used - 1)
        best = min(found, key=lambda path: path.value + lead * (path is not found[0]), default=empty)
        if self._too_many:  # below the next point of the path, coefficients would be too many
            self.bounds[0, 0] = max(self.bounds[0, 0], best.log_penalties[0] - np.log(2))
        return self.refine(self.single, best.log_penalties, best.fits)

    def _follow_path(self, ratio: float, near: Learned | None) -> list[Learned]:
        """Return the best point of a path, or nothing if the work limit is reached before its first point."""
        objective = Objective(self.model, self._path_folds, self.single, near and near.fits)
        place = near.log_penalties[0] - np.log(_PATH * self.units[0]) if near else np.zeros(1)
        first = np.clip(np.argmin(np.abs(place)) + _RATIOS[ratio], 0, len(_PATH) - 1)
        rises, best = 0, None
        with self._tolerance(_PATH_TOL):
            for factor in _PATH[first:]:
                log_strengths = np.log([factor * self.units[0], factor * ratio * self.units[1]])
                try:
                    value = objective.value(log_strengths)
                except WorkLimitReached:
                    self.out_of_work = True
                    break
                assert objective.fits is not None
                if best and max(solved.solution.size for solved in objective.fits.state.solved) > _MAX_NONZERO:
                    self._too_many = True
                    break
                if best is None or value < best.value:
                    best = Learned(self.single, log_strengths, value, objective.fits, objective.values, True)
                rises = rises + 1 if value > min(objective.values[-2:]) else 0
                if rises == _MAX_RISES or value > best.value + _HOPELESS:
                    break
        return [best] if best else []

    @contextmanager
    def _limit_work(self, max_flops: float) -> Iterator[None]:
        """Limit the work of fits; a fit that would exceed the limit ends the block."""
        self.model.flops_left = max_flops
        try:
            yield
        except WorkLimitReached:
            self.out_of_work = True
        finally:
            self.model.flops_left = np.inf

    @contextmanager
    def _tolerance(self, tol: float) -> Iterator[None]:
        """Temporarily use a looser tolerance of fits."""
        before, self.model.tol = self.model.tol, tol
        try:
            yield
        finally:
            self.model.tol = before

    def refine(
        self, structure: Structure, start: Array, fits: Fits | None = None, folds: Folds | None = None
    ) -> Learned:
        """Minimize the objective by L-BFGS-B, and return the best point of all evaluations."""
        objective = Objective(self.model, folds or self.folds, structure, fits)
        bounds = np.repeat(self.bounds, len(start) // 2, axis=0).T
        with self._tolerance(_GRADIENT_TOL):
            tracked, last, converged = _BestPoint(objective, np.clip(start, *bounds)), np.inf, True
            options = {"max_iter": self.max_iter, "ftol": self.tol / tracked.scale, "gtol": self.tol / tracked.scale}
            with self._limit_work(self._max_flops / (2 * OUTER_FOLDS if folds else 2)):
                while tracked.best[1] < last - self.tol:  # in boxes, because too long a step costs more than all others
                    point, last = tracked.best[:2]
                    box = np.clip(point + np.array([[-_MAX_STEP], [_MAX_STEP]]), *bounds[:, None])
                    found = run_lbfgs(tracked, point, bounds=box.T, **options)
                    converged = found.status != 1
                    if np.all((tracked.best[0] > box[0]) & (tracked.best[0] < box[1])):
                        break
        best, value, best_fits = tracked.best
        assert best_fits is not None
        return Learned(structure, best, value, best_fits, objective.values, converged)

    def find_start(self, structures: Sequence[Structure], single: Learned) -> Learned:
        """Return the shared strengths as a start for the last structure."""
        structure = structures[-1]
        return single._replace(structure=structure, log_penalties=np.repeat(single.log_penalties, structure.size // 2))

    def compare(self, candidates: Sequence[Structure], single: Learned) -> tuple[Comparison | None, Learned | None]:
        """Compare structures on rows on which they were not learned; return None if folds are too few."""
        comparison = SequentialComparison(candidates, self.model.loss)
        for folds in self.folds.by_shuffle():
            pairs = folds.nested(OUTER_FOLDS)
            if pairs and not comparison.decided:
                still_open = [candidates[k] for k in comparison.open.tolist()]
                losses = [self._nested_losses(*pair, still_open, single) for pair in pairs]
                comparison.add_outer_folds(losses, [outer.held_out[0] for _, outer in pairs])
        if not pairs:
            return None, None
        result = comparison.result("nested folds")
        return result, self.find_start([candidates[result.chosen]], single)

    def _nested_losses(self, inner: Folds, outer: Folds, structures: Sequence[Structure], near: Learned) -> Array:
        """Return the losses of rows, (structures, rows), under strengths learned on the inner folds."""
        shared = self.refine(self.single, near.log_penalties, near.fits, inner)
        starts = [self.find_start([structure], shared) for structure in structures[1:]]
        found = [shared, *(self.refine(one.structure, one.log_penalties, one.fits, inner) for one in starts)]
        fits = [self.model.fit(outer.fitted, learned.of_model, learned.fits) for learned in found]
        return np.array([self.model.loss.value(self.model.y, fit.predictor)[0] for fit in fits])


@dataclass(eq=False, repr=False, kw_only=True)
class SparsePenaltySelector(PenaltySelector):
    """A linear model with two kinds of strengths."""

    structure: str = field(default="single", kw_only=False)
    sparsity: str = "features"

    l1_penalties_: Array = field(init=False)

    _entries: ClassVar[str] = """
structure : {"single", "auto", "per_group", "per_feature"}, default="single"
    Which strengths of either kind are free: one for all features, one per group of features, or one per feature.
    "auto" takes several strengths only if they are better than two by a standard error and by 2 nats, on rows on
    which they were not learned.
sparsity : {"features", "groups"}, default="features"
    Whether to penalize absolute values of coefficients, or the norm of each group of them, so that whole groups
    become zero.
prior_scale : float or "auto", default="auto"
    Scale by which the log strengths of a kind spread around their mean. "auto" means 0.5.
l1_penalties_ : ndarray of shape (n_features,)
    Strengths of absolute values or norms, of standardized features and targets, relative to the summed loss.
"""

    @property
    def penalty(self) -> str:
        """The name "l1", by which SelectFromModel recognizes that it should drop columns with zero coefficients."""
        return "l1"

    def _check_parameters(self) -> None:
        super()._check_parameters()
        if self.sparsity not in SPARSITIES:
            reject(self, "sparsity", f"a str among {SPARSITIES}")
        if self.sparsity == "groups" and self.groups is None:
            raise ValueError("`sparsity='groups'` needs `groups`: a label for each feature, a dict, or 'prefix'.")

    def _make_model(self, data: TrainingData) -> SparseModel:
        groups = data.groups.numbers if self.sparsity == "groups" else None
        options: dict[str, Any] = {"penalized": data.groups.penalized, "fit_intercept": self.fit_intercept}
        return SparseModel(data.X, data.y, self._make_loss(), groups, **options)

    def _search(self, model: InnerModel, data: TrainingData) -> Learned:
        assert isinstance(model, SparseModel)
        search = StrengthSearch(model, data.folds, tol=self.tol, max_iter=self.max_iter)
        learned = self._select(search, data.groups)
        if search.out_of_work:
            warn(_WORK_LIMIT_REACHED.format(type(self).__name__, self.max_iter), ConvergenceWarning)
        return learned

    def _list_structures(self, groups: Groups) -> list[Structure]:
        """Return the candidates with several strengths of a kind; norms of groups have no strengths per feature."""
        scale = _PRIOR_SCALE if self.prior_scale == "auto" else float(self.prior_scale)
        numbers = {"per_group": groups.numbers, "per_feature": np.arange(len(groups.penalized))}
        if self.sparsity == "groups":
            del numbers["per_feature"]
        names = [name for name in numbers if self.structure in ("auto", name) and numbers[name].max() > 0]
        norms = {name: numbers[name] if self.sparsity == "features" else np.unique(numbers[name]) for name in names}
        return [StrengthStructure.join(name, norms[name], numbers[name], scale) for name in names]

    def _set_penalties(self, log_penalties: Array, data: TrainingData) -> Array:
        """Set both attributes, and return the log strengths, those of norms adapted to the number of all rows.

        A strength of squares is a ratio of variances, of errors and of coefficients, and does not depend on the number
        of rows. A strength of absolute values is compared with sums of errors times columns of noise, which grow with
        the square root of the number of rows.
        """
        groups, self.l1_penalties_ = data.groups, np.zeros(data.X.shape[1])
        norms, squares = np.split(log_penalties, [len(log_penalties) - len(groups.penalized)])
        norms = norms + float(np.log(data.weights.sum() / data.folds.fitted.sum(axis=1).mean()) / 2)
        strengths = np.exp(norms)
        self.l1_penalties_[groups.penalized] = strengths[groups.numbers] if self.sparsity == "groups" else strengths
        super()._set_penalties(squares, data)
        return np.concatenate([norms, squares])

    @property
    def penalty_table_(self) -> Any:
        """A DataFrame of features, groups, both strengths and coefficients, the least penalized first."""
        table = super().penalty_table_
        table.insert(2, "l1_penalty", self.l1_penalties_[np.argsort(self.penalties_, kind="stable")])
        return table


@document
@dataclass(eq=False, repr=False, kw_only=True)
class BilevelElasticNet(SparsePenaltySelector, LeastSquares):
    """Least squares with absolute values and squares of coefficients, whose strengths are learned.

    Fits minimize sum ½ error² + sum l1_k |coef_k| + ½ sum penalty_k coef_k², with targets of unit deviation. Strengths
    minimize n/2 log(mean squared error of held-out rows) by exact gradients: first on coarse paths, then by L-BFGS-B.
    By default there are two of them, which all features share. The work of a search has a limit that grows with
    `max_iter`; a search that reaches it emits a ConvergenceWarning.

    Parameters
    ----------
    {parameters}

    Attributes
    ----------
    {attributes}

    Examples
    --------
    >>> from sklearn.datasets import make_regression
    >>> from bilevel.estimators import BilevelElasticNet
    >>> X, y = make_regression(100, 50, n_informative=5, noise=5.0, random_state=0)
    >>> model = BilevelElasticNet(random_state=0).fit(X, y)
    >>> 5 <= sum(model.coef_ != 0) < 40
    np.True_
    """


@document
@dataclass(eq=False, repr=False, kw_only=True)
class BilevelSparseLogisticRegression(SparsePenaltySelector, BilevelLogisticRegression):
    """Logistic regression with absolute values and squares of coefficients, whose strengths are learned.

    Fits minimize sum log-loss + sum l1_k |coef_k| + ½ sum penalty_k coef_k². Strengths minimize the log-loss of
    held-out rows by exact gradients: first on coarse paths, then by L-BFGS-B. By default there are two of them, which
    all features share. The work of a search has a limit that grows with `max_iter`; a search that reaches it emits a
    ConvergenceWarning.

    Parameters
    ----------
    {parameters}

    Attributes
    ----------
    {attributes}

    Examples
    --------
    >>> from sklearn.datasets import load_breast_cancer
    >>> from bilevel.estimators import BilevelSparseLogisticRegression
    >>> X, y = load_breast_cancer(return_X_y=True)
    >>> model = BilevelSparseLogisticRegression(random_state=0).fit(X, y)
    >>> model.score(X, y) > 0.97
    True
    """

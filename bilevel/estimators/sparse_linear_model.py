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

from bilevel.estimators.base import Groups, document, warn
from bilevel.estimators.linear_model import BilevelLogisticRegression, LeastSquares, PenaltySelector, TrainingData
from bilevel.estimators.losses import Array
from bilevel.estimators.selection import (
    OUTER_FOLDS,
    Fits,
    Folds,
    InnerModel,
    Learned,
    Objective,
    Search,
    Structure,
    run_lbfgs,
)
from bilevel.estimators.sparse import SparseModel, WorkLimitReached

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


def join_strengths(name: str, norms: Array, squares: Array, prior_scale: float = np.inf) -> Structure:
    """Return the structure of groups of strengths of norms and of squares, both numbered from 0."""
    return Structure(name, np.concatenate([norms, norms.max() + 1 + squares]), prior_scale, n_kinds=2)


class StrengthSearch(Search):
    """The search for strengths of one model over folds.

    Parameters
    ----------
    max_iter : maximum number of iterations of L-BFGS-B, which also limits the work, to `_PASSES` passes over X for each

    Attributes
    ----------
    out_of_work : whether a search ended at that limit, with the best point until then
    """

    model: SparseModel

    def __init__(self, model: SparseModel, folds: Folds, *, tol: float, max_iter: int) -> None:
        single = join_strengths("single", np.zeros(model.n_norms, int), np.zeros(len(model.penalized), int))
        super().__init__(model, folds, single, tol=tol, max_iter=max_iter)
        self._max_flops, self.out_of_work = _MIN_FLOPS + _PASSES * max_iter * model.X.size * model.outputs, False
        self._empty, self.units = self._measure_units()
        self.bounds = np.log(self.units)[:, None] + _LOG_BOUNDS
        self._too_many = False
        held_out = np.cumsum((folds.held_out > 0).sum(axis=1))
        self._path_folds = folds.rescaled(np.flatnonzero(np.append(0, held_out[:-1]) < _PATH_ROWS))

    def _measure_units(self) -> tuple[Fits, Array]:
        """Return fits of intercepts alone, the strength that just gives these fits, and the curvature of the loss."""
        model, weights = self.model, self.folds.fitted
        empty = model.fit(weights, np.full(model.n_penalties, _INFINITE))
        gradients = [solved.loss.gradient(solved.eta)[0].ravel() for solved in empty.state.solved]
        curvature = np.mean(weights[..., None] * model.loss.curvature(model.y, empty.predictor), axis=(0, 2))
        strength = max(empty.state.solved[0].penalty.largest_norm(gradient) for gradient in gradients)
        return empty, np.array([strength or 1.0, model.columns.mean_squares(curvature) or 1.0])

    def find_single(self) -> Learned:
        """Follow paths from strong strengths to weak ones, and refine the best point."""
        paths: list[Objective] = []
        with self._limit_fits(_PATH_TOL, self._max_flops / 2):
            for ratio in _RATIOS:
                near = paths[0].best if paths else None
                path = Objective(self.model, self._path_folds, self.single, near and near.fits)
                paths.append(path)
                self._follow_path(path, ratio, near)
                if near and path.best and path.best.value < near.value - _HOPELESS:
                    break  # if weaker squares are better, stronger ones are not
        empty = Learned(self.single, np.log(self.units), np.inf, self._empty, [], True)
        found = [path.best or empty for path in paths]
        rows, used = (np.count_nonzero(part.held_out.any(axis=0)) for part in (self.folds, self._path_folds))
        lead = _MIN_LEAD * (rows / used - 1)
        best = min(found, key=lambda path: path.value + lead * (path is not found[0]))
        if self._too_many:  # below the next point of the path, coefficients would be too many
            self.bounds[0, 0] = max(self.bounds[0, 0], best.log_penalties[0] - np.log(2))
        return self.refine(self.single, best.log_penalties, best.fits)

    def _follow_path(self, objective: Objective, ratio: float, near: Learned | None) -> None:
        """Evaluate weaker and weaker strengths, at first those near a point, until they are clearly too weak."""
        place = near.log_penalties[0] - np.log(_PATH * self.units[0]) if near else np.zeros(1)
        first = np.clip(np.argmin(np.abs(place)) + _RATIOS[ratio], 0, len(_PATH) - 1)
        rises = 0
        for factor in _PATH[first:]:
            best, value = objective.best, objective.value(np.log([factor, factor * ratio] * self.units))
            assert objective.best and objective.fits
            if best and max(solved.size for solved in objective.fits.state.solved) > _MAX_NONZERO:
                objective.best, self._too_many = best, True
                break
            rises = rises + 1 if value > min(objective.values[-2:]) else 0
            if rises == _MAX_RISES or value > objective.best.value + _HOPELESS:
                break

    @contextmanager
    def _limit_fits(self, tol: float, max_flops: float = np.inf) -> Iterator[None]:
        """Temporarily set the tolerance and the work limit of fits; a fit that would exceed it ends the block."""
        before = self.model.tol
        self.model.tol, self.model.flops_left = tol, max_flops
        try:
            yield
        except WorkLimitReached:
            self.out_of_work = True
        finally:
            self.model.tol, self.model.flops_left = before, np.inf

    def refine(
        self, structure: Structure, start: Array, fits: Fits | None = None, folds: Folds | None = None
    ) -> Learned:
        """Minimize the objective by L-BFGS-B, and return the best point of all evaluations."""
        objective = Objective(self.model, folds or self.folds, structure, fits)
        bounds = np.repeat(self.bounds, len(start) // 2, axis=0).T
        with self._limit_fits(_GRADIENT_TOL):
            first, slope = objective(np.clip(start, *bounds))
        # The first step of L-BFGS-B has the length of the gradient, which may be hundreds of nats.
        scale, last, converged = max(np.abs(slope).max() / _FIRST_STEP, 1e-12), np.inf, True

        def scaled(log_strengths: Array) -> tuple[float, Array]:
            value, gradient = objective(log_strengths)
            return (value - first) / scale, gradient / scale

        options = {"max_iter": self.max_iter, "ftol": self.tol / scale, "gtol": self.tol / scale}
        with self._limit_fits(_GRADIENT_TOL, self._max_flops / (2 * OUTER_FOLDS if folds else 2)):
            while (best := objective.best) and best.value < last - self.tol:
                point, last = best.log_penalties, best.value
                # in boxes, because too long a step costs more than all others
                box = np.clip(point + np.array([[-_MAX_STEP], [_MAX_STEP]]), *bounds[:, None])
                converged = run_lbfgs(scaled, point, bounds=box.T, **options).status != 1
                moved = objective.best.log_penalties
                if np.all((moved > box[0]) & (moved < box[1])):
                    break
        assert objective.best
        return objective.best._replace(converged=converged)

    def follow_path(self, folds: Folds, structures: Sequence[Structure], single: Learned) -> list[Learned]:
        """Return the shared strengths as a start for every structure."""
        shared = single.log_penalties
        starts = [single._replace(structure=one, log_penalties=np.repeat(shared, one.size // 2)) for one in structures]
        return [single, *starts]

    def relearn(self, folds: Folds, path: Sequence[Learned]) -> list[Learned]:
        single, *others = path
        shared = self.refine(self.single, single.log_penalties, single.fits, folds)
        starts = self.follow_path(folds, [one.structure for one in others], shared)[1:]
        return [shared, *(self.refine(one.structure, one.log_penalties, one.fits, folds) for one in starts)]


@dataclass(eq=False, repr=False, kw_only=True)
class SparsePenaltySelector(PenaltySelector):
    """A linear model with two kinds of strengths."""

    structure: str = field(default="single", kw_only=False)
    sparsity: str = "features"

    _prior_scales: ClassVar[tuple[float, ...]] = (0.5,)
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
        found = super()._list_structures(groups)
        if self.sparsity == "features":
            return [join_strengths(one.name, one.groups, one.groups, one.prior_scale) for one in found]
        found = [one for one in found if one.name == "per_group"]
        return [join_strengths(one.name, np.unique(one.groups), one.groups, one.prior_scale) for one in found]

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

    Examples
    --------
    >>> from sklearn.datasets import load_breast_cancer
    >>> from bilevel.estimators import BilevelSparseLogisticRegression
    >>> X, y = load_breast_cancer(return_X_y=True)
    >>> model = BilevelSparseLogisticRegression(random_state=0).fit(X, y)
    >>> model.score(X, y) > 0.97
    True
    """

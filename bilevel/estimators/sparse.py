"""Linear models with coefficients that are zero: strengths of absolute values and squares are learned over folds."""

import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning

from bilevel.estimators.base import refuse
from bilevel.estimators.comparison import Comparison
from bilevel.estimators.groups import Groups
from bilevel.estimators.linear import BilevelLogisticRegression, LeastSquares
from bilevel.estimators.penalties import PenaltySelector, Rows
from bilevel.estimators.selection import Learned, Structure
from bilevel.estimators.sparse_models import ElasticNetModel, GroupLassoModel, SparseModel
from bilevel.estimators.strengths import StrengthSearch, StrengthStructure

SPARSITIES = ("features", "groups")
_PRIOR_SCALE = 0.5
_OUT_OF_WORK = (
    "{} stopped the search for its penalties at the limit of work that max_iter={} sets, at the best of those that it "
    "evaluated; weaker penalties, which leave more nonzero coefficients, may be better. Increase max_iter, or give "
    "fewer columns."
)


@dataclass(eq=False, repr=False, kw_only=True)
class SparsePenalties(PenaltySelector):
    """A search for two kinds of strengths in the place of one."""

    structure: str = field(default="single", kw_only=False)
    sparsity: str = "features"

    l1_penalties_: np.ndarray = field(init=False)

    @property
    def penalty(self) -> str:
        """The name "l1", by which SelectFromModel recognizes that columns with zero coefficients are to be dropped."""
        return "l1"

    def _check_parameters(self) -> None:
        super()._check_parameters()
        if self.sparsity not in SPARSITIES:
            refuse(self, "sparsity", f"a str among {SPARSITIES}")
        if self.sparsity == "groups" and self.groups is None:
            raise ValueError("`sparsity='groups'` needs `groups`: a label for each feature, a dict, or 'prefix'.")

    def _learn(self, rows: Rows, groups: Groups) -> tuple[np.ndarray, np.ndarray]:
        model = self._make_model(rows, groups)
        self._groups, self._comparison = groups, None
        self.penalties_, self.l1_penalties_ = np.zeros((2, rows.X.shape[1]))
        log_strengths, start = np.zeros(model.n_penalties), None
        if len(groups.penalized):
            search = StrengthSearch(model, rows.folds, tol=self.tol, max_iter=self.max_iter)
            learned = self._select(search, groups)
            self._note(learned)
            if search.out_of_work:
                warnings.warn(_OUT_OF_WORK.format(type(self).__name__, self.max_iter), ConvergenceWarning, stacklevel=3)
            log_strengths, start = learned.log_penalties[learned.structure.groups], learned.fits
            log_strengths = log_strengths + self._choose_level(model, rows, log_strengths)
            norms = model.n_penalties - len(groups.penalized)
            log_strengths[:norms] += _adapt(rows)
            self.penalties_[groups.penalized] = np.exp(log_strengths[norms:])
            self.l1_penalties_[groups.penalized] = self._spread(np.exp(log_strengths[:norms]), groups)
        fits = model.fit(rows.weights[None], log_strengths, start)
        return fits.coef[0], fits.intercept[0]

    @property
    def penalty_table_(self) -> Any:
        """A DataFrame of features, groups, both strengths and coefficients, the least penalized first."""
        table = super().penalty_table_
        table.insert(2, "l1_penalty", self.l1_penalties_[np.argsort(self.penalties_, kind="stable")])
        return table

    def _make_model(self, rows: Rows, groups: Groups) -> SparseModel:
        options: dict[str, Any] = {"penalized": groups.penalized, "fit_intercept": self.fit_intercept}
        if self.sparsity == "groups":
            return GroupLassoModel(rows.X, rows.y, self._make_loss(), groups.numbers, **options)
        return ElasticNetModel(rows.X, rows.y, self._make_loss(), **options)

    def _spread(self, norms: np.ndarray, groups: Groups) -> np.ndarray:
        return norms[groups.numbers] if self.sparsity == "groups" else norms

    def _select(self, search: StrengthSearch, groups: Groups) -> Learned:  # type: ignore[override]
        """Return the strengths of the structure that is asked for, or of the best one."""
        single, structures = search.learn_single(), self._list_structures(groups)
        if not structures:
            return single
        chosen = structures[0]
        if self.structure == "auto":
            self._comparison: Comparison | None = search.compare(structures, single)
            chosen = self._comparison.structures[self._comparison.chosen] if self._comparison else search.single
        return single if chosen.name == "single" else search.learn_structure(chosen, single)

    def _list_structures(self, groups: Groups) -> list[Structure]:
        """Return those with more than one strength of a kind; norms of groups have no strengths of features."""
        scale = _PRIOR_SCALE if self.prior_scale == "auto" else float(self.prior_scale)
        numbers = {"per_group": groups.numbers, "per_feature": np.arange(len(groups.penalized))}
        if self.sparsity == "groups":
            del numbers["per_feature"]
        names = [name for name in numbers if self.structure in ("auto", name) and numbers[name].max() > 0]
        norms = {name: numbers[name] if self.sparsity == "features" else np.unique(numbers[name]) for name in names}
        return [StrengthStructure.tie(name, norms[name], numbers[name], scale) for name in names]


def _adapt(rows: Rows) -> float:
    """Return what the logarithms of strengths of absolute values grow by, from the rows of a fold to all rows.

    A strength of squares is a ratio of variances, of errors and of coefficients, and stays. That of absolute values is
    compared with sums of errors times columns that are noise, which grow with the root of the number of rows.
    """
    return float(np.log(rows.weights.sum() / rows.folds.fitted.sum(axis=1).mean()) / 2)


@dataclass(eq=False, repr=False, kw_only=True)
class BilevelElasticNet(SparsePenalties, LeastSquares):
    """Least squares with absolute values and squares of coefficients, both strengths learned.

    Fits minimize sum ½ error² + sum l1_k |coef_k| + ½ sum penalty_k coef_k², with targets of deviation 1. Strengths
    minimize n/2 log of the mean squared error of held-out rows, by exact gradients: first on coarse paths, then by
    L-BFGS-B. Two of them, shared by all features, are the default. The work of a search has a limit, which grows with
    `max_iter`; a search that reaches it emits a ConvergenceWarning.

    Parameters
    ----------
    structure : "single", "per_group" or "per_feature", the strengths of either kind; "auto" takes many only where they
        are ahead of two by a standard error and 2 nats, on rows that did not choose them
    sparsity : "features", for absolute values of coefficients, or "groups", for the norm of each group of them
    prior_scale : how far the log strengths of a kind spread around their mean; "auto" means 0.5
    groups, unpenalized, cv, scoring, fit_intercept, standardize : as in `BilevelRidge`
    max_iter, tol, random_state, verbose : as there

    Attributes
    ----------
    coef_ : (features,), or (targets, features)
    intercept_ : float, or (targets,)
    l1_penalties_ : (features,), of standardized features and targets, beside the summed loss
    penalties_ : (features,), of the squares, as `alpha` of Ridge
    penalty_structure_, prior_scale_, candidates_, penalty_table_, history_ : as in `BilevelRidge`
    n_iter_, n_features_in_, feature_names_in_ : as in scikit-learn

    Examples
    --------
    >>> from sklearn.datasets import make_regression
    >>> from bilevel.estimators import BilevelElasticNet
    >>> X, y = make_regression(100, 50, n_informative=5, noise=5.0, random_state=0)
    >>> model = BilevelElasticNet(random_state=0).fit(X, y)
    >>> 5 <= sum(model.coef_ != 0) < 40
    np.True_
    """


@dataclass(eq=False, repr=False, kw_only=True)
class BilevelSparseLogisticRegression(SparsePenalties, BilevelLogisticRegression):
    """Logistic regression with absolute values and squares of coefficients, both strengths learned.

    Fits minimize sum log-loss + sum l1_k |coef_k| + ½ sum penalty_k coef_k². Strengths minimize the log-loss of
    held-out rows. All else is as in `BilevelElasticNet` and `BilevelLogisticRegression`.

    Parameters
    ----------
    structure, sparsity, prior_scale : as in `BilevelElasticNet`
    groups, unpenalized, cv, scoring, class_weight, fit_intercept, standardize : as in `BilevelLogisticRegression`
    max_iter, tol, random_state, verbose : as there

    Attributes
    ----------
    coef_ : (1, features), or (classes, features)
    intercept_ : (1,), or (classes,)
    l1_penalties_ : (features,), of standardized features, beside the summed loss as 1 / `C`
    penalties_ : (features,), of the squares
    penalty_structure_, prior_scale_, candidates_, penalty_table_, history_ : as in `BilevelLogisticRegression`
    classes_, n_iter_, n_features_in_, feature_names_in_ : as in scikit-learn

    Examples
    --------
    >>> from sklearn.datasets import load_breast_cancer
    >>> from bilevel.estimators import BilevelSparseLogisticRegression
    >>> X, y = load_breast_cancer(return_X_y=True)
    >>> model = BilevelSparseLogisticRegression(random_state=0).fit(X, y)
    >>> model.score(X, y) > 0.97
    True
    """

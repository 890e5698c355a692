"""The base of estimators that learn their penalties: rows to folds, a search for penalties, one fit on all rows."""

import warnings
from abc import abstractmethod
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import scipy.sparse as sp
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from bilevel.estimators.base import LinearEstimator, check_parameters, check_validation_rows, refuse
from bilevel.estimators.choice import Comparison, Search
from bilevel.estimators.folds import Scaling, make_folds, split
from bilevel.estimators.glm import RidgeGLM
from bilevel.estimators.groups import Groups, find_groups
from bilevel.estimators.losses import Loss
from bilevel.estimators.selection import Folds, Learned, Structure
from bilevel.estimators.tables import candidates, penalty_table, plot

STRUCTURES = ("auto", "single", "per_group", "per_feature")
PRIOR_SCALES = (2.0, 1.0, 0.5)
# Of columns of deviation 1, per row: a smaller penalty is as good as none, a larger one leaves the feature out.
_LEAST, _MOST = 1e-6, 1e3
_REFIT_TOL = 1e-14
_FEW_ENTRIES = 2e5  # of sparse rows that are handled faster as an array


class Rows(NamedTuple):
    """Rows to learn from, those to validate on last: features, encoded targets, weights, and folds."""

    X: Any
    y: np.ndarray
    weights: np.ndarray
    folds: Folds


@dataclass(eq=False, repr=False, kw_only=True)
class PenaltySelector(LinearEstimator):
    """A linear model whose penalties minimize the loss of rows on which it was not fitted."""

    structure: str = field(default="auto", kw_only=False)
    groups: Any = None
    unpenalized: Any = None
    prior_scale: Any = "auto"
    cv: Any = 5
    max_iter: int = 100
    tol: float = 0.01

    _classifies: ClassVar[bool] = False
    _many_outputs: ClassVar[bool] = False
    penalties_: np.ndarray = field(init=False)
    _comparison: Comparison | None = field(init=False)

    @abstractmethod
    def _encode(self, y: np.ndarray, y_val: np.ndarray | None, weights: np.ndarray) -> tuple[np.ndarray, Any]:
        """Return targets as the loss takes them, (rows, outputs), and note what decodes predictions."""

    @abstractmethod
    def _make_loss(self) -> Loss:
        """Return the loss of encoded targets."""

    @abstractmethod
    def _set_model(self, coef: np.ndarray, intercept: np.ndarray) -> None:
        """Note `coef_` and `intercept_`, given as (outputs, features) and (outputs,) for encoded targets."""

    def _prepare(self, X: Any, y: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return the targets that the loss is of."""
        return y

    def _weigh(self, targets: np.ndarray) -> np.ndarray:
        """Return a factor of the weight of each row."""
        return np.ones(len(targets))

    def fit(
        self, X: Any, y: Any, sample_weight: Any = None, *, X_val: Any = None, y_val: Any = None, cv_groups: Any = None
    ) -> Self:
        """Learn the penalties over folds, fit the model with them to all rows, and return the estimator.

        Parameters
        ----------
        X : dense or sparse, (samples, features)
        y : one target per row
        sample_weight : of rows, in the fits and in the loss of held-out rows; 2 means the row twice
        X_val, y_val : rows to learn the penalties by, in the place of folds of X
        cv_groups : of rows, for a splitter that needs groups, such as GroupKFold
        """
        self._check_parameters()
        X, y = validate_data(
            self,
            X,
            y,
            accept_sparse="csr",
            dtype=np.float64,
            ensure_min_samples=2,
            multi_output=self._many_outputs,
            y_numeric=not self._classifies,
        )
        if sp.issparse(X) and X.shape[0] * X.shape[1] <= _FEW_ENTRIES:
            X = X.toarray()
        groups = find_groups(X, getattr(self, "feature_names_in_", None), self.groups, self.unpenalized)
        rows = self._make_rows(X, y, sample_weight, X_val, y_val, cv_groups)
        scaling = Scaling.fit(rows.X, rows.weights, center=self.fit_intercept, divide=self.standardize)
        scaled = scaling.transform(rows.X)
        rows = rows._replace(X=scaled, y=self._prepare(scaled, rows.y, rows.weights))
        coef, intercept = self._learn(rows, groups)
        self._scale = scaling.scale
        self._set_model(*scaling.unscale(coef.T, intercept))
        return self

    def _check_parameters(self) -> None:
        check_parameters(self)
        if self.structure not in STRUCTURES:
            refuse(self, "structure", f"a str among {STRUCTURES}")
        if self.structure == "per_group" and self.groups is None:
            raise ValueError("`structure='per_group'` needs `groups`: a label for each feature, a dict, or 'prefix'.")
        scale = self.prior_scale
        if scale != "auto" and (not isinstance(scale, Real) or isinstance(scale, bool) or not float(scale) > 0):
            refuse(self, "prior_scale", "'auto' or a float above 0")

    def _make_rows(self, X: Any, y: np.ndarray, sample_weight: Any, X_val: Any, y_val: Any, cv_groups: Any) -> Rows:
        weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        if not weights.any():
            raise ValueError("`sample_weight` is zero for every row; give a positive weight to some.")
        X_val, y_val = check_validation_rows(
            self, X_val, y_val, y_numeric=not self._classifies, many_outputs=self._many_outputs
        )
        targets, targets_val = self._encode(y, y_val, weights)
        splits = [] if y_val is not None else self._split(X, y, weights, cv_groups)
        if targets_val is not None:
            splits = [(np.arange(len(y)), len(y) + np.arange(len(targets_val)))]
            X = sp.vstack([X, X_val], format="csr") if sp.issparse(X) or sp.issparse(X_val) else np.vstack([X, X_val])
            targets, weights = np.vstack([targets, targets_val]), np.append(weights, np.ones(len(targets_val)))
        weights = weights * self._weigh(targets)
        folds, used = make_folds(splits, weights), weights > 0
        folds = Folds(folds.fitted[:, used], folds.held_out[:, used], folds.sizes)
        return Rows(X[used], targets[used], weights[used], folds)

    def _split(self, X: Any, y: np.ndarray, weights: np.ndarray, cv_groups: Any) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the splits of `cv`; a number of folds is one of rows that count."""
        if not isinstance(self.cv, int | np.integer):
            return split(self.cv, X, y, cv_groups, self.random_state, classes=self._classifies)
        used = np.flatnonzero(weights)
        pairs = split(self.cv, X[used], y[used], None, self.random_state, classes=self._classifies)
        return [(used[train], used[test]) for train, test in pairs]

    def _learn(self, rows: Rows, groups: Groups) -> tuple[np.ndarray, np.ndarray]:
        model = RidgeGLM(rows.X, rows.y, self._make_loss(), penalized=groups.penalized, intercept=self.fit_intercept)
        total = np.log(rows.weights.sum())
        self.penalties_ = np.zeros(rows.X.shape[1])
        log_penalties, self._comparison = np.zeros(0), None
        self.penalty_structure_, self.prior_scale_, self.n_iter_ = "none", np.inf, 1
        self.history_ = {"value": np.zeros(0)}
        self._groups = groups
        if len(groups.penalized):
            bounds = total + np.log(_LEAST), total + np.log(_MOST)
            search = Search(model, rows.folds, bounds, tol=self.tol, max_iter=self.max_iter)
            learned = self._select(search, groups, float(total))
            log_penalties = learned.log_penalties[learned.structure.groups]
            self._note(learned)
        model.tol = _REFIT_TOL
        fits = model.fit(rows.weights[None], log_penalties)
        self.penalties_[groups.penalized] = np.exp(log_penalties)
        return fits.coef[0], fits.intercept[0]

    def _select(self, search: Search, groups: Groups, start: float) -> Learned:
        """Return the penalties of the structure that is asked for, or of the best one."""
        single = search.learn_single(start)
        structures = self._list_structures(groups)
        first = float(single.log_penalties[0])
        chosen: Structure | None = structures[0] if len(structures) == 1 and self.structure != "auto" else None
        if structures and chosen is None:
            self._comparison = search.compare(structures, first, against_single=self.structure == "auto")
            chosen = self._comparison.structures[self._comparison.chosen]
            if self.structure not in ("auto", chosen.name):  # too much work to compare: the strictest prior is safe
                chosen = structures[-1]
        if chosen is None or chosen.name == "single":
            return single
        path = [item for item in structures if item.name == chosen.name and item.prior_scale >= chosen.prior_scale]
        return search.polish(chosen, search.learn_path(search.arena.folds, path, first)[-1].log_penalties)

    def _list_structures(self, groups: Groups) -> list[Structure]:
        """Return the structures with more than one penalty that come into question."""
        scales = PRIOR_SCALES if self.prior_scale == "auto" else (float(self.prior_scale),)
        numbers = {"per_group": groups.numbers, "per_feature": np.arange(len(groups.penalized))}
        wanted = numbers if self.structure == "auto" else {self.structure: numbers.get(self.structure)}
        found = [(name, of) for name, of in wanted.items() if of is not None and of.max() > 0]
        if len(found) == 2 and np.array_equal(found[0][1], found[1][1]):
            found = found[:1]
        return [Structure(name, of, scale) for name, of in found for scale in scales]

    def _note(self, learned: Learned) -> None:
        self.penalty_structure_, self.prior_scale_ = learned.structure.name, learned.structure.prior_scale
        self.history_ = {"value": np.array(learned.values)}
        self.n_iter_ = max(1, len(learned.values))
        if not learned.converged:
            message = f"{type(self).__name__} took max_iter={self.max_iter} iterations and the loss of held-out rows "
            warnings.warn(message + "was still falling. Increase max_iter or tol.", ConvergenceWarning, stacklevel=4)

    @property
    def candidates_(self) -> Any:
        """A DataFrame of the structures that were compared, on rows that their penalties were not learned by."""
        check_is_fitted(self)
        return candidates(self._comparison)

    @property
    def penalty_table_(self) -> Any:
        """A DataFrame of features, the least penalized first.

        Its columns are feature, group, penalty, coefficient (a norm, for several outputs) and effect, which is the
        coefficient times the deviation of the feature.
        """
        check_is_fitted(self)
        names = getattr(self, "feature_names_in_", np.array([f"x{k}" for k in range(self.n_features_in_)], object))
        return penalty_table(names, self._groups, self.penalties_, self.coef_, self._scale)

    def plot_penalties(self, most: int = 30) -> Any:
        """Return a figure of the features with the largest effects, at most so many, by penalty."""
        return plot(self.penalty_table_, most)

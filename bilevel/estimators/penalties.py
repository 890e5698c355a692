"""The base of estimators that learn their penalties: rows to folds, a search for penalties, one fit on all rows."""

import copy
import warnings
from abc import abstractmethod
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import scipy.sparse as sp
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import check_scoring
from sklearn.utils import assert_all_finite
from sklearn.utils.validation import check_is_fitted, validate_data

from bilevel.estimators.base import (
    LinearEstimator,
    all_or_nothing,
    check_parameters,
    check_range,
    check_validation_rows,
    check_weights,
    refuse,
)
from bilevel.estimators.choice import Search
from bilevel.estimators.comparison import Comparison
from bilevel.estimators.folds import Scaling, count_shuffles, make_folds, split
from bilevel.estimators.glm import RidgeGLM
from bilevel.estimators.groups import Groups, find_groups
from bilevel.estimators.losses import Loss
from bilevel.estimators.selection import Folds, InnerModel, Learned, Structure
from bilevel.estimators.tables import candidates, penalty_table, plot
from bilevel.estimators.threads import one_thread_if_small

STRUCTURES = ("auto", "single", "per_group", "per_feature")
PRIOR_SCALES = (2.0, 1.0, 0.5)
# Of columns of deviation 1, per row: a smaller penalty is as good as none, a larger one leaves the feature out.
_LEAST, _MOST = 1e-6, 1e3
_REFIT_TOL = 1e-14
_FEW_ENTRIES = 2e5  # of sparse rows that are handled faster as an array
_LEVELS = np.log(10.0) * np.array([0.0, -0.5, 0.5, -1.0, 1.0, -1.5, 1.5, -2.0, 2.0])


class Rows(NamedTuple):
    """Rows to learn from, those to validate on last: features, encoded targets, weights, folds, targets as given."""

    X: Any
    y: np.ndarray
    weights: np.ndarray
    folds: Folds
    targets: np.ndarray


@dataclass(eq=False, repr=False, kw_only=True)
class PenaltySelector(LinearEstimator):
    """A linear model whose penalties minimize the loss of rows on which it was not fitted."""

    structure: str = field(default="auto", kw_only=False)
    groups: Any = None
    unpenalized: Any = None
    prior_scale: Any = "auto"
    cv: Any = 5
    scoring: Any = None
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

    @all_or_nothing
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
        check_parameters(self, X=X, y=y, sample_weight=sample_weight)
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
        if not self._classifies:
            assert_all_finite(y, input_name="y")  # None among objects has become NaN unseen
        check_range(X=X, y=y)
        if sp.issparse(X) and X.shape[0] * X.shape[1] <= _FEW_ENTRIES:
            X = X.toarray()
        groups = find_groups(X, getattr(self, "feature_names_in_", None), self.groups, self.unpenalized)
        rows = self._make_rows(X, y, sample_weight, X_val, y_val, cv_groups)
        scaling = Scaling.fit(rows.X, rows.weights, center=self.fit_intercept, divide=self.standardize)
        scaled = scaling.transform(rows.X)
        rows = rows._replace(X=scaled, y=self._prepare(scaled, rows.y, rows.weights))
        with one_thread_if_small(scaled):
            coef, intercept = self._learn(rows, groups)
        self._scale = scaling.scale
        self._set_model(*scaling.unscale(coef.T, intercept))
        return self

    def _check_parameters(self) -> None:
        if not isinstance(self.structure, str) or self.structure not in STRUCTURES:
            refuse(self, "structure", f"a str among {STRUCTURES}")
        if self.structure == "per_group" and self.groups is None:
            raise ValueError("`structure='per_group'` needs `groups`: a label for each feature, a dict, or 'prefix'.")
        scale = self.prior_scale
        is_word, is_number = isinstance(scale, str), isinstance(scale, Real) and not isinstance(scale, bool)
        if scale != "auto" if is_word else not (is_number and 1e-100 <= scale <= 1e100):
            refuse(self, "prior_scale", "'auto' or a float from 1e-100 to 1e100")

    def _make_rows(self, X: Any, y: np.ndarray, sample_weight: Any, X_val: Any, y_val: Any, cv_groups: Any) -> Rows:
        weights = check_weights(X, sample_weight)
        X_val, y_val = check_validation_rows(
            self, X_val, y_val, y_numeric=not self._classifies, many_outputs=self._many_outputs
        )
        targets, targets_val = self._encode(y, y_val, weights)
        splits = [] if y_val is not None else self._split(X, y, weights, cv_groups)
        if targets_val is not None:
            splits = [(np.arange(len(y)), len(y) + np.arange(len(targets_val)))]
            X = sp.vstack([X, X_val], format="csr") if sp.issparse(X) or sp.issparse(X_val) else np.vstack([X, X_val])
            targets, weights = np.vstack([targets, targets_val]), np.append(weights, np.ones(len(targets_val)))
            y = np.concatenate([y, y_val])
        weights = weights * self._weigh(targets)
        folds, used = make_folds(splits, weights), weights > 0
        folds = folds._replace(fitted=folds.fitted[:, used], held_out=folds.held_out[:, used])
        return Rows(X[used], targets[used], weights[used], folds, y[used])

    def _split(self, X: Any, y: np.ndarray, weights: np.ndarray, cv_groups: Any) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the splits of `cv`; a number of folds is one of rows that count."""
        if not isinstance(self.cv, int | np.integer):
            return split(self.cv, X, y, cv_groups, self.random_state, classes=self._classifies)
        if cv_groups is not None:
            message = f"`cv_groups` is ignored by cv={self.cv}, whose folds are of single rows; set cv=GroupKFold("
            warnings.warn(f"{message}{self.cv}) to keep groups together.", UserWarning, stacklevel=5)
        used = np.flatnonzero(weights)
        options: dict[str, Any] = {"classes": self._classifies, "shuffles": count_shuffles(len(used))}
        pairs = split(self.cv, X[used], y[used], None, self.random_state, **options)
        return [(used[train], used[test]) for train, test in pairs]

    def _make_ridge(self, rows: Rows, groups: Groups) -> RidgeGLM:
        loss = self._make_loss()
        return RidgeGLM(rows.X, rows.y, loss, penalized=groups.penalized, intercept=self.fit_intercept)

    def _learn(self, rows: Rows, groups: Groups) -> tuple[np.ndarray, np.ndarray]:
        model = self._make_ridge(rows, groups)
        self._groups, self.penalties_ = groups, np.zeros(rows.X.shape[1])
        log_penalties = np.zeros(0)
        if (learned := self._search(model, rows, groups)) is not None:
            log_penalties = learned.log_penalties[learned.structure.groups]
            log_penalties = log_penalties + self._choose_level(model, rows, log_penalties)
        model.tol = _REFIT_TOL
        fits = model.fit(rows.weights[None], log_penalties)
        self.penalties_[groups.penalized] = np.exp(log_penalties)
        return fits.coef[0], fits.intercept[0]

    def _search(self, model: InnerModel, rows: Rows, groups: Groups) -> Learned | None:
        """Learn the penalties of a model over folds, and note how; return None where it has none."""
        self._comparison = None
        self.penalty_structure_, self.prior_scale_, self.n_iter_ = "none", np.inf, 1
        self.history_ = {"value": np.zeros(0)}
        if not len(groups.penalized):
            return None
        size = f"{len(groups.penalized)} features on {len(rows.y)} rows, {len(rows.folds.fitted)} folds"
        self._say(f"learning the penalties of {size}")
        learned = self._select(self._make_search(model, rows), groups, float(np.log(rows.weights.sum())))
        self._note(learned)
        return learned

    def _make_search(self, model: InnerModel, rows: Rows) -> Search:
        total = np.log(rows.weights.sum())
        bounds = total + np.log(_LEAST), total + np.log(_MOST)
        return Search(model, rows.folds, bounds, tol=self.tol, max_iter=self.max_iter)

    def _choose_level(self, model: InnerModel, rows: Rows, log_penalties: np.ndarray) -> float:
        """Return what `scoring` adds to all log penalties."""
        if self.scoring is None:
            return 0.0
        return choose_level(self, model, rows.folds, log_penalties, rows.X, rows.targets)

    def _select(self, search: Search, groups: Groups, start: float) -> Learned:
        """Return the penalties of the structure that is asked for, or of the best one."""
        single = search.learn_single(start)
        self._say(f"a single penalty: {np.exp(single.log_penalties[0]):.4g}, {single.value:.6g} nats")
        structures = self._list_structures(groups)
        if not structures:
            return single
        start, found = float(single.log_penalties[0]), None
        if self.structure == "auto" or len(structures) > 1:
            self._say(f"comparing {', '.join(f'{one.name} ({one.prior_scale:g})' for one in structures)}")
            self._comparison, found = search.compare(structures, start, against_single=self.structure == "auto")
        if found is None and self.structure != "auto":  # nothing was compared: the strictest prior is safe
            found = search.learn_path(search.arena.folds, structures, start)[-1]
        if found is None or found.structure.name == "single":
            return single
        return search.polish(found.structure, found.log_penalties, found.fits)

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
        self._say(f"{learned.structure.name}, {learned.value:.6g} nats after {self.n_iter_} evaluations")
        if not learned.converged:
            message = f"{type(self).__name__} took max_iter={self.max_iter} iterations and the loss of held-out rows "
            warnings.warn(message + "was still falling. Increase max_iter or tol.", ConvergenceWarning, stacklevel=4)

    def _learned(self) -> tuple[dict[str, str], np.ndarray]:
        of_features = self.penalties_[self._groups.penalized]
        rows = {"structure": f"{self.penalty_structure_}, prior_scale {self.prior_scale_:g}"}
        if len(of_features):
            least, most = of_features.min(), of_features.max()
            rows["penalties"] = f"{least:.4g} to {most:.4g}, {len(np.unique(of_features))} different"
        return rows | {"evaluations": str(self.n_iter_)}, self.history_["value"]

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


def choose_level(
    estimator: Any, model: InnerModel, folds: Folds, log_penalties: np.ndarray, X: Any, y: np.ndarray
) -> float:
    """Return the logarithm of the factor of all penalties that scores best in the mean over folds; 0 where several do.

    `X` are the columns that the model is fitted to, `y` the targets as the user has them.
    """
    scorer = check_scoring(estimator, scoring=estimator.scoring)
    held_out = [np.flatnonzero(weights) for weights in folds.held_out]
    means = []
    for level in _LEVELS:
        fits = model.fit(folds.fitted, log_penalties + level)
        scores = [
            scorer(_fitted(estimator, coef, intercept), X[rows], y[rows])
            for coef, intercept, rows in zip(fits.coef, fits.intercept, held_out, strict=True)
        ]
        means.append(np.mean(scores))
    return float(_LEVELS[np.argmax(means)]) if np.isfinite(means).any() else 0.0


def _fitted(estimator: Any, coef: np.ndarray, intercept: np.ndarray) -> Any:
    """Return the estimator with these coefficients of columns without names."""
    view = copy.copy(estimator)
    vars(view).pop("feature_names_in_", None)
    view._set_model(coef.T, intercept)
    return view

"""Linear models whose squared penalties are learned: the pipeline of a fit, and the estimators.

A fit is `rows -> scaled rows with folds (TrainingData) -> model -> search -> refit`. `PenaltySelector` holds these
steps, and the estimators define targets, loss and, where necessary, another model or search.
"""

from abc import abstractmethod
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import scipy.sparse as sp
from sklearn.base import RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import assert_all_finite
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.validation import check_is_fitted, validate_data

from bilevel._core.extras import require
from bilevel.estimators.base import (
    Groups,
    LinearClassifier,
    LinearEstimator,
    all_or_nothing,
    check_parameters,
    check_range,
    check_validation_rows,
    check_weights,
    document,
    find_groups,
    one_thread_if_small,
    reject,
    stack_rows,
    warn,
)
from bilevel.estimators.kernel_ridge import KernelRidge
from bilevel.estimators.losses import Array, Gamma, Huber, Logistic, Poisson, RowLoss, Softmax, Squared
from bilevel.estimators.ridge import RidgeGLM
from bilevel.estimators.selection import (
    Comparison,
    Folds,
    InnerModel,
    Learned,
    PenaltySearch,
    Scaling,
    Search,
    Structure,
    count_shuffles,
    make_folds,
    split,
)

_FEW_ENTRIES = 2e5  # of sparse rows that are converted to an array, which is faster
_MANY_TARGETS = 10  # from which kernels are used if rows are fewer than features
_SKETCH_SIZE = 32  # combinations of many targets by which the structure is chosen
_MEDIAN_OF_ABSOLUTE_NORMAL = 0.6744897501960817
_SCALE_ROUNDS, _SCALE_PENALTY = 3, 1e-2  # of the robust fits that estimate the scale


class TrainingData(NamedTuple):
    """The rows of a fit with encoded targets, (rows, outputs), and positive weights."""

    X: Any
    y: Array
    weights: Array
    folds: Folds
    groups: Groups

    def take(self, rows: Array) -> "TrainingData":
        """Return some of the rows, or all in another order."""
        folds = self.folds.take_rows(rows)
        return self._replace(X=self.X[rows], y=self.y[rows], weights=self.weights[rows], folds=folds)


@dataclass(eq=False, repr=False, kw_only=True)
class PenaltySelector(LinearEstimator):
    """A linear model whose penalties minimize the loss of held-out rows."""

    structure: str = field(default="auto", kw_only=False)
    groups: Any = None
    unpenalized: Any = None
    prior_scale: Any = "auto"
    cv: Any = 5
    max_iter: int = 100
    tol: float = 0.01

    _classifies: ClassVar[bool] = False
    _many_outputs: ClassVar[bool] = False
    _prior_scales: ClassVar[tuple[float, ...]] = (2.0, 1.0, 0.5)  # that "auto" compares
    penalties_: Array = field(init=False)
    _comparison: Comparison | None = field(init=False)

    _entries: ClassVar[str] = """
structure : {"auto", "single", "per_group", "per_feature"}, default="auto"
    Which penalties are free: one for all features, one for each group of features, or one for each feature. "auto"
    chooses by nested cross-validation: it takes several penalties only if they are better than a single one by a
    standard error and by 2 nats, on rows on which they were not learned. Name a structure to save that comparison.
groups : array-like of shape (n_features,), dict, "prefix" or None, default=None
    Group of each feature: labels, a dict from column names to labels (columns that it does not name form the group
    "rest"), or "prefix" for the column names up to their last separator, where one-hot columns of one source form
    one group.
unpenalized : list of str or int, or None, default=None
    Names or numbers of features without a penalty.
prior_scale : float or "auto", default="auto"
    Scale by which log penalties l spread around their mean: sum (l_k - mean l)² / (2 prior_scale²) is added to the loss
    of held-out rows, so that smaller values pull the penalties together. "auto" compares 0.5, 1 and 2.
cv : int, splitter or iterable, default=5
    Number of folds, a splitter of scikit-learn, or pairs of arrays of row numbers. Folds of an int are shuffled,
    and stratified by classes, or by whether an event was seen; fewer than 1000 rows are shuffled into folds up to
    five times.
max_iter : int, default=100
    Maximum number of iterations of L-BFGS-B, for each set of penalties that is learned.
tol : float, default=0.01
    Stop if an iteration improves the held-out loss by less than this number of nats in total.
penalties_ : ndarray of shape (n_features,)
    Penalties of the squared coefficients of standardized features, relative to the summed loss, as `alpha` of
    Ridge.
penalty_structure_ : str
    The structure of the penalties: "single", "per_group" or "per_feature", or "none" if no feature is penalized.
prior_scale_ : float
    The scale of the prior; inf for a single penalty.
candidates_ : DataFrame
    The structures that were compared, with their held-out losses and differences from the first.
penalty_table_ : DataFrame
    Features with their groups, penalties, coefficients and effects, the least penalized first.
history_ : dict
    "value" is the objective at each evaluation.
n_iter_ : int
    Number of evaluations of the objective.
"""

    @abstractmethod
    def _encode(self, y: Array, y_val: Array | None, weights: Array) -> tuple[Array, Any]:
        """Return targets as the loss takes them, (rows, outputs), and store what decodes predictions."""

    @abstractmethod
    def _make_loss(self) -> RowLoss:
        """Return the loss of encoded targets."""

    @abstractmethod
    def _set_model(self, coef: Array, intercept: Array) -> None:
        """Set `coef_` and `intercept_` from (outputs, features) and (outputs,) for encoded targets."""

    def _class_weights(self, targets: Array) -> Array:
        """Return a factor for the weight of each row."""
        return np.ones(len(targets))

    @all_or_nothing
    def fit(
        self, X: Any, y: Any, sample_weight: Any = None, *, X_val: Any = None, y_val: Any = None, cv_groups: Any = None
    ) -> Self:
        """Learn the penalties over folds, and fit the model with them to all rows.

        Parameters
        ----------
        X : {array-like, sparse matrix} of shape (n_samples, n_features)
            Training rows.
        y : array-like of shape (n_samples,) or (n_samples, n_targets)
            Targets. BilevelCoxPH takes a structured array of two fields, event (bool) and time.
        sample_weight : array-like of shape (n_samples,), default=None
            Weights of rows, in the fits and in the loss of held-out rows; 2 means the same as the row twice.
        X_val, y_val : array-like, default=None
            Rows by which to learn the penalties, instead of folds of X. The final model is fitted to them too.
        cv_groups : array-like of shape (n_samples,), default=None
            Groups of rows, for a splitter that needs them, such as GroupKFold.

        Returns
        -------
        self : object
            The fitted estimator.
        """
        X, y, groups = self._validate(X, y, sample_weight)
        data, scaling = self._scale(self._make_rows(X, y, groups, sample_weight, X_val, y_val, cv_groups))
        with one_thread_if_small(data.X):
            coef, intercept = self._learn(data)
        self._groups, self._scales = groups, scaling.scale
        self._set_model(*scaling.unscale(coef.T, intercept))
        return self

    def _validate(self, X: Any, y: Any, sample_weight: Any) -> tuple[Any, Array, Groups]:
        check_parameters(self, X=X, y=y, sample_weight=sample_weight)
        self._check_parameters()
        options: dict[str, Any] = {"accept_sparse": "csr", "dtype": np.float64, "ensure_min_samples": 2}
        options |= {"multi_output": self._many_outputs, "y_numeric": not self._classifies}
        X, y = validate_data(self, X, y, **options)
        if not self._classifies:
            assert_all_finite(y, input_name="y")  # None in an array of objects has become NaN without a check
        check_range(X=X, y=y)
        if sp.issparse(X) and X.shape[0] * X.shape[1] <= _FEW_ENTRIES:
            X = X.toarray()
        return X, y, find_groups(X, getattr(self, "feature_names_in_", None), self.groups, self.unpenalized)

    def _check_parameters(self) -> None:
        if self.structure == "per_group" and self.groups is None:
            raise ValueError("`structure='per_group'` needs `groups`: a label for each feature, a dict, or 'prefix'.")
        scale = self.prior_scale
        is_number = isinstance(scale, Real) and not isinstance(scale, bool)
        if not (is_number and 1e-100 <= scale <= 1e100) and not (isinstance(scale, str) and scale == "auto"):
            reject(self, "prior_scale", "'auto' or a float from 1e-100 to 1e100")

    def _make_rows(
        self, X: Any, y: Array, groups: Groups, sample_weight: Any, X_val: Any, y_val: Any, cv_groups: Any
    ) -> TrainingData:
        """Encode targets, append validation rows, and divide the rows into folds."""
        weights = check_weights(X, sample_weight)
        X_val, y_val = check_validation_rows(
            self, X_val, y_val, y_numeric=not self._classifies, many_outputs=self._many_outputs
        )
        targets, targets_val = self._encode(y, y_val, weights)
        if targets_val is None:
            splits = self._split(X, y, weights, cv_groups)
        else:
            splits = [(np.arange(len(y)), len(y) + np.arange(len(targets_val)))]
            X, targets = stack_rows(X, X_val), np.vstack([targets, targets_val])
            weights = np.append(weights, np.ones(len(targets_val)))
        weights = weights * self._class_weights(targets)
        data = TrainingData(X, targets, weights, make_folds(splits, weights), groups)
        return data.take(np.flatnonzero(weights > 0))

    def _split(self, X: Any, y: Array, weights: Array, cv_groups: Any) -> list[tuple[Array, Array]]:
        """Return the splits of `cv`; an int refers to folds of the rows with positive weight."""
        if not isinstance(self.cv, int | np.integer):
            return split(self.cv, X, y, cv_groups, self.random_state, classes=self._classifies)
        if cv_groups is not None:
            message = f"`cv_groups` is ignored by cv={self.cv}, whose folds are of single rows; set cv=GroupKFold("
            warn(f"{message}{self.cv}) to keep groups together.")
        used = np.flatnonzero(weights)
        options: dict[str, Any] = {"classes": self._classifies, "shuffles": count_shuffles(len(used))}
        pairs = split(self.cv, X[used], y[used], None, self.random_state, **options)
        return [(used[train], used[test]) for train, test in pairs]

    def _scale(self, data: TrainingData) -> tuple[TrainingData, Scaling]:
        scaling = Scaling.fit(data.X, data.weights, center=self.fit_intercept, divide=self.standardize)
        return data._replace(X=scaling.transform(data.X)), scaling

    def _learn(self, data: TrainingData) -> tuple[Array, Array]:
        """Learn the penalties, and return coefficients, (features, outputs), and intercepts of scaled columns."""
        model, groups = self._make_model(data), data.groups
        self.penalty_structure_, self.prior_scale_, self._comparison = "none", np.inf, None
        self.history_, self.n_iter_ = {"value": np.zeros(0)}, 1
        log_penalties, start = np.zeros(model.n_penalties), None
        if len(groups.penalized):
            size = f"{len(groups.penalized)} features on {len(data.y)} rows, {len(data.folds.fitted)} folds"
            self._print(f"learning the penalties of {size}")
            learned = self._search(model, data)
            self.penalty_structure_, self.prior_scale_ = learned.structure.name, learned.structure.prior_scale
            self.history_, self.n_iter_ = {"value": np.array(learned.values)}, max(1, len(learned.values))
            self._print(f"{learned.structure.name}, {learned.value:.6g} nats after {self.n_iter_} evaluations")
            if not learned.converged:
                name = f"{type(self).__name__} took max_iter={self.max_iter} iterations"
                message = f"{name} and the loss of held-out rows was still falling. Increase max_iter or tol."
                warn(message, ConvergenceWarning)
            log_penalties, start = learned.of_model, learned.fits
        log_penalties = self._set_penalties(log_penalties, data)
        return model.refit(data.weights, log_penalties, start)

    def _make_model(self, data: TrainingData) -> InnerModel:
        penalized, loss = data.groups.penalized, self._make_loss()
        return RidgeGLM(data.X, data.y, loss, penalized=penalized, intercept=self.fit_intercept)

    def _set_penalties(self, log_penalties: Array, data: TrainingData) -> Array:
        """Set `penalties_`, and return the log penalties of the model that is fitted to all rows."""
        self.penalties_ = np.zeros(data.X.shape[1])
        self.penalties_[data.groups.penalized] = np.exp(log_penalties)
        return log_penalties

    def _search(self, model: InnerModel, data: TrainingData) -> Learned:
        """Learn the penalties of a model over folds."""
        return self._select(self._make_search(model, data), data.groups)

    def _make_search(self, model: InnerModel, data: TrainingData) -> Search:
        tol = self.tol * (model.loss.count(model.y) if model.loss.is_quadratic else 1)
        return PenaltySearch(model, data.folds, data.weights.sum(), tol=tol, max_iter=self.max_iter)

    def _select(self, search: Search, groups: Groups) -> Learned:
        """Return the penalties of the structure that the user names, or of the best one."""
        single = search.find_single()
        self._print(f"a single penalty: {np.exp(single.log_penalties[0]):.4g}, {single.value:.6g} nats")
        structures, auto = self._list_structures(groups), self.structure == "auto"
        if not structures:
            return single
        if auto or len(structures) > 1:
            self._print(f"comparing {', '.join(f'{one.name} ({one.prior_scale:g})' for one in structures)}")
            candidates = [search.single, *structures] if auto else structures
            self._comparison, found = search.compare(candidates, single)
        else:
            found = search.find_start(structures, single)
        if found.structure.name == "single":
            return single
        return search.refine(found.structure, found.log_penalties, found.fits)

    def _list_structures(self, groups: Groups) -> list[Structure]:
        """Return the candidates with more than one penalty, the strictest prior last."""
        scales = self._prior_scales if self.prior_scale == "auto" else (float(self.prior_scale),)
        numbers = {"per_group": groups.numbers, "per_feature": np.arange(len(groups.penalized))}
        wanted = numbers if self.structure == "auto" else {self.structure: numbers.get(self.structure)}
        found = [(name, of) for name, of in wanted.items() if of is not None and of.max() > 0]
        if len(found) == 2 and np.array_equal(found[0][1], found[1][1]):
            found = found[:1]
        return [Structure(name, of, scale) for name, of in found for scale in scales]

    @property
    def candidates_(self) -> Any:
        """A DataFrame of the structures that were compared, on rows on which their penalties were not learned.

        It is empty if one structure is named, or if folds are too few or the work is too much for a comparison.
        """
        check_is_fitted(self)
        none = np.zeros(0)
        found = self._comparison or Comparison([], none, none, none, 0)
        columns = {
            "structure": [item.name for item in found.structures],
            "prior_scale": [item.prior_scale for item in found.structures],
            "loss": found.losses,
            "difference": found.differences,
            "standard_error": found.standard_errors,
            "chosen": np.arange(len(found.structures)) == found.chosen,
        }
        return require("pandas", "estimators").DataFrame(columns)

    @property
    def penalty_table_(self) -> Any:
        """A DataFrame of features, the least penalized first.

        Its columns are feature, group, penalty, coefficient (a norm, for several outputs) and effect, which is the
        coefficient times the deviation of the feature.
        """
        check_is_fitted(self)
        names = getattr(self, "feature_names_in_", np.array([f"x{k}" for k in range(self.n_features_in_)], object))
        labels = np.full(len(names), "unpenalized", dtype=object)
        labels[self._groups.penalized] = self._groups.labels[self._groups.numbers]
        several = np.ndim(self.coef_) > 1 and len(self.coef_) > 1
        size = np.linalg.norm(self.coef_, axis=0) if several else np.ravel(self.coef_)
        columns = {"feature": names, "group": labels, "penalty": self.penalties_}
        columns |= {"coefficient": size, "effect": size * self._scales}
        table = require("pandas", "estimators").DataFrame(columns)
        return table.sort_values("penalty", kind="stable", ignore_index=True)

    def plot_penalties(self, most: int = 30) -> Any:
        """Return a figure of penalties and effects of the features with the largest effects.

        Parameters
        ----------
        most : int, default=30
            Maximum number of features.
        """
        pyplot, ticker = require("matplotlib.pyplot", "plot"), require("matplotlib.ticker", "plot")
        table = self.penalty_table_
        shown = table.loc[np.sort(np.argsort(-np.abs(table["effect"].to_numpy()), kind="stable")[:most])][::-1]
        figure, axes = pyplot.subplots(1, 2, sharey=True, figsize=(8, 1 + 0.22 * len(shown)), layout="constrained")
        places, codes = np.arange(len(shown)), {label: k for k, label in enumerate(dict.fromkeys(shown["group"][::-1]))}
        colors = [f"C{codes[label] % 10}" for label in shown["group"]]
        axes[0].scatter(np.where(shown["penalty"] > 0, shown["penalty"], np.nan), places, c=colors)
        axes[0].set(xscale="log", xlabel="penalty", yticks=places, yticklabels=shown["feature"])
        axes[0].xaxis.set_minor_formatter(ticker.NullFormatter())
        axes[1].barh(places, shown["effect"], color=colors)
        axes[1].set(xlabel="coefficient × deviation")
        if len(codes) > 1:
            for label, code in codes.items():
                axes[1].bar(0, 0, color=f"C{code % 10}", label=str(label))
            figure.legend(loc="outside right upper", title="group")
        return figure


@document
@dataclass(eq=False, repr=False, kw_only=True)
class BilevelLogisticRegression(LinearClassifier, PenaltySelector):
    """Logistic regression with learned penalties: one, one per group of features, or one per feature.

    Fits minimize sum log-loss + ½ sum penalty_k coef_k², with one row of coefficients for two classes, and one row per
    class for more (softmax). Penalties minimize the summed log-loss of held-out rows by exact gradients. The number of
    free penalties and `prior_scale` are chosen by nested folds.

    Examples
    --------
    >>> from sklearn.datasets import load_breast_cancer
    >>> from bilevel.estimators import BilevelLogisticRegression
    >>> X, y = load_breast_cancer(return_X_y=True, as_frame=True)
    >>> model = BilevelLogisticRegression(groups="prefix", random_state=0).fit(X, y)
    >>> model.penalties_.shape
    (30,)
    """

    class_weight: Any = None

    _entries: ClassVar[str] = """
class_weight : dict, "balanced" or None, default=None
    Weights of classes, as in scikit-learn's LogisticRegression.
"""

    def _encode(self, y: Array, y_val: Array | None, weights: Array) -> tuple[Array, Any]:
        numbers, numbers_val = self._encode_classes(y, y_val, weights)
        if self.class_weight == "balanced":
            totals = np.bincount(numbers, weights, len(self.classes_))
            sizes = np.count_nonzero(totals) * np.maximum(totals, np.finfo(float).tiny)
            self._class_factors = totals.sum() / sizes
        else:
            self._class_factors = compute_class_weight(self.class_weight, classes=self.classes_, y=y)
        columns = np.eye(len(self.classes_)) if len(self.classes_) > 2 else np.array([[0.0], [1.0]])
        return columns[numbers], None if numbers_val is None else columns[numbers_val]

    def _class_weights(self, targets: Array) -> Array:
        return self._class_factors[targets.argmax(axis=1) if targets.shape[1] > 1 else targets[:, 0].astype(int)]

    def _make_loss(self) -> RowLoss:
        return Softmax() if len(self.classes_) > 2 else Logistic()

    def _set_model(self, coef: Array, intercept: Array) -> None:
        self.coef_, self.intercept_ = coef, intercept


class LinearRegressor(RegressorMixin, PenaltySelector):
    """A regressor that predicts the linear predictor."""

    _units: Scaling  # of the targets

    def _find_units(self, y: Array, weights: Array) -> Scaling:
        """Return the mean and the scale of the targets in the units of the loss."""
        return Scaling(np.zeros(1), np.ones(1))

    def _encode(self, y: Array, y_val: Array | None, weights: Array) -> tuple[Array, Any]:
        self._flat = y.ndim == 1
        y = y.reshape(len(y), -1)
        self._units = self._find_units(y, weights)
        return self._units.transform(y), None if y_val is None else self._units.transform(y_val.reshape(len(y_val), -1))

    def _set_model(self, coef: Array, intercept: Array) -> None:
        coef, intercept = coef * self._units.scale[:, None], intercept * self._units.scale + self._units.mean
        self.coef_, self.intercept_ = (coef[0], float(intercept[0])) if self._flat else (coef, intercept)

    def predict(self, X: Any) -> Array:
        """Return the prediction of each row."""
        return self._linear_predictor(X)


class LeastSquares(LinearRegressor):
    """A regressor of one target or several by squared errors; targets are scaled to unit deviation."""

    _many_outputs = True

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _find_units(self, y: Array, weights: Array) -> Scaling:
        return Scaling.fit(y, weights, center=self.fit_intercept, divide=True)

    def _make_loss(self) -> RowLoss:
        return Squared()


@document
class BilevelRidge(LeastSquares):
    """Ridge regression with learned penalties: one, one per group of features, or one per feature.

    Fits minimize sum ½ error² + ½ sum penalty_k coef_k², as Ridge does with one alpha. Penalties minimize n/2 log(mean
    squared error of held-out rows) by exact gradients.

    Several targets share the penalties and have equal influence: they are scaled to unit deviation, the mean is over
    rows and targets, and n is the number of both. From 10 targets on, if rows are fewer than features, the model is
    fitted through kernels of the groups, whose cost barely depends on the numbers of features and targets. "auto" then
    compares one penalty per group with a single one.

    Examples
    --------
    >>> from sklearn.datasets import load_diabetes
    >>> from bilevel.estimators import BilevelRidge
    >>> X, y = load_diabetes(return_X_y=True)
    >>> model = BilevelRidge(random_state=0).fit(X, y)
    >>> model.coef_.shape
    (10,)
    """

    _entries: ClassVar[str] = """
tol : float, default=0.01
    Stop if an iteration improves the held-out loss by less than this number of nats per target.
"""

    def _uses_kernels(self, data: TrainingData) -> bool:
        many = data.y.shape[1] >= _MANY_TARGETS and len(data.y) < len(data.groups.penalized)
        return many and self.structure != "per_feature"

    def _make_model(self, data: TrainingData) -> InnerModel:
        if not self._uses_kernels(data):
            return super()._make_model(data)
        return KernelRidge(data.X, data.y, data.groups, intercept=self.fit_intercept)

    def _search(self, model: InnerModel, data: TrainingData) -> Learned:
        if not isinstance(model, KernelRidge):
            return super()._search(model, data)
        # Penalties of the kernels: the structure is chosen by a few combinations of targets, then refined with all.
        numbers, few = np.arange(model.n_penalties), model.sketch(_SKETCH_SIZE)
        groups = data.groups._replace(penalized=numbers, numbers=numbers)
        search = self._make_search(few, data)
        learned, structures = self._select(search, groups), self._list_structures(groups)
        if self.structure == "auto" and structures and self._comparison is None:
            # Many targets determine few penalties well, so that the strictest prior is safe.
            learned = search.find_start(structures[-1:], learned)
        if few is not model:
            learned = self._make_search(model, data).refine(learned.structure, learned.log_penalties)
        return learned

    def _set_penalties(self, log_penalties: Array, data: TrainingData) -> Array:
        of_features = log_penalties[data.groups.numbers] if self._uses_kernels(data) else log_penalties
        super()._set_penalties(of_features, data)
        return log_penalties


class LogLinkRegressor(LinearRegressor):
    """A regressor whose mean is exp(linear predictor)."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = True
        return tags

    @abstractmethod
    def _check_targets(self, name: str, y: Array) -> None:
        """Reject targets for which the loss is not defined."""

    def _encode(self, y: Array, y_val: Array | None, weights: Array) -> tuple[Array, Any]:
        self._check_targets("y", y)
        if y_val is not None:
            self._check_targets("y_val", y_val)
        return super()._encode(y, y_val, weights)

    def predict(self, X: Any) -> Array:
        """Return the mean of each row."""
        return np.exp(self._linear_predictor(X))


@document
class BilevelPoissonRegressor(LogLinkRegressor):
    """Poisson regression with learned penalties, for targets that are counts with mean exp(X coef_ + intercept_).

    Fits minimize sum half deviance + ½ sum penalty_k coef_k²; PoissonRegressor minimizes the mean of the deviance
    instead. With m the mean deviance of held-out rows, penalties minimize n/2 log m, or n m / 2 if m is less than 1.

    Examples
    --------
    >>> import numpy as np
    >>> from bilevel.estimators import BilevelPoissonRegressor
    >>> rng = np.random.default_rng(0)
    >>> X = rng.standard_normal((100, 3))
    >>> y = rng.poisson(np.exp(X[:, 0]))
    >>> BilevelPoissonRegressor(random_state=0).fit(X, y).coef_.shape
    (3,)
    """

    def _check_targets(self, name: str, y: Array) -> None:
        if y.min() < 0 or not y.any():
            raise ValueError(f"Some value(s) of {name} are negative, or all are zero; counts are needed.")

    def _make_loss(self) -> RowLoss:
        return Poisson()


@document
class BilevelGammaRegressor(LogLinkRegressor):
    """Gamma regression with learned penalties, for positive targets with mean exp(X coef_ + intercept_).

    Fits minimize sum half deviance + ½ sum penalty_k coef_k²; GammaRegressor minimizes the mean of the deviance
    instead. Penalties minimize n/2 log(mean deviance of held-out rows).

    Examples
    --------
    >>> import numpy as np
    >>> from bilevel.estimators import BilevelGammaRegressor
    >>> rng = np.random.default_rng(0)
    >>> X = rng.standard_normal((100, 3))
    >>> y = rng.gamma(2.0, np.exp(X[:, 0]))
    >>> BilevelGammaRegressor(random_state=0).fit(X, y).coef_.shape
    (3,)
    """

    def _check_targets(self, name: str, y: Array) -> None:
        if y.min() <= 0:
            raise ValueError(f"Some value(s) of {name} are not positive; the gamma distribution needs that.")

    def _make_loss(self) -> RowLoss:
        return Gamma()


@document
@dataclass(eq=False, repr=False, kw_only=True)
class BilevelHuberRegressor(LinearRegressor):
    """Robust regression with learned penalties: squared errors up to `epsilon` deviations, and linear beyond.

    Fits minimize sum ρ(error / scale_) + ½ sum penalty_k coef_k², where ρ is the Huber loss. The scale is the median
    absolute error of a robust fit divided by 0.674, which is the deviation for normal errors. Penalties minimize the
    loss of held-out rows.

    Examples
    --------
    >>> import numpy as np
    >>> from bilevel.estimators import BilevelHuberRegressor
    >>> rng = np.random.default_rng(0)
    >>> X = rng.standard_normal((100, 3))
    >>> y = X[:, 0] + 0.1 * rng.standard_t(2, 100)
    >>> BilevelHuberRegressor(random_state=0).fit(X, y).coef_.shape
    (3,)
    """

    epsilon: float = 1.35

    _entries: ClassVar[str] = """
epsilon : float, default=1.35
    Number of deviations from which errors count linearly. Smaller values are more robust, larger ones more
    efficient if errors are normal.
scale_ : float
    Deviation of the errors that are not outliers.
"""

    def _make_loss(self) -> RowLoss:
        return Huber(self.epsilon)

    def _scale(self, data: TrainingData) -> tuple[TrainingData, Scaling]:
        """Scale the columns, estimate the scale of the errors, and divide the targets by it."""
        data, scaling = super()._scale(data)
        X, y, weights = data.X, data.y, data.weights
        errors = y - _weighted_median(y, weights)
        for _ in range(_SCALE_ROUNDS):
            median = _weighted_median(np.abs(errors), weights) / _MEDIAN_OF_ABSOLUTE_NORMAL
            self.scale_ = median or float(np.abs(errors).mean()) or 1.0
            model = RidgeGLM(X, y / self.scale_, self._make_loss(), intercept=self.fit_intercept)
            fits = model.fit(weights[None], np.full(X.shape[1], np.log(_SCALE_PENALTY * weights.sum())))
            errors = y - self.scale_ * fits.predictor[0]
        self._units = Scaling(np.zeros(1), np.array([self.scale_]))
        return data._replace(y=y / self.scale_), scaling


def _weighted_median(values: Array, weights: Array) -> float:
    order = np.argsort(values[:, 0], kind="stable")
    cumulated = np.cumsum(weights[order])
    return float(values[order[np.searchsorted(cumulated, cumulated[-1] / 2)], 0])

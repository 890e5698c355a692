"""Logistic and ridge regression with learned penalties."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.base import RegressorMixin
from sklearn.utils.class_weight import compute_class_weight

from bilevel.estimators.base import LinearClassifier, refuse
from bilevel.estimators.choice import Search
from bilevel.estimators.folds import Scaling
from bilevel.estimators.glm import RidgeGLM
from bilevel.estimators.groups import Groups
from bilevel.estimators.kernels import DEVICES, DTYPES, KernelRidge, find_arrays, find_gpu, find_model
from bilevel.estimators.losses import Logistic, Loss, Softmax, Squared
from bilevel.estimators.penalties import PenaltySelector, Rows
from bilevel.estimators.selection import InnerModel, Learned

_MANY_TARGETS = 10
_FEW_TARGETS = 32  # combinations of many, by which penalties are learned about


@dataclass(eq=False, repr=False, kw_only=True)
class BilevelLogisticRegression(LinearClassifier, PenaltySelector):
    """Logistic regression with one penalty, one for each group of features or one for each feature, all learned.

    Fits minimize sum log-loss + ½ sum penalty_k coef_k², two classes with one row of coefficients, more with one each
    (softmax). With l = log penalties and w_f(l) the fit without fold f, l minimizes

        sum over rows of the log-loss of w_fold(row)(l) + sum over penalties (l_k - mean l)² / 2 prior_scale²

    by exact gradients. How many penalties there are and `prior_scale` are chosen by nested folds.

    Parameters
    ----------
    structure : "auto", or "single", "per_group", "per_feature"; "auto" takes many penalties only where they are ahead
        of a single one by a standard error and 2 nats, on rows that did not choose them
    groups : of features: a label for each; a dict from names of columns to labels; "prefix", the names of columns up to
        the last separator, where one-hot columns of one source are one group; None for none
    unpenalized : names or numbers of features without penalty
    prior_scale : how far log penalties spread around their mean, or "auto" for the best of 0.5, 1 and 2
    cv : number of folds (stratified; fewer than 1000 rows are shuffled into them up to five times), a splitter of
        scikit-learn, or pairs of numbers of rows
    scoring : a name or scorer of scikit-learn, which then chooses the common level of the learned penalties: all are
        multiplied by what scores best over the folds, from 0.01 to 100; None leaves them as they are
    class_weight : None, "balanced" or a dict, as in scikit-learn
    fit_intercept : whether to fit an intercept, without penalty
    standardize : whether penalties act on features of deviation 1; coefficients are given in the units of X
    max_iter : most iterations of L-BFGS-B, for each set of penalties that is learned
    tol : stop where an iteration gains less than so many nats in all
    random_state : of the folds
    verbose : print what is done, line by line, where this is not 0

    Attributes
    ----------
    coef_ : (1, features), or (classes, features)
    intercept_ : (1,), or (classes,)
    penalties_ : (features,), of standardized features, beside the summed loss as Ridge's `alpha` or 1 / `C`
    penalty_structure_ : "single", "per_group" or "per_feature"
    prior_scale_ : the one that was taken; inf for a single penalty
    candidates_ : DataFrame of what was compared
    penalty_table_ : DataFrame of features, groups, penalties and coefficients
    classes_ : labels, sorted
    history_ : "value", the objective at each evaluation
    n_iter_, n_features_in_, feature_names_in_ : as in scikit-learn

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

    def _encode(self, y: np.ndarray, y_val: np.ndarray | None, weights: np.ndarray) -> tuple[np.ndarray, Any]:
        numbers, numbers_val = self._encode_classes(y, y_val, weights)
        self._class_factors = self._weigh_classes(y, np.bincount(numbers, weights, len(self.classes_)))
        columns = np.eye(len(self.classes_)) if len(self.classes_) > 2 else np.array([[0.0], [1.0]])
        return columns[numbers], None if numbers_val is None else columns[numbers_val]

    def _weigh_classes(self, y: np.ndarray, totals: np.ndarray) -> np.ndarray:
        """Return the factor of the weights of each class; `totals` are the sums of these weights."""
        if self.class_weight == "balanced":
            return totals.sum() / (np.count_nonzero(totals) * np.maximum(totals, np.finfo(float).tiny))
        return compute_class_weight(self.class_weight, classes=self.classes_, y=y)

    def _weigh(self, targets: np.ndarray) -> np.ndarray:
        return self._class_factors[targets.argmax(axis=1) if targets.shape[1] > 1 else targets[:, 0].astype(int)]

    def _make_loss(self) -> Loss:
        return Softmax() if len(self.classes_) > 2 else Logistic()

    def _set_model(self, coef: np.ndarray, intercept: np.ndarray) -> None:
        self.coef_, self.intercept_ = coef, intercept


class LeastSquares(RegressorMixin, PenaltySelector):
    """A regressor of one target or several, all of deviation 1, by squared errors."""

    _many_outputs = True

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _encode(self, y: np.ndarray, y_val: np.ndarray | None, weights: np.ndarray) -> tuple[np.ndarray, Any]:
        self._flat = y.ndim == 1
        y = y.reshape(len(y), -1)
        self._target = Scaling.fit(y, weights, center=self.fit_intercept, divide=True)
        return self._target.transform(y), None if y_val is None else self._target.transform(
            y_val.reshape(len(y_val), -1)
        )

    def _make_loss(self) -> Loss:
        return Squared()

    def _set_model(self, coef: np.ndarray, intercept: np.ndarray) -> None:
        coef, intercept = coef * self._target.scale[:, None], intercept * self._target.scale + self._target.mean
        self.coef_, self.intercept_ = (coef[0], float(intercept[0])) if self._flat else (coef, intercept)

    def predict(self, X: Any) -> np.ndarray:
        """Return the prediction of each row."""
        return self._score(X)


@dataclass(eq=False, repr=False, kw_only=True)
class BilevelRidge(LeastSquares):
    """Ridge regression with one penalty, one for each group of features or one for each feature, all learned.

    Fits minimize sum ½ error² + ½ sum penalty_k coef_k², as `Ridge` does with one alpha. Penalties minimize n/2 log of
    the mean squared error of held-out rows, and their prior, as in `BilevelLogisticRegression`. Several targets share
    the penalties, and count alike: the mean is that over rows and targets, which have deviation 1, and n is the number
    of both. From 10 targets on, fewer rows than features are handled by kernels of the groups, at a cost that hardly
    depends on how many features and targets there are; "auto" then means one penalty for each group, or a single one.

    Parameters
    ----------
    structure, groups, unpenalized, prior_scale, cv, scoring : as in `BilevelLogisticRegression`
    fit_intercept, standardize, max_iter, tol, random_state, verbose : as there; tol is for each target
    device : "cpu", or "gpu" to compute with JAX on the first GPU, always by kernels
    dtype : "float64", or "float32", in which kernels take half the time and memory

    Attributes
    ----------
    coef_ : (features,), or (targets, features)
    intercept_ : float, or (targets,)
    penalties_, penalty_structure_, prior_scale_, candidates_, penalty_table_, history_ : as there
    n_iter_, n_features_in_, feature_names_in_ : as in scikit-learn

    Examples
    --------
    >>> from sklearn.datasets import load_diabetes
    >>> from bilevel.estimators import BilevelRidge
    >>> X, y = load_diabetes(return_X_y=True)
    >>> model = BilevelRidge(random_state=0).fit(X, y)
    >>> model.coef_.shape
    (10,)
    """

    device: str = "cpu"
    dtype: str = "float64"

    def _check_parameters(self) -> None:
        super()._check_parameters()
        for name, known in (("device", DEVICES), ("dtype", DTYPES)):
            given = getattr(self, name)
            if not isinstance(given, str) or given not in known:
                refuse(self, name, f"a str among {known}")
        if self.structure == "per_feature" and (self.device != "cpu" or self.dtype != "float64"):
            raise ValueError("`structure='per_feature'` needs device='cpu' and dtype='float64'; kernels are of groups.")
        if self.device == "gpu":
            find_gpu()

    def _learn(self, rows: Rows, groups: Groups) -> tuple[np.ndarray, np.ndarray]:
        wanted = self.device != "cpu" or self.dtype != "float64"
        many = rows.y.shape[1] >= _MANY_TARGETS and len(rows.y) < len(groups.penalized)
        self._by_kernels = self.structure != "per_feature" and len(groups.penalized) > 0 and (wanted or many)
        if not self._by_kernels:
            return super()._learn(rows, groups)
        arrays = find_arrays(self.device, self.dtype)
        with arrays.scope():
            model = find_model(self.device)(rows.X, rows.y, groups, intercept=self.fit_intercept, arrays=arrays)
            return self._learn_by_kernels(model, rows, groups)

    def _learn_by_kernels(self, model: KernelRidge, rows: Rows, groups: Groups) -> tuple[np.ndarray, np.ndarray]:
        """Learn from a few combinations of targets, then from all, and fit."""
        tied = groups._replace(penalized=np.arange(model.n_penalties), numbers=np.arange(model.n_penalties))
        few = model.sketch(_FEW_TARGETS)
        learned = self._search(few, rows, tied)
        assert learned is not None
        if few is not model:
            learned = self._make_search(model, rows).polish(learned.structure, learned.log_penalties)
            self._note(learned)
        log_penalties = learned.log_penalties[learned.structure.groups]
        self._groups, self.penalties_ = groups, np.zeros(rows.X.shape[1])
        if self.scoring is not None:
            glm = RidgeGLM(rows.X, rows.y, Squared(), penalized=groups.penalized, intercept=self.fit_intercept)
            log_penalties = log_penalties + self._choose_level(glm, rows, log_penalties[groups.numbers])
        self.penalties_[groups.penalized] = np.exp(log_penalties[groups.numbers])
        return model.refit(rows.weights, log_penalties)

    def _make_search(self, model: InnerModel, rows: Rows) -> Search:
        search = super()._make_search(model, rows)
        search.tol *= model.loss.count(model.y)
        return search

    def _select(self, search: Search, groups: Groups, start: float) -> Learned:
        learned = super()._select(search, groups, start)
        if self._by_kernels and self._comparison is not None and self._comparison.how == "too much work":
            # Many targets tell few groups apart: what is safe is the strictest prior, not a single penalty.
            strictest = self._list_structures(groups)[-1:]
            return search.learn_path(search.arena.folds, strictest, float(learned.log_penalties[0]))[-1]
        return learned

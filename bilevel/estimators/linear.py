"""Logistic and ridge regression with learned penalties: which features share one, and how far they are shrunk."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from sklearn.base import RegressorMixin

from bilevel.estimators.base import DTYPE, BilevelEstimator, LinearClassifier, refuse, solve_all
from bilevel.estimators.rows import Scaling, Split
from bilevel.problems import BilevelProblem, logistic_selection, ridge_selection, softmax_selection

PENALTIES = ("per_feature", "per_group", "single")
# Beside columns of mean square 1, a smaller penalty is as good as none, and a larger one as leaving the feature out.
_LEAST, _MOST = 1e-5, 1e3
_SINGLE = 10.0 ** np.arange(0, -6, -1)
_FREE = 1e-6  # of the constant column; 0 would leave the Hessian of several classes singular
_PARTS = np.linspace(0, 1, 5)


class PenaltyGroups(NamedTuple):
    """The group of each column; the last of them may be constant, for the intercept. Penalties count in `unit`."""

    groups: np.ndarray
    has_constant: bool
    unit: float

    @property
    def lead(self) -> int:
        """How many decades above the best single penalty to start: ∇h hardly tells weak penalties from none."""
        return 0 if self.groups.max() == self.has_constant else 2

    def fill(self, penalty: float) -> np.ndarray:
        """Return the outer variable with one penalty for all features."""
        logarithms = np.full(self.groups.max() + 1, np.log(penalty * self.unit))
        if self.has_constant:
            logarithms[-1] = np.log(_FREE)
        return logarithms


def group_columns(estimator: Any, X: np.ndarray) -> PenaltyGroups:
    """Return what the parameters `penalty`, `groups` and `fit_intercept` of the estimator say of these columns."""
    penalty, labels, n_features = estimator.penalty, estimator.groups, X.shape[1]
    if penalty not in PENALTIES:
        refuse(estimator, "penalty", f"a str among {PENALTIES}")
    if (labels is not None) != (penalty == "per_group"):
        raise ValueError(f"`groups` and penalty='per_group' go together. Got penalty={penalty!r}, groups={labels!r}.")
    if labels is None:
        labels = np.arange(n_features) if penalty == "per_feature" else np.zeros(n_features, int)
    if (shape := np.shape(labels)) != (n_features,):
        raise ValueError(f"`groups` must name the group of each of the {n_features} features, got {shape}.")
    groups = np.unique(labels, return_inverse=True)[1]
    if estimator.fit_intercept:
        groups = np.append(groups, groups.max() + 1)
    return PenaltyGroups(groups, estimator.fit_intercept, float(np.mean(X**2)) or 1.0)


@dataclass(eq=False, repr=False, kw_only=True)
class PenaltySelector(BilevelEstimator):
    """A linear model whose penalties minimize the loss on validation rows of the model fitted with them."""

    penalty: str = field(default="per_feature", kw_only=False)
    groups: Any = None
    shrink: bool = True
    refit: bool = True

    _builder: Callable[..., BilevelProblem] = field(init=False)  # of rows, groups, start and bounds

    def _learn(self, rows: Split, seed: int) -> np.ndarray:
        groups, n_features = group_columns(self, rows.X), rows.X.shape[1]
        rows = rows.map_columns(self._add_constant)
        domain = {"outer_var": groups.fill(1.0), "outer_bounds": (groups.fill(_LEAST), groups.fill(_MOST))}
        build = partial(self._builder, groups=groups.groups, **domain, seed=seed, dtype=DTYPE)
        problem = build(*rows[:4])
        single, learned = self._solve(problem, [groups.fill(penalty) for penalty in _SINGLE], seed, groups.lead)
        self.shrinkage_ = 0.0
        # A model can be fitted to the validation rows where they have all classes, or targets are numbers.
        can_be_exchanged = rows.y.dtype.kind == "f" or np.isin(rows.y, rows.y_val).all()
        if self.shrink and groups.lead and can_be_exchanged:
            # The validation rows may have made too much of the penalties; with the rows exchanged they are tested.
            shrunk = [(1 - part) * single + part * learned for part in _PARTS]
            _, best = solve_all(build(*rows[2:4], *rows[:2]), shrunk)
            learned, self.shrinkage_ = shrunk[best], 1 - float(_PARTS[best])
        self.penalty_ = np.exp(learned)[groups.groups[:n_features]]
        if self.refit:
            X, y = np.concatenate([rows.X, rows.X_val]), np.concatenate([rows.y, rows.y_val])
            problem = build(X, y, rows.X_val, rows.y_val)
        return solve_all(problem, [learned])[0][0].inner_var


class BilevelLogisticRegression(LinearClassifier, PenaltySelector):
    """Logistic regression with a penalty for each feature, group of features, or for all, learned on validation rows.

    The penalties minimize the log-loss on validation rows of the model that minimizes, on training rows,
    mean log-loss + ½ sum penalty_k coef_k². Two classes have one row of coefficients, more have one each (softmax).

    Parameters
    ----------
    penalty : "per_feature", "per_group" or "single"
    groups : the group of each feature, any labels, for penalty="per_group"
    fit_intercept : whether to fit an intercept, which is not penalized (but by 1e-6, so that it is unique)
    standardize : whether penalties act on features of deviation 1; coefficients are given in the units of X
    validation_fraction : of the rows of X, held out at random with all classes, where `fit` gets no `X_val`
    shrink : whether several penalties, which may overfit the validation rows, are shrunk towards the best shared one,
        as far as is best when training and validation rows change places
    refit : whether the final model is fitted on training and validation rows together; otherwise on training rows
    solver : None means Exact() for few rows and features, SRBA(step_size="auto") for many; neither needs tuning
    max_iter : most steps of the solver
    tol : stop where the loss on validation rows changes by less than this part of it, per unit of a log-penalty
    random_state : of the split and of the solver's batches
    verbose : 1 shows a bar

    Attributes
    ----------
    coef_ : (1, features), or (classes, features)
    intercept_ : (1,), or (classes,)
    penalty_ : (features,), the penalty of each feature (divided by its deviation, where standardized)
    classes_ : labels, sorted
    shrinkage_ : from 0, the penalties as learned, to 1, the best shared one
    history_ : columns of the run, one entry per evaluation: "step", "seconds", "calls", "value" on validation rows, …
    n_calls_ : derivatives of one row's loss that were computed
    n_iter_ : steps of the solver
    status_ : "converged", "out_of_budget" or "diverged"
    n_features_in_, feature_names_in_ : of X

    Examples
    --------
    >>> from sklearn.datasets import load_breast_cancer
    >>> from bilevel.estimators import BilevelLogisticRegression
    >>> X, y = load_breast_cancer(return_X_y=True)
    >>> model = BilevelLogisticRegression(random_state=0).fit(X, y)
    >>> model.penalty_.shape
    (30,)
    """

    def _encode(self, y: np.ndarray, y_val: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        y, y_val = super()._encode(y, y_val)
        if len(self.classes_) > 2:
            self._builder = partial(softmax_selection, per="feature")
            return y, y_val
        self._builder = logistic_selection
        return 2 * y - 1, None if y_val is None else 2 * y_val - 1


class BilevelRidge(RegressorMixin, PenaltySelector):
    """Ridge regression with a penalty for each feature, group of features, or for all, learned on validation rows.

    The penalties minimize the squared error on validation rows of the model that minimizes, on training rows,
    mean ½ error² + ½ sum penalty_k coef_k², with targets of deviation 1.

    Parameters
    ----------
    penalty, groups, standardize : as in `BilevelLogisticRegression`
    fit_intercept : whether to fit an intercept, which is not penalized (but by 1e-6, once targets are centered)
    validation_fraction : of the rows of X, held out at random, where `fit` gets no `X_val`
    shrink, refit, solver, max_iter, tol, random_state, verbose : as in `BilevelLogisticRegression`

    Attributes
    ----------
    coef_ : (features,)
    intercept_ : float
    penalty_, shrinkage_, history_, n_calls_, n_iter_, status_ : as in `BilevelLogisticRegression`
    n_features_in_, feature_names_in_ : of X

    Examples
    --------
    >>> from sklearn.datasets import load_diabetes
    >>> from bilevel.estimators import BilevelRidge
    >>> X, y = load_diabetes(return_X_y=True)
    >>> model = BilevelRidge(random_state=0).fit(X, y)
    >>> model.coef_.shape
    (10,)
    """

    _classifies = False
    _builder = staticmethod(ridge_selection)

    def _encode(self, y: np.ndarray, y_val: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        self._target = Scaling.fit(y[:, None], center=self.fit_intercept, divide=True)
        return self._target.transform(y), None if y_val is None else self._target.transform(y_val)

    def _set_model(self, weights: np.ndarray, intercept: np.ndarray, scaling: Scaling) -> None:
        coef, intercept = scaling.unscale(weights, intercept)
        self.coef_ = coef * self._target.scale
        self.intercept_ = float(intercept * self._target.scale[0] + self._target.mean[0])

    def predict(self, X: Any) -> np.ndarray:
        """Return the prediction of each row."""
        return self._score(X)

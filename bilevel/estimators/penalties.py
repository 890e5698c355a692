"""Learned penalties: which features share one, how far they are shrunk, and the estimator that learns them."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np

from bilevel.estimators.base import DTYPE, BilevelEstimator, check_bools, choose_solver, draw_seed, find_start, refuse
from bilevel.estimators.rows import Scaling
from bilevel.problems import BilevelProblem

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
    def arguments(self) -> dict[str, Any]:
        """The groups, the start and the bounds of x, as problems take them."""
        bounds = self._fill(_LEAST), self._fill(_MOST)
        return {"groups": self.groups, "outer_var": self._fill(1.0), "outer_bounds": bounds}

    @property
    def single(self) -> list[np.ndarray]:
        """Outer variables with one penalty for all features, from a strong one to a weak one."""
        return [self._fill(penalty) for penalty in _SINGLE]

    @property
    def lead(self) -> int:
        """How many decades above the best single penalty to start: ∇h hardly tells weak penalties from none."""
        return 0 if self.groups.max() == self.has_constant else 2

    def _fill(self, penalty: float) -> np.ndarray:
        logarithms = np.full(self.groups.max() + 1, np.log(penalty * self.unit))
        if self.has_constant:
            logarithms[-1] = np.log(_FREE)
        return logarithms

    def per_feature(self, log_penalties: np.ndarray) -> np.ndarray:
        """Return the penalty of each feature."""
        features = self.groups[:-1] if self.has_constant else self.groups
        return np.exp(np.asarray(log_penalties, np.float64))[features]


def group_columns(estimator: Any, X: np.ndarray) -> PenaltyGroups:
    """Return what the parameters `penalty`, `groups` and `fit_intercept` of the estimator say of these columns."""
    groups, unit = _number_groups(estimator, X.shape[1]), float(np.mean(X**2)) or 1.0
    if estimator.fit_intercept:
        groups = np.append(groups, groups.max() + 1)
    return PenaltyGroups(groups, estimator.fit_intercept, unit)


def _number_groups(estimator: Any, n_features: int) -> np.ndarray:
    penalty, groups = estimator.penalty, estimator.groups
    if penalty not in PENALTIES:
        refuse(estimator, "penalty", f"a str among {PENALTIES}")
    if (groups is not None) != (penalty == "per_group"):
        raise ValueError(f"`groups` and penalty='per_group' go together. Got penalty={penalty!r}, groups={groups!r}.")
    if penalty == "per_feature":
        return np.arange(n_features)
    if penalty == "single":
        return np.zeros(n_features, int)
    labels = np.asarray(groups)
    if labels.shape != (n_features,):
        raise ValueError(f"`groups` must name the group of each of the {n_features} features, got {labels.shape}.")
    return np.unique(labels, return_inverse=True)[1]


def shrink_penalties(exchanged: BilevelProblem, single: np.ndarray, learned: np.ndarray) -> tuple[np.ndarray, float]:
    """Return learned log-penalties shrunk towards the best shared one, and how far: from 0, not at all, to 1.

    The validation rows may have made too much of the penalties. The problem with training and validation rows
    exchanged chooses among five shares.
    """
    assert exchanged.exact_solver is not None
    solution, values = None, []
    for part in _PARTS:
        solution = exchanged.exact_solver((1 - part) * single + part * learned, solution)
        values.append(solution.value)
    part = float(_PARTS[int(np.argmin(values))])
    return (1 - part) * single + part * learned, 1 - part


@dataclass(eq=False, repr=False, kw_only=True)
class PenaltySelector(BilevelEstimator):
    """A linear model whose penalties minimize the loss on validation rows of the model fitted with them."""

    penalty: str = field(default="per_feature", kw_only=False)
    groups: Any = None
    shrink: bool = True
    refit: bool = True

    @abstractmethod
    def _builder(self) -> Callable[..., BilevelProblem]:
        """Return the function that makes the problem of rows, groups, start and bounds."""

    @abstractmethod
    def _set_model(self, weights: np.ndarray, intercept: np.ndarray, scaling: Scaling) -> None:
        """Note `coef_` and `intercept_` in the user's units; weights are (features, …)."""

    def fit(self, X: Any, y: Any, X_val: Any = None, y_val: Any = None) -> Self:
        """Learn the penalties, then fit the model with them.

        Parameters
        ----------
        X : dense or sparse, (samples, features)
        y : one target per row
        X_val, y_val : rows to choose penalties by; by default `validation_fraction` of the rows of X is held out

        Returns
        -------
        self
        """
        self._check_parameters()
        check_bools(self, "shrink", "refit")
        seed = draw_seed(self.random_state)
        rows, scaling = self._prepare(X, y, X_val, y_val, seed)
        groups = group_columns(self, rows.X)
        rows = rows.map_columns(self._add_constant)
        build = partial(self._builder(), **groups.arguments, seed=seed, dtype=DTYPE)
        problem = build(*rows.levels)
        start = find_start(problem, groups.single, groups.lead)
        solver = choose_solver(problem, exact_if_small=True)
        log_penalties, self.shrinkage_ = self._solve(start, seed, solver), 0.0
        if self.shrink and groups.lead and rows.can_be_exchanged:
            exchanged = build(*rows.exchanged)
            log_penalties, self.shrinkage_ = shrink_penalties(exchanged, start.outer_var, log_penalties)
        self.penalty_ = groups.per_feature(log_penalties)
        if self.refit:
            problem = build(*rows.refit_levels)
        assert problem.exact_solver is not None
        self._set_model(*self._part(problem.exact_solver(log_penalties, None).inner_var), scaling)
        self._report_status()
        return self

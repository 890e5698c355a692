"""What estimators that learn penalties have in common."""

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
from sklearn.base import BaseEstimator

from bilevel.estimators.between import shrunk, started
from bilevel.estimators.fitting import announce, drawn_seed, exact_where_cheap, solve
from bilevel.estimators.penalties import sharing
from bilevel.estimators.rows import split, validated, validated_apart
from bilevel.estimators.scaling import Scaling
from bilevel.estimators.settings import check_bool, check_common
from bilevel.problems import BilevelProblem
from bilevel.solvers.base import Solver


class PenaltySelector(BaseEstimator):
    """A linear model whose penalties minimise the loss on validation rows of the model fitted with them."""

    _stratified: ClassVar[bool]
    _y_numeric: ClassVar[bool]

    def __init__(
        self,
        penalty: str = "per_feature",
        *,
        groups: Any = None,
        fit_intercept: bool = True,
        standardize: bool = True,
        validation_fraction: float = 0.25,
        shrink: bool = True,
        refit: bool = True,
        solver: Solver | None = None,
        max_iter: int = 3000,
        tol: float = 1e-3,
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        self.penalty = penalty
        self.groups = groups
        self.fit_intercept = fit_intercept
        self.standardize = standardize
        self.validation_fraction = validation_fraction
        self.shrink = shrink
        self.refit = refit
        self.solver = solver
        self.max_iter = max_iter
        self.tol = tol
        self.random_state = random_state
        self.verbose = verbose

    def __sklearn_tags__(self) -> Any:
        """Say that sparse rows are taken."""
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    @abstractmethod
    def _encoded(self, y: np.ndarray, y_val: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        """Return targets as the problem takes them, and note what predictions need to go back."""

    @abstractmethod
    def _builder(self) -> Callable[..., BilevelProblem]:
        """Return the function that makes the problem of rows, groups, start and bounds."""

    @abstractmethod
    def _keep(self, weights: np.ndarray, intercept: np.ndarray, scaling: Scaling) -> None:
        """Note `coef_` and `intercept_` in the user's units; weights are (features, …)."""

    def fit(self, X: Any, y: Any, X_val: Any = None, y_val: Any = None) -> Self:
        """Learn the penalties, then fit the model with them.

        Parameters
        ----------
        X : dense or sparse, (samples, features)
        y : one target per row
        X_val, y_val : rows to judge penalties by; by default `validation_fraction` of the rows of X is held out

        Returns
        -------
        self
        """
        check_common(self)
        check_bool(self, "shrink")
        check_bool(self, "refit")
        X, y = validated(self, X, y, y_numeric=self._y_numeric)
        X_val, y_val = validated_apart(self, X_val, y_val, y_numeric=self._y_numeric)
        seed = drawn_seed(self.random_state)
        y, y_val = self._encoded(y, y_val)
        rows = split(X, y, X_val, y_val, self.validation_fraction, seed, stratified=self._stratified)
        scaling = Scaling.of(rows.X, centred=self.fit_intercept, divided=self.standardize)
        rows = rows.changed(scaling.done)
        shared = sharing(self, rows.X)
        rows = rows.changed(shared.columns)
        build = partial(self._builder(), **shared.arguments, seed=seed)
        problem = build(*rows.levels)
        start = started(problem, shared.single, shared.lead)
        outcome = solve(self, start, seed, exact_where_cheap(problem))
        log_penalties, self.shrinkage_ = outcome.outer_var, 0.0
        if self.shrink and shared.lead and rows.can_be_exchanged:
            log_penalties, part = shrunk(build(*rows.exchanged), start.outer_var, log_penalties)
            self.shrinkage_ = 1 - part
        self.penalty_ = shared.per_feature(log_penalties)
        if self.refit:
            problem = build(*rows.together, *rows.levels[2:])
        assert problem.referee is not None
        self._keep(*shared.parted(problem.referee(log_penalties, None).inner_var), scaling)
        announce(self, outcome.status)
        return self

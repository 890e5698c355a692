"""Parameters of an estimator, refused in scikit-learn's words when `fit` begins.

Which features share a penalty, with a constant column whose penalty is fixed and as good as none.

Outer variables that need no solver: where a run starts, and how far of its way to keep.

Running a solver for an estimator, and what the estimator tells of the run.

What estimators that learn penalties have in common.
"""

import warnings
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from numbers import Integral, Real
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state

from bilevel._types import Point
from bilevel.engine.result import Status
from bilevel.engine.run import run
from bilevel.estimators.rows import Scaling, split, validated, validated_apart
from bilevel.problems import BilevelProblem
from bilevel.solvers.base import SolverBase
from bilevel.solvers.exact import Exact
from bilevel.solvers.host import HostSolver
from bilevel.solvers.srba import SRBA


def refuse(estimator: Any, name: str, wanted: str) -> None:
    """Raise the error that scikit-learn raises for a parameter out of place."""
    value = getattr(estimator, name)
    raise ValueError(f"The {name!r} parameter of {type(estimator).__name__} must be {wanted}. Got {value!r} instead.")


def check_real(estimator: Any, name: str, low: float, high: float = float("inf"), *, closed: bool = False) -> None:
    """Refuse what is not a number above ``low`` (or at it, where closed) and below ``high``."""
    value = getattr(estimator, name)
    inside = isinstance(value, Real) and not isinstance(value, bool) and low <= float(value) < high
    if not inside or (value == low and not closed):
        refuse(estimator, name, f"a float in the range {'[' if closed else '('}{low}, {high})")


def check_count(estimator: Any, name: str) -> None:
    """Refuse what is not a whole number from 1 on."""
    value = getattr(estimator, name)
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        refuse(estimator, name, "an int in the range [1, inf)")


def check_bool(estimator: Any, name: str) -> None:
    """Refuse what is neither True nor False."""
    if not isinstance(getattr(estimator, name), bool):
        refuse(estimator, name, "an instance of 'bool'")


def check_common(estimator: Any) -> None:
    """Check what all estimators take."""
    check_real(estimator, "validation_fraction", 0.0, 1.0)
    check_real(estimator, "tol", 0.0, closed=True)
    check_count(estimator, "max_iter")
    check_bool(estimator, "fit_intercept")
    check_bool(estimator, "standardize")
    if not isinstance(estimator.verbose, Integral) or estimator.verbose < 0:
        refuse(estimator, "verbose", "an int in the range [0, inf)")
    if estimator.solver is not None and not isinstance(estimator.solver, SolverBase):
        refuse(estimator, "solver", "None or a solver of `bilevel`, such as bilevel.SRBA(step_size=0.1)")


PENALTIES = ("per_feature", "per_group", "single")
# Beside columns of mean square 1, a smaller penalty is as good as none, and a larger one as leaving the feature out.
_LEAST, _MOST = 1e-5, 1e3
_SINGLE = 10.0 ** np.arange(0, -6, -1)
_FREE = 1e-6  # of the constant column; 0 would leave the Hessian of several classes singular


class Sharing(NamedTuple):
    """The group of each column; the last of them may be constant, for the intercept. Penalties count in `unit`."""

    groups: np.ndarray
    has_constant: bool
    unit: float

    @property
    def n_penalties(self) -> int:
        """Number of groups."""
        return int(self.groups.max()) + 1

    @property
    def arguments(self) -> dict[str, Any]:
        """The groups, the start and the bounds of x, as problems take them."""
        return {
            "groups": self.groups,
            "outer_var": self._filled(1.0),
            "outer_bounds": (self._filled(_LEAST), self._filled(_MOST)),
        }

    @property
    def single(self) -> list[np.ndarray]:
        """Outer variables with one penalty for all features, from a strong one to a weak one."""
        return [self._filled(penalty) for penalty in _SINGLE]

    @property
    def lead(self) -> int:
        """How many decades above the best single penalty to start: ∇h hardly tells weak penalties from none."""
        return 0 if self.n_penalties == 1 + self.has_constant else 2

    def _filled(self, penalty: float) -> np.ndarray:
        logarithms = np.full(self.n_penalties, np.log(penalty * self.unit))
        if self.has_constant:
            logarithms[-1] = np.log(_FREE)
        return logarithms

    def columns(self, X: np.ndarray) -> np.ndarray:
        """Return the columns with the constant one."""
        return np.column_stack([X, np.ones(len(X))]) if self.has_constant else X

    def parted(self, inner_var: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return what belongs to the features, and to the constant column."""
        return (inner_var[:-1], inner_var[-1]) if self.has_constant else (inner_var, np.zeros_like(inner_var[0]))

    def per_feature(self, log_penalties: np.ndarray) -> np.ndarray:
        """Return the penalty of each feature."""
        features = self.groups[:-1] if self.has_constant else self.groups
        return np.exp(np.asarray(log_penalties, np.float64))[features]


def sharing(estimator: Any, X: np.ndarray) -> Sharing:
    """Return what the parameters `penalty`, `groups` and `fit_intercept` of the estimator say of these columns."""
    groups, unit = _numbered(estimator, X.shape[1]), float(np.mean(X**2)) or 1.0
    if estimator.fit_intercept:
        return Sharing(np.append(groups, groups.max() + 1), True, unit)
    return Sharing(groups, False, unit)


def _numbered(estimator: Any, n_features: int) -> np.ndarray:
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


_PARTS = np.linspace(0, 1, 5)


class Start(NamedTuple):
    """A problem to solve from where it starts, and an x to improve on, with h there."""

    problem: BilevelProblem
    outer_var: np.ndarray
    value: float


def started(problem: BilevelProblem, candidates: list[np.ndarray], lead: int = 0) -> Start:
    """Start a problem near the best of some outer variables, with z and v exact there.

    Parameters
    ----------
    problem : with a exact_solver
    candidates : outer variables to try
    lead : how many places before the best of them to start
    """
    assert problem.exact_solver is not None
    references = [problem.exact_solver(candidates[0], None)]
    for outer_var in candidates[1:]:
        references.append(problem.exact_solver(outer_var, references[-1]))
    best = int(np.argmin([reference.value for reference in references]))
    first = max(0, best - lead)
    point = references[first].inner_var, candidates[first], references[first].v
    moved = replace(problem, start=Point(*(part.astype(problem.dtype) for part in point)))
    return Start(moved, candidates[best], references[best].value)


def shrunk(exchanged: BilevelProblem, start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the best x between two, and how far from the first it is, by rows that did not judge the second.

    Parameters
    ----------
    exchanged : the problem with training and validation rows in each other's place
    start, end : where x came from, and what the validation rows made of it; they may have made too much of it
    """
    assert exchanged.exact_solver is not None
    reference, values = None, []
    for part in _PARTS:
        reference = exchanged.exact_solver((1 - part) * start + part * end, reference)
        values.append(reference.value)
    part = float(_PARTS[int(np.argmin(values))])
    return (1 - part) * start + part * end, part


_EVALUATIONS = 10
_BATCH = 64
_SMALL = 1e7  # multiplications in a Hessian of the inner problem


class Trail:
    """As a metric, how far x is from its start; it remembers each x that it was asked for."""

    def __init__(self) -> None:
        self.visited: list[np.ndarray] = []

    def __call__(self, point: Point) -> float:
        """Return ||x - start|| and remember x."""
        self.visited.append(np.asarray(point.outer_var, np.float64))
        return float(np.linalg.norm(self.visited[-1] - self.visited[0]))


class Outcome(NamedTuple):
    """The best x that is known, and how the run ended."""

    outer_var: np.ndarray
    status: Status


def drawn_seed(random_state: Any) -> int:
    """Return the seed of the split and of the run."""
    return int(check_random_state(random_state).randint(np.iinfo(np.int32).max))


def solve(estimator: Any, start: Start, seed: int, untuned: SolverBase) -> Outcome:
    """Run the estimator's solver, or this one, and note `history_`, `n_calls_`, `n_iter_`, `status_`."""
    problem, trail = start.problem, Trail()
    solver = untuned if estimator.solver is None else estimator.solver
    with warnings.catch_warnings():
        # The best x, by exact values, is kept, however far estimates have drifted since.
        warnings.filterwarnings("ignore", "SRBA's recursive estimate", RuntimeWarning)
        result = run(
            replace(problem, metrics={"moved": trail}),
            solver,
            seed=seed,
            max_steps=estimator.max_iter,
            tolerance=(estimator.tol * start.value) ** 2,
            eval_every=1 if isinstance(solver, HostSolver) else max(1, estimator.max_iter // _EVALUATIONS),
            progress=estimator.verbose > 0,
        )
    estimator.history_ = result.history
    estimator.n_calls_ = sum(result.calls)
    estimator.n_iter_ = max(1, int(result.history["step"][-1]))
    estimator.status_ = str(result.status)
    values = np.nan_to_num(result.history["value"], nan=np.inf)
    improved = values.min() < start.value
    return Outcome(trail.visited[int(values.argmin())] if improved else start.outer_var, result.status)


def stochastic(problem: BilevelProblem) -> SolverBase:
    """Return the stochastic solver that needs no tuning."""
    return SRBA(step_size="auto", batch_size=min(_BATCH, problem.n_inner, problem.n_outer))


def exact_where_cheap(problem: BilevelProblem) -> SolverBase:
    """Return exact steps for few rows and features, where they take a second in all, else stochastic ones."""
    return Exact() if problem.n_inner * problem.start.inner_var.size**2 <= _SMALL else stochastic(problem)


def announce(estimator: Any, status: Status) -> None:
    """Warn of a run that did not end well; pass Ctrl-C on, now that what it found is kept."""
    if status is Status.interrupted:
        raise KeyboardInterrupt
    name, steps = type(estimator).__name__, estimator.n_iter_
    if status is Status.diverged:
        message = f"{name}: the solver left the finite numbers after {steps} steps; the best point before is kept."
        warnings.warn(message, ConvergenceWarning, stacklevel=3)
    elif status is Status.out_of_budget and _still_falls(estimator.history_["value"]):
        message = f"{name} took max_iter={steps} steps and the loss on validation rows was still falling, "
        fall = "from {:.4g} to {:.4g} since the last evaluation but one. Increase max_iter."
        warnings.warn(message + fall.format(*estimator.history_["value"][-2:]), ConvergenceWarning, stacklevel=3)


def _still_falls(values: np.ndarray) -> bool:
    """Tell whether more steps would help: the last value is the best, by one in a hundred."""
    return len(values) > 1 and values[-1] < 0.99 * np.nanmin(values[:-1])


class PenaltySelector(BaseEstimator):
    """A linear model whose penalties minimize the loss on validation rows of the model fitted with them."""

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
        solver: SolverBase | None = None,
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
        scaling = Scaling.of(rows.X, centered=self.fit_intercept, divided=self.standardize)
        rows = rows.changed(scaling.done)
        shared = sharing(self, rows.X)
        rows = rows.changed(shared.columns)
        build = partial(self._builder(), **shared.arguments, dtype="float32", seed=seed)
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
        assert problem.exact_solver is not None
        self._keep(*shared.parted(problem.exact_solver(log_penalties, None).inner_var), scaling)
        announce(self, outcome.status)
        return self

"""Which features share a penalty, with a constant column whose penalty is fixed and as good as none."""

from typing import Any, NamedTuple

import numpy as np

from bilevel.estimators.settings import refuse

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

"""Selection of penalties for least squares: l = ½ (d'z - y)² in :mod:`bilevel.problems.linear`."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from bilevel._precision import resolve_dtype
from bilevel._types import AnyArray, Array
from bilevel.oracles import HostData, Samples
from bilevel.oracles.host_samples import head
from bilevel.problems.base import BilevelProblem, lay_out
from bilevel.problems.checks import check_data, check_groups, check_tables, make_rng
from bilevel.problems.exact import InnerSolution, System, newton
from bilevel.problems.linear import EVERY_WIDTH, LinearBounds, LinearExactSolver, LinearOracles


def ridge_selection(
    X_train: Any,
    y_train: Any,
    X_val: Any,
    y_val: Any,
    *,
    inner_var: Any = None,
    outer_var: Any = None,
    outer_bounds: Any = None,
    groups: Any = None,
    dtype: DTypeLike | None = None,
    seed: int = 0,
) -> BilevelProblem:
    """Build the problem min over x of the validation error of ridge regression with penalties exp(x).

        G = mean ½ (d'z - y)² + ½ sum_k exp(x_g(k)) z_k²  on training rows
        F = mean ½ (d'z - y)²                             on validation rows

    There is no intercept: center features and targets, or add a column of ones.

    Parameters
    ----------
    y_train, y_val : real targets
    inner_var, outer_var : the start; z = 0 and x = -2 by default
    X_train, X_val, outer_bounds, groups, dtype, seed : as for `logistic_selection`
    """
    dtype = resolve_dtype(dtype, X_train=head(X_train), X_val=head(X_val))
    targets = _check_targets("y_train", X_train, y_train), _check_targets("y_val", X_val, y_val)
    tables = check_tables(X_train, targets[0], X_val, targets[1], on_host=True)
    train, validation = (_regression(*table) for table in tables)
    dim, starts = head(train).features.shape[1], (inner_var, outer_var)
    groups, n_penalties = check_groups(groups, dim)
    defaults, rng = (np.zeros(dim), np.full(n_penalties, -2.0)), make_rng(seed)
    parts, start = lay_out((train, validation), starts, defaults, outer_bounds, dtype, rng, narrow=EVERY_WIDTH)
    oracles = RidgeOracles(**parts, groups=groups)
    if oracles.is_on_host:
        return BilevelProblem(oracles, start, name="ridge_selection")
    solver = RidgeExactSolver(oracles)
    return BilevelProblem(oracles, start, solver, "ridge_selection", certificate_bounds=LinearBounds)


def _check_targets(name: str, rows: Any, targets: Any) -> Any:
    # Those beside rows on the host stay there, unread.
    return targets if isinstance(rows, HostData) else check_data(name, targets)


def _regression(rows: Any, targets: Any) -> Any:
    if isinstance(rows, HostData):
        return rows.with_column(targets, _regression)
    # Integers too are numbers to compute with.
    return Regression(*(part.astype(np.result_type(part, np.float32), copy=False) for part in (rows, targets)))


class Regression(NamedTuple):
    """Features, (features, samples), and one target per sample."""

    features: AnyArray
    targets: AnyArray


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RidgeOracles(LinearOracles):
    """Features and targets on each level."""

    def _losses(self, scores: Array, data: Regression) -> Array:
        return (scores - data.targets) ** 2 / 2

    def _slopes(self, scores: Array, data: Regression) -> tuple[Array, Array]:
        return scores - data.targets, jnp.ones_like(scores)

    def curvature_near(self, scores: Array, reach: Array) -> tuple[Array, Array, Array]:
        return jnp.ones_like(scores), jnp.ones_like(scores), jnp.zeros_like(scores)


class RidgeExactSolver(LinearExactSolver):
    """Exact solutions from the moments of both levels: one p×p solve, however many rows there are."""

    def __init__(self, oracles: LinearOracles) -> None:
        self._oracles = oracles
        self.gram, self.right_side, _ = _moments(oracles.inner_samples)
        self.outer_gram, self.outer_right_side, self.outer_square = _moments(oracles.outer_samples)

    def _fit(self, penalties: np.ndarray, start: np.ndarray) -> tuple[InnerSolution, float, np.ndarray]:
        system = System.dense(self.gram + np.diag(penalties))
        z = system.solve(self.right_side, 0.0)
        found = newton(lambda z: system.product(z) - self.right_side, lambda _: system, z)
        z = found.z
        value = z @ self.outer_gram @ z / 2 - self.outer_right_side @ z + self.outer_square / 2
        return found, float(value), self.outer_gram @ z - self.outer_right_side


def _moments(samples: Samples) -> tuple[np.ndarray, np.ndarray, float]:
    """Return the means of d d', d y and y², in float64 on the rows that runs use."""
    features, targets = (np.asarray(leaf, np.float64) for leaf in samples.leaves)
    return features @ features.T / samples.n, features @ targets / samples.n, float(targets @ targets / samples.n)

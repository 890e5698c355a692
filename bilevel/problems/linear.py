"""Selection of penalties for linear models, logistic regression and ridge regression, on a validation set.

With a loss l of one score per row,

    G = mean l(d'z) + ½ sum_k exp(x_g(k)) z_k²        F = mean l(d'z)

and x has one number per feature, or per group g of features. On rows D, features first,

    ∇z G = D l' + exp(x) z      (∇²zz G) v = D (l'' D'v) + exp(x) v      (∇²xz G) v = exp(x) z v, summed by group

The logistic loss is l = log(1 + exp(-y d'z)) on rows y d, as the label is part of the data. Its constants are proved on
a ball of z and a box of x. Ridge regression has l = ½ (d'z - y)².

Certificates. With P = diag exp(x), H = mean l'' dd' + P. Rows are measured in the metric, d̃ = L⁻¹d, so that within t of
z a score changes by at most ||d̃|| t. Two metrics are tried, and the smaller error is kept:

    M = P     H >= P everywhere, so μ = 1 and δ = ||D_z||'
    M = H     of z; δ and μ from the least l'' near z, as in :mod:`bilevel.problems.certificate`

    a = λ_max(mean k |d'v| d̃d̃')    k the supremum of |l'''| over scores within ||d̃|| δ of d'z
    b = λ_max(mean l'' d̃d̃')        on outer rows, l'' the supremum over the same scores
    c = ||S diag(P v)||             S sums over the features of a group
    e = ||S diag(P z)|| + δ         as ||S P (z* - z) w||_2 <= sum P |z* - z| |w| <= ||z - z*|| ||w||, for M >= P
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import exp, log, sqrt
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from bilevel._core import trees
from bilevel._core.compilation import Compiled, arithmetic, compiled, resolve_dtype
from bilevel._core.types import AnyArray, Array, InnerPass, OuterPass, Point, PyTree
from bilevel._process import may_be_fused
from bilevel.oracles import HostData, RowwiseOracles
from bilevel.oracles.base import estimate
from bilevel.oracles.host_samples import head
from bilevel.oracles.samples import STATIC, Samples
from bilevel.problems import certificate
from bilevel.problems.base import BilevelProblem, documented, lay_out
from bilevel.problems.certificate import Bounds, Found, Metric, Moments, Region, Values
from bilevel.problems.checks import check_data, check_groups, check_outer, check_signs, check_tables, make_rng
from bilevel.problems.exact import ExactSolution, InnerSolution, System, newton, solve_adjoint

LOG_PENALTIES = (-20.0, 20.0)  # as good as no penalty and as no feature, compared with curvatures near 1
EVERY_WIDTH = 2**62  # a limit that no row reaches: closed forms need features first, whatever their number is
# On a CPU, XLA computes products of a matrix of this size and a vector by loops over single numbers. Sums of `_LANES`
# rows at a time take half the time. Products of other sizes are at least as fast as sums.
_LANES, _MOST_ROWS, _NUMBERS = 16, 64, (512, 2048)


# Linear models


def sum_groups(per_member: Array, groups: Array | None, n_groups: int) -> Array:
    """Return the sum over the members of each group."""
    return per_member if groups is None else jax.ops.segment_sum(per_member, groups, num_segments=n_groups)


def _is_small(features: Array) -> bool:
    """Return True if products with a block of rows are faster as sums."""
    n_rows, (least, most) = features.shape[1], _NUMBERS
    return n_rows % _LANES == 0 and n_rows <= _MOST_ROWS and least <= features.size <= most


@dataclass(frozen=True)
class LinearOracles(RowwiseOracles):
    """A loss of one score per row.

    Attributes
    ----------
    groups : the group of each feature; None means one group for each
    sums_small_products : whether small products are computed as sums
    """

    groups: Array | None = None
    sums_small_products: bool = field(default=False, metadata=STATIC)

    has_row_diagonals = True
    holds_only_rows = True
    wide_bounds = LOG_PENALTIES

    def for_one_run(self) -> Self:
        return replace(self, sums_small_products=True)

    def inner(self, point: Point, rows: Any = None) -> InnerPass:
        return estimate(self._inner, point, self._as_steps_read(self.inner_samples), rows)

    def outer(self, point: Point, rows: Any = None) -> OuterPass:
        return estimate(self._outer, point, self._as_steps_read(self.outer_samples), rows)

    def _as_steps_read(self, samples: Samples) -> Samples:
        """Return samples whose full-batch pass reads blocks, as steps do, so that they stay in the cache."""
        if not self.sums_small_products or samples.blocks is None or samples.sampling != "blocks":
            return samples
        block = jax.tree.leaves(samples.blocks)[0][0]
        return replace(samples, piece=samples.batch_size) if may_be_fused() and _is_small(block) else samples

    def _features(self, data: PyTree) -> Array:
        """Return the rows, (features, samples): the first array of the data."""
        return jax.tree.leaves(data)[0]

    def _scores(self, var: Array, features: Array) -> Array:
        """Return D'var."""
        if self.sums_small_products and _is_small(features):
            return jnp.sum(var[:, None] * features, axis=0)
        return var @ features

    def _sum_rows(self, features: Array, terms: Array) -> Array:
        """Return D times a term of each row."""
        if self.sums_small_products and _is_small(features):
            computed_once = jax.lax.optimization_barrier(terms)  # instead of once per feature
            parts = jnp.split(features * computed_once, features.shape[1] // _LANES, axis=1)
            return jnp.sum(sum(parts[1:], parts[0]), axis=1)
        return features @ terms

    @abstractmethod
    def _losses(self, scores: Array, data: PyTree) -> Array:
        """Return l of each score."""

    @abstractmethod
    def _slopes(self, scores: Array, data: PyTree) -> tuple[Array, Array]:
        """Return l' and l'' of each score."""

    @abstractmethod
    def curvature_near(self, scores: Array, reach: Array) -> tuple[Array, Array, Array]:
        """Return inf l'', sup l'' and sup |l'''| within a reach of each score."""

    def bound_curvature(
        self, point: Point, data: PyTree, weights: Array, *, inverse_root: Array, radius: Array, kind: str
    ) -> Array:
        """Return the matrix with the largest eigenvalue "a" or "b", or the "least" sum w l'' dd' in a radius of z."""
        rows = self._features(data)
        whitened = certificate.whiten(rows, inverse_root)
        least, second, third = self.curvature_near(point.inner_var @ rows, certificate.norms(whitened) * radius)
        if kind == "least":
            return (rows * (weights * least)) @ rows.T
        changes = weights * third * abs(point.v @ rows)
        return certificate.second_moment(whitened, changes if kind == "a" else weights * second)

    def _majorizer(self, slopes: Array, curvatures: Array) -> Array:
        """Return the curvatures, or larger ones for badly fitted rows, whose loss is flat."""
        return curvatures

    def penalties(self, outer_var: Array) -> Array:
        penalties = jnp.exp(outer_var)
        return penalties if self.groups is None else penalties[self.groups]

    def _row_diagonals(self, point: Point, data: PyTree, weights: Array, *, power: int, majorize: bool) -> Array:
        features = self._features(data)
        slopes, curvatures = self._slopes(point.inner_var @ features, data)
        if majorize:
            curvatures = self._majorizer(slopes, curvatures)
        return features ** (2 * power) @ (weights * curvatures**power)

    def _majorized_product(self, point: Point, data: PyTree, weights: Array) -> Array:
        features = self._features(data)
        curvatures = self._majorizer(*self._slopes(point.inner_var @ features, data))
        return features @ (weights * curvatures * (point.v @ features)) + self.penalties(point.outer_var) * point.v

    def _inner_terms(self, point: Point, data: PyTree) -> tuple[Array, Array]:
        features = self._features(data)
        slopes, curvatures = self._slopes(self._scores(point.inner_var, features), data)
        return slopes, curvatures * self._scores(point.v, features)

    def _inner_sum(self, terms: tuple[Array, Array], data: PyTree, weights: Array, like: Point) -> InnerPass:
        features = self._features(data)
        grad, hvp = (self._sum_rows(features, weights * term) for term in terms)
        return InnerPass(grad, hvp, jnp.zeros_like(like.outer_var))

    def inner_regularization(self, point: Point) -> InnerPass:
        z, x, v = point
        penalties = self.penalties(x)
        return InnerPass(penalties * z, penalties * v, sum_groups(penalties * z * v, self.groups, x.size))

    def _inner_grad_outer(self, point: Point, data: PyTree, weights: Array) -> Array:
        z, x, _ = point
        return sum_groups(self.penalties(x) * z**2 / 2, self.groups, x.size)

    def _outer_terms(self, point: Point, data: PyTree) -> Array:
        return self._slopes(self._scores(point.inner_var, self._features(data)), data)[0]

    def _outer_sum(self, terms: Array, data: PyTree, weights: Array, like: Point) -> OuterPass:
        return OuterPass(self._sum_rows(self._features(data), weights * terms), jnp.zeros_like(like.outer_var))

    def _inner_value(self, point: Point, data: PyTree, weights: Array) -> Array:
        penalty = jnp.sum(self.penalties(point.outer_var) * point.inner_var**2) / 2
        return self._outer_value(point, data, weights) + penalty

    def _outer_value(self, point: Point, data: PyTree, weights: Array) -> Array:
        return jnp.sum(weights * self._losses(point.inner_var @ self._features(data), data))


class LinearExactSolver(ABC):
    """Exact solutions with a dense Hessian; a subclass fits the model with given penalties."""

    def __init__(self, oracles: LinearOracles) -> None:
        self._oracles = oracles

    @abstractmethod
    def _fit(self, penalties: np.ndarray, start: np.ndarray) -> tuple[InnerSolution, float, np.ndarray]:
        """Fit the model in float64; return the solution with F and ∇z F there."""

    def __call__(self, outer_var: np.ndarray, guess: ExactSolution | None = None) -> ExactSolution:
        # In NumPy, which needs no compilation.
        x = check_outer(outer_var)
        groups = np.arange(x.size) if self._oracles.groups is None else np.asarray(self._oracles.groups)
        penalties = np.exp(x)[groups]
        with arithmetic(np.float64):
            start = np.zeros_like(penalties) if guess is None else guess.inner_var
            found, value, outer_grad = self._fit(penalties, start)
        v, left = solve_adjoint(found, value, outer_grad)
        hypergrad = np.bincount(groups, penalties * found.z * v, x.size)
        residuals = float(np.linalg.norm(found.grad)), float(np.linalg.norm(left))
        return ExactSolution(found.z, v, value, hypergrad, *residuals)


class LinearBounds:
    """Bounds at points of logistic or ridge selection; a subclass may measure rows in another way."""

    why = "Penalties and curvature of the rows are known."

    def __init__(self, problem: BilevelProblem) -> None:
        oracles, size = problem.oracles, problem.start.inner_var.size
        assert isinstance(oracles, LinearOracles)
        self._groups = np.arange(size) if oracles.groups is None else np.asarray(oracles.groups)
        self._oracles: Any = oracles.in_float64()
        self._is_dense = size <= certificate.DENSE

    def _measure(self, metric: Metric | None, z: np.ndarray) -> np.ndarray:
        """Return the matrix or vector that gives the length of a row in a metric; None is for a radius of 0."""
        return np.ones(z.size) if metric is None else metric.inverse_root

    def _curvature(self, kind: str, point: Point, measure: np.ndarray, radius: Any) -> Array:
        return _curvature(self._oracles, point, measure, radius, kind)

    def _changes(self, metric: Metric, point: Point, delta: Any) -> list[float]:
        changes = (self._curvature(kind, point, metric.inverse_root, delta) for kind in ("a", "b"))
        return [certificate.largest(matrix) for matrix in changes]

    def __call__(self, point: Point, direction: Point) -> Bounds:
        penalties = np.exp(point.outer_var)[self._groups]
        plain = Metric.diagonal(penalties)
        found = self._bounds(plain, point, direction, plain.dual_norm(direction.inner_var.ravel()), 1.0)
        try:
            local = self._local(point, direction, penalties) if self._is_dense else found
        except np.linalg.LinAlgError:
            return found
        return min(found, local, key=lambda bounds: bounds.error)

    def _local(self, point: Point, direction: Point, penalties: np.ndarray) -> Bounds:
        def least_hessian(measure: np.ndarray, radius: float) -> np.ndarray:
            return np.asarray(self._curvature("least", point, measure, np.float64(radius))) + np.diag(penalties)

        metric = Metric.dense(least_hessian(self._measure(None, point.inner_var), 0.0))
        within = partial(least_hessian, self._measure(metric, point.inner_var))
        found = certificate.ball(metric, metric.dual_norm(direction.inner_var.ravel()), within)
        return certificate.NOTHING if found is None else self._bounds(metric, point, direction, *found)

    def _bounds(self, metric: Metric, point: Point, direction: Point, delta: float, mu: float) -> Bounds:
        a, b = self._changes(metric, point, np.float64(delta))
        penalties, v_residual = np.exp(point.outer_var)[self._groups], metric.dual_norm(direction.v.ravel())
        parts = point.v, point.inner_var
        c, e = (metric.grouped_norm(penalties * part.ravel(), self._groups) for part in parts)
        return Bounds(delta, mu, v_residual, a, b, c, e + delta, metric.least)


@compiled("kind")
def _curvature(oracles: LinearOracles, point: Point, inverse_root: Array, radius: Array, kind: str) -> Array:
    of_piece = partial(oracles.bound_curvature, point, inverse_root=inverse_root, radius=radius, kind=kind)
    return (oracles.outer_samples if kind == "b" else oracles.inner_samples).mean(of_piece)


# The logistic loss, with derivatives that XLA compiles to short loops, and bounds of its curvature


@jax.custom_jvp
def softplus(margin: Array) -> Array:
    """Return log(1 + exp(margin)) without overflow."""
    # The derivatives of jax.nn.softplus treat infinite input separately, which takes a quarter of the time of a step.
    return jnp.maximum(margin, 0) + jnp.log1p(jnp.exp(-jnp.abs(margin)))


@jax.custom_jvp
def sigmoid(margin: Array) -> Array:
    """Return 1 / (1 + exp(-margin))."""
    return 1 / (1 + jnp.exp(-margin))


def sigmoid_and_slope(margin: Array) -> tuple[Array, Array]:
    """Return σ(margin) and σ'(margin) = σ(margin) σ(-margin); 1 - σ(margin) would cancel at large margins."""
    value = sigmoid(margin)
    return value, value * sigmoid(-margin)


softplus.defjvps(lambda tangent, _, margin: sigmoid(margin) * tangent)
sigmoid.defjvps(lambda tangent, _, margin: sigmoid_and_slope(margin)[1] * tangent)


def logistic(margin: Array) -> Array:
    """Return log(1 + exp(-margin)), the loss of a label ±1 times its score."""
    return softplus(-margin)


# Suprema of the derivatives of log(1 + exp(s)), from the first one |σ|.
_ROOT = sqrt(0.5 - sqrt(105) / 30)
SIGMOID = (1.0, 1 / 4, 1 / (6 * sqrt(3)), 1 / 8, _ROOT * (1 - _ROOT**2) * (2 - 3 * _ROOT**2) / 4)
STEEPEST = log(2 + sqrt(3))  # the score where |l'''| of the logistic loss is largest


def logistic_curvature(scores: Array, reach: Array) -> tuple[Array, Array, Array]:
    """Return inf l'', sup l'' and sup |l'''| of the logistic loss within ``reach`` of each score."""
    sizes = jnp.abs(scores)
    nearest, farthest = jnp.maximum(sizes - reach, 0), sizes + reach
    steepest = jnp.clip(STEEPEST, nearest, farthest)  # |l'''| is even, and increases up to its maximum
    third = _logistic_second(steepest) * (1 - 2 * sigmoid(-steepest))
    return _logistic_second(farthest), _logistic_second(nearest), third


def _logistic_second(sizes: Array) -> Array:
    """Return l'' of scores with these absolute values."""
    return sigmoid_and_slope(sizes)[1]


# Logistic regression


@documented
def logistic_selection(
    X_train: Any,
    y_train: Any,
    X_val: Any,
    y_val: Any,
    *,
    groups: Any = None,
    inner_var: Any = None,
    outer_var: Any = None,
    outer_bounds: Any = None,
    dtype: DTypeLike | None = None,
    seed: int = 0,
) -> BilevelProblem:
    """Build the problem min over x of the validation loss of the best-fitting penalized model.

        G = mean log(1 + exp(-y d'z)) + ½ sum_k exp(x_g(k)) z_k²  on training rows
        F = mean log(1 + exp(-y d'z))                             on validation rows

    Parameters
    ----------
    X_train, X_val : features of each level, (samples, features). A :class:`bilevel.HostData` stays on the host; the
        problem then has no exact solution
    y_train, y_val : labels -1 and 1
    %(groups)s
    inner_var : start of z; N(0, I) by default
    outer_var : start of x, the logarithms of the penalties; log U(0, 1) by default
    %(outer_bounds)s
    %(dtype)s
    seed : seed of the default start and of the shuffle of the rows
    """
    dtype = resolve_dtype(dtype, X_train=head(X_train), X_val=head(X_val))
    tables = check_tables(X_train, y_train, X_val, y_val, on_host=True)
    train, validation = (_sign(name, *table) for name, table in zip(("y_train", "y_val"), tables, strict=True))
    rng, dim, starts = make_rng(seed), head(train).shape[1], (inner_var, outer_var)
    groups, n_penalties = check_groups(groups, dim)
    defaults = rng.standard_normal((dim,)), np.log(rng.uniform(size=(n_penalties,)))
    parts, start = lay_out((train, validation), starts, defaults, outer_bounds, dtype, rng, narrow=EVERY_WIDTH)
    oracles = LogisticOracles(**parts, groups=groups)
    if oracles.is_on_host:
        return BilevelProblem(oracles, start, name="logistic_selection")
    return BilevelProblem(
        oracles,
        start,
        LogisticExactSolver(oracles),
        "logistic_selection",
        find_constants=logistic_constants,
        certificate_bounds=LinearBounds,
    )


def _sign(name: str, rows: Any, labels: np.ndarray) -> Any:
    """Return rows times their labels."""
    if isinstance(rows, HostData):
        return rows.with_column(labels, partial(_sign, name))
    return rows * check_signs(name, labels)[:, None].astype(np.result_type(rows, np.float32))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LogisticOracles(LinearOracles):
    """One array per level: signed rows, (features, samples)."""

    curvature_near = staticmethod(logistic_curvature)

    def _losses(self, scores: Array, data: Array) -> Array:
        return logistic(scores)

    def _slopes(self, scores: Array, data: Array) -> tuple[Array, Array]:
        residuals, curvatures = sigmoid_and_slope(-scores)
        return -residuals, curvatures

    def _majorizer(self, slopes: Array, curvatures: Array) -> Array:
        # Both have the same mean if the model is correct. For a badly fitted row only the squared slope is not near 0.
        return jnp.maximum(slopes**2, curvatures)


class LogisticExactSolver(LinearExactSolver):
    """Exact solutions by damped Newton steps, from the previous solution or from zero.

    JAX computes the sums over rows, since the threads of NumPy's BLAS spin after a call and slow down later steps.
    """

    @cached_property
    def _rows(self) -> list[Array]:
        levels = self._oracles.inner_samples, self._oracles.outer_samples
        return [trees.cast(level.leaves, np.float64) for level in levels]

    def _fit(self, penalties: np.ndarray, start: np.ndarray) -> tuple[InnerSolution, float, np.ndarray]:
        train, validation = self._rows

        def system_at(z: np.ndarray) -> System:
            return System.dense(np.asarray(_hessian(train, penalties, z)))

        found = newton(lambda z: np.asarray(_gradient(train, penalties, z)), system_at, start)
        value, outer_grad = _mean_loss_and_gradient(validation, found.z)
        return found, float(value), np.asarray(outer_grad)


@Compiled
def _gradient(rows: Array, penalty: Array, z: Array) -> Array:
    return penalty * z - (rows @ sigmoid(-(z @ rows))) / rows.shape[1]


@Compiled
def _hessian(rows: Array, penalty: Array, z: Array) -> Array:
    return (rows * sigmoid_and_slope(z @ rows)[1]) @ rows.T / rows.shape[1] + jnp.diag(penalty)


@Compiled
def _mean_loss_and_gradient(rows: Array, z: Array) -> tuple[Array, Array]:
    margins = z @ rows
    return jnp.mean(logistic(margins)), -(rows @ sigmoid(-margins)) / rows.shape[1]


def logistic_constants(problem: BilevelProblem, radius: float | None, box: Any, seed: int) -> Found:
    """Bound l(d'z) + ½ sum_k exp(x_g(k)) z_k² on a ball of z and a box of x."""
    lower, upper = certificate.box_around(problem, box)
    weakest, strongest = float(np.exp(lower.min())), float(np.exp(upper.max()))
    radius = radius or certificate.radius_with_start(problem, sqrt(2 * log(2) / weakest))
    levels = problem.oracles.inner_samples, problem.oracles.outer_samples
    train, validation = (np.asarray(level.leaves, np.float64).T for level in levels)
    longest, outer_longest = (float(np.linalg.norm(rows, axis=1).max()) for rows in (train, validation))
    values: Values = {
        "mu_G": weakest + _least_fit_curvature(train, radius),
        "L0_F": outer_longest / (1 + exp(-radius * outer_longest)),
        "L1_F": outer_longest**2 * SIGMOID[1],
        "L2_F": outer_longest**3 * _steepest_curvature(radius * outer_longest),
    }
    steepest = SIGMOID[1], _steepest_curvature(radius * longest), SIGMOID[3]
    for order, slope in zip((2, 3, 4), steepest, strict=True):
        # Along (a, b), ½ sum exp(x) z² has derivatives up to sum_j t_j |b|^j |a|^(order - j) at x = 0.
        terms = np.zeros(order + 1)
        terms[-3:] = order * (order - 1) / 2, order * radius, radius**2 / 2
        terms *= strongest
        terms[0] += longest**order * slope
        values[f"L{order - 1}_G"] = certificate.largest_on_circle(terms)
    fitted = min(sqrt(2 * log(2)), sqrt(strongest) * radius)
    values |= _constants_of_solution(values["mu_G"], fitted, Moments.of(train), Moments.of(validation))
    how = dict.fromkeys(values, "bound") | dict.fromkeys(("L0_F", "L1_F", "L2_F"), "exact")
    return values, how, Region(radius, lower, upper)


def _constants_of_solution(mu: Any, fitted: float, train: Moments, validation: Moments) -> Values:
    """Bound z*, v* and ∇²h with P = diag(exp(x)) <= H = ∇²zz G, and ||√P z*|| <= ``fitted`` as G(z*) <= G(0).

    J = -H^-1 P diag(z*) and √P v* = -√P H^-1 ∇F, where ||H^-1 √P|| <= 1/√μ.
    """
    L_z_star, slope = fitted / sqrt(mu), sqrt(validation.second)
    curvature = validation.second * SIGMOID[1] + train.third * SIGMOID[2] * slope / mu
    L_v_star = (curvature * L_z_star + slope) / mu
    return {"L_z_star": L_z_star, "L_v_star": L_v_star, "L_h": curvature * L_z_star**2 + 3 * fitted * slope / sqrt(mu)}


def _least_fit_curvature(rows: np.ndarray, radius: float) -> float:
    """Return a lower bound of the eigenvalues of mean l''(d'z) dd' over ||z|| <= radius."""
    # l'' decreases with |d'z|.
    small = np.exp(-radius * np.linalg.norm(rows, axis=1))
    return max(0.0, float(np.linalg.eigvalsh((rows.T * (small / (1 + small) ** 2)) @ rows / len(rows))[0]))


def _steepest_curvature(margin: float) -> float:
    """Return max |l'''| over scores of absolute value up to ``margin``."""
    if margin >= STEEPEST:
        return SIGMOID[2]
    slope = 1 / (1 + exp(margin))
    return slope * (1 - slope) * (1 - 2 * slope)


# Ridge regression


@documented
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
    X_train, X_val : features of each level, (samples, features). A :class:`bilevel.HostData` stays on the host; the
        problem then has no exact solution
    y_train, y_val : real targets
    inner_var, outer_var : the start; z = 0 and x = -2 by default
    %(outer_bounds)s
    %(groups)s
    %(dtype)s
    %(seed)s
    """
    dtype = resolve_dtype(dtype, X_train=head(X_train), X_val=head(X_val))
    tables = check_tables(X_train, y_train, X_val, y_val, on_host=True)
    train, validation = (_regression(name, *table) for name, table in zip(("y_train", "y_val"), tables, strict=True))
    dim, starts = head(train).features.shape[1], (inner_var, outer_var)
    groups, n_penalties = check_groups(groups, dim)
    defaults, rng = (np.zeros(dim), np.full(n_penalties, -2.0)), make_rng(seed)
    parts, start = lay_out((train, validation), starts, defaults, outer_bounds, dtype, rng, narrow=EVERY_WIDTH)
    oracles = RidgeOracles(**parts, groups=groups)
    if oracles.is_on_host:
        return BilevelProblem(oracles, start, name="ridge_selection")
    solver = RidgeExactSolver(oracles)
    return BilevelProblem(oracles, start, solver, "ridge_selection", certificate_bounds=LinearBounds)


def _regression(name: str, rows: Any, targets: Any) -> Any:
    """Return rows and targets as floats."""
    if isinstance(rows, HostData):
        return rows.with_column(targets, partial(_regression, name))
    parts = rows, check_data(name, targets)
    return Regression(*(part.astype(np.result_type(part, np.float32), copy=False) for part in parts))


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
    """Exact solutions from the moments of both levels, by one p×p solve for any number of rows."""

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
    """Return the means of d d', d y and y² in float64."""
    features, targets = (np.asarray(leaf, np.float64) for leaf in samples.leaves)
    return features @ features.T / samples.n, features @ targets / samples.n, float(targets @ targets / samples.n)

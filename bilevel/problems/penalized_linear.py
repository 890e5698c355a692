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

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from functools import partial
from math import exp, inf, log, sqrt
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from bilevel._core.compilation import compiled
from bilevel._core.types import AnyArray, Array, InnerPass, OuterPass, Point, PyTree
from bilevel._process import may_be_fused
from bilevel.oracles import HostData, RowwiseOracles
from bilevel.oracles.base import estimate
from bilevel.oracles.samples import STATIC, Samples
from bilevel.problems import certificate
from bilevel.problems.base import BilevelProblem
from bilevel.problems.certificate import Bounds, Found, Moments, Region, Values, WeightedNorm
from bilevel.problems.checks import check_data, check_outer, check_signs
from bilevel.problems.exact import ExactSolution, System, newton, solve_adjoint

LOG_PENALTIES = (-20.0, 20.0)  # as good as no penalty and as no feature, compared with curvatures near 1
# On a CPU, XLA computes products of a matrix of this size and a vector by loops over single numbers. Sums of `_LANES`
# rows at a time take half the time. Products of other sizes are at least as fast as sums.
_LANES, _MOST_ROWS, _NUMBERS = 16, 64, (512, 2048)


# Penalties


@dataclass(frozen=True)
class PenalizedOracles(RowwiseOracles):
    """The same loss on both levels, and ½ sum exp(x) z² on the inner one, where several z may share a penalty.

    Attributes
    ----------
    groups : the group of each feature (or class, in a softmax model); None means one group for each
    """

    groups: Array | None = None

    has_row_diagonals = True
    holds_only_rows = True
    wide_bounds = LOG_PENALTIES
    most_dense_work: ClassVar[float] = inf  # of a pass that computes a matrix like H: rows times squared size of z

    def spread(self, per_penalty: Array) -> Array:
        """Return a number of each penalty as an array that broadcasts to z."""
        return per_penalty if self.groups is None else per_penalty[self.groups]

    def collect(self, per_entry: Array, n_penalties: int) -> Array:
        """Return the sum over the entries of z that share a penalty."""
        if self.groups is None:
            return per_entry
        return jax.ops.segment_sum(per_entry, self.groups, num_segments=n_penalties)

    def inner_regularization(self, point: Point) -> InnerPass:
        z, x, v = point
        penalties = self.spread(jnp.exp(x))
        return InnerPass(penalties * z, penalties * v, self.collect(penalties * z * v, x.size))

    def _inner_grad_outer(self, point: Point, data: PyTree, weights: Array) -> Array:
        z, x, _ = point
        return self.collect(self.spread(jnp.exp(x)) * z**2 / 2, x.size)

    def _inner_value(self, point: Point, data: PyTree, weights: Array) -> Array:
        penalty = jnp.sum(self.spread(jnp.exp(point.outer_var)) * point.inner_var**2) / 2
        return self._outer_value(point, data, weights) + penalty

    @abstractmethod
    def bound_curvature(
        self, point: Point, data: PyTree, weights: Array, *, measure: Array, radius: Array, kind: str
    ) -> Array:
        """Return the matrix with the largest eigenvalue "a" or "b", or a lower bound of the "least" mean of l'' dd'.

        ``measure`` determines the lengths of rows: L⁻¹ or its diagonal, or a matrix for each class.
        """


class PenaltyBounds:
    """Bounds at points of problems with penalties exp(x)."""

    why = "Penalties and curvature of the rows are known."

    def __init__(self, problem: BilevelProblem) -> None:
        oracles: Any = problem.oracles.in_float64()
        size, most_rows = problem.start.inner_var.size, max(problem.n_inner, problem.n_outer)
        self._oracles, self._groups = oracles, _groups(oracles, problem.start)
        self._is_dense = size <= certificate.DENSE and most_rows * size**2 <= oracles.most_dense_work

    def __call__(self, point: Point, direction: Point) -> Bounds:
        penalties = np.exp(point.outer_var)[self._groups]
        plain = WeightedNorm.diagonal(penalties)
        found = self._bounds(plain, point, direction, plain.dual_norm(direction.inner_var.ravel()), 1.0)
        try:
            local = self._local(point, direction, penalties) if self._is_dense else found
        except np.linalg.LinAlgError:
            return found
        return min(found, local, key=lambda bounds: bounds.error)

    def _local(self, point: Point, direction: Point, penalties: np.ndarray) -> Bounds:
        def least_hessian(inverse_root: np.ndarray, radius: float) -> np.ndarray:
            return self._curvatures("least", point, _measure(inverse_root, point), radius)[0] + np.diag(penalties)

        metric = WeightedNorm.dense(least_hessian(np.eye(penalties.size), 0.0))
        within = partial(least_hessian, metric.inverse_root)
        found = certificate.ball(metric, metric.dual_norm(direction.inner_var.ravel()), within)
        return certificate.NOTHING if found is None else self._bounds(metric, point, direction, *found)

    def _bounds(self, metric: WeightedNorm, point: Point, direction: Point, delta: float, mu: float) -> Bounds:
        measure = _measure(metric.inverse_root, point)
        # With a metric for each class, rows have no common L⁻¹d, and the matrices are those of plain rows.
        largest = metric.largest if measure.ndim == 3 else certificate.largest
        a, b = (max(map(largest, self._curvatures(kind, point, measure, delta))) for kind in ("a", "b"))
        penalties, v_residual = np.exp(point.outer_var)[self._groups], metric.dual_norm(direction.v.ravel())
        parts = point.v, point.inner_var
        c, e = (metric.grouped_norm(penalties * part.ravel(), self._groups) for part in parts)
        return Bounds(delta, mu, v_residual, a, b, c, e + delta, metric)

    def _curvatures(self, kind: str, point: Point, measure: np.ndarray, radius: float) -> np.ndarray:
        """Return the matrix of each model that is fitted."""
        found = np.asarray(_curvature(self._oracles, point, measure, np.float64(radius), kind))
        return found.reshape(-1, *found.shape[-2:])


def _groups(oracles: Any, start: Point) -> np.ndarray:
    """Return the number of the penalty of each number of z."""
    z, x, _ = start
    return np.broadcast_to(oracles.spread(np.arange(x.size)), z.shape).ravel()


def _measure(inverse_root: np.ndarray, point: Point) -> np.ndarray:
    """Return what determines the lengths of rows in a metric L L': L⁻¹ or its diagonal, or a matrix for each class."""
    *models, n_features = point.inner_var.shape
    if inverse_root.ndim == 1:
        return inverse_root.reshape(-1, n_features).max(axis=0)
    if not models:
        return inverse_root
    blocks = inverse_root.reshape(-1, *models, n_features).swapaxes(0, 1)
    return np.stack([np.linalg.cholesky(block.T @ block).T for block in blocks])


@compiled("kind")
def _curvature(oracles: Any, point: Point, measure: Array, radius: Array, kind: str) -> Array:
    of_piece = partial(oracles.bound_curvature, point, measure=measure, radius=radius, kind=kind)
    return (oracles.outer_samples if kind == "b" else oracles.inner_samples).mean(of_piece)


# Linear models


def as_floats(array: np.ndarray) -> np.ndarray:
    """Return an array with a dtype of floats that holds its numbers."""
    return array.astype(np.result_type(array, np.float32), copy=False)


def _is_small(features: Array) -> bool:
    """Return True if products with a block of rows are faster as sums."""
    n_rows, (least, most) = features.shape[1], _NUMBERS
    return n_rows % _LANES == 0 and n_rows <= _MOST_ROWS and least <= features.size <= most


@dataclass(frozen=True)
class LinearOracles(PenalizedOracles):
    """A loss of one score per row.

    Attributes
    ----------
    groups : the group of each feature; None means one group for each
    sums_small_products : whether small products are computed as sums
    """

    sums_small_products: bool = field(default=False, metadata=STATIC)

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
        self, point: Point, data: PyTree, weights: Array, *, measure: Array, radius: Array, kind: str
    ) -> Array:
        rows = self._features(data)
        whitened = certificate.whiten(rows, measure)
        least, second, third = self.curvature_near(point.inner_var @ rows, certificate.norms(whitened) * radius)
        if kind == "least":
            return (rows * (weights * least)) @ rows.T
        changes = weights * third * abs(point.v @ rows)
        return certificate.second_moment(whitened, changes if kind == "a" else weights * second)

    def _majorizer(self, slopes: Array, curvatures: Array) -> Array:
        """Return the curvatures, or larger ones for badly fitted rows, whose loss is flat."""
        return curvatures

    def _row_diagonals(self, point: Point, data: PyTree, weights: Array, *, power: int, majorize: bool) -> Array:
        features = self._features(data)
        slopes, curvatures = self._slopes(point.inner_var @ features, data)
        if majorize:
            curvatures = self._majorizer(slopes, curvatures)
        return features ** (2 * power) @ (weights * curvatures**power)

    def _majorized_product(self, point: Point, data: PyTree, weights: Array) -> Array:
        features = self._features(data)
        curvatures = self._majorizer(*self._slopes(point.inner_var @ features, data))
        return features @ (weights * curvatures * (point.v @ features)) + self.inner_regularization(point).hvp

    def _inner_terms(self, point: Point, data: PyTree) -> tuple[Array, Array]:
        features = self._features(data)
        slopes, curvatures = self._slopes(self._scores(point.inner_var, features), data)
        return slopes, curvatures * self._scores(point.v, features)

    def _inner_sum(self, terms: tuple[Array, Array], data: PyTree, weights: Array, like: Point) -> InnerPass:
        features = self._features(data)
        grad, hvp = (self._sum_rows(features, weights * term) for term in terms)
        return InnerPass(grad, hvp, jnp.zeros_like(like.outer_var))

    def _outer_terms(self, point: Point, data: PyTree) -> Array:
        return self._slopes(self._scores(point.inner_var, self._features(data)), data)[0]

    def _outer_sum(self, terms: Array, data: PyTree, weights: Array, like: Point) -> OuterPass:
        return OuterPass(self._sum_rows(self._features(data), weights * terms), jnp.zeros_like(like.outer_var))

    def _outer_value(self, point: Point, data: PyTree, weights: Array) -> Array:
        return jnp.sum(weights * self._losses(point.inner_var @ self._features(data), data))


# The logistic loss, with derivatives that XLA compiles to short loops, and bounds of its curvature


@jax.custom_jvp
def sigmoid(margin: Array) -> Array:
    """Return 1 / (1 + exp(-margin))."""
    return 1 / (1 + jnp.exp(-margin))


def sigmoid_and_slope(margin: Array) -> tuple[Array, Array]:
    """Return σ(margin) and σ'(margin) = σ(margin) σ(-margin); 1 - σ(margin) would cancel at large margins."""
    value = sigmoid(margin)
    return value, value * sigmoid(-margin)


@jax.custom_jvp
def logistic(margin: Array) -> Array:
    """Return log(1 + exp(-margin)), the loss of a label ±1 times its score, without overflow."""
    # The derivatives of jax.nn.softplus treat infinite input separately, which takes a quarter of the time of a step.
    return jnp.maximum(-margin, 0) + jnp.log1p(jnp.exp(-jnp.abs(margin)))


sigmoid.defjvps(lambda tangent, _, margin: sigmoid_and_slope(margin)[1] * tangent)
logistic.defjvps(lambda tangent, _, margin: -sigmoid(-margin) * tangent)


# Suprema of the derivatives of log(1 + exp(s)), from the first one |σ|.
_ROOT = sqrt(0.5 - sqrt(105) / 30)
SIGMOID = (1.0, 1 / 4, 1 / (6 * sqrt(3)), 1 / 8, _ROOT * (1 - _ROOT**2) * (2 - 3 * _ROOT**2) / 4)
STEEPEST = log(2 + sqrt(3))  # the score where |l'''| of the logistic loss is largest


def logistic_curvature(scores: Array, reach: Array) -> tuple[Array, Array, Array]:
    """Return inf l'', sup l'' and sup |l'''| of the logistic loss within ``reach`` of each score."""
    sizes = jnp.abs(scores)
    nearest, farthest = jnp.maximum(sizes - reach, 0), sizes + reach
    steepest = jnp.clip(STEEPEST, nearest, farthest)  # |l'''| is even, and increases up to its maximum
    least, second, scale = (sigmoid_and_slope(at)[1] for at in (farthest, nearest, steepest))
    return least, second, scale * (1 - 2 * sigmoid(-steepest))


# Logistic regression


def read_signed(name: str, rows: Any, labels: Any, n_classes: int | None = None) -> tuple[Any, None]:
    """Return rows times their labels ±1, and no number of classes."""
    if isinstance(rows, HostData):
        return rows.with_column(labels, lambda *part: read_signed(name, *part)[0]), None
    return rows * check_signs(name, labels)[:, None].astype(np.result_type(rows, np.float32)), None


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


def logistic_constants(problem: BilevelProblem, radius: float | None, box: Any) -> Found:
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


def read_targets(name: str, rows: Any, targets: Any, n_classes: int | None = None) -> tuple[Any, None]:
    """Return rows with their targets, and no number of classes."""
    if isinstance(rows, HostData):
        return rows.with_column(targets, lambda *part: read_targets(name, *part)[0]), None
    return Regression(as_floats(rows), as_floats(check_data(name, targets))), None


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


class RidgeExactSolver:
    """Exact solutions from the moments of both levels, by one p×p solve in NumPy for any number of rows."""

    def __init__(self, oracles: RidgeOracles, start: Point) -> None:
        self._groups = _groups(oracles, start)
        self.gram, self.right_side, _ = _moments(oracles.inner_samples)
        self.outer_gram, self.outer_right_side, self.outer_square = _moments(oracles.outer_samples)

    def __call__(self, outer_var: np.ndarray, guess: ExactSolution | None = None) -> ExactSolution:
        x = check_outer(outer_var)
        penalties = np.exp(x)[self._groups]
        system = System.dense(self.gram + np.diag(penalties))
        guessed = system.solve(self.right_side, 0.0)
        found = newton(lambda z: system.product(z) - self.right_side, lambda _: system, guessed)
        z = found.z
        value = float(z @ self.outer_gram @ z / 2 - self.outer_right_side @ z + self.outer_square / 2)
        v, left = solve_adjoint(found, value, self.outer_gram @ z - self.outer_right_side)
        hypergrad = np.bincount(self._groups, penalties * z * v, x.size)
        return ExactSolution(z, v, value, hypergrad, float(np.linalg.norm(found.grad)), float(np.linalg.norm(left)))


def _moments(samples: Samples) -> tuple[np.ndarray, np.ndarray, float]:
    """Return the means of d d', d y and y² in float64."""
    features, targets = (np.asarray(leaf, np.float64) for leaf in samples.leaves)
    return features @ features.T / samples.n, features @ targets / samples.n, float(targets @ targets / samples.n)

"""Data cleaning: learn the weight of each training row, by the loss of the fit on clean validation rows.

With z: classes × features, the residual r_i = softmax(z d_i) - e_label and S_i t = p (t - p't), where s = sigmoid(x):

    ∇z G = (s r)D + 2C z     (∇²zz G) v = (s S(vD'))D + 2C v     ((∇²xz G) v)_i = s_i (1 - s_i) r_i'(v d_i) / n

so that the cross product of a batch is zero outside the rows of the batch. Constants are proved on a ball of z.

Certificates. M = I: H >= 2C everywhere, so μ = 2C and δ = ||D_z||/μ. With K and k, the C and k of
:mod:`bilevel.problems.softmax` within ||d|| δ of the scores:

    a = λ_max(mean s k dd')                        b = λ_max(mean K dd') on outer rows
    c² = λ_max(sum q² K² ||t - mean t||² dd')      t = vd and q = s (1 - s)/n: the factor of row i in D_x
    e² = λ_max(sum q² ρ² dd')                      ρ = min(√2, ||p - e_label|| + K ||d|| δ) >= the residual at z*
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import comb, log, sqrt
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial
from numpy.typing import DTypeLike

from bilevel._core import trees
from bilevel._core.compilation import Compiled, arithmetic, resolve_dtype
from bilevel._core.types import Array, InnerPass, Point
from bilevel.problems import certificate, softmax
from bilevel.problems.base import BilevelProblem, documented, lay_out
from bilevel.problems.certificate import Bounds, Found, Moments, Region, Values
from bilevel.problems.checks import check_positive, check_tables, make_rng
from bilevel.problems.exact import IterativeExactSolver
from bilevel.problems.penalized_linear import SIGMOID, sigmoid, sigmoid_and_slope
from bilevel.problems.softmax import Labeled, SoftmaxOracles

LOGITS = (-8.0, 8.0)  # bounds of the logit of a weight, beyond which the weight is practically 0 or 1


@documented
def data_cleaning(
    X_train: Any,
    y_train: Any,
    X_val: Any,
    y_val: Any,
    *,
    regularization: float = 0.2,
    inner_var: Any = None,
    outer_var: Any = None,
    outer_bounds: Any = None,
    dtype: DTypeLike | None = None,
    seed: int = 0,
) -> BilevelProblem:
    """Build the problem min over x of the validation loss of a softmax fit with the weight sigmoid(x_i) on row i.

        G = mean_i sigmoid(x_i) CE(z d_i, y_i) + C ||z||²  on training rows, some of whose labels are wrong
        F = mean CE(zd, y)                                 on validation rows, whose labels are right

    The metric ``validation_error`` is the share of validation rows that z misclassifies; add others, such as the error
    on test rows, by ``dataclasses.replace(problem, metrics=problem.metrics | {...})``.

    Parameters
    ----------
    X_train, X_val : features of each level, (samples, features)
    y_train, y_val : classes 0, 1, 2, …
    regularization : C
    inner_var, outer_var : the start; z = 0, (classes, features), and x = -2, one per training row, by default
    %(outer_bounds)s
    %(dtype)s
    %(seed)s
    """
    dtype = resolve_dtype(dtype, X_train=X_train, X_val=X_val)
    (regularization,) = check_positive(regularization=regularization)
    (X, y), (X_outer, y_outer) = check_tables(X_train, y_train, X_val, y_val)
    train, n_classes = softmax.read_labeled("y_train", X, y)
    validation, _ = softmax.read_labeled("y_val", X_outer, y_outer, n_classes)
    defaults, rng = (np.zeros((n_classes, X.shape[1])), np.full(len(y), -2.0)), make_rng(seed)
    parts, start = lay_out((train, validation), (inner_var, outer_var), defaults, outer_bounds, dtype, rng, narrow=0)
    with arithmetic(dtype):
        oracles = CleaningOracles(**parts, regularization=trees.put(regularization, dtype))
    rows = oracles.outer_samples.leaves
    metrics = {"validation_error": Partial(error_rate, rows.features, rows.labels)}
    solver = IterativeExactSolver(oracles, start, accuracy=1e-10)
    bounds = partial(CleaningBounds, 2 * float(oracles.regularization), _bound_changes)
    return BilevelProblem(oracles, start, solver, "data_cleaning", metrics, {}, cleaning_constants, bounds)


@Compiled
def error_rate(rows: Array, labels: Array, point: Point) -> Array:
    """Return the share of rows that z misclassifies."""
    guesses = jnp.argmax(point.inner_var @ rows.T, axis=0).astype(labels.dtype)
    return jnp.mean(guesses != labels, dtype=rows.dtype)


@Compiled
def weight_auc(clean: Array, corrupted: Array, point: Point) -> Array:
    """Return the probability that a clean row has a larger weight than a corrupted one; ties count half."""
    weights = jnp.sort(point.outer_var[corrupted])
    below, not_above = (jnp.searchsorted(weights, point.outer_var[clean], side=side) for side in ("left", "right"))
    dtype = point.outer_var.dtype
    return jnp.mean((below.astype(dtype) + not_above.astype(dtype)) / 2) / len(corrupted)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class CleaningOracles(SoftmaxOracles):
    """Labeled rows on each level; ``regularization`` is C, in the dtype of the rows."""

    regularization: Array

    wide_bounds = LOGITS

    def _inner_terms_of(self, scores: Array, tangents: Array, point: Point, data: Labeled) -> tuple[Array, ...]:
        residuals, products = super()._inner_terms_of(scores, tangents, point, data)
        s, slope = sigmoid_and_slope(point.outer_var[data.index])
        return s * residuals, s * products, slope * jnp.sum(residuals * tangents, axis=0)

    def _inner_bundle(self, grad: Array, hvp: Array, terms: tuple[Array, ...], data: Labeled, like: Point) -> InnerPass:
        return InnerPass(grad, hvp, jnp.zeros_like(like.outer_var).at[data.index].add(terms[2]))

    def inner_regularization(self, point: Point) -> InnerPass:
        ridge = 2 * self.regularization
        return InnerPass(ridge * point.inner_var, ridge * point.v, jnp.zeros_like(point.outer_var))

    def _curvatures(self, point: Point, data: Labeled, majorize: bool) -> Array:
        return sigmoid(point.outer_var[data.index]) * super()._curvatures(point, data, majorize)

    def _inner_grad_outer(self, point: Point, data: Labeled, weights: Array) -> Array:
        _, slope = sigmoid_and_slope(point.outer_var[data.index])
        losses = softmax.cross_entropies(point.inner_var @ data.features.T, data.labels)
        return jnp.zeros_like(point.outer_var).at[data.index].add(weights * slope * losses)

    def _inner_value(self, point: Point, data: Labeled, weights: Array) -> Array:
        losses = softmax.cross_entropies(point.inner_var @ data.features.T, data.labels)
        fit = jnp.sum(weights * sigmoid(point.outer_var[data.index]) * losses)
        return fit + self.regularization * jnp.sum(point.inner_var**2)


def cleaning_constants(problem: BilevelProblem, radius: float | None, box: Any) -> Found:
    """Bound σ(x_i) CE_i(z) + C ||z||² on a ball of z, for all x.

    Derivatives of the cross-entropy along a are cumulants of a variable with a range of √2 ||d|| ||a||. A variable of
    range r has a variance up to r²/4 and a third and fourth cumulant up to r³/(6√3) and r⁴/8.
    """
    oracles = problem.oracles
    assert isinstance(oracles, CleaningOracles)
    ridge, n_classes = float(oracles.regularization), len(problem.start.inner_var)
    radius = radius or certificate.radius_with_start(problem, sqrt(log(n_classes) / ridge))
    levels = oracles.inner_samples, oracles.outer_samples
    train, validation = (Moments.of(np.asarray(level.leaves.features, np.float64)) for level in levels)
    values: Values = {"mu_G": 2 * ridge}
    values |= {f"L{k - 1}_F": _cumulant(k, validation.longest) for k in (1, 2, 3)}
    loss = float(np.logaddexp(0, log(n_classes - 1) + sqrt(2) * train.longest * radius))
    slopes = [loss, *(_cumulant(k, train.longest) for k in (1, 2, 3, 4))]
    for order in (2, 3, 4):
        terms = np.array([comb(order, j) * SIGMOID[j] * slopes[order - j] for j in range(order + 1)])
        terms[0] += 2 * ridge if order == 2 else 0
        values[f"L{order - 1}_G"] = certificate.largest_on_circle(terms)
    values |= _constants_of_solution(2 * ridge, train, validation)
    # Those of F are attained only in the limit of infinite z.
    return values, dict.fromkeys(values, "bound") | {"mu_G": "exact"}, Region(radius)


def _cumulant(order: int, longest: float) -> float:
    return (sqrt(2) * longest) ** order * SIGMOID[order - 1]


def _constants_of_solution(mu: float, train: Moments, validation: Moments) -> Values:
    """Bound z*, v* and ∇²h, given that x_i enters the mean G only through row i, with the weight 1/n."""
    R = sqrt(2) * validation.longest / mu
    spread = sqrt(train.second / train.n)  # the norm of the table of rows, over n
    L_z_star = SIGMOID[1] * sqrt(2) * spread / mu
    curvature = validation.second / 2 + train.third * _cumulant(3, 1) * R
    mixed = SIGMOID[1] / 2 * spread * train.longest * R
    pure = SIGMOID[2] * sqrt(2) * train.longest * R / train.n
    L_v_star = (curvature * L_z_star + mixed) / mu
    return {"L_z_star": L_z_star, "L_v_star": L_v_star, "L_h": curvature * L_z_star**2 + 2 * mixed * L_z_star + pure}


class CleaningBounds:
    """Bounds from μ and a function that returns the matrices whose largest eigenvalues are a, b, c² and e²."""

    why = "The regularization and the curvature of the rows are known."

    def __init__(self, mu: float, changes: Callable[..., tuple[Array, ...]], problem: BilevelProblem) -> None:
        self._mu, self._changes, self._oracles = mu, changes, problem.oracles.in_float64()

    def __call__(self, point: Point, direction: Point) -> Bounds:
        delta = float(np.linalg.norm(direction.inner_var)) / self._mu
        a, b, c_sq, e_sq = map(certificate.largest, self._changes(self._oracles, point, np.float64(delta)))
        return Bounds(delta, self._mu, float(np.linalg.norm(direction.v)), a, b, sqrt(c_sq), sqrt(e_sq))


@Compiled
def _bound_changes(oracles: CleaningOracles, point: Point, delta: Array) -> tuple[Array, ...]:
    z, x, v = point

    def inner(data: Labeled, weights: Array) -> tuple[Array, ...]:
        rows, tangents = data.features.T, v @ data.features.T
        reach, p = certificate.norms(rows) * delta, softmax.probabilities(z @ rows)
        curvatures, (s, slope) = softmax.curvature_bounds(p, reach), sigmoid_and_slope(x[data.index])
        sizes = jnp.sqrt(jnp.sum(softmax.residuals(p, data.labels) ** 2, axis=0))
        largest_residuals = jnp.minimum(sizes + curvatures * reach, sqrt(2))
        factors = slope**2 / oracles.n_inner
        return (
            softmax.bounded_moment(p, rows, weights * s, delta, tangents),
            certificate.second_moment(rows, weights * factors * (curvatures * softmax.centered_norms(tangents)) ** 2),
            certificate.second_moment(rows, weights * factors * largest_residuals**2),
        )

    def outer(data: Labeled, weights: Array) -> Array:
        rows = data.features.T
        return softmax.bounded_moment(softmax.probabilities(z @ rows), rows, weights, delta)

    a, c_sq, e_sq = oracles.inner_samples.mean(inner)
    return a, oracles.outer_samples.mean(outer), c_sq, e_sq

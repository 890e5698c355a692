"""Dataset distillation: learn one image for each class, such that a fit to these images has a low loss on real ones.

With z: classes × pixels, the images x_i, r_i = softmax(z x_i) - e_i, S_i t = p (t - p't) and t_i = v x_i:

    G = mean_i CE(z x_i, i) + C ||z||²      F = mean CE(zd, y)      ((∇²xz G) v)_i = (z'S_i t_i + v'r_i) / n

Certificates. M = I, and μ, δ, a, b, K, k and ρ are those of :mod:`bilevel.problems.data_cleaning` if all weights are 1:

    c² = sum ((k ||z|| + K ||v||) ||x_i|| + K ||t_i - mean t_i||)² / n²    e² = sum ((||z|| + δ) K ||x_i|| + ρ)² / n²
"""

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial
from numpy.typing import DTypeLike

from bilevel._core import trees
from bilevel._core.compilation import Compiled, arithmetic, resolve_dtype
from bilevel._core.types import Array, Point
from bilevel.datasets import load
from bilevel.oracles import Oracles
from bilevel.oracles.autodiff import BatchLoss
from bilevel.problems import certificate, softmax
from bilevel.problems.base import BilevelProblem, documented
from bilevel.problems.checks import check_choice, check_sizes, make_rng
from bilevel.problems.data_cleaning import CleaningBounds, error_rate
from bilevel.problems.softmax import Labeled

C = 0.2


@documented
def distillation(
    data: str = "digits", *, n_train: int = 1_000, dtype: DTypeLike | None = None, seed: int = 0
) -> BilevelProblem:
    """Build dataset distillation: ten learned images, one of each digit, and real images on the outer level.

    Real pixels are from 0 to 1, learned ones are free. Runs start at real images. Each batch has all learned images, so
    ``batch_size`` is a number of real ones. The metric ``test_error`` is that on at most 10 000 other real images.

    Parameters
    ----------
    data : "digits", from scikit-learn, or "mnist"
    n_train : number of real images on the outer level
    %(dtype)s
    seed : seed of the choice of real images and of the shuffle of the rows
    """
    check_choice("data", data, ("digits", "mnist"))
    known, dtype, [n_train] = load(data), resolve_dtype(dtype), check_sizes(n_train=n_train)
    train, test, _ = np.split(make_rng(seed).permutation(len(known.X_train)), [n_train, n_train + 10_000])
    labels, pixels = known.y_train.astype(np.int32), known.X_train.reshape(len(known.X_train), -1)
    classes, first = np.unique(labels[train], return_index=True)
    if len(classes) < 10 or not len(test):
        raise ValueError(f"`n_train={n_train}`: take all ten digits, and leave some of {len(labels)} images for tests.")
    X, X_test = (np.divide(pixels[part], pixels.max(), dtype=dtype) for part in (train, test))
    real, _ = softmax.read_labeled("data", X, labels[train])
    given = BatchLoss(_inner_loss), BatchLoss(_outer_loss), classes, real, np.zeros((10, X.shape[1]), dtype), X[first]
    problem = BilevelProblem.from_losses(*given, strongly_convex=True, dtype=dtype, seed=seed)
    with arithmetic(dtype):
        metrics = {"test_error": Partial(error_rate, trees.put(X_test), trees.put(labels[test]))}
    bounds = partial(CleaningBounds, 2 * C, _bound_changes)
    oracles = replace(problem.oracles, full_inner=True)
    return replace(problem, oracles=oracles, name="distillation", metrics=metrics, certificate_bounds=bounds)


def _inner_loss(z: Array, x: Array, classes: Array) -> Array:
    return softmax.cross_entropies(z @ x[classes].T, classes) + C * jnp.sum(z**2)


def _outer_loss(z: Array, x: Array, rows: Labeled) -> Array:
    return softmax.cross_entropies(z @ rows.features.T, rows.labels)


@Compiled
def _bound_changes(oracles: Oracles, point: Point, delta: Array) -> tuple[Array, ...]:
    (z, x, v), n = point, len(point.outer_var)
    p, tangents, lengths = softmax.probabilities(z @ x.T), v @ x.T, certificate.norms(x.T)
    K, sizes = softmax.curvature_bounds(p, lengths * delta), [jnp.linalg.norm(matrix, 2) for matrix in (z, v)]
    residuals = jnp.minimum(certificate.norms(p - jnp.eye(n)) + K * lengths * delta, 2**0.5)
    c = (softmax.third_derivative_bounds(tangents, K) * sizes[0] + K * sizes[1]) * lengths
    terms = c + K * softmax.centered_norms(tangents), (sizes[0] + delta) * K * lengths + residuals
    a = softmax.bounded_moment(p, x.T, jnp.full(n, 1 / n), delta, tangents)

    def outer(data: Labeled, weights: Array) -> Array:
        rows = data.features.T
        return softmax.bounded_moment(softmax.probabilities(z @ rows), rows, weights, delta)

    return a, oracles.outer_samples.mean(outer), *(jnp.sum(part**2, keepdims=True)[None] / n**2 for part in terms)

"""The three problems that are timed, with the batch losses from which their textbook versions are made.

The rows are random and have the shape of the published data, because times do not depend on their values. A textbook
version reads the rows of the problem in the same order, as rows × features, so that block i is the same in both.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import bilevel
from bilevel._core.types import Calls
from bilevel.problems.penalized_linear import logistic

BATCH = 64
RIDGE = 0.2  # regularization of cleaning


class Shape(NamedTuple):
    """A problem, its losses on a batch, its rows, and the minimal cost of a row.

    ``row_flops`` are the operations of each kind of derivative that no sharing between kinds saves, and ``least_read``
    is the smallest share of a row that a kind reads.
    """

    name: str
    problem: bilevel.BilevelProblem
    inner_loss: Callable[..., Any]
    outer_loss: Callable[..., Any]
    inner_rows: Any
    outer_rows: Any
    step_size: float
    row_flops: Calls
    least_read: float = 1.0
    from_losses: bilevel.BilevelProblem | None = None


def logistic_problem(n_train=49_990, n_val=91_701, dim=22, dtype="float32"):
    """Return penalty selection in the shape of IJCNN1."""
    rows = signed_rows(n_train, n_val, dim)
    return without_exact_solver(bilevel.problems.penalty_selection(*rows, **logistic_start(dim), dtype=dtype))


def logistic_like(dtype="float32", **sizes):
    problem = logistic_problem(**sizes, dtype=dtype)
    dim = len(problem.start.inner_var)
    levels = [level.leaves.T for level in (problem.oracles.inner_samples, problem.oracles.outer_samples)]
    # The rows of the problem are multiplied by their labels, so separate labels are ones.
    inner_rows, outer_rows = ((np.asarray(rows), np.ones(len(rows), dtype)) for rows in levels)

    def outer_loss(z, x, rows):
        features, labels = rows
        return jnp.mean(jax.nn.softplus(-labels * (features @ z)))

    def inner_loss(z, x, rows):
        return outer_loss(z, x, rows) + 0.5 * jnp.sum(jnp.exp(x) * z**2)

    # One product with the row and one with its transpose; ∇x F = 0, and the penalty does not depend on rows.
    flops = Calls(inner_grad=4 * dim, hvp=4 * dim, outer_grad=4 * dim)
    losses = logistic_from_losses(inner_rows, outer_rows, dim, dtype)
    return Shape("IJCNN1", problem, inner_loss, outer_loss, inner_rows, outer_rows, 0.05, flops, from_losses=losses)


def logistic_from_losses(inner_rows, outer_rows, dim, dtype):
    """Return the same problem defined by losses of one sample, as a user would write it."""

    def outer_loss(z, x, sample):
        row, label = sample
        return logistic(label * (row @ z))

    def inner_loss(z, x, sample):
        return outer_loss(z, x, sample) + jnp.sum(jnp.exp(x) * z**2) / 2

    return bilevel.BilevelProblem.from_losses(
        inner_loss, outer_loss, inner_rows, outer_rows, **logistic_start(dim), dtype=dtype
    )


def logistic_start(dim):
    return {"inner_var": np.zeros(dim), "outer_var": np.full(dim, -2.0)}


def signed_rows(n_train, n_val, dim, seed=0):
    """Return rows and labels of each level."""
    rng = np.random.default_rng(seed)
    truth = (rng.standard_normal(dim) / dim**0.5).astype(np.float32)

    def level(n):
        rows = rng.random((n, dim), dtype=np.float32)
        rows -= np.float32(0.5)
        return rows, np.where(rows @ truth + rng.random(n) > 0.5, 1, -1)

    return *level(n_train), *level(n_val)


def quadratic_problem(n_inner=32_768, n_outer=1_024, p=100, d=10, dtype="float32"):
    """Return the quadratics of the paper."""
    return without_exact_solver(bilevel.problems.quadratic(n_inner, n_outer, p, d, dtype=dtype))


def quadratic_like(**sizes):
    """Return the quadratics with a loss that uses the rank-one factors; p × p matrices would be 100 times slower."""
    problem = quadratic_problem(**sizes)
    p, d = len(problem.start.inner_var), len(problem.start.outer_var)

    def loss(z, x, rows):
        squares = ((rows.a @ z) ** 2 + (rows.c @ x) ** 2) / 2
        return jnp.mean(squares + (rows.e @ x) * (rows.f @ z) + rows.linear_inner @ z + rows.linear_outer @ x)

    levels = problem.oracles.inner_samples.leaves, problem.oracles.outer_samples.leaves
    flops = Calls(
        inner_grad=8 * p + 2 * d,
        inner_grad_outer=2 * p + 8 * d,
        hvp=4 * p,
        cross=2 * p + 2 * d,
        outer_grad=8 * p + 2 * d,
        outer_grad_outer=2 * p + 8 * d,
    )
    return Shape("quadratics", problem, loss, loss, *levels, 0.002, flops, least_read=p / (3 * p + 3 * d))


def cleaning_problem(n_train=20_000, n_val=5_000, dim=784, classes=10, dtype="float32"):
    """Return data cleaning in the shape of MNIST."""
    rng = np.random.default_rng(0)
    data = []
    for n in (n_train, n_val):
        data += [rng.standard_normal((n, dim), dtype=np.float32), rng.integers(0, classes, n).astype(np.int32)]
    data[1][:classes] = np.arange(classes)
    return without_exact_solver(bilevel.problems.data_cleaning(*data, regularization=RIDGE, dtype=dtype))


def cleaning_like(**sizes):
    problem = cleaning_problem(**sizes)

    def cross_entropies(z, rows):
        scores = jax.nn.log_softmax(rows.features @ z.T)
        return -jnp.take_along_axis(scores, rows.labels[:, None], axis=1)[:, 0]

    def outer_loss(z, x, rows):
        return jnp.mean(cross_entropies(z, rows))

    def inner_loss(z, x, rows):
        return jnp.mean(jax.nn.sigmoid(x[rows.index]) * cross_entropies(z, rows)) + RIDGE * jnp.sum(z**2)

    levels = problem.oracles.inner_samples.leaves, problem.oracles.outer_samples.leaves
    products = 4 * problem.start.inner_var.size
    flops = Calls(inner_grad=products, inner_grad_outer=products // 2, hvp=products, outer_grad=products)
    return Shape("cleaning", problem, inner_loss, outer_loss, *levels, 0.001, flops)


def without_exact_solver(problem):
    """Return the problem without exact metrics, which would take far longer than the steps."""
    return bilevel.BilevelProblem(problem.oracles, problem.start, name=problem.name)


PROBLEMS = {"IJCNN1": logistic_problem, "quadratics": quadratic_problem, "cleaning": cleaning_problem}
BY_NAME = {"IJCNN1": logistic_like, "quadratics": quadratic_like, "cleaning": cleaning_like}

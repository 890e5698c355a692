"""The three problems that are timed, with the losses of a batch from which their textbook versions are made.

The rows are drawn at random in the shape of the published data: time does not depend on their values. A textbook
version reads the rows of the problem in the problem's order, rows × features, so that block i is block i in both.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import bilevel
from bilevel._types import Calls
from bilevel.problems.linear import logistic

BATCH = 64
RIDGE = 0.2  # of cleaning


class Shape(NamedTuple):
    """A problem, its losses on a batch, its rows, and what a row costs at least.

    ``row_flops`` are those of each kind of derivative that no sharing between kinds saves, ``least_read`` is the share
    of a row that the most frugal kind reads.
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
    """Penalty selection in the shape of IJCNN1."""
    rows = signed_rows(n_train, n_val, dim)
    return without_exact_solver(bilevel.problems.logistic_selection(*rows, **logistic_start(dim), dtype=dtype))


def logistic_like(dtype="float32", **sizes):
    problem = logistic_problem(**sizes, dtype=dtype)
    dim = len(problem.start.inner_var)
    levels = [level.leaves.T for level in (problem.oracles.inner_samples, problem.oracles.outer_samples)]
    # Labels are multiplied into the rows of the problem, so ones are left for a version that keeps them apart.
    inner_rows, outer_rows = ((np.asarray(rows), np.ones(len(rows), dtype)) for rows in levels)

    def outer_loss(z, x, rows):
        features, labels = rows
        return jnp.mean(jax.nn.softplus(-labels * (features @ z)))

    def inner_loss(z, x, rows):
        return outer_loss(z, x, rows) + 0.5 * jnp.sum(jnp.exp(x) * z**2)

    # One product with the row forwards and one back; ∇x F = 0 and the penalty has no row.
    flops = Calls(inner_grad=4 * dim, hvp=4 * dim, outer_grad=4 * dim)
    losses = logistic_from_losses(inner_rows, outer_rows, dim, dtype)
    return Shape("IJCNN1", problem, inner_loss, outer_loss, inner_rows, outer_rows, 0.05, flops, from_losses=losses)


def logistic_from_losses(inner_rows, outer_rows, dim, dtype):
    """The same problem as a user would write it, sample by sample."""

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
    """Rows and labels of each level."""
    rng = np.random.default_rng(seed)
    truth = (rng.standard_normal(dim) / dim**0.5).astype(np.float32)

    def level(n):
        rows = rng.random((n, dim), dtype=np.float32)
        rows -= np.float32(0.5)
        return rows, np.where(rows @ truth + rng.random(n) > 0.5, 1, -1)

    return *level(n_train), *level(n_val)


def quadratic_problem(n_inner=32_768, n_outer=1_024, p=100, d=10, dtype="float32"):
    """The quadratics of the paper."""
    return without_exact_solver(bilevel.problems.quadratic(n_inner, n_outer, p, d, dtype=dtype))


def quadratic_like(**sizes):
    """The textbook loss knows the rank-one factors: with p × p matrices it would be slower a hundredfold."""
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
    """Data cleaning in the shape of MNIST."""
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
    """The same problem, evaluated by cheap metrics alone: exact solutions would take far longer than the steps."""
    return bilevel.BilevelProblem(problem.oracles, problem.start, name=problem.name)


PROBLEMS = {"IJCNN1": logistic_problem, "quadratics": quadratic_problem, "cleaning": cleaning_problem}
BY_NAME = {"IJCNN1": logistic_like, "quadratics": quadratic_like, "cleaning": cleaning_like}

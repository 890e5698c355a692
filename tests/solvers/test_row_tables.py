"""SABA with tables of the terms of rows, compared with a NumPy transcription that stores the gradient of every row."""

import jax
import numpy as np
import pytest

import bilevel
from bilevel._core.compilation import arithmetic
from bilevel.engine.loop import initial_state
from tests import cases

STEP, RATIO, STEPS = 0.05, 20.0, 40


def cleaning():
    rng = np.random.default_rng(3)
    rows, val = rng.standard_normal((53, 4)), rng.standard_normal((31, 4))
    labels, val_labels = rng.integers(0, 3, 53), rng.integers(0, 3, 31)
    return bilevel.problems.data_cleaning(rows, labels, val, val_labels, dtype="float64")


class LogisticRows:
    """Derivatives of single rows: l' d and l'' (d'v) d of G, and l' d of F; `rest` has those of the penalty."""

    def __init__(self, problem):
        self.train, self.val = (
            np.asarray(level.leaves).T for level in (problem.oracles.inner_samples, problem.oracles.outer_samples)
        )

    def inner(self, i, z, x, v):
        d = self.train[i]
        slope = 1 / (1 + np.exp(d @ z))
        return -slope * d, slope * (1 - slope) * (d @ v) * d, np.zeros_like(x)

    def rest(self, z, x, v):
        return np.exp(x) * z, np.exp(x) * v, np.exp(x) * z * v

    def outer(self, j, z):
        d = self.val[j]
        return -d / (1 + np.exp(d @ z))


class CleaningRows:
    """Derivatives of single rows of weighted softmax regression, with dense Jacobians of the softmax."""

    def __init__(self, problem):
        self.train, self.val = problem.oracles.inner_samples.leaves, problem.oracles.outer_samples.leaves
        self.ridge = 2 * float(problem.oracles.regularization)

    def _residual(self, level, i, z):
        row, label = np.asarray(level.features[i]), int(level.labels[i])
        exponentials = np.exp(z @ row)
        probabilities = exponentials / exponentials.sum()
        return row, probabilities, probabilities - np.eye(len(z))[label]

    def inner(self, i, z, x, v):
        row, probabilities, residual = self._residual(self.train, i, z)
        index = int(self.train.index[i])
        weight = 1 / (1 + np.exp(-x[index]))
        jacobian = np.diag(probabilities) - np.outer(probabilities, probabilities)
        cross = np.zeros_like(x)
        cross[index] = weight * (1 - weight) * residual @ (v @ row)
        return weight * np.outer(residual, row), weight * np.outer(jacobian @ (v @ row), row), cross

    def rest(self, z, x, v):
        return self.ridge * z, self.ridge * v, np.zeros_like(x)

    def outer(self, j, z):
        row, _, residual = self._residual(self.val, j, z)
        return np.outer(residual, row)


def transcribed(model, start, draws, n, m, fill):
    """SABA with tables of row gradients; the mean of each table is computed from scratch in every step."""
    z, x, v = (np.array(part, np.float64) for part in start)
    inner = [model.inner(i, z, x, v) for i in range(n)]
    outer = [model.outer(j, z) for j in range(m)]
    if not fill:
        inner = [tuple(0 * part for part in row) for row in inner]
        outer = [0 * row for row in outer]
    for draw in draws:
        means = [np.mean([row[k] for row in inner], axis=0) for k in range(3)]
        outer_mean = np.mean(outer, axis=0)
        block, outer_block = (
            range(8 * int(b), min(8 * int(b) + 8, size)) for b, size in ((draw.inner, n), (draw.outer, m))
        )
        new, outer_new = {i: model.inner(i, z, x, v) for i in block}, {j: model.outer(j, z) for j in outer_block}
        change = [np.mean([new[i][k] - inner[i][k] for i in block], axis=0) for k in range(3)]
        outer_change = np.mean([outer_new[j] - outer[j] for j in outer_block], axis=0)
        grad, hvp, cross = (a + b + c for a, b, c in zip(change, means, model.rest(z, x, v), strict=True))
        z, v, x = z - STEP * grad, v - STEP * (hvp + outer_change + outer_mean), x - STEP / RATIO * cross
        for i in block:
            inner[i] = new[i]
        for j in outer_block:
            outer[j] = outer_new[j]
    return z, x, v


@pytest.mark.parametrize("tables", ["zero", "full"])
@pytest.mark.parametrize(("problem_of", "rows"), [(cases.logistic_selection, LogisticRows), (cleaning, CleaningRows)])
@pytest.mark.slow
def test_iterates_equal_a_transcription_that_stores_every_row(problem_of, rows, tables):
    problem = problem_of()
    solver = bilevel.SABA(STEP, RATIO, 8, tables=tables, memory="rows", rebuild_every=7)
    made = cases.trajectory(problem, solver, STEPS)
    sizes = problem.n_inner, problem.n_outer
    expected = transcribed(rows(problem), problem.start, made.draws, *sizes, fill=tables == "full")
    for ours, theirs in zip(made.states[-1].point, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("problem_of", [cases.logistic_selection, cleaning])
@pytest.mark.slow
def test_rebuilding_the_means_changes_only_rounding_errors(problem_of):
    seldom, often = (
        cases.trajectory(problem_of(), bilevel.SABA(STEP, RATIO, 8, memory="rows", rebuild_every=every), STEPS)
        for every in (1000, 1)
    )
    cases.assert_trees_close(seldom.states[-1].point, often.states[-1].point, rtol=1e-11)


def table_bytes(memory):
    rng = np.random.default_rng(0)
    rows, val = np.zeros((20_000, 784), np.float32), np.zeros((5_000, 784), np.float32)
    problem = bilevel.problems.data_cleaning(
        rows, rng.integers(0, 10, 20_000), val, rng.integers(0, 10, 5_000), dtype="float32"
    )
    with arithmetic(problem.dtype):
        oracles = problem.oracles.with_batches(64, "blocks")
        solver = bilevel.SABA(0.1, 1.0, 64, memory=memory).configure(problem).cast(problem.dtype)
        state = jax.eval_shape(initial_state, solver, oracles, problem.start)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((state.inner.table, state.outer.table)))


def test_row_tables_take_less_than_3_megabytes_for_data_cleaning_of_the_size_in_the_paper():
    assert table_bytes("rows") < 3e6 < 20e6 < table_bytes("blocks")


def test_row_tables_require_a_problem_with_terms_of_rows():
    with pytest.raises(ValueError, match=r"SABA\(memory='rows'\).*use memory='blocks'"):
        bilevel.run(cases.quadratic(), bilevel.SABA(0.1, 1.0, 8, memory="rows"), max_steps=1)

"""Losses of a whole batch, and losses that take a key."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevel
from bilevel._core.compilation import arithmetic
from bilevel._core.types import Rows
from tests import cases

RNG = np.random.default_rng(0)
ROWS, TARGETS = RNG.normal(size=(cases.N_INNER, 3)), RNG.normal(size=cases.N_INNER)
START = {"inner_var": np.array([0.3, -0.2, 0.5]), "outer_var": np.array([-1.0, 0.5])}


def inner_loss(z, x, sample):
    row, target = sample
    return (jnp.tanh(row @ z) - target) ** 2 + jnp.exp(x[0]) * jnp.sum(z**2) + x[1] * z[0]


def outer_loss(z, x, sample):
    row, target = sample
    return (jnp.tanh(row @ z) - target) ** 2


@bilevel.BatchLoss
def inner_batch_loss(z, x, batch):
    rows, targets = batch
    return (jnp.tanh(rows @ z) - targets) ** 2 + jnp.exp(x[0]) * jnp.sum(z**2) + x[1] * z[0]


@bilevel.BatchLoss
def outer_batch_loss(z, x, batch):
    rows, targets = batch
    return (jnp.tanh(rows @ z) - targets) ** 2


def made(inner=inner_loss, outer=outer_loss, dtype="float64", **changes):
    data = (ROWS, TARGETS), (ROWS[: cases.N_OUTER], TARGETS[: cases.N_OUTER])
    return bilevel.BilevelProblem.from_losses(inner, outer, *data, **(START | changes), dtype=dtype)


@pytest.fixture(scope="module")
def of_batches():
    return made(inner_batch_loss, outer_batch_loss)


@pytest.mark.parametrize("sampling", ["blocks", "iid", "reshuffle", "full"])
def test_losses_of_a_batch_have_the_derivatives_of_losses_of_a_sample(sampling, of_batches):
    with arithmetic("float64"):
        point = bilevel.Point(START["inner_var"], START["outer_var"], np.array([1.0, -2.0, 0.5]))
        last = Rows(*(np.int32(n // cases.BATCH) for n in (cases.N_INNER, cases.N_OUTER)))  # the short blocks
        drawn = Rows(*(np.arange(cases.BATCH, dtype=np.int32),) * 2) if sampling == "iid" else last
        rows = Rows() if sampling == "full" else drawn
        both = [problem.oracles.with_batches(cases.BATCH, sampling) for problem in (made(), of_batches)]
        cases.assert_trees_close(*(cases.every_kind(oracles, point, rows) for oracles in both))


@pytest.mark.parametrize(
    "name", ["SRBA", pytest.param("SABA", marks=pytest.mark.slow)]
)  # all others: tests/solvers/test_options.py
def test_steps_on_losses_of_a_batch_are_those_on_losses_of_a_sample(name, of_batches):
    solver = cases.short(type(cases.SOLVERS[name]), 0.05, 20.0, cases.BATCH)
    one, many = (bilevel.run(problem, solver, max_steps=20, eval_every=20) for problem in (made(), of_batches))
    cases.assert_trees_close(one.point, many.point, rtol=1e-9, atol=1e-11)
    assert one.calls == many.calls


def test_a_batch_loss_may_mix_its_rows():
    @bilevel.BatchLoss
    def centered(z, x, batch):
        rows, targets = batch
        scores = rows @ z
        return (scores - jnp.mean(scores) - targets) ** 2 + jnp.exp(x[0]) * jnp.sum(z**2) + 0 * x[1]

    problem = made(centered)
    errors = problem.check()
    assert max(errors.values()) < 1e-6
    scores = ROWS @ START["inner_var"]
    expected = np.mean((scores - scores.mean() - TARGETS) ** 2) + np.exp(-1.0) * np.sum(START["inner_var"] ** 2)
    with arithmetic("float64"):
        assert float(problem.oracles.inner_value(problem.start)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"outer": None}, "`outer_loss` failed on one sample; .*'NoneType' object is not callable"),
        (
            {"inner": bilevel.BatchLoss(lambda z, x, batch: jnp.sum(z))},
            r"`inner_loss` must return a real number for each of its 53 rows, got float\d\d\[\]; it is averaged",
        ),
        ({"inner": bilevel.BatchLoss(lambda z, x, batch: batch[5])}, "`inner_loss` failed on a batch"),
    ],
)
def test_bad_losses_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        made(**changes)


def noisy(z, x, sample, key):
    """A loss with noise of mean zero in its linear term."""
    return inner_loss(z, x, sample) + jax.random.normal(key, (3,), z.dtype) @ z


@bilevel.BatchLoss
def noisy_batch(z, x, batch, key):
    return inner_batch_loss.loss(z, x, batch) + jax.random.normal(key, (3,), z.dtype) @ z


def test_each_row_of_a_step_has_a_key_of_its_own_and_the_same_one_at_another_point():
    problem = made(noisy)
    with arithmetic("float64"):
        oracles = problem.oracles.with_batches(4, "iid")
        rows = np.array([3, 3, 7, 9], np.int32)
        words = [np.array(pair, np.uint32) for pair in ((1, 2), (1, 3))]
        here, there = (oracles.with_key(pair) for pair in words)
        moved = problem.start._replace(inner_var=np.array([5.0, 1.0, -1.0]))

        def extra(keyed, point):
            return np.asarray(
                keyed.inner_grad(point, rows) - made().oracles.with_batches(4, "iid").inner_grad(point, rows)
            )

        at_start, elsewhere, next_step = extra(here, problem.start), extra(here, moved), extra(there, problem.start)
        np.testing.assert_allclose(at_start, elsewhere, rtol=1e-9)
        assert np.abs(at_start - next_step).min() > 1e-3
        keys = here.inner_samples.take(rows)[0][1]
        assert len(np.unique(np.asarray(keys), axis=0)) == 4, "rows that are drawn twice have two keys"
        drawn = [np.asarray(jax.random.normal(jax.random.wrap_key_data(k), (3,), "float64")) for k in np.asarray(keys)]
        np.testing.assert_allclose(at_start, np.mean(drawn, axis=0), rtol=1e-9)


KEYED = [name for name, solver in cases.SOLVERS.items() if not solver.needs_finite_sum]


@pytest.mark.parametrize("name", cases.marked(KEYED))
def test_random_losses_repeat_and_resume_bit_for_bit(name, tmp_path):
    problem, solver = made(noisy, dtype="float32"), cases.short(type(cases.SOLVERS[name]), 0.02, 20.0, cases.BATCH)
    whole = bilevel.run(problem, solver, seed=1, max_steps=40, eval_every=40)
    plain = bilevel.run(made(), solver, seed=1, max_steps=40, eval_every=40)  # the program of a test above
    assert np.abs(whole.point.inner_var - plain.point.inner_var).max() > 1e-4, "noise was meant to be there"
    assert whole.calls == plain.calls
    bilevel.run(problem, solver, seed=1, max_steps=17, eval_every=17).save(tmp_path / "run.npz")
    resumed = bilevel.resume(tmp_path / "run.npz", problem, max_steps=40, eval_every=40)
    cases.assert_trees_equal(resumed.state, whole.state)
    other = bilevel.run(problem, solver, seed=2, max_steps=40, eval_every=40)
    assert np.abs(whole.point.inner_var - other.point.inner_var).max() > 1e-6


def test_random_losses_of_a_batch_get_one_key():
    problem = made(noisy_batch, dtype="float32")
    result = bilevel.run(problem, bilevel.SOBA(0.02, 20.0, cases.BATCH), max_steps=20)
    again = bilevel.run(problem, bilevel.SOBA(0.02, 20.0, cases.BATCH), max_steps=20)
    assert result.status == "out_of_budget"
    cases.assert_trees_equal(result.point, again.point)


def test_random_losses_are_refused_where_they_are_remembered_or_solved():
    for solver in (bilevel.SABA(), bilevel.SRBA(), bilevel.SPABA(), bilevel.VRBO(), bilevel.PnPBO(), bilevel.SHINE()):
        with pytest.raises(ValueError, match=r": it remembers derivatives of rows, and these losses take a `key`"):
            bilevel.run(made(noisy), replace(solver, batch_size=8), max_steps=1)
    with pytest.raises(ValueError, match=r"`strongly_convex=True`: a loss that takes a `key` is random"):
        made(noisy, strongly_convex=True)
    with pytest.raises(ValueError, match=r"`sharded`: losses that take a `key` run on one device"):
        made(noisy).sharded()

"""Batches read in parts, and losses that compute in bfloat16."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevel
from bilevel._core.compilation import arithmetic
from bilevel._core.types import Rows
from tests import cases
from tests.oracles.test_losses_of_batches import START, inner_batch_loss, made, noisy, outer_batch_loss

POINT = bilevel.Point(START["inner_var"], START["outer_var"], np.array([1.0, -2.0, 0.5]))
KINDS = {"samples": {}, "batches": {"inner": inner_batch_loss, "outer": outer_batch_loss}, "keys": {"inner": noisy}}


def in_parts(count):
    return bilevel.Differentiation(accumulate=count)


# Of a pass over all rows, pieces of other sizes have other keys.
@pytest.mark.parametrize(
    ("kind", "full"), [("samples", 0), ("samples", 1), ("batches", 0), ("batches", 1), ("keys", 0)]
)
def test_parts_of_a_batch_have_the_derivatives_of_the_whole(kind, full):
    last = Rows(*(np.int32(n // cases.BATCH) for n in (cases.N_INNER, cases.N_OUTER)))  # the short blocks
    with arithmetic("float64"):
        both = [
            made(**KINDS[kind], differentiation=in_parts(k)).oracles.with_batches(cases.BATCH, "blocks") for k in (1, 4)
        ]
        cases.assert_trees_close(*(cases.every_kind(oracles, POINT, Rows() if full else last) for oracles in both))


@pytest.mark.parametrize(
    "name", ["SRBA", pytest.param("SOBA", marks=pytest.mark.slow)]
)  # all others: tests/solvers/test_options.py
def test_steps_on_parts_of_batches_are_those_on_whole_ones(name):
    solver = cases.short(type(cases.SOLVERS[name]), 0.05, 20.0, cases.BATCH, outer_batch_size=4)
    whole, parts = (bilevel.run(made(differentiation=in_parts(k)), solver, max_steps=20, eval_every=20) for k in (1, 2))
    cases.assert_trees_close(whole.point, parts.point, rtol=1e-9, atol=1e-11)
    assert whole.calls == parts.calls


def test_a_batch_that_cannot_be_cut_is_refused():
    with pytest.raises(ValueError, match=r"`accumulate=3` does not divide `batch_size=8`"):
        bilevel.run(made(differentiation=in_parts(3)), bilevel.SOBA(0.1, 1.0, 8), max_steps=1)
    with pytest.raises(ValueError, match=r"`accumulate=4` does not divide `outer_batch_size=6`"):
        bilevel.run(made(differentiation=in_parts(4)), bilevel.SOBA(0.1, 1.0, 8, outer_batch_size=6), max_steps=1)
    with pytest.raises(ValueError, match=r"`accumulate=0`"):
        in_parts(0)
    with pytest.raises(ValueError, match=r"`compute_dtype='int8'`: must be one of 'bfloat16'"):
        bilevel.Differentiation(compute_dtype="int8")
    with pytest.raises(ValueError, match=r"`differentiation=2`: must be a bilevel.Differentiation"):
        made(differentiation=2)


def wide(n=512, **options):
    """A network whose activations are most of the memory of a step."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(n, 32))

    def loss(z, x, row):
        for _ in range(6):
            row = jnp.tanh(row @ z) * 1.1
        return jnp.sum(row) + jnp.exp(x) * jnp.sum(z**2)

    start = {"inner_var": rng.normal(size=(32, 32)) / 6, "outer_var": np.array(-3.0)}
    given = {"differentiation": bilevel.Differentiation(**options), "dtype": "float32"}
    return bilevel.BilevelProblem.from_losses(loss, loss, rows, rows, **start, **given)


def step_bytes(problem):
    with arithmetic(problem.dtype):
        oracles = problem.oracles.with_batches(256, "blocks")
        solver = bilevel.SOBA(0.1, 1.0, 256).cast(problem.dtype)
        return cases.lowered_steps(problem, solver, oracles).compile().memory_analysis().temp_size_in_bytes


def test_parts_take_less_memory():
    assert step_bytes(wide(accumulate=8)) < step_bytes(wide()) / 3


def test_a_pass_over_many_rows_takes_the_memory_of_few():
    problem = wide(n=4100)
    with arithmetic(problem.dtype):
        pieces = problem.oracles.with_batches(64, "blocks")
        whole = replace(pieces, inner_samples=replace(pieces.inner_samples, piece=None))
        gradient = jax.jit(lambda oracles, point: oracles.inner_grad(point))
        programs = [gradient.lower(oracles, problem.start).compile() for oracles in (pieces, whole)]
        sizes = [program.memory_analysis().temp_size_in_bytes for program in programs]
        cases.assert_trees_close(gradient(pieces, problem.start), gradient(whole, problem.start), rtol=1e-4, atol=1e-5)
    assert sizes[0] < sizes[1] / 4


def test_bfloat16_is_in_the_products_and_float32_in_the_state():
    plain, narrow = wide(), wide(compute_dtype="bfloat16")
    solver = bilevel.SOBA(0.01, 10.0, 64)
    results = [bilevel.run(problem, solver, max_steps=20, eval_every=20) for problem in (plain, narrow)]
    assert {leaf.dtype for leaf in jax.tree.leaves(results[1].state)} == {np.dtype("float32")}
    difference = np.abs(results[0].point.inner_var - results[1].point.inner_var).max()
    assert 0 < difference < 0.02 * np.abs(results[0].point.inner_var).max()
    with arithmetic("float32"):
        oracles = narrow.oracles.with_batches(64, "blocks")
        text = cases.lowered_steps(narrow, solver.cast("float32"), oracles).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert products and all("bf16" in line for line in products)


@pytest.mark.slow
def test_what_is_computed_in_float64_stays_so():
    found = [bilevel.hypergradient(problem, damping=5.0) for problem in (wide(), wide(compute_dtype="bfloat16"))]
    assert found[0].gradient == found[1].gradient
    assert max(wide(compute_dtype="bfloat16").check().values()) < 1e-5

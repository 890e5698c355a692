"""A batch size for each level, for every compiled solver and every sampling."""

from dataclasses import replace

import numpy as np
import pytest

import bilevel
from tests import cases
from tests.solvers.test_transcriptions import assert_same_path, both, plain, steps
from tests.solvers.transcribed import KIND_NAMES, TRANSCRIBED

OUTER = 5  # 31 rows have a shorter last block


def two_sizes(name, **changes):
    return replace(plain(type(cases.SOLVERS[name])), outer_batch_size=OUTER, **changes)


@pytest.mark.parametrize("name", cases.marked(TRANSCRIBED, quick=("SRBA",)))
def test_iterates_and_costs_with_two_sizes_equal_the_transcription(name):
    solver = two_sizes(name)
    run, expected, counted = both("quadratic", solver)
    assert run.oracles.inner_samples.batch_size == cases.BATCH and run.oracles.outer_samples.batch_size == OUTER
    assert_same_path(run, expected)
    initial = run.solver.init_calls(run.oracles)._asdict()
    for kind, name in KIND_NAMES.items():
        declared = int(np.sum(getattr(run.page.calls, kind)[: steps(solver)]))
        assert declared + initial[kind] == counted.calls[name], kind


@pytest.mark.parametrize("sampling", ["iid", "reshuffle", "full"])
def test_calls_are_counted_per_level_for_every_sampling(sampling):
    run = bilevel.run(cases.quadratic("float32"), two_sizes("SOBA", sampling=sampling), max_steps=6, eval_every=6)
    rows = {"iid": (6 * cases.BATCH, 6 * OUTER), "full": (6 * cases.N_INNER, 6 * cases.N_OUTER)}
    # "reshuffle" draws six of seven blocks, which may include the shorter one.
    inner, outer = run.calls.inner_grad, run.calls.outer_grad
    if sampling == "reshuffle":
        assert inner in (6 * cases.BATCH, 5 * cases.BATCH + cases.N_INNER % cases.BATCH)
        assert outer in (6 * OUTER, 5 * OUTER + cases.N_OUTER % OUTER)
    else:
        assert (inner, outer) == rows[sampling]


@pytest.mark.slow
def test_equal_sizes_compile_the_same_program():
    problem = cases.quadratic("float32")

    def text(solver):
        run = bilevel.Run(problem, solver)
        oracles = problem.oracles.with_batches(*solver.batches()[:1], solver.sampling, solver.batches()[1])
        return cases.lowered_steps(problem, run.solver.cast(problem.dtype), oracles).as_text()

    for name in ("SRBA", "SABA", "SOBA"):
        solver = cases.SOLVERS[name]
        assert text(solver) == text(replace(solver, outer_batch_size=solver.batch_size))


def test_default_periods_count_both_sizes():
    problem = cases.quadratic()
    rows = cases.N_INNER + cases.N_OUTER
    assert bilevel.SRBA(batch_size=8, outer_batch_size=4).configure(problem).period == rows // 12
    assert bilevel.SRBA(batch_size=8).configure(problem).period == rows // 16
    assert bilevel.VRBO(batch_size=8, outer_batch_size=4).configure(problem).period == rows // 12


def test_batches_larger_than_their_level_are_refused():
    problem = cases.quadratic("float32")
    with pytest.raises(ValueError, match=r"`SOBA\(outer_batch_size=32\)` exceeds.*use outer_batch_size <= 31"):
        bilevel.run(problem, bilevel.SOBA(batch_size=50, outer_batch_size=32), max_steps=1)
    with pytest.raises(ValueError, match=r"`SOBA\(batch_size=54\)` exceeds.*use batch_size <= 53"):
        bilevel.run(problem, bilevel.SOBA(batch_size=54, outer_batch_size=31), max_steps=1)
    bilevel.run(problem, bilevel.SOBA(batch_size=50, outer_batch_size=31), max_steps=1)


def test_solvers_that_are_not_compiled_have_no_outer_batch_size():
    with pytest.raises(TypeError, match=r"`HOAG` has no parameter `outer_batch_size`"):
        bilevel.HOAG(outer_batch_size=5)


def test_levels_that_share_their_rows_share_a_batch():
    rows, targets = np.random.default_rng(0).normal(size=(40, 3)), np.arange(40) / 40
    problem = bilevel.problems.cross_validation(rows, targets, folds=4, loss="squared", dtype="float32")
    with pytest.raises(ValueError, match=r"`SOBA\(outer_batch_size=4\)`: both levels of this problem share each batch"):
        bilevel.run(problem, bilevel.SOBA(batch_size=8, outer_batch_size=4), max_steps=1)

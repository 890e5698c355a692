"""Rows that stay on the host: the iterates of rows on the device, however they are read; failures; refusals."""

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bilevel
from bilevel import HostData
from bilevel._core import trees
from bilevel._core.compilation import arithmetic
from bilevel.engine.driver import sweep
from bilevel.oracles import host_samples
from bilevel.oracles.samples import PIECE
from tests import cases
from tests.oracles import host_reads

# Steps with a pass between them, with one batch, with tables, and with loops inside.
WAYS = ["SRBA blocks", "MASOBA iid"]
WAYS += [pytest.param(way, marks=pytest.mark.slow) for way in ("SOBA iid", "SABA blocks", "StocBiO reshuffle")]


@pytest.fixture(scope="module")
def on_device():
    return cases.logistic_selection()


def logistic(dtype="float64", **options):
    X, y, X_val, y_val = cases.logistic_data()
    rows = HostData(X, **options), y, HostData(X_val, **options), y_val
    return bilevel.problems.penalty_selection(*rows, dtype=dtype)


def run(problem, solver, **options):
    return bilevel.run(problem, solver, **({"max_steps": 40, "eval_every": 40, "exact": False} | options))


def assert_same_bits(one, other):
    cases.assert_trees_equal(one.point, other.point)
    assert one.calls == other.calls


def assert_same_to_rounding(one, other):
    steps = one.history["step"][-1]
    for found, expected in zip(jax.tree.leaves(one.point), jax.tree.leaves(other.point), strict=True):
        error = 8 * np.finfo(expected.dtype).eps * steps
        np.testing.assert_allclose(found, expected, rtol=error, atol=error * np.abs(expected).max())
    assert one.calls == other.calls


@pytest.mark.parametrize("way", WAYS)
def test_a_run_is_that_with_its_rows_on_the_device_to_rounding(way, on_device, monkeypatch):
    name, sampling = way.split()
    monkeypatch.setattr("bilevel.engine.steps._PART_BYTES", 2**12)  # several parts
    solver = replace(cases.SOLVERS[name], sampling=sampling)
    assert_same_to_rounding(run(logistic(), solver), run(on_device, solver))


def scores(z, rows):
    return jnp.tanh(rows @ z["a"]) @ z["b"]


@bilevel.BatchLoss
def inner_batch_loss(z, x, batch):
    rows, targets = batch
    return (scores(z, rows) - targets) ** 2 + jnp.exp(x) * jnp.sum(z["a"] ** 2)


@bilevel.BatchLoss
def outer_batch_loss(z, x, batch):
    rows, targets = batch
    return (scores(z, rows) - targets) ** 2


RNG = np.random.default_rng(0)
N = PIECE + 101  # a pass has two pieces, also on the device
ROWS, TARGETS = RNG.normal(size=(N, 70)).astype(np.float32), RNG.normal(size=N).astype(np.float32)
START = {"a": RNG.normal(size=(70, 3)).astype(np.float32) / 9, "b": np.ones(3, np.float32)}
NETWORK = bilevel.SOBA(0.05, 10.0, 16, outer_batch_size=7)


def network(inner, outer=None, **options):
    outer = (ROWS[:60], TARGETS[:60]) if outer is None else outer
    given = inner_batch_loss, outer_batch_loss, inner, outer, START, np.float32(-2.0)
    return bilevel.BilevelProblem.from_losses(*given, dtype="float32", **options)


@pytest.fixture(scope="module")
def trained():
    return run(network(HostData((ROWS, TARGETS))), NETWORK)


@pytest.fixture
def files(tmp_path):
    for name, array in (("rows", ROWS), ("targets", TARGETS)):
        np.save(tmp_path / f"{name}.npy", array)
    return tuple(np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in ("rows", "targets"))


def test_arrays_files_and_functions_train_a_network_alike(trained, files):
    def function(numbers):
        return ROWS[numbers], TARGETS[numbers]

    for source in (HostData(files), HostData(function, length=N)):
        assert_same_bits(run(network(source), NETWORK), trained)
    assert_same_to_rounding(run(network((ROWS, TARGETS)), NETWORK), trained)


class Images:
    """A data set as PyTorch has them: a length, and a row for each number."""

    def __init__(self, X, y):
        self.X, self.y = X, y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, number):
        return {"image": self.X[number], "label": int(self.y[number] > 0)}


class ImagesTogether(Images):
    def __getitems__(self, numbers):
        assert isinstance(numbers, list)
        return [Images.__getitem__(self, number) for number in numbers]

    def __getitem__(self, number):
        raise AssertionError("several rows are read at once")


@pytest.mark.parametrize("kind", [ImagesTogether, pytest.param(Images, marks=pytest.mark.slow)])
def test_a_data_set_that_returns_single_rows_trains_like_its_arrays(kind):
    X, y, X_val, y_val = cases.logistic_data()

    def outer(z, x, row):
        return jnp.logaddexp(0, jnp.where(row["label"] > 0, -1, 1).astype(z.dtype) * (row["image"] @ z))

    def inner(z, x, row):
        return outer(z, x, row) + jnp.exp(x) * (z @ z)

    def problem(levels):
        start = np.zeros(X.shape[1]), np.array(-2.0)
        return bilevel.BilevelProblem.from_losses(inner, outer, *levels, *start, dtype="float64")

    levels = (X, y), (X_val, y_val)
    arrays = [{"image": rows, "label": (labels > 0).astype(int)} for rows, labels in levels]
    solver = cases.SOLVERS["MASOBA"]
    found = run(problem([HostData(kind(*level)) for level in levels]), solver)
    assert_same_to_rounding(found, run(problem(arrays), solver))
    with pytest.raises(ValueError, match=r"`inner_data` returns its rows one by one; give `bilevel.HostData\(…\)`"):
        problem([kind(*level) for level in levels])
    with pytest.raises(ValueError, match=r"`HostData\(length=3\)`: the data set has"):
        HostData(kind(X, y), length=3)


def test_rows_as_they_lie_are_drawn_and_passed_over_like_a_shuffled_copy(tmp_path):
    order = np.random.default_rng(0).permutation(N)  # of the first level that a problem lays out
    np.save(tmp_path / "rows.npy", ROWS[order])
    lying = HostData((np.load(tmp_path / "rows.npy", mmap_mode="r"), TARGETS[order]), shuffle=False)
    both = [network(lying).oracles, network((ROWS, TARGETS)).oracles]
    with arithmetic("float32"):
        point = trees.cast(network(lying).start, np.float32)
        last = np.int32(N // 16)  # a short block
        for size, rows in ((16, None), (16, last)):
            found, expected = (_inner(oracles.with_batches(size, "blocks"), point, rows) for oracles in both)
            jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, expected)


@jax.jit
def _inner(oracles, point, rows):
    return oracles.inner(point, rows)


def test_a_pass_is_the_mean_over_all_rows():
    X, y, X_val, y_val = cases.logistic_data(997, 31)
    problem = bilevel.problems.penalty_selection(HostData(X), y, X_val, y_val, dtype="float64")
    pieces = replace(problem.oracles, inner_samples=replace(problem.oracles.inner_samples, piece=100))
    z = problem.start.inner_var
    weights = -y / (1 + np.exp(y * (X @ z)))
    expected = X.T @ weights / len(y) + np.exp(problem.start.outer_var) * z
    with arithmetic("float64"):
        np.testing.assert_allclose(jax.jit(pieces.inner_grad)(problem.start), expected, rtol=1e-12)


def test_a_killed_run_goes_on_with_the_same_bits(tmp_path, files, trained):
    problem = network(HostData(files))
    run(problem, NETWORK, max_steps=20, checkpoint=bilevel.Checkpoints(tmp_path / "run", every=7))
    max((tmp_path / "run").iterdir()).unlink()  # what a killed run does not write
    again = network(HostData(files))
    assert_same_bits(bilevel.resume(tmp_path / "run", again, max_steps=40, eval_every=40), trained)


def test_a_saved_run_of_other_rows_is_refused(tmp_path, files):
    run(network(HostData(files)), NETWORK, max_steps=1).save(tmp_path / "run.npz")
    with pytest.raises(ValueError, match="another problem"):
        bilevel.resume(tmp_path / "run.npz", network(HostData((ROWS + 1, TARGETS))), max_steps=2)


@pytest.mark.slow
def test_settings_and_seeds_step_together_as_alone():
    problem, solvers = logistic(), [replace(cases.SOLVERS["SOBA"], step_size=step) for step in (0.05, 0.1)]
    for together in (False, True):
        cells = sweep(problem, solvers, [0, 1], 2000, together=together)
        for seed, row in enumerate(cells):
            for solver, cell in zip(solvers, row, strict=True):
                alone = bilevel.run(problem, solver, seed=seed, max_calls=2000)
                np.testing.assert_allclose(cell.rows[-1]["outer_value"], alone.history["outer_value"][-1], rtol=1e-5)


def test_rows_that_nobody_has_foreseen_are_not_taken_for_others():
    samples = logistic().oracles.with_batches(cases.BATCH, "blocks").inner_samples
    with arithmetic("float64"):
        held = samples.hold(np.array([1, 4]), 3)
        assert np.isfinite(held.take(jnp.int32(4))[1]).all()
        for block in (0, 2, 6):
            assert np.isnan(held.take(jnp.int32(block))[1]).all()


def assert_reads(data, array):
    rng, n = np.random.default_rng(0), len(array)
    for numbers in (np.array([7]), rng.integers(0, n, 300), np.arange(n)[::-1], np.array([3, 3, n - 1, 0])):
        np.testing.assert_array_equal(data.read(numbers), array[numbers])
    np.testing.assert_array_equal(data.read(np.arange(10, 20)), array[10:20])


@pytest.mark.parametrize("part", [slice(None), slice(100, None), slice(None, None, 3)])
def test_rows_of_a_file_are_those_of_its_array(tmp_path, part):
    array = np.random.default_rng(0).integers(0, 100, (5000, 3, 50)).astype(np.int16)
    np.save(tmp_path / "rows.npy", array)
    assert_reads(HostData(np.load(tmp_path / "rows.npy", mmap_mode="r")[part]), array[part])


def test_changes_of_a_private_memory_map_are_read_and_not_its_file(tmp_path):
    np.save(tmp_path / "rows.npy", ROWS)
    private = np.load(tmp_path / "rows.npy", mmap_mode="c")
    private *= 3
    assert_reads(HostData(private), 3 * ROWS)


@pytest.mark.parametrize("how", ["replaced", "deleted", "moved"])
def test_a_memory_map_keeps_its_rows_when_its_path_gets_another_file(tmp_path, how):
    path, other = tmp_path / "rows.npy", tmp_path / "other.npy"
    np.save(path, ROWS)
    mapped = np.load(path, mmap_mode="r")
    if how == "moved":
        path.rename(tmp_path / "elsewhere.npy")
    if how == "deleted":
        path.unlink()
    else:
        np.save(other, ROWS + 1)
        other.rename(path)
    assert_reads(HostData(mapped), ROWS)


@pytest.mark.parametrize("mode", ["r", "c"])
def test_a_memory_map_whose_file_was_cut_is_told_and_ends_no_process(tmp_path, mode):
    np.save(tmp_path / "rows.npy", ROWS)
    data = HostData(np.load(tmp_path / "rows.npy", mmap_mode=mode)[1:])
    os.truncate(tmp_path / "rows.npy", 5000)
    with pytest.raises(ValueError, match="shorter than when"):
        data.read(np.arange(N - 1))


MASKED = np.ma.masked_greater(ROWS, 2.0)


@pytest.mark.parametrize("give", [lambda: HostData((MASKED, TARGETS)), lambda: HostData(lambda i: MASKED[i], N)])
def test_masked_entries_are_not_used_as_data(give):
    assert MASKED[:1].mask.any() or MASKED.mask.any()
    with pytest.raises(ValueError, match="masked values; remove or impute"):
        give().read(np.arange(N))


def test_an_array_with_a_mask_that_hides_nothing_is_taken():
    assert_reads(HostData(np.ma.masked_invalid(ROWS)), ROWS)


# --- reads that fail


SOLVER = bilevel.SRBA(0.05, 1.0, 8)
LIMITS = {"max_steps": 40, "eval_every": 20, "exact": False}


@pytest.mark.parametrize("how", ["fail", "once"])
def test_each_read_that_fails_is_named_and_leaves_a_result_to_resume(how, tmp_path, capfd):
    whole = run(logistic(), SOLVER)
    for at in (3, 4, 5, 7):  # the first two are of the fingerprint and of the compilation
        rows = host_reads.Rows(None, how)
        chosen = host_reads.problem(rows)
        rows.arm(at)
        with pytest.raises(
            bilevel.StepError, match=r"`HostData` could not be read in step \d+ \(Time.* not answer"
        ) as caught:
            bilevel.run(chosen, SOLVER, **LIMITS)
        error = caught.value
        assert (error.loss, error.result.status) == (None, "failed")
        error.result.save(tmp_path / "run.npz")  # the rows still cannot be read
        rows.arm(None)
        resumed = bilevel.resume(tmp_path / "run.npz", host_reads.problem(rows), max_steps=40, eval_every=20)
        assert_same_bits(resumed, whole)
        assert np.isfinite(resumed.history["outer_value"]).all() and {0, 20, 40} <= set(resumed.history["step"])
    capfd.readouterr()  # JAX prints what callbacks raise


def test_a_file_that_is_cut_during_a_run_is_named(tmp_path, capfd):
    X, y, X_val, y_val = cases.logistic_data()
    np.save(tmp_path / "features.npy", X)
    rows = HostData(np.load(tmp_path / "features.npy", mmap_mode="r"))
    cut = {"cut": lambda point: os.truncate(tmp_path / "features.npy", 300) or 0.0}
    chosen = replace(bilevel.problems.penalty_selection(rows, y, X_val, y_val, dtype="float64"), metrics=cut)
    with pytest.raises(bilevel.StepError, match=r"rows of a `HostData`.*features.npy is shorter than"):
        bilevel.run(chosen, SOLVER, max_steps=40, eval_every=20)
    capfd.readouterr()


def test_failures_that_are_caught_leave_no_reader_and_no_thread(capfd, caplog):
    def attempt():
        rows = host_reads.Rows(None)
        chosen = host_reads.problem(rows)
        rows.arm(3)
        with pytest.raises(bilevel.StepError):
            bilevel.run(chosen, SOLVER, **LIMITS)

    caplog.set_level(logging.CRITICAL + 1, "jax")  # pytest would keep the records, and these hold what was raised
    gc.collect()
    before = len(host_samples._readers), threading.active_count()
    for _ in range(10):
        attempt()
    gc.collect()
    assert (len(host_samples._readers), threading.active_count()) == before
    capfd.readouterr()


def start_reads(*arguments):
    command = [sys.executable, "-m", "tests.oracles.host_reads", *map(str, arguments)]
    root = Path(__file__).parents[2]
    return subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("read", [3, 8, 13])
def test_ctrl_c_twice_ends_a_run_whose_reader_is_blocked(read):
    with start_reads("block", read) as process:
        try:
            assert process.stdout.readline().startswith("blocked")
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
            assert process.poll() is None, "once, it ends after the step that it is in"
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=20) == 0
            assert process.stdout.read().splitlines()[-1] == "KeyboardInterrupt"
        finally:
            process.kill()


def test_what_a_function_returns_is_looked_at_in_a_run():
    def short(numbers):
        return ROWS[numbers[:7]], TARGETS[numbers[:7]]

    with pytest.raises(ValueError, match=r"returned \[7\] rows for"):
        run(network(HostData(short, length=N)), NETWORK)


def test_labels_that_are_no_signs_are_refused():
    X, y, X_val, y_val = cases.logistic_data()
    with pytest.raises(ValueError, match="labels -1 and 1"):
        bilevel.problems.penalty_selection(HostData(X), y + 1, X_val, y_val)


REFUSED = {
    "no length": (lambda: HostData(lambda numbers: ROWS[numbers]), "`length=…`"),
    "other length": (lambda: HostData(ROWS, length=3), "the arrays have 2149 rows"),
    "uneven": (lambda: HostData((ROWS, TARGETS[1:])), r"\[2148, 2149\] rows"),
    "texts": (lambda: HostData(np.array(["a"])), "dtype <U1"),
    "nothing": (lambda: HostData(()), "give an array"),
    "a number": (lambda: HostData(3.0), "give an array"),
    "length": (lambda: HostData(lambda numbers: ROWS[numbers], length=0), "length=0"),
    "other dtype": (lambda: HostData(lambda i: ROWS[i] if len(i) == 1 else ROWS[i] > 0, 9).read(np.arange(2)), "bool"),
    "convex": (lambda: network(HostData((ROWS, TARGETS)), strongly_convex=True), "leave it out"),
    "Exact": (lambda: run(logistic(), bilevel.Exact()), "Take a solver such as SRBA"),
    "tolerance": (lambda: run(logistic(), cases.SOLVERS["SOBA"], exact=True, stop=1.0), "leave it out"),
    "constants": (lambda: logistic().constants(), "as arrays"),
    "full": (lambda: run(logistic(), bilevel.SOBA(0.1, 1.0, 8, sampling="full")), "draw batches"),
    "rows": (lambda: run(logistic(), bilevel.SABA(0.1, 1.0, 8, memory="rows")), "memory='blocks'"),
    "devices": (lambda: logistic().sharded(), "build the problem from arrays"),
    "cleaning": (lambda: bilevel.problems.data_cleaning(HostData(ROWS), TARGETS, ROWS, TARGETS), "Give arrays"),
    "width": (
        lambda: bilevel.problems.penalty_selection(
            HostData(ROWS), TARGETS, HostData(ROWS[:, 1:]), TARGETS, loss="squared"
        ),
        "70 features",
    ),
    "length of y": (
        lambda: bilevel.problems.penalty_selection(
            HostData(ROWS), TARGETS[1:], HostData(ROWS), TARGETS, loss="squared"
        ),
        "2149 rows and `y_train` 2148",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_in_a_sentence(name):
    attempt, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        attempt()


def test_tables_beyond_memory_are_refused():
    many = HostData(lambda numbers: (ROWS[numbers % N], TARGETS[numbers % N]), length=2**31 - 1, shuffle=False)
    with pytest.raises(ValueError, match="use larger batches, or a solver without tables"):
        run(network(many, many), bilevel.SABA(0.1, 1.0, 4))


def test_a_reader_goes_with_its_problem():
    problem = logistic()
    number = int(problem.oracles.inner_samples.token)
    assert number in host_samples._readers
    del problem
    gc.collect()
    assert number not in host_samples._readers

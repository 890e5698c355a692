"""Textbook versions that are timed compute the same as the library, and the tables have the expected contents."""

import importlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import bilevel
from bilevel._core.compilation import arithmetic
from bilevel.bench.store import Store
from bilevel.engine.loop import run_key

FOLDER = Path(__file__).parents[1] / "benchmarks"
BATCH, STEPS, STEP_SIZE, OUTER_RATIO = 8, 12, 0.05, 0.1
TINY = {
    "IJCNN1": {"n_train": 48, "n_val": 32, "dim": 5},
    "quadratics": {"n_inner": 64, "n_outer": 40, "p": 5, "d": 3},
    "cleaning": {"n_train": 48, "n_val": 32, "dim": 6, "classes": 3},
}
BASELINES = ("SABA", "StocBiO", "AmIGO", "MRBO", "VRBO", "F2SA")
QUICK = [("IJCNN1", "SRBA"), ("IJCNN1", "SOBA")]
PAIRS = [("IJCNN1", solver) for solver in ("SRBA", "SOBA", *BASELINES)]
PAIRS += [(problem, solver) for problem in ("quadratics", "cleaning") for solver in ("SRBA", "SABA", "AmIGO")]
TIMED = ["SRBA", "SABA", "AmIGO", "F2SAp", "STFBO"]  # with and without a baseline, tables or own steps


@pytest.fixture
def script(monkeypatch):
    """Return a function that imports a script by name, as other scripts do."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for path in FOLDER.glob("*.py"):
        sys.modules.pop(path.stem, None)


def tiny(script, problem, dtype="float64"):
    shape = script("shapes").BY_NAME[problem](**TINY[problem], dtype=dtype)
    return shape._replace(step_size=STEP_SIZE)


def textbook_point(script, shape, solver):
    """Return the point of the textbook version after some steps on the blocks of the library."""
    textbook = script("textbook")
    with arithmetic(np.float64):
        oracles = shape.problem.oracles.with_batches(BATCH, "blocks")

    def same_blocks(method, key, index):
        inner, outer = method.batches()
        return oracles.draw_inner(run_key(0), index, inner), oracles.draw_outer(run_key(0), index, outer)

    method = textbook.build(textbook.METHODS[solver], shape, BATCH, OUTER_RATIO)
    return textbook.compiled(method, shape, BATCH, same_blocks)(STEPS)[0]


def marked(pair):
    return pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow)


@pytest.mark.parametrize(("problem", "solver"), [marked(pair) for pair in PAIRS])
@pytest.mark.slow
def test_textbook_versions_take_the_steps_of_the_library(script, problem, solver):
    shape = tiny(script, problem)
    settings = bilevel.SOLVERS[solver](STEP_SIZE, OUTER_RATIO, BATCH)
    ours = bilevel.run(shape.problem, settings, max_steps=STEPS).point
    point = textbook_point(script, shape, solver)
    assert len(point) in (2, 3)  # some methods have no v
    for here, before, there in zip(ours, shape.problem.start, point, strict=False):
        move = np.linalg.norm(here - before)
        assert move > 1e-6
        assert np.linalg.norm(here - np.asarray(there)) < 1e-9 * move


def rows_of(markdown):
    lines = [line.strip("| ").split(" | ") for line in markdown.splitlines() if line.startswith("| ")]
    return {cells[0]: cells[1:] for cells in lines[2:]}


@pytest.mark.parametrize(("problem", "names"), [("quadratics", ["SOBA"]), ("IJCNN1", TIMED)])
@pytest.mark.slow
def test_the_table_of_steps_has_every_solver_above_its_floor(script, problem, names):
    table = script("step").problem_table(tiny(script, problem, "float32"), BATCH, names, rounds=1, seconds=0.001)
    rows = rows_of(table)
    assert [name for name in rows if "," not in name] == names
    for name, (best, median, *textbook, floor, _) in rows.items():
        assert 0 < float(floor) < float(best) <= float(median)
        has_baseline = name.partition(",")[0] in ("SRBA", "SOBA", *BASELINES)
        assert all(re.fullmatch(r"[\d.e+-]+" if has_baseline else "–", cell) for cell in textbook)


def test_slopes_are_those_of_powers(script):
    sizes = np.array([10, 100, 1000])
    lines = np.stack([3.0 * sizes, sizes**2.0, np.full(3, 7.0)], axis=1)
    fitted, steepest = script("scaling").slopes(sizes, lines)
    np.testing.assert_allclose([fitted, steepest], [[1, 2, 0]] * 2, atol=1e-12)


def test_a_part_that_does_not_exist_is_refused(script):
    with pytest.raises(Exception, match="'steps' is not one of step, memory"):
        script("bench").chosen("step,steps")


def times_written(solver, folder):
    rows = Store(folder).read()
    return rows[rows["solver"] == solver].set_index("cell")["written_at"].sort_index().tolist()


@pytest.mark.slow
def test_the_table_of_equal_calls_is_resumed_from_kept_results(script, tmp_path, monkeypatch):
    monkeypatch.chdir(FOLDER.parent)
    equal, page, store = script("equal_calls"), tmp_path / "page.md", tmp_path / "store"
    options = ["--quick", "--out", str(page), "--store", str(store), "--only", "SOBA"]
    assert equal.main(options) == 0
    first = times_written("SOBA", store)
    assert equal.main([*options, "--only", "MASOBA"]) == 0
    assert {path.name for path in store.glob("*.parquet")} == {"runs.parquet"}
    assert len(first) > 0 and times_written("SOBA", store) == first, "it was not run again"
    equal.compact(store, ["MASOBA"])
    assert times_written("SOBA", store) == first and not times_written("MASOBA", store)
    rows = rows_of(page.read_text().partition("## How")[0])
    assert set(rows) == {"`MASOBA`", "`SOBA`"} and all(len(cells) == 5 for cells in rows.values())


@pytest.mark.slow
def test_the_page_with_the_larger_budget_has_the_small_problem_alone(script, tmp_path, monkeypatch):
    monkeypatch.chdir(FOLDER.parent)
    equal, page = script("equal_calls"), tmp_path / "page.md"
    options = ["--quick", "--small", "--out", str(page), "--store", str(tmp_path / "store"), "--only", "SOBA"]
    assert equal.main(options) == 0
    text = page.read_text()
    assert text.startswith("# Equal oracle calls with a larger budget")
    assert all(len(cells) == 3 for cells in rows_of(text.partition("## How")[0]).values())


def test_solvers_are_ranked_by_their_medians_and_the_missing_are_last(script):
    outcomes = {
        "a": {"one": (1.0, 0.5, ""), "two": (2.0, 2.0, ""), "three": (np.inf, np.inf, "")},
        "b": {"one": (3.0, 3.0, ""), "two": (2.0, 2.0, "")},
    }
    assert script("equal_calls").mean_ranks(outcomes) == {"one": 1.5, "two": 1.5, "three": 3.0}


def test_a_folder_that_is_no_checkout_of_the_reference_is_refused(script, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"`--reference .*has no solvers/srba.py"):
        script("beside_reference").Reference(tmp_path, "IJCNN1")


def test_a_row_has_ratios_only_if_there_is_a_reference(script):
    row = script("beside_reference").row
    micros = np.array([[2.0, 12.0], [4.0, 8.0], [3.0, 9.0]])
    assert row("IJCNN1", "SOBA", micros)[2:] == ["2.00", "3.00", "8.00", "9.00", "4", "3", "4"]
    assert row("IJCNN1", "SOBA", micros[:, :1]) == ["IJCNN1", "SOBA", "2.00", "3.00"]


def test_processes_that_take_turns_answer_every_round(script):
    turns = script("processes")
    program = "import processes; processes.answer_turns({'one': iter((1, 2)).__next__})"
    process = turns.Turns(["-c", program], PYTHONPATH=str(FOLDER))
    assert [process.take(), process.take()] == [{"one": 1}, {"one": 2}]
    process.end()
    with pytest.raises(RuntimeError, match="did not start"):
        turns.Turns(["-c", "pass"])


@pytest.mark.slow
def test_the_batches_handed_to_betty_are_those_of_a_run(script):
    beside = script("beside_betty")
    task = beside.make_task(5)
    (rows,) = beside.draw_batches(task, 1)["inner"]
    run = bilevel.Run(beside.build(task), bilevel.SOBA(beside.RATE, 1e12, beside.BATCH))
    run.advance(1)
    hidden = np.tanh(task["train_rows"][rows] @ task["first"] + task["bias"])
    residuals = np.exp(hidden @ task["last"])
    residuals /= residuals.sum(axis=1, keepdims=True)
    residuals[np.arange(beside.BATCH), task["train_labels"][rows]] -= 1
    gradient = hidden.T @ residuals / 2 / beside.BATCH + 2 * beside.DECAY * task["last"]  # weights start at 1/2
    np.testing.assert_allclose(run.point.inner_var["last"], task["last"] - beside.RATE * gradient, atol=1e-6)


def test_streaming_is_refused_if_the_disk_is_too_small(script, tmp_path):
    with pytest.raises(SystemExit, match=r"takes 8900000000\.0 GB"):
        script("streaming").write(tmp_path, 10**17, 22)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_streamed_rows_equal_those_that_were_written(script, tmp_path):
    streaming = script("streaming")
    paths = streaming.write(tmp_path, 3000, 4)
    rows, labels = streaming.make_rows(np.random.default_rng(0), 3000, 4)
    problem = streaming.build(paths, 3000, 4)
    np.testing.assert_array_equal(problem.oracles.inner_samples.reader.rows(np.arange(3000))[0], rows * labels[:, None])
    assert streaming.plain_read(paths) > 0 and streaming.memory()["VmHWM"] > 0


def test_every_script_that_a_page_names_exists():
    root = FOLDER.parent
    pages = [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("reports/**/*.md"), root / "Makefile"]
    pages += root.glob("reports/**/*.toml")
    for page in pages:
        text = page.read_text()
        for path in re.findall(r"(?<![\w/])(?:benchmarks|examples|paper|tests)/[\w/]+\.(?:py|toml)\b", text):
            assert (root / path).exists(), f"{page.name} names {path}"
        for module in re.findall(r"python -m ((?:benchmarks|paper|tests)[\w.]*)", text):
            path = root / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), f"{page.name} names {module}"

"""What is timed beside the library computes the same, and the tables hold what they say."""

import importlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import bilevel
from bilevel._precision import arithmetic
from bilevel.engine.loop import run_key
from bilevel.solvers import Solver

FOLDER = Path(__file__).parents[1] / "benchmarks"
BATCH, STEPS, STEP_SIZE, OUTER_RATIO = 8, 12, 0.05, 0.1
TINY = {
    "IJCNN1": {"n_train": 48, "n_val": 32, "dim": 5},
    "quadratics": {"n_inner": 64, "n_outer": 40, "p": 5, "d": 3},
    "cleaning": {"n_train": 48, "n_val": 32, "dim": 6, "classes": 3},
}
BASELINES = ("SABA", "StocBiO", "AmIGO", "MRBO", "VRBO", "F2SA")
QUICK = [("IJCNN1", "SRBA"), ("IJCNN1", "SOBA")]
PAIRS = [(problem, solver) for problem in TINY for solver in ("SRBA", "SOBA", *BASELINES)]
COMPILED = [name for name, cls in bilevel.SOLVERS.items() if issubclass(cls, Solver)]


@pytest.fixture
def script(monkeypatch):
    """Import one of the scripts by name, as its neighbors do."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for path in FOLDER.glob("*.py"):
        sys.modules.pop(path.stem, None)


def tiny(script, problem, dtype="float64"):
    shape = script("shapes").BY_NAME[problem](**TINY[problem], dtype=dtype)
    return shape._replace(step_size=STEP_SIZE)


def textbook_point(script, shape, solver):
    """The point of the textbook version after some steps on the library's blocks."""
    textbook, methods = script("textbook"), script("textbook_methods").METHODS
    with arithmetic(np.float64):
        oracles = shape.problem.oracles.with_batches(BATCH, "blocks")

    def same_blocks(method, key, index):
        inner, outer = method.batches()
        return oracles.draw_inner(run_key(0), index, inner), oracles.draw_outer(run_key(0), index, outer)

    method = textbook.build(methods[solver], shape, BATCH, OUTER_RATIO)
    return textbook.compiled(method, shape, BATCH, same_blocks)(STEPS)[0]


def marked(pair):
    return pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow)


@pytest.mark.parametrize(("problem", "solver"), [marked(pair) for pair in PAIRS])
def test_textbook_versions_take_the_librarys_steps(script, problem, solver):
    shape = tiny(script, problem)
    settings = bilevel.SOLVERS[solver](STEP_SIZE, OUTER_RATIO, BATCH)
    ours = bilevel.run(shape.problem, settings, max_steps=STEPS).point
    point = textbook_point(script, shape, solver)
    assert len(point) in (2, 3)  # v is not always kept
    for here, before, there in zip(ours, shape.problem.start, point, strict=False):
        move = np.linalg.norm(here - before)
        assert move > 1e-6
        assert np.linalg.norm(here - np.asarray(there)) < 1e-9 * move


def rows_of(markdown):
    lines = [line.strip("| ").split(" | ") for line in markdown.splitlines() if line.startswith("| ")]
    return {cells[0]: cells[1:] for cells in lines[2:]}


@pytest.mark.parametrize(
    ("problem", "names"), [("quadratics", ["SOBA"]), pytest.param("IJCNN1", COMPILED, marks=pytest.mark.slow)]
)
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

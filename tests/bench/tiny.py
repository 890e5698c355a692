"""An experiment of a few seconds, and a replacement of its runs for tests of the bookkeeping alone."""

import itertools

import numpy as np

from bilevel._core.types import Calls
from bilevel.bench.config import load_config
from bilevel.bench.execute import make_rows
from bilevel.engine.driver import CellResult
from bilevel.engine.result import Status
from bilevel.solvers import SOLVERS
from tests.cases import N_INNER, N_OUTER

HEAD = f"""
name = "tiny"
metric = "value_gap"
seeds = 2
[problem]
name = "quadratic"
n_inner = {N_INNER}
n_outer = {N_OUTER}
dim_inner = 5
dim_outer = 3
dtype = "float64"
"""
BUDGET = """
[budget]
epochs = 20
"""
SOBA = """
[[solvers]]
name = "SOBA"
batch_size = 8
step_size = [0.05, 0.02]
"""
SRBA = """
[[solvers]]
name = "SRBA"
batch_size = 8
step_size = [0.05, 0.02]
period = [5, 7]
"""
EXACT = """
[[solvers]]
name = "Exact"
"""
SECONDS = "seconds = 0.05\n"
UNLIKE = ["written_at", "seconds", "revision"]  # from one run of a cell to another


def write(folder, text):
    path = folder / "tiny.toml"
    path.write_text(text)
    return path


def experiment(folder, solvers=SOBA, seconds="", seeds=2, epochs=20):
    text = HEAD.replace("seeds = 2", f"seeds = {seeds}") + BUDGET.replace("20", str(epochs)) + seconds + solvers
    return load_config(write(folder, text))


def cells(experiment):
    return experiment.cells(N_INNER, N_OUTER)


def pretended(cell, seconds=None):
    """Two rows of a cell, without running it; the gap is the step size, so the least one is the best."""
    solver = SOLVERS[cell.solver](**dict(cell.parameters))
    by_kind = {f"calls_{kind}": 0 for kind in Calls._fields}
    rows = [{"step": step, "seconds": seconds, "calls": 0, **by_kind, "epochs": 0.0} for step in (0, 1)]
    rows[-1] |= {"value_gap": solver.step_size, "outer_value": 1.0}
    return make_rows(cell, solver, CellResult(rows, Status.out_of_budget, 8))


class Pretence:
    """Replaces `run_task` and `time_cell`, and records their arguments."""

    def __init__(self, broken=()):
        self.broken = set(broken)
        self.swept, self.timed = [], []

    def install(self, monkeypatch):
        monkeypatch.setattr("bilevel.bench.execute.run_task", self.run_task)
        monkeypatch.setattr("bilevel.bench.execute.time_cell", self.time_cell)
        return self

    def run_task(self, task, *, seeds_together=False):
        self.swept.append(task)
        if (task.cells[0].solver, task.cells[0].seed) in self.broken:
            raise RuntimeError(f"no {task.cells[0].solver} today")
        return list(itertools.chain.from_iterable(pretended(cell) for cell in task.cells))

    def time_cell(self, cell):
        self.timed.append(cell)
        if (cell.solver, "timing") in self.broken:
            raise RuntimeError("the clock is broken")
        return pretended(cell, seconds=0.5)

    @property
    def cells(self):
        return [cell.id for task in self.swept for cell in task.cells]


class Watcher:
    """Records all calls."""

    def __init__(self):
        self.begun, self.started, self.advanced, self.failures = [], [], [], []

    def begin(self, phase, done, total):
        self.begun.append((phase, done, total))

    def start(self, title):
        self.started.append(title)

    def advance(self, n_cells, title, values):
        self.advanced.append((n_cells, title, values))

    def failed(self, title, error):
        self.failures.append((title, error))


def table(store, phase=None):
    """The rows of a store in an order of their own, without what may differ between two runs."""
    frame = store.read(phase).drop(columns=UNLIKE)
    return frame.sort_values(["cell", "step"]).reset_index(drop=True)


def assert_same_table(found, expected, rtol=0.0):
    assert list(found.columns) == list(expected.columns)
    for name in expected.columns:
        if expected[name].dtype == np.float64:
            np.testing.assert_allclose(found[name], expected[name], rtol=rtol, err_msg=name)
        else:
            assert found[name].astype(object).where(found[name].notna(), None).tolist() == (
                expected[name].astype(object).where(expected[name].notna(), None).tolist()
            ), name

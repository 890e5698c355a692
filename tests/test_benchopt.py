"""The adapter for benchopt: curves of its command equal those of `bilevel.engine.run`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import bilevel

pytestmark = pytest.mark.slow

ADAPTER = Path(__file__).parents[1] / "examples" / "benchopt"
PROBLEM = {"n_inner": 60, "n_outer": 40, "dim_inner": 5, "dim_outer": 3}
STRETCH, TOO_LONG = 10, 5000.0


def by_name(name, parameters):
    return f"{name}[{','.join(f'{key}={value}' for key, value in parameters.items())}]"


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory):
    """Return output and table of the command, run in a copy with its own home and without a compilation cache."""
    folder = tmp_path_factory.mktemp("benchopt")
    shutil.copytree(ADAPTER, folder / "adapter", ignore=shutil.ignore_patterns("outputs", "__cache__", "__pycache__"))
    out = folder / "out" / "curves.parquet"
    steps = {"step_size": f"[0.1,{TOO_LONG}]", "batch_size": 8, "steps_per_iteration": STRETCH}
    solvers = [by_name("stochastic", {"algorithm": "[SRBA,SABA]"} | steps), by_name("deterministic", {})]
    command = [sys.executable, "-m", "benchopt", "run", folder / "adapter", "--max-runs", "3", "--n-repetitions", "2"]
    command += ["--no-plot", "--no-display", "--seed", "7", "--output", out, "-d", "ijcnn1"]
    command += ["-d", by_name("quadratic", PROBLEM), *(part for name in solvers for part in ("-s", name))]
    nowhere = {name: str(folder) for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "BILEVEL_CACHE")}
    unwanted = ("JAX_COMPILATION_CACHE_DIR", "BILEVEL_DATA")
    environment = {name: value for name, value in os.environ.items() if name not in unwanted} | nowhere
    run = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=110, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout, pd.read_parquet(out)


def rerun(rows):
    """Return the history of the same solver by `bilevel.engine.run` at the steps of the rows."""
    problem = bilevel.problems.quadratic(**PROBLEM, common_linear=0.5, dtype="float32")
    first = rows.iloc[0]
    settings = () if first.file_solver.endswith("deterministic.py") else (first.p_solver_step_size, 1.0, 8)
    solver = bilevel.SOLVERS[first.p_solver_algorithm](*settings)
    last = int(rows.objective_steps.max())
    history = bilevel.run(problem, solver, seed=int(first.objective_seed), max_steps=last, eval_every=1).history
    return {name: column[rows.objective_steps] for name, column in history.items()}


def curves(table):
    return dict(list(table.groupby(["p_solver_algorithm", "idx_rep"])))


def test_curves_are_those_of_run(benchmark):
    found = curves(benchmark[1])
    assert set(found) == {(name, rep) for name in ("SRBA", "SABA", "Exact", "HOAG") for rep in (0, 1)}
    for rows in found.values():
        history = rerun(rows)
        stretch = 1 if rows.p_solver_algorithm.iloc[0] in ("Exact", "HOAG") else STRETCH
        assert rows.objective_steps.tolist() == [0, stretch, 2 * stretch, 3 * stretch]
        assert rows.objective_calls.tolist() == history["calls"].tolist()
        np.testing.assert_allclose(rows.objective_value, history["value"], rtol=1e-9)
        np.testing.assert_allclose(rows.objective_hypergrad_norm_sq, history["hypergrad_norm_sq"], rtol=1e-9)


def test_repetitions_have_different_seeds(benchmark):
    found = curves(benchmark[1])
    first, second = found["SRBA", 0], found["SRBA", 1]
    assert first.objective_seed.iloc[0] != second.objective_seed.iloc[0]
    assert first.objective_value.iloc[0] == second.objective_value.iloc[0]
    assert first.objective_value.iloc[-1] != second.objective_value.iloc[-1]


def test_the_clock_excludes_compilation(benchmark):
    # Without a cache, SRBA or SABA take a second or two to compile; thirty steps take a few milliseconds.
    for name in ("SRBA", "SABA"):
        seconds = curves(benchmark[1])[name, 0].time.to_numpy()
        assert np.all(np.diff(seconds) > 0) and seconds[-1] < 0.3


def test_a_diverging_solver_is_reported(benchmark):
    printed, table = benchmark
    assert TOO_LONG not in table.p_solver_step_size.tolist()
    assert "diverged" in printed


def test_missing_data_are_skipped(benchmark):
    printed, table = benchmark
    assert "name its folder in BILEVEL_DATA" in printed
    assert not table.dataset_name.str.startswith("ijcnn1").any()

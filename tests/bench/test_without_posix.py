"""Systems without signals for threads, `fcntl` and `os.fork`, such as Windows."""

import os
import signal
import subprocess
import sys
import time

import pytest

from bilevel.cli import terminal
from tests.bench import tiny
from tests.bench.test_store import ROOT

# Imported by every process before anything else.
WITHOUT = """
import os, signal, sys
for module, name in ((signal, "pthread_sigmask"), (signal, "pthread_kill"), (os, "fork")):
    if hasattr(module, name):
        delattr(module, name)
sys.modules["fcntl"] = None
"""
SCRIPT = """
import signal, sys
import bilevel

if __name__ == "__main__":
    assert not hasattr(signal, "pthread_sigmask")
    config, folder = sys.argv[1:]
    for n_files in (2, 2):
        store = bilevel.benchmark(config, f"{folder}/store", jobs=2)
        assert len([*store.folder.glob("*.parquet")]) == n_files and store.read()["final"].sum() == 4
    problem = bilevel.problems.quadratic(64, 32, 5, 3)
    run = bilevel.run(problem, bilevel.SOBA(batch_size=8), max_steps=20, checkpoint=f"{folder}/checkpoints")
    run.save(f"{folder}/run.npz")
    for saved in ("run.npz", "checkpoints"):
        assert bilevel.resume(f"{folder}/{saved}", problem, max_steps=40).history["step"][-1] == 40
"""


FIT = """
import os, signal, sys
import numpy as np
from sklearn.model_selection import cross_val_score
from bilevel.estimators import BilevelLogisticRegression, BilevelRidge, DataCleaningClassifier

if __name__ == "__main__":
    assert not hasattr(signal, "pthread_sigmask") and not hasattr(os, "fork") and sys.modules["fcntl"] is None
    rng = np.random.default_rng(0)
    X = rng.standard_normal((120, 6))
    target = X[:, 0] - X[:, 1] + 0.1 * rng.standard_normal(120)
    ridge = BilevelRidge(groups=[0, 0, 1, 1, 1, 1], random_state=0)
    assert cross_val_score(ridge, X, target, cv=3, n_jobs=2).min() > 0.9
    for estimator in (BilevelLogisticRegression, DataCleaningClassifier):
        assert estimator(random_state=0).fit(X, target > 0).score(X, target > 0) > 0.9
"""


def run_without_posix(folder, script, *arguments):
    (folder / "sitecustomize.py").write_text(WITHOUT)
    (folder / "script.py").write_text(script)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    command = [sys.executable, folder / "script.py", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_estimators_are_fitted_in_two_jobs_without_posix(tmp_path):
    run_without_posix(tmp_path, FIT)


@pytest.mark.slow
def test_a_benchmark_with_two_jobs_and_a_saved_run_need_no_posix(tmp_path):
    config = tiny.write(tmp_path, tiny.HEAD + tiny.BUDGET + tiny.SOBA)
    run_without_posix(tmp_path, SCRIPT, config, tmp_path)


def test_a_stop_is_repeated_without_signals_for_threads(monkeypatch):
    monkeypatch.delattr(signal, "pthread_kill")
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        terminal._stop_main_thread()
        time.sleep(1)

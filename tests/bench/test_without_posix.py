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


@pytest.mark.slow
def test_a_benchmark_with_two_jobs_and_a_saved_run_need_no_posix(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    (tmp_path / "script.py").write_text(SCRIPT)
    config = tiny.write(tmp_path, tiny.HEAD + tiny.BUDGET + tiny.SOBA)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, tmp_path / "script.py", config, tmp_path]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_stop_is_repeated_without_signals_for_threads(monkeypatch):
    monkeypatch.delattr(signal, "pthread_kill")
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        terminal._stop_main_thread()
        time.sleep(1)

"""The command line in processes of its own, on an experiment of several tasks of a fraction of a second."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from bilevel.bench.store import Store

ROOT = Path(__file__).parents[2]
CONFIG = """
name = "steady"
metric = "value_gap"
seeds = 3
[problem]
name = "quadratic"
n_inner = 2048
n_outer = 512
dim_inner = 8
dim_outer = 4
[budget]
epochs = 400
seconds = 0.1
[[solvers]]
name = "SOBA"
batch_size = 8
step_size = [0.05, 0.02]
[[solvers]]
name = "SRBA"
batch_size = 8
step_size = [0.05, 0.02]
period = [100, 200]
"""
N_TASKS, N_TIMED = 9, 6
PATIENCE = 240


def environment(cache):
    """Programs compiled once serve all processes."""
    return os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "COLUMNS": "200",
    }


def start(cache, *arguments):
    # What a shell runs in the background ignores Ctrl-C, and hands that down.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return subprocess.Popen(
        [sys.executable, "-m", "bilevel.cli", *map(str, arguments)],
        cwd=ROOT,
        env=environment(cache),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process):
    """What it said, once it has ended."""
    try:
        out, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert "Traceback" not in out + err, err
    return out + err


def wait_for(condition, process=None):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "out of patience"
        time.sleep(0.01)


def n_files(folder):
    return len(list(Path(folder).glob("[!._]*.parquet")))


def completed(cache, config, folder, *options):
    """A store that a command filled without being disturbed."""
    process = start(cache, "run", config, "--store", folder, *options)
    said = end(process)
    assert process.returncode == 0, said
    return Store(folder)

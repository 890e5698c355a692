"""A sweep of a few seconds, commands in sessions of their own, and what the store must contain in the end."""

import atexit
import fcntl
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

from bilevel.bench.store import Store
from tests.bench.tiny import assert_same_table, table

ROOT = Path(__file__).parents[2]
FOLDER = "BILEVEL_CAMPAIGN_FOLDER"  # environment variable: folder shared by all processes
PATIENCE = 300.0  # seconds
CONFIG = """
name = "steady"
metric = "value_gap"
seeds = 3
[problem]
name = "quadratic"
n_inner = 256
n_outer = 64
dim_inner = 5
dim_outer = 3
[budget]
epochs = 40
seconds = 0.05
[[solvers]]
name = "SOBA"
batch_size = 8
step_size = [0.05, 0.02]
[[solvers]]
name = "SRBA"
batch_size = 8
step_size = [0.05, 0.02]
period = [10, 20]
"""


@functools.cache
def folder():
    """Return the folder that all tests of this process share, which also caches compiled programs."""
    if FOLDER in os.environ:
        return Path(os.environ[FOLDER])
    made = Path(tempfile.mkdtemp(prefix="campaign-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def new_folder(name):
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=folder()))


@functools.cache
def config():
    path = folder() / "steady.toml"
    path.write_text(CONFIG)
    return path


def environment(**changes):
    cache = {"JAX_COMPILATION_CACHE_DIR": str(folder() / "programs")}
    fixed = {"COLUMNS": "200", "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu", FOLDER: str(folder())}
    return dict(os.environ) | cache | fixed | changes


class Process:
    """A process in a session of its own, so that its descendants can be listed."""

    def __init__(self, *words, limits=(), **changes):
        # Background jobs of a shell ignore Ctrl-C, and their children inherit that.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.output = Path(tempfile.mkstemp(dir=folder(), suffix=".txt")[1])
        with self.output.open("wb") as out:
            options = {"cwd": ROOT, "env": environment(**changes), "stdout": out, "stderr": subprocess.STDOUT}
            self.popen = subprocess.Popen(
                [*limits, sys.executable, *map(str, words)], start_new_session=True, **options
            )
        signal.signal(signal.SIGINT, before)
        atexit.register(self.kill_all)

    @property
    def pid(self):
        return self.popen.pid

    def others(self):
        """Return the running processes of the session other than the first."""
        return [pid for pid in living(self.pid) if pid != self.pid]

    def end(self, code=0):
        """Wait until the process ends with this code and without leaving processes behind; return its output."""
        try:
            self.popen.wait(timeout=PATIENCE)
            deadline = time.monotonic() + 30.0
            while (left := self.others()) and time.monotonic() < deadline:
                time.sleep(0.05)
        finally:
            self.kill_all()
        output = self.output.read_text(errors="replace")
        assert code is None or self.popen.returncode == code, f"exit code {self.popen.returncode}: {output[-2000:]}"
        assert "Traceback" not in output, output[-2000:]
        assert not left, f"processes {left} are still running: {output[-2000:]}"
        return output

    def kill_all(self):
        for pid in living(self.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.popen.wait()
        atexit.unregister(self.kill_all)


def living(session):
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] not in "ZX":
            found.append(int(entry.parent.name))
    return found


def command(*words, **changes):
    """Start a command of `bilevel`."""
    return Process("-m", "bilevel.cli", *words, **changes)


def start_run(store, *options, **changes):
    return command("run", config(), "--store", store, *options, **changes)


@functools.cache
def undisturbed():
    """Return the store of an undisturbed run and its seconds. The first call runs it."""
    store, seconds = folder() / "undisturbed", folder() / "undisturbed.seconds"
    with (folder() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not seconds.exists():
            start_run(folder() / "first").end()  # compiles
            began = time.monotonic()
            start_run(store).end()
            seconds.write_text(str(time.monotonic() - began))
    return Store(store), float(seconds.read_text())


def read(folder):
    """Return the rows of a store; a warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return Store(folder).read()


def check_whole(folder):
    """Check that each cell is complete or absent."""
    frame = read(folder)
    assert frame.groupby("cell")["final"].sum().eq(1).all(), "a cell is incomplete"


def check_finished(folder, phases=("sweep", "timing")):
    """Check that the store equals that of an undisturbed run, cell by cell, and that its folder has no other file."""
    check_whole(folder)
    found, expected = Store(folder), undisturbed()[0]
    assert_same_table(table(found, "sweep"), table(expected, "sweep"))
    if "timing" in phases:  # the number of timed steps depends on the clock
        assert _ends(found) == _ends(expected), "other cells were timed"
    expected_names = {"HOW-TO-READ.txt", "_steady.toml", "_steady-sweep.cells", "_steady-timing.cells"}
    stray = {path.name for path in Path(folder).iterdir() if path.suffix != ".parquet"} - expected_names
    assert not stray, f"stray files: {stray}"


def _ends(store):
    timed = store.read("timing")
    return dict(zip(timed["cell"], timed["status"], strict=True))


def finish(folder, *options, **changes):
    """Run the missing cells and check the store."""
    start_run(folder, *options, **changes).end()
    check_finished(folder)

"""A store survives SIGKILL at random moments, and several writers at the same time.

After each kill the store holds complete cells only. The same command is then run again until it ends by itself.
"""

import os
import signal
import time

import pytest

from tests.bench.cluster import Cluster
from tests.faults import repeats, rng, sweeps

pytestmark = pytest.mark.slow
KILLS_PER_STORE = 4


def wait_for(condition, process):
    deadline = time.monotonic() + sweeps.PATIENCE
    while not condition() and process.popen.poll() is None:
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def sleep(random, shortest, longest):
    """Sleep for a random share of the time that an undisturbed run takes."""
    time.sleep(random.uniform(shortest, longest) * sweeps.undisturbed()[1])


def stores(name, n_kills):
    """Yield new folders, each with the number of kills in it."""
    for first in range(0, n_kills, KILLS_PER_STORE):
        yield sweeps.new_folder(name) / "store", min(KILLS_PER_STORE, n_kills - first)


def test_a_killed_sweep_is_completed_by_the_same_command():
    random = rng()
    for folder, n_kills in stores("killed", repeats(1, 60)):
        for _ in range(n_kills):
            process = sweeps.start_run(folder)
            sleep(random, 0.2, 0.9)
            process.kill_all()
            sweeps.check_whole(folder)
        sweeps.finish(folder)


def loky_workers(process):
    """Return the process ids of the loky workers that a command has started."""
    found = []
    for pid in process.others():
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                words = file.read()
        except OSError:
            continue
        if b"loky" in words and b"resource_tracker" not in words:
            found.append(pid)
    return found


def kill_one_worker(random, process):
    wait_for(lambda: len(loky_workers(process)) >= 2, process)
    sleep(random, 0.0, 0.7)
    for pid in random.sample(victims := loky_workers(process), len(victims)):
        try:
            return os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def test_after_a_killed_joblib_worker_the_command_says_how_to_resume():
    random = rng()
    for folder, n_kills in stores("jobs", repeats(1, 16)):
        for _ in range(n_kills):
            process = sweeps.start_run(folder, "--jobs", 2)
            kill_one_worker(random, process)
            output = process.end(code=None)
            if process.popen.returncode != 0:  # 0 if the sweep ended before the kill
                assert process.popen.returncode == 1, output
                assert "To try again: bilevel run" in output and "TerminatedWorkerError" in output, output
            sweeps.check_whole(folder)
        sweeps.finish(folder)


def start_on(port, store):
    """Start a run on a cluster and wait until it has begun."""
    process = sweeps.start_run(store, "--dask", f"tcp://127.0.0.1:{port}")
    wait_for((store / "_steady.toml").exists, process)
    return process


def test_a_run_continues_after_a_killed_dask_worker():
    random, scratch = rng(), sweeps.new_folder("dask")
    with Cluster(sweeps.environment(), scratch) as cluster:
        for _ in range(repeats(1, 12)):
            store = sweeps.new_folder("dask") / "store"
            cluster.fill(2)
            process = start_on(cluster.port, store)
            sleep(random, 0.0, 0.7)
            cluster.workers[0].kill()
            process.end()
            sweeps.check_finished(store)


def test_a_killed_dask_scheduler_is_reported_and_the_sweep_ends_without_it():
    random = rng()
    for store, n_kills in stores("dask", repeats(1, 12)):
        for _ in range(n_kills):
            with Cluster(sweeps.environment(), store.parent / "scratch") as cluster:
                cluster.fill(1)
                process = start_on(cluster.port, store)
                sleep(random, 0.0, 0.7)
                cluster.scheduler.kill()
                output = process.end(code=None)
            reported = "To try again" in output or "no Dask scheduler" in output
            assert process.popen.returncode == 0 or (process.popen.returncode in (1, 2) and reported), output
            sweeps.check_whole(store)
        sweeps.finish(store)


def start_writers(n_writers, folder, random):
    processes = []
    for _ in range(n_writers):
        processes.append(sweeps.start_run(folder))
        time.sleep(random.uniform(0.0, 0.3))
    return processes


@pytest.mark.parametrize("n_killed", [0, 1])
def test_each_cell_of_three_writers_is_there_once(n_killed):
    random = rng()
    for _ in range(repeats(1, 6)):
        folder = sweeps.new_folder("writers")
        processes = start_writers(3, folder, random)
        if n_killed:
            sleep(random, 0.5, 1.5)
            processes.pop(0).kill_all()
        for process in processes:
            process.end()
        sweeps.finish(folder)  # also removes what a killed writer was writing

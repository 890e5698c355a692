"""Processes that are killed.

The signal is SIGKILL, at random moments. After each kill the store holds whole cells alone. The same command is then
given again, until it ends by itself.
"""

import os
import random
import signal
import time

from benchmarks.campaign import workshop
from benchmarks.campaign.table import Counter
from tests.bench.cluster import Cluster


def rows(seed, quick):
    rng = random.Random(seed)
    counts = (1, 1, 1, 1) if quick else (60, 16, 16, 12)
    kinds = (kill_command, kill_local_worker, kill_dask_worker, kill_scheduler)
    return [kind(rng, count) for kind, count in zip(kinds, counts, strict=True)]


def kill_command(rng, n_kills):
    """The only process of a sweep, several times in one store."""
    counter = Counter("`kill -9`, one process", "`bilevel run`, up to five times in a store")
    most = workshop.undisturbed()[1]
    while (left := n_kills - counter.survived - counter.lost) > 0:
        folder, kills = workshop.new_folder("killed"), 0
        with counter.case(f"{folder.name}", weight=min(left, 5)):
            while kills < min(left, 5):
                process = workshop.start_run(folder)
                time.sleep(rng.uniform(0.2, 1.0) * most)
                if process.popen.poll() is not None:  # it was faster: what it did is checked, and it starts anew
                    process.end()
                    workshop.check_finished(folder)
                    folder = workshop.new_folder("killed")
                    continue
                process.kill_all()
                kills += 1
                workshop.check_whole(folder)
            workshop.finish(folder)
    return counter.row()


def kill_local_worker(rng, n_kills):
    """One of two joblib workers, several times in one store."""
    counter = Counter("`kill -9`, a joblib worker", "one of two (`--jobs 2`), up to four times in a store")
    while (left := n_kills - counter.survived - counter.lost) > 0:
        folder, kills = workshop.new_folder("jobs"), 0
        with counter.case(folder.name, weight=min(left, 4)):
            while kills < min(left, 4):
                process = workshop.start_run(folder, "--jobs", 2)
                kills += kill_one(rng, process)
                said = process.end(code=None)
                assert process.popen.returncode in (0, 1), said
                if process.popen.returncode == 0:
                    workshop.check_finished(folder)
                    folder = workshop.new_folder("jobs")
                else:
                    assert "To try again: bilevel run" in said and "TerminatedWorkerError" in said, said
                    workshop.check_whole(folder)
            workshop.finish(folder)
    return counter.row()


def kill_one(rng, process):
    """Kill a loky worker and return 1, or 0 where they have all ended."""
    wait_for(lambda: len(workers(process)) >= 2, process)
    time.sleep(rng.uniform(0.0, 0.7) * workshop.undisturbed()[1])
    for pid in rng.sample(victims := workers(process), len(victims)):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        return 1
    return 0


def workers(process):
    """The loky workers that a command has started."""
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


def wait_for(condition, process):
    deadline = time.monotonic() + workshop.PATIENCE
    while not condition() and process.popen.poll() is None:
        assert time.monotonic() < deadline, "out of patience"
        time.sleep(0.01)


def start_on(port, store):
    """Start a run on a cluster, and wait until it has begun."""
    process = workshop.start_run(store, "--dask", f"tcp://127.0.0.1:{port}")
    wait_for((store / "_steady.toml").exists, process)
    return process


def kill_dask_worker(rng, n_kills):
    """One of two Dask workers; the other goes on, and a new one comes."""
    counter = Counter("`kill -9`, a Dask worker", "one of two; the command goes on by itself")
    scratch = workshop.new_folder("dask")
    with Cluster(workshop.environment(), scratch) as cluster:
        for _ in range(n_kills):
            store = workshop.new_folder("dask") / "store"
            with counter.case(store.parent.name):
                cluster.fill(2)
                process = start_on(cluster.port, store)
                time.sleep(rng.uniform(0.0, 0.7) * workshop.undisturbed()[1])
                cluster.workers[0].kill()
                process.end()
                workshop.check_finished(store)
    return counter.row()


def kill_scheduler(rng, n_kills):
    """The scheduler of a Dask cluster, several times in one store; the sweep is finished without it."""
    what = "up to four times in a store; the command ends by itself and says so; then without Dask"
    counter = Counter("`kill -9`, the Dask scheduler", what)
    while (left := n_kills - counter.survived - counter.lost) > 0:
        store = workshop.new_folder("dask") / "store"
        with counter.case(store.parent.name, weight=min(left, 4)):
            for _ in range(min(left, 4)):
                with Cluster(workshop.environment(), store.parent / "scratch") as cluster:
                    cluster.fill(1)
                    process = start_on(cluster.port, store)
                    time.sleep(rng.uniform(0.0, 0.7) * workshop.undisturbed()[1])
                    cluster.scheduler.kill()
                    said = process.end(code=None)
                told = "To try again" in said or "no Dask scheduler" in said
                assert process.popen.returncode == 0 or (process.popen.returncode in (1, 2) and told), said
                workshop.check_whole(store)
            workshop.finish(store)
    return counter.row()

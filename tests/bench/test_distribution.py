"""A sweep on a Dask cluster gives the rows of a sweep on one machine, also where a worker dies."""

import contextlib
import os
import signal
import socket
import subprocess
import sys

import pytest

from tests.bench import commands, tiny

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def server(cache, module, *arguments):
    """A process of the cluster, which does not outlive the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", f"distributed.cli.{module}", *map(str, arguments)],
        cwd=commands.ROOT,
        env=commands.environment(cache),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def is_open(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def cluster(cache, folder, n_workers=2):
    """The port of a scheduler, and its workers."""
    port = free_port()
    local = ("--host", "127.0.0.1", "--no-dashboard")
    with contextlib.ExitStack() as stack:
        stack.enter_context(server(cache, "dask_scheduler", *local, "--port", port))
        commands.wait_for(lambda: is_open(port))
        worker = (f"tcp://127.0.0.1:{port}", *local, "--no-nanny", "--nthreads", 1, "--local-directory", folder)
        yield port, [stack.enter_context(server(cache, "dask_worker", *worker)) for _ in range(n_workers)]
    assert not is_open(port), "no server stays behind"


def test_a_worker_that_dies_costs_nothing_but_time(tmp_path):
    cache, config = tmp_path / "cache", tiny.write(tmp_path, commands.CONFIG)
    local = commands.completed(cache, config, tmp_path / "local")
    folder = tmp_path / "far"
    with cluster(cache, tmp_path / "dask") as (port, workers):
        address = f"tcp://127.0.0.1:{port}"
        process = commands.start(cache, "run", config, "--store", folder, "--dask", address)
        commands.wait_for(lambda: commands.n_files(folder) >= 2, process)
        os.kill(workers[0].pid, signal.SIGKILL)
        done_before = commands.n_files(folder)
        said = commands.end(process)
        assert workers[0].wait(timeout=20) == -signal.SIGKILL
    assert done_before < commands.N_TASKS, "or it died too late"
    assert process.returncode == 0, said
    far = commands.Store(folder)
    tiny.assert_same_table(tiny.table(far, "sweep"), tiny.table(local, "sweep"))
    assert set(far.read("timing")["cell"]) == set(local.read("timing")["cell"])


def test_an_address_where_nobody_listens_is_named(tmp_path):
    address = f"tcp://127.0.0.1:{free_port()}"
    config = tiny.write(tmp_path, commands.CONFIG)
    process = commands.start(tmp_path, "run", config, "--store", tmp_path / "store", "--dask", address)
    said = commands.end(process)
    assert process.returncode == 2
    assert f"no Dask scheduler answers at `{address}`" in said
    assert commands.n_files(tmp_path / "store") == 0

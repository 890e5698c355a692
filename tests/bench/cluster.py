"""A Dask cluster on the loopback interface."""

import socket
import subprocess
import sys
import time
from pathlib import Path

from tests import listening

ROOT = Path(__file__).parents[2]
PATIENCE = 240


def wait_for(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "out of patience"
        time.sleep(0.01)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def is_open(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Cluster:
    """A Dask scheduler on this machine alone, and workers; none outlives the block."""

    def __init__(self, environment, folder):
        self.environment, self.folder, self.port, self.workers = environment, folder, free_port(), []

    def __enter__(self):
        self.scheduler = self._serve("dask_scheduler", "--port", self.port)
        wait_for(lambda: is_open(self.port))
        return self

    def fill(self, n_workers):
        """Start workers to replace those that died."""
        self.workers = [worker for worker in self.workers if worker.poll() is None]
        options = "--no-nanny", "--nthreads", 1, "--local-directory", self.folder
        while len(self.workers) < n_workers:
            self.workers.append(self._serve("dask_worker", f"tcp://127.0.0.1:{self.port}", *options))
        if self.scheduler.poll() is None:
            listening.assert_loopback(self.scheduler.pid)

    def _serve(self, module, *arguments):
        # Without a dashboard there is still its server, which would listen at every address.
        local = ("--host", "127.0.0.1", "--dashboard-address", "127.0.0.1:0", "--no-dashboard")
        return subprocess.Popen(
            [sys.executable, "-m", f"distributed.cli.{module}", *map(str, arguments), *local],
            cwd=ROOT,
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def __exit__(self, *_):
        for process in (*self.workers, self.scheduler):
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        assert not is_open(self.port), "no server stays behind"

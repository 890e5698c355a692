"""A sweep on a Dask cluster: messages if a scheduler or its workers are missing or stop.

``tests/faults/test_kills.py`` compares the store with that of an undisturbed run, cell by cell.
"""

import logging
import os
import re
import signal
import time

import distributed
import pytest
from typer.testing import CliRunner

from bilevel.bench import distribution, execute
from bilevel.bench.store import Store
from bilevel.cli.app import app
from tests.bench import cluster, tiny


def test_an_address_without_a_scheduler_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(distribution, "_PATIENCE", 1)
    address, store = f"tcp://127.0.0.1:{cluster.free_port()}", tmp_path / "store"
    config = tiny.write(tmp_path, tiny.HEAD + tiny.BUDGET + tiny.SOBA)
    words = ["run", config, "--store", store, "--dask", address]
    done = CliRunner().invoke(app, list(map(str, words)), env={"COLUMNS": "200"})
    assert done.exit_code == 2 and f"no Dask scheduler answers at `{address}`" in done.output
    assert not list(store.glob("*.parquet"))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (TimeoutError("only 0 came"), "the Dask scheduler at `tcp://here` has no workers: only 0 came"),
        (ConnectionResetError("reset"), "no Dask scheduler answers at `tcp://here` any more: reset"),
    ],
)
def test_a_lost_scheduler_and_one_without_workers_have_different_messages(error, said, monkeypatch):
    class Client:
        def __init__(self, address, timeout):
            pass

        def wait_for_workers(self, n, timeout):
            raise error

        def close(self):
            pass

    monkeypatch.setattr("distributed.Client", Client)
    with pytest.raises(ConnectionError) as caught:
        distribution._connect("tcp://here")
    assert str(caught.value) == said


def test_the_loggers_of_dask_keep_their_levels(monkeypatch):
    monkeypatch.setattr(distribution, "_PATIENCE", 0.2)
    loggers = [logging.getLogger(name) for name in ("distributed", "distributed.client", "distributed.core")]
    monkeypatch.setattr(loggers[1], "level", logging.DEBUG)
    before = [(one.level, one.filters, one.handlers, one.disabled) for one in loggers]
    with pytest.raises(ConnectionError, match="no Dask scheduler answers"):
        distribution._connect(f"tcp://127.0.0.1:{cluster.free_port()}")
    assert [(one.level, one.filters, one.handlers, one.disabled) for one in loggers] == before


@pytest.mark.slow
def test_lost_workers_and_schedulers_are_reported(tmp_path, monkeypatch):
    died, said = tmp_path / "died", []

    def in_worker(task, _):
        if not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return task, [], f"in {os.getpid()}"

    def failures():
        watcher = tiny.Watcher()
        assert execute.execute(tiny.experiment(tmp_path), Store(tmp_path / "store"), watcher, where=where) == 2
        return {text for _, text in watcher.failures}

    monkeypatch.setattr(execute, "_in_worker", in_worker)
    monkeypatch.setattr(distribution, "_PATIENCE", 2)
    with cluster.Cluster(os.environ, tmp_path / "dask") as servers:
        where = distribution.Where(dask=f"tcp://127.0.0.1:{servers.port}")
        monkeypatch.setattr(distribution.warnings, "warn", lambda text, **_: (said.append(text), servers.fill(1)))
        with pytest.raises(ConnectionError, match="has no workers"):
            failures()
        servers.fill(1)
        monkeypatch.setattr(distribution, "_PATIENCE", 10)
        assert failures() == {f"in {servers.workers[0].pid}"}, "a cluster of one worker does the work"
        (text,) = said
        assert text.startswith(f"the Dask cluster at `{where.dask}` has no workers left; start one. 2 tasks wait;")
        scheduler = servers.scheduler.pid
        monkeypatch.setattr(execute, "_in_worker", lambda *_: os.kill(scheduler, signal.SIGKILL) or time.sleep(3))
        assert all("scheduler-connection-lost" in text for text in failures())
    assert not list((tmp_path / "store").glob("[!_]*"))


@pytest.mark.slow
def test_a_stopped_worker_is_named_and_continues(tmp_path, monkeypatch):
    said = []

    def in_worker(task, _):
        if not (tmp_path / "stopped").exists():
            (tmp_path / "stopped").touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        return task, [], f"in {os.getpid()}"

    monkeypatch.setattr(execute, "_in_worker", in_worker)
    monkeypatch.setattr(distribution, "_PATIENCE", 3)
    with cluster.Cluster(os.environ, tmp_path / "dask") as servers:
        where = distribution.Where(dask=f"tcp://127.0.0.1:{servers.port}")
        servers.fill(1)

        def let_go(text, **_):
            said.append(text)
            os.kill(servers.workers[0].pid, signal.SIGCONT)

        monkeypatch.setattr(distribution.warnings, "warn", let_go)
        cluster.wait_for(lambda: is_ready(where.dask))
        watcher = tiny.Watcher()
        assert execute.execute(tiny.experiment(tmp_path), Store(tmp_path / "store"), watcher, where=where) == 2
    (text,) = said
    assert text.startswith(
        f"the Dask cluster at `{where.dask}` has not heard of 1 of its 1 workers for 3 seconds (tcp://"
    )
    assert "if they were stopped, continue or end them" in text and "2 tasks wait; Ctrl-C ends the waiting" in text


def is_ready(address):
    with distributed.Client(address) as client:
        return bool(client.ncores())


@pytest.mark.parametrize(
    ("signs", "seen", "said"),
    [
        ({"a": 2.0, "b": 9.0}, {"a": 1.0, "b": 8.0}, ""),
        ({"a": 2.0, "b": 9.0}, None, ""),
        ({"a": 2.0}, {"b": 2.0}, ""),
        ({"a": 2.0, "b": 9.0}, {"a": 2.0, "b": 8.0}, r"not heard of 1 of its 2 workers for 7 seconds \(a\); if they"),
        (dict.fromkeys("abcd", 1.0), dict.fromkeys("abcd", 1.0), r"4 of its 4 workers for 7 seconds \(a, b, c, …\)"),
        ({}, {"a": 1.0}, "has no workers left; start one"),
        (None, {"a": 1.0}, "does not answer"),
    ],
)
def test_workers_are_silent_if_their_last_sign_is_the_same_at_two_looks(signs, seen, said):
    found = distribution._describe_silence(signs, seen, 7)
    assert re.search(said, found) and bool(found) == bool(said)

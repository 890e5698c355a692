"""A sweep on a Dask cluster: what is said where a scheduler or its workers are not there, or go.

That the store is then the same, cell by cell, is shown by the campaign of faults.
"""

import logging
import os
import signal
import time

import pytest
from typer.testing import CliRunner

from bilevel.bench import execute
from bilevel.bench.store import Store
from bilevel.cli.app import app
from tests.bench import cluster, tiny


def test_an_address_where_nobody_listens_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(execute, "_PATIENCE", 1)
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
def test_a_scheduler_that_goes_before_its_workers_are_asked_for_is_told_from_one_without(error, said, monkeypatch):
    class Client:
        def __init__(self, address, timeout):
            pass

        def wait_for_workers(self, n, timeout):
            raise error

        def close(self):
            pass

    monkeypatch.setattr("distributed.Client", Client)
    with pytest.raises(ConnectionError) as caught:
        execute._connect("tcp://here")
    assert str(caught.value) == said


def test_the_loggers_of_dask_keep_their_levels(monkeypatch):
    monkeypatch.setattr(execute, "_PATIENCE", 0.2)
    pytest.importorskip("distributed")  # its import sets the levels
    loggers = [logging.getLogger(name) for name in ("distributed", "distributed.client", "distributed.core")]
    monkeypatch.setattr(loggers[1], "level", logging.DEBUG)
    before = [(one.level, one.filters, one.handlers, one.disabled) for one in loggers]
    with pytest.raises(ConnectionError, match="no Dask scheduler answers"):
        execute._connect(f"tcp://127.0.0.1:{cluster.free_port()}")
    assert [(one.level, one.filters, one.handlers, one.disabled) for one in loggers] == before


@pytest.mark.slow
def test_of_lost_workers_and_schedulers_it_is_told_in_sentences(tmp_path, monkeypatch):
    died, said = tmp_path / "died", []

    def in_worker(place, task, _):
        if not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return place, (task, [], f"in {os.getpid()}")

    def failures():
        watcher = tiny.Watcher()
        assert execute.execute(tiny.experiment(tmp_path), Store(tmp_path / "store"), watcher, where=where) == 2
        return {text for _, text in watcher.failures}

    monkeypatch.setattr(execute, "_in_worker", in_worker)
    monkeypatch.setattr(execute, "_PATIENCE", 2)
    with cluster.Cluster(os.environ, tmp_path / "dask") as servers:
        where = execute.Where(dask=f"tcp://127.0.0.1:{servers.port}")
        monkeypatch.setattr(execute.warnings, "warn", lambda text, **_: (said.append(text), servers.fill(1)))
        with pytest.raises(ConnectionError, match="has no workers"):
            failures()
        servers.fill(1)
        monkeypatch.setattr(execute, "_PATIENCE", 10)
        assert failures() == {f"in {servers.workers[0].pid}"}, "a cluster of one worker does the work"
        (text,) = said
        assert text.startswith(f"the Dask cluster at `{where.dask}` has no workers left; 2 tasks wait until one comes")
        scheduler = servers.scheduler.pid
        monkeypatch.setattr(execute, "_in_worker", lambda *_: os.kill(scheduler, signal.SIGKILL) or time.sleep(3))
        assert all("scheduler-connection-lost" in text for text in failures())
    assert not list((tmp_path / "store").glob("[!_]*"))

import socket

import pytest

from bilevel.datasets import loading
from bilevel.datasets.registry import SETS
from tests.datasets import server as servers
from tests.datasets import tiny


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    known, resolve = {"data.test": "93.184.215.14", "inside.test": "10.20.30.40"}, socket.getaddrinfo
    found = {name: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (place, 0))] for name, place in known.items()}
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **more: found.get(host) or resolve(host, *rest))
    with servers.running() as server:
        monkeypatch.setattr(loading, "_open_session", server.open_session)
        yield server


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Use an empty data folder and an empty cache."""
    data, cache = tmp_path / "data", tmp_path / "cache"
    data.mkdir()
    cache.mkdir()
    monkeypatch.setenv("BILEVEL_DATA", str(data))
    monkeypatch.setenv("BILEVEL_CACHE", str(cache))
    return data, cache


@pytest.fixture
def register(monkeypatch):
    def add(known):
        monkeypatch.setitem(SETS, known.name, known)
        return known

    return add


@pytest.fixture
def served(server, folders, register):
    """Serve the synthetic set with a split, which is in no folder."""
    for name, body in tiny.packed_libsvm().items():
        server.serve(f"/{name}", body)
    return register(tiny.libsvm_set(server.url))

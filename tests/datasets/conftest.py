import pytest

from bilevel.datasets.registry import SETS
from tests.datasets import server as servers
from tests.datasets import tiny


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """Let pooch try again at once."""
    monkeypatch.setattr("pooch.core.time.sleep", lambda seconds: None)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with servers.running() as server:
        yield server


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """An empty data folder and an empty cache, and no other."""
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
    """The made-up set with a split, at the server and in no folder."""
    for name, body in tiny.packed_libsvm().items():
        server.serve(f"/{name}", body)
    return register(tiny.libsvm_set(server.url))

import gc
import signal
from pathlib import Path

import jax
import pytest

from bilevel import _programs

jax.config.update("jax_numpy_dtype_promotion", "strict")

# A shell lets its background jobs ignore Ctrl-C, and so would this process and those that tests start and stop.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_programs.MAX_PROGRAMS = 10**6  # tests share programs across modules; the fixture below frees them

gc.set_threshold(50_000, 20, 50)  # tracing makes many objects that live on; looking through them takes a twentieth

# Files with the longest tests. They come first: a worker that is done takes over the last tests of the other, and at
# the end neither waits long for the other.
_LONG = ("test_audit.py", "test_cpu_loops.py", "test_sharded.py", "test_wheel.py")

_MAPS = Path("/proc/self/maps")


def pytest_addoption(parser):
    parser.addoption("--solver", help="run only the shared tests of this solver")


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: item.path.name not in _LONG)
    if name := config.getoption("solver"):
        chosen = [item for item in items if name in _names(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


def _names(item):
    """The first words of the parameters of a test, such as "SRBA" of the case "SRBA q=5"."""
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return {value.split()[0] for value in parameters if isinstance(value, str) and value.strip()}


@pytest.fixture(autouse=True, scope="module")
def _compiled_programs_are_let_go():
    """Each takes dozens of memory maps, of which a process has 65 530; without any left XLA crashes."""
    yield
    if not _MAPS.exists() or _MAPS.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()

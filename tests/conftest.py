import gc
import signal
from pathlib import Path

import jax
import pytest

from bilevel._core import compilation

jax.config.update("jax_numpy_dtype_promotion", "strict")

# Background jobs of a shell ignore Ctrl-C, and so would this process and the processes that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

compilation.MAX_PROGRAMS = 10**6  # tests share programs across modules; the fixture below frees them

gc.set_threshold(50_000, 20, 50)  # tracing creates many long-lived objects; this saves 5 % of the time

# Files with the longest tests. They run first, so that both workers finish at about the same time.
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
def _compiled_programs_are_freed():
    """Each compiled program takes dozens of the 65 530 memory maps of a process, without which XLA crashes."""
    yield
    if not _MAPS.exists() or _MAPS.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()

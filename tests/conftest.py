from pathlib import Path

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")

_MAPS = Path("/proc/self/maps")


@pytest.fixture(autouse=True, scope="module")
def _compiled_programs_are_let_go():
    """Each takes dozens of memory maps, of which a process has 65 530; without any left XLA crashes."""
    yield
    if not _MAPS.exists() or _MAPS.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()

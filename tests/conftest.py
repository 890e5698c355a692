import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(autouse=True, scope="module")
def _compiled_programs_are_let_go():
    """Each takes dozens of memory maps, of which a process has 65 530; without any left XLA crashes."""
    yield
    jax.clear_caches()

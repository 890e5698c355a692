"""How many threads BLAS has during a fit.

A fit of a small table is many products of small matrices. Threads that share such a product wait for one another longer
than they compute, and much longer where other processes want the processors too.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SMALL = 200_000  # entries of a table
_lock = threading.Lock()
_inside = 0  # fits of small tables that are under way
_limits: Any = None


@contextmanager
def one_thread_if_small(X: Any) -> Iterator[None]:
    """Let BLAS have one thread while small tables are fitted; the last such fit to end restores what was before."""
    if X.shape[0] * X.shape[1] > _SMALL:
        yield
        return
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    from threadpoolctl import threadpool_limits

    global _inside, _limits
    with _lock:
        if _inside == 0:
            _limits = threadpool_limits(1, user_api="blas")
        _inside += 1


def _leave() -> None:
    global _inside
    with _lock:
        _inside -= 1
        if _inside == 0:
            _limits.restore_original_limits()

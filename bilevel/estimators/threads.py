"""Number of BLAS threads during a fit.

A fit of a small table is many products of small matrices. Threads that share such a product wait for one another longer
than they compute, and much longer if other processes use the same processors. BLAS libraries mostly have one limit for
the whole process, which other threads of the process therefore share while the fit runs.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SMALL = 200_000  # entries of a table
_limited = threading.Lock()  # held by the fit that has limited the threads


@contextmanager
def one_thread_if_small(X: Any) -> Iterator[None]:
    """Limit BLAS to one thread while a small table is fitted, and restore the previous limit, also after exceptions.

    Of several fits at a time, only the first one sets the limit, and restores it when it ends: threadpoolctl ignores
    other threads than the one that set a limit. A limit that the user changes during the fit is kept.
    """
    if X.shape[0] * X.shape[1] > _SMALL or not _limited.acquire(blocking=False):
        yield
        return
    try:
        from threadpoolctl import ThreadpoolController

        libraries = ThreadpoolController().select(user_api="blas").lib_controllers
        before = [library.get_num_threads() for library in libraries]
        try:
            for library in libraries:
                library.set_num_threads(1)
            yield
        finally:
            for library, number in zip(libraries, before, strict=True):
                if library.get_num_threads() == 1:
                    library.set_num_threads(number)
                if threading.current_thread() is not threading.main_thread():
                    getattr(library, "clear_controlling_thread", int)()  # so that other threads can set limits again
    finally:
        _limited.release()

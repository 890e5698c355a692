"""How a command is stopped: Ctrl-C and SIGTERM raise KeyboardInterrupt, also where a callback would lose it."""

import signal
import sys
import threading
from typing import Any, NoReturn

_last = int(signal.SIGINT)  # the signal that a stop came by


def install() -> None:
    """Take SIGTERM, by which systems and schedulers stop a job, as Ctrl-C."""
    signal.signal(signal.SIGTERM, _terminate)
    sys.unraisablehook = _stop_again


def exit_code() -> int:
    """Return the exit code of a command that was stopped, as shells expect it."""
    return 128 + _last


def _terminate(number: int, _: Any) -> NoReturn:
    global _last
    _last = number
    raise KeyboardInterrupt


def _stop_again(unraisable: Any) -> None:
    """Stop a moment later where a stop was raised in a callback, as of the garbage collector, which would lose it."""
    if unraisable.exc_type is not KeyboardInterrupt:
        return sys.__unraisablehook__(unraisable)
    # To the main thread, which may sleep in a system call.
    timer = threading.Timer(0.05, signal.pthread_kill, [threading.main_thread().ident, _last])
    timer.daemon = True
    timer.start()

"""Ctrl-C and errors during a run, which end it without losing its results."""

import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from traceback import format_exception_only
from typing import Any

import jax

from bilevel._core.compilation import compiled
from bilevel._core.types import Array, Point
from bilevel.engine.result import RunResult
from bilevel.engine.steps import CompiledSteps, Steps
from bilevel.oracles import Oracles
from bilevel.oracles.host_samples import Reader


class StepError(RuntimeError):
    """A step or an evaluation failed: a loss raised, rows could not be read, or another process was lost.

    Attributes
    ----------
    loss : "inner_loss" or "outer_loss" if one of them raised, else None
    step : the step that was not taken, or after which the run could not be evaluated
    result : the run before that step, with status "failed"; it can be saved and resumed
    """

    def __init__(self, what: str, loss: str | None, step: int, error: Exception, result: RunResult) -> None:
        self.loss, self.step, self.result = loss, step, result
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
        # The text of an error in a compiled program is a traceback, whose last line is the error.
        said = lines[-1] if "Traceback" in str(error) else f"{type(error).__name__}: {lines[0]}"
        rest = "`error.result` contains the steps before: save it, and continue with `bilevel.resume`."
        super().__init__(f"{what.format(step=step, said=said[:300])} {rest}")


class Presses:
    """Counts Ctrl-C: the first press ends a run after its step, and the last allowed one raises KeyboardInterrupt."""

    def __init__(self, limit: int) -> None:
        self.limit, self.handled, self.received = limit, 0, 0

    def any(self) -> bool:
        return self.handled > 0

    def forced(self) -> bool:
        return max(self.handled, self.received) >= self.limit

    def handle(self, *_: Any) -> None:
        self.handled += 1
        if self.forced():
            raise KeyboardInterrupt
        with suppress(OSError):  # not `print`, which a signal may interrupt
            os.write(2, b"\nCtrl-C: the run ends after its present step. Press again to stop at once.\n")


@contextmanager
def counting_interrupts(oracles: Oracles, limit: int = 2) -> Iterator[Presses]:
    """Count presses of Ctrl-C, also while a program waits for rows; below the limit they raise no KeyboardInterrupt.

    Nothing changes if the caller has its own handler of the signal, or outside of the main thread. One of several
    processes cannot end by itself, so there the first press raises.
    """
    presses = Presses(limit if oracles.n_processes == 1 else 1)
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield presses
        return
    signal.signal(signal.SIGINT, presses.handle)
    try:
        with _watching(presses, oracles.readers) if oracles.readers else nullcontext():
            yield presses
    except Exception as error:
        if presses.forced():  # interrupted callbacks make a compiled program raise its own error
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _watching(presses: Presses, readers: list[Reader]) -> Iterator[None]:
    """Stop all readers when the limit is reached."""
    # Python calls signal handlers in the main thread, which cannot run them while a compiled program waits for rows. So
    # a thread listens to the bytes that Python writes as soon as a signal arrives.
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)

    def watch() -> None:
        with receiver:
            while signals := receiver.recv(64):
                if before != -1:  # an event loop uses it too
                    with suppress(OSError):
                        os.write(before, signals)
                presses.received += signals.count(signal.SIGINT)
                if presses.received >= presses.limit:
                    for reader in readers:
                        reader.give_up()

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        sender.close()


def find_failure(steps: Steps, error: Exception) -> tuple[str, str | None] | None:
    """Return what failed, and the loss that raised, if any, and go to the last state before it.

    Return None if no loss, row or process caused the error.

    A compiled program takes many steps at once and repeats bit for bit, so the failing step is found by bisection.
    """
    text = f"{error}\n{''.join(format_exception_only(error))}"
    if any(reader.failure is not None and reader.failure in text for reader in steps.oracles.readers):
        return "the rows of a `HostData` could not be read in step {step} ({said}).", None
    in_program = isinstance(error, jax.errors.JaxRuntimeError) or re.match(r"[A-Z]+(_[A-Z]+)*: ", str(error))
    if steps.oracles.n_processes > 1:  # nothing is tried again, since all processes must run the same programs
        here = f"in process {jax.process_index()} of {steps.oracles.n_processes}"
        hint = "" if "Callback" in text else " Another process has probably failed or ended; see its output."
        return (f"step {{step}} failed {here} ({{said}}).{hint}", None) if in_program else None
    loss, aim = _failing_loss(steps), steps.target
    size = aim - steps.position.step
    compiled = size > 0 and isinstance(steps, CompiledSteps)
    while loss is None and compiled and steps.position.step < aim:
        try:
            steps.advance(min(aim, steps.position.step + size))
        except Exception:
            if size == 1:
                loss = _failing_loss(steps)
                break
            size //= 2
    if loss is not None:
        return f"`{loss}` raised in step {{step}} ({{said}}).", loss
    return ("step {step} failed ({said}).", None) if compiled or in_program else None


def _failing_loss(steps: Steps) -> str | None:
    """Return the loss that raises at the current point, if any."""
    point = steps.solver.monitor.evaluation_point(steps.position.state)
    for loss in ("inner_loss", "outer_loss"):
        try:
            jax.block_until_ready(_value(loss.replace("loss", "value"), steps.oracles, point))
        except Exception:  # a loss of the user may raise anything
            return loss
    return None


@compiled("name")  # a loop outside of a compiled program that fails would keep its data in memory
def _value(name: str, oracles: Oracles, point: Point) -> Array:
    return getattr(oracles, name)(point)

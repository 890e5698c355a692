"""Ctrl-C and errors during a run, which end it without losing its results."""

import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from traceback import format_exception_only
from typing import Any, NamedTuple

import jax

from bilevel._core.compilation import compiled
from bilevel._core.types import Array, Point
from bilevel.engine.result import RunResult
from bilevel.engine.steps import CompiledSteps, Steps
from bilevel.oracles import Oracles
from bilevel.oracles.host_samples import Reader


class Failure(NamedTuple):
    """What failed, as a sentence with a placeholder for the step, and the loss that raised, if any."""

    sentence: str = "step {} failed"
    loss: str | None = None
    hint: str = ""


class StepError(RuntimeError):
    """A step or an evaluation failed: a loss raised, rows could not be read, or another process was lost.

    Attributes
    ----------
    loss : "inner_loss" or "outer_loss" if one of them raised, else None
    step : the step that was not taken, or after which the run could not be evaluated
    result : the run before that step, with status "failed"; it can be saved and resumed
    """

    def __init__(self, failure: Failure, step: int, error: Exception, result: RunResult) -> None:
        self.loss, self.step, self.result = failure.loss, step, result
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
        # The text of an error in a compiled program is a traceback, whose last line is the error.
        said = lines[-1] if "Traceback" in str(error) else f"{type(error).__name__}: {lines[0]}"
        rest = "`error.result` contains the steps before: save it, and continue with `bilevel.resume`."
        super().__init__(f"{failure.sentence.format(step)} ({said[:300]}). {failure.hint}{rest}")


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
    """Count presses of Ctrl-C; below the limit they do not raise KeyboardInterrupt.

    Nothing changes if the caller has its own handler of the signal, or outside of the main thread.
    """
    presses, readers = Presses(limit), oracles.readers
    own = threading.current_thread() is threading.main_thread()
    if not own or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield presses
        return
    signal.signal(signal.SIGINT, presses.handle)
    try:
        with _watching(presses, readers) if readers else nullcontext():
            yield presses
    except Exception as error:
        if presses.forced():  # interrupted callbacks make a compiled program raise its own error
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def reads_can_be_interrupted(oracles: Oracles) -> AbstractContextManager[Any]:
    """Make Ctrl-C raise KeyboardInterrupt even while a compiled program waits for rows."""
    return counting_interrupts(oracles, limit=1) if oracles.readers else nullcontext()


@contextmanager
def _watching(presses: Presses, readers: list[Reader]) -> Iterator[None]:
    """Stop all readers when the limit is reached.

    Python calls signal handlers in the main thread, which cannot run them while a compiled program waits for rows. So a
    thread listens to the bytes that Python writes as soon as a signal arrives.
    """
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


def find_failure(steps: Steps, error: Exception) -> Failure | None:
    """Return what failed, and go to the last state before it; None if no loss, row or process caused the error.

    A compiled program takes many steps at once and repeats bit for bit, so the failing step is found by bisection.
    """
    text = f"{error}\n{''.join(format_exception_only(error))}"
    if any(reader.failure is not None and reader.failure in text for reader in steps.oracles.readers):
        return Failure("the rows of a `HostData` could not be read in step {}")
    in_program = isinstance(error, jax.errors.JaxRuntimeError) or re.match(r"[A-Z]+(_[A-Z]+)*: ", str(error))
    if steps.oracles.n_processes > 1:
        # Nothing is tried again, since all processes must run the same programs.
        here = f"in process {jax.process_index()} of {steps.oracles.n_processes}"
        hint = "" if "Callback" in text else "Another process has probably failed or ended; see its output. "
        return Failure(f"step {{}} failed {here}", hint=hint) if in_program else None
    loss, aim = _failing_loss(steps), steps.target
    size = aim - steps.position.step
    compiled = size > 0 and isinstance(steps, CompiledSteps)
    while loss is None and compiled and steps.position.step < aim:
        try:
            steps.advance(min(aim, steps.position.step + size), None)
        except Exception:
            if size == 1:
                loss = _failing_loss(steps)
                break
            size //= 2
    if loss is not None:
        return Failure(f"`{loss}` raised in step {{}}", loss)
    return Failure() if compiled or in_program else None


def _failing_loss(steps: Steps) -> str | None:
    """Return the loss that raises at the current point, if any."""
    for loss, value in (("inner_loss", "inner_value"), ("outer_loss", "outer_value")):
        try:
            jax.block_until_ready(
                _value(value, steps.oracles, steps.solver.monitor.evaluation_point(steps.position.state))
            )
        except Exception:  # a loss of the user may raise anything
            return loss
    return None


@compiled("name")  # a loop outside of a compiled program that fails would keep its data in memory
def _value(name: str, oracles: Oracles, point: Point) -> Array:
    return getattr(oracles, name)(point)

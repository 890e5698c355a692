"""How a run stops before its end, by Ctrl-C or by an error, without losing what it has computed."""

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

from bilevel._programs import compiled
from bilevel._types import Array, Point
from bilevel.engine.result import RunResult
from bilevel.engine.steps import CompiledSteps, Steps
from bilevel.oracles import Oracles
from bilevel.oracles.host_samples import Reader


class Failure(NamedTuple):
    """What failed in a step, as a sentence with a place for its number, and the loss that raised, if one did."""

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
        # An error inside of a compiled program has a traceback as its text, and ends with what was raised.
        said = lines[-1] if "Traceback" in str(error) else f"{type(error).__name__}: {lines[0]}"
        rest = "The steps before it are in `error.result`: save that, and `bilevel.resume` goes on from there."
        super().__init__(f"{failure.sentence.format(step)} ({said[:300]}). {failure.hint}{rest}")


class Presses:
    """How often Ctrl-C was pressed: once asks a run to end after its step, the limit ends it by KeyboardInterrupt."""

    def __init__(self, limit: int) -> None:
        self.limit, self.handled, self.received = limit, 0, 0

    def asked(self) -> bool:
        return self.handled > 0

    def forced(self) -> bool:
        return max(self.handled, self.received) >= self.limit

    def handle(self, *_: Any) -> None:
        self.handled += 1
        if self.forced():
            raise KeyboardInterrupt


@contextmanager
def first_interrupt_asks(oracles: Oracles, limit: int = 2) -> Iterator[Presses]:
    """Count presses of Ctrl-C; below the limit they do not raise KeyboardInterrupt.

    Where somebody else handles the signal, or in another thread than the main one, nothing changes.
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
        if presses.forced():  # a compiled program fails with an error of its own when its callbacks are interrupted
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def reads_can_be_interrupted(oracles: Oracles) -> AbstractContextManager[Any]:
    """Let Ctrl-C raise KeyboardInterrupt also while a compiled program waits for rows."""
    return first_interrupt_asks(oracles, limit=1) if oracles.readers else nullcontext()


@contextmanager
def _watching(presses: Presses, readers: list[Reader]) -> Iterator[None]:
    """Give up reading at the limit.

    Python calls the handler of a signal in the main thread, which cannot run it while a compiled program waits there
    for rows. So a thread listens to the bytes that Python writes as soon as a signal arrives.
    """
    heard, told = socket.socketpair()
    told.setblocking(False)
    before = signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)

    def watch() -> None:
        with heard:
            while signals := heard.recv(64):
                if before != -1:  # an event loop listens too
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
        told.close()


def find_failure(steps: Steps, error: Exception) -> Failure | None:
    """Find what failed, and go to the last state before it; None for an error that no loss, row or process caused.

    A compiled program takes many steps at once, and repeats bit for bit: shorter and shorter parts of it are tried.
    """
    text = f"{error}\n{''.join(format_exception_only(error))}"
    if any(reader.failure is not None and reader.failure in text for reader in steps.oracles.readers):
        return Failure("the rows of a `HostData` could not be read in step {}")
    in_program = isinstance(error, jax.errors.JaxRuntimeError) or re.match(r"[A-Z]+(_[A-Z]+)*: ", str(error))
    if steps.oracles.n_processes > 1:
        # Nothing is tried again: programs of several processes fit together only while all run the same ones.
        here = f"in process {jax.process_index()} of {steps.oracles.n_processes}"
        hint = "" if "Callback" in text else "Another process has probably failed or ended; see what it printed. "
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
    """Return the loss that raises at the point where a run is, if one does."""
    for loss, value in (("inner_loss", "inner_value"), ("outer_loss", "outer_value")):
        try:
            jax.block_until_ready(
                _value(value, steps.oracles, steps.solver.monitor.evaluation_point(steps.position.state))
            )
        except Exception:  # a loss is the user's, and may raise anything
            return loss
    return None


@compiled("name")  # loops outside of a compiled program that fails would keep its data in memory
def _value(name: str, oracles: Oracles, point: Point) -> Array:
    return getattr(oracles, name)(point)

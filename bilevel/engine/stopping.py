"""How a run is stopped before its end: by Ctrl-C, or by a loss that raises; either way with what it has."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from bilevel.engine.result import RunResult
from bilevel.engine.steps import CompiledSteps, Steps


class StepError(RuntimeError):
    """A run that could not take a step, or could not be evaluated, since a loss raised.

    Attributes
    ----------
    loss : "inner_loss", "outer_loss", or None where neither raises by itself at the point before the step
    step : the step that was not taken
    result : the run before that step, with status "failed"; it can be saved and resumed
    """

    def __init__(self, loss: str | None, step: int, error: Exception, result: RunResult) -> None:
        self.loss, self.step, self.result = loss, step, result
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
        # An error inside of a compiled program has a traceback as its text, and ends with what was raised.
        said = lines[-1] if "Traceback" in str(error) else f"{type(error).__name__}: {lines[0]}"
        who = f"`{loss}` raised in step {step}" if loss else f"step {step} failed"
        rest = "The steps before it are in `error.result`: save that, and `bilevel.resume` goes on from there."
        super().__init__(f"{who} ({said[:300]}). {rest}")


@contextmanager
def first_interrupt_asks() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether Ctrl-C was pressed; pressed again, it raises at once.

    Where somebody else handles the signal, or in another thread than the main one, nothing changes.
    """
    own = threading.current_thread() is threading.main_thread()
    if not own or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False
        return
    pressed = []

    def ask(*_: Any) -> None:
        pressed.append(True)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def find_failure(steps: Steps) -> tuple[bool, str | None]:
    """Go to the last state before a step fails; return whether a loss is to blame, and which one, where that is known.

    A compiled program takes many steps at once, and repeats bit for bit: shorter and shorter parts of it are tried.
    """
    loss, aim = _failing_loss(steps), steps.aim
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
    return compiled or loss is not None, loss


def _failing_loss(steps: Steps) -> str | None:
    """Return the loss that raises at the point where a run is, if one does."""
    for name, value in (("inner_loss", steps.oracles.inner_value), ("outer_loss", steps.oracles.outer_value)):
        try:
            jax.block_until_ready(value(steps.solver.evaluation_point(steps.position.state)))
        except Exception:  # a loss is the user's, and may raise anything
            return name
    return None

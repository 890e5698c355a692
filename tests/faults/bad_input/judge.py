"""The outcome of an invalid input: a result, a sentence that names the argument, or a defect."""

import dis
import os
import re
import signal
import traceback
import warnings
from collections.abc import Callable
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import bilevel

PACKAGE = os.path.realpath(Path(bilevel.__file__).parent)
LONGEST = 2000  # characters of a message
SECONDS = 20.0  # processor time of a case, including compilation
REFUSALS = (ValueError, TypeError, OSError, ImportError, bilevel.StepError)
SIGNATURE = re.compile(r"[\w.]+\(\) (takes|missing|got (an unexpected|some|multiple)) ")


@dataclass(frozen=True)
class Case:
    """One input.

    Parameters
    ----------
    what : description of the input
    act : calls the library with the input
    names : names of the arguments; a refusal must contain one of them
    check : returns what is wrong with the return value of ``act``, or None
    others : packages whose own refusals are accepted, such as scikit-learn for its validation
    own : exception that the code of the user raises and that must be passed on
    """

    what: str
    act: Callable[[], Any]
    names: tuple[str, ...] = ()
    check: Callable[[Any], str | None] = lambda result: None
    others: tuple[str, ...] = ()
    own: type[Exception] | None = None


@dataclass(frozen=True)
class Verdict:
    """How a case ended: "result", "refused", or a defect: "raw", "vague", "nonsense", "hung", "crashed"."""

    kind: str
    what: str
    message: str = ""
    where: str = ""

    @property
    def is_defect(self) -> bool:
        return self.kind not in ("result", "refused")


class TooLong(BaseException):
    """A case took too long. It is not an `Exception`, so that no handler catches it."""


@contextmanager
def limited(seconds: float):
    """Raise `TooLong` after this processor time."""

    def ring(number, frame):
        raise TooLong

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def judge(case: Case, seconds: float = SECONDS) -> Verdict:
    """Run a case and return its verdict."""
    try:
        with limited(seconds), warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            complaint = case.check(case.act())
    except TooLong as late:
        return Verdict("hung", case.what, f"over {seconds:g} s of processor time", innermost(late))
    except Exception as error:
        return _judge_refusal(case, error)
    return Verdict("result", case.what) if complaint is None else Verdict("nonsense", case.what, complaint, "check")


def _judge_refusal(case: Case, error: Exception) -> Verdict:
    message, where = f"{type(error).__name__}: {error}", innermost(error)
    if case.own is not None and isinstance(error, case.own):
        return Verdict("refused", case.what, message, where)
    known = isinstance(error, REFUSALS) or is_by_others(error, case.others)
    if not known or not is_deliberate(error, case.others):
        return Verdict("raw", case.what, message, where)
    if len(str(error)) > LONGEST or not str(error).strip():
        return Verdict("vague", case.what, message, where)
    if case.names and not is_by_others(error, case.others) and not any(name in str(error) for name in case.names):
        return Verdict("vague", case.what, message, where)
    return Verdict("refused", case.what, message, where)


def is_deliberate(error: BaseException, others: tuple[str, ...] = ()) -> bool:
    """Return True if a `raise` statement of the library, or of an accepted package, made this error.

    The innermost frame of an error from C code is that of its caller, whose instruction is a call and not a `raise`.
    Errors of Python about the signature of a function that is called here are accepted too.
    """
    *outer, frame = walk(error)
    if isinstance(error, TypeError) and SIGNATURE.match(str(error)) and sum(map(_is_ours, outer)) == 0:
        return True
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        return True  # an error of the operating system with a path
    if is_by_others(error, others):
        return True
    return _is_ours(frame) and frame.tb_frame.f_code.co_code[frame.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def is_by_others(error: BaseException, others: tuple[str, ...]) -> bool:
    """Return True if one of these packages, called by the library, made this error."""
    frames = list(walk(error))
    beyond = frames[max((i for i, frame in enumerate(frames) if _is_ours(frame)), default=0) + 1 :]
    names = [frame.tb_frame.f_code.co_filename for frame in beyond]
    return any(f"{os.sep}{other}{os.sep}" in name for other in others for name in names)


def _is_ours(frame) -> bool:
    return os.path.realpath(frame.tb_frame.f_code.co_filename).startswith(PACKAGE)


def walk(error: BaseException):
    step = error.__traceback__
    while step is not None:
        yield step
        step = step.tb_next


def innermost(error: BaseException) -> str:
    """Return the innermost frame of all and of the library, by which defects are grouped."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if os.path.realpath(frame.filename).startswith(PACKAGE)]
    places = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in [*ours[-1:], frames[-1]]]
    return " < ".join(reversed(places))

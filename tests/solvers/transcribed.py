"""The NumPy transcription of each solver: the module of the same name in tests/transcription."""

from importlib import import_module

import numpy as np

from tests import cases
from tests.transcription.d_tfbo import d_tfbo
from tests.transcription.hoag import hoag
from tests.transcription.maid import maid
from tests.transcription.shine import shine


def transcription(cls):
    """Return the function that repeats a run in NumPy, from the module with the name of the solver's file."""
    return import_module(f"tests.transcription.{cls.__module__.rpartition('.')[2]}").transcribe


# The parts of AutoSRBA have separate transcriptions, in tests/solvers/auto.
TRANSCRIBED = {name: solver for name, solver in cases.SOLVERS.items() if name != "AutoSRBA"}
TRANSCRIPTIONS = {name: transcription(type(solver)) for name, solver in TRANSCRIBED.items()}
# Of solvers that are stepped from Python; test_deterministic.py and test_maid.py compare them.
HOST_TRANSCRIPTIONS = {"DTFBO": d_tfbo, "HOAG": hoag, "MAID": maid, "SHINE": shine}

KIND_NAMES = {
    "inner_grad": "gz",
    "inner_grad_outer": "gx",
    "hvp": "hv",
    "cross": "cr",
    "outer_grad": "fz",
    "outer_grad_outer": "fx",
    "inner_value": "inner_value",
    "outer_value": "outer_value",
}


def start_of(problem):
    return tuple(np.asarray(part, np.float64) for part in (problem.start.inner_var, problem.start.outer_var))

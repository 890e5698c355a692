"""Each compiled solver beside its NumPy transcription: the module of the same name under tests/transcription."""

from importlib import import_module

import numpy as np

from tests import cases


def transcription(cls):
    """The function that follows a run of a solver, by the name of the file of the solver."""
    return import_module(f"tests.transcription.{cls.__module__.rpartition('.')[2]}").transcribe


# AutoSRBA has transcriptions of its parts, in tests/solvers/auto.
TRANSCRIBED = {name: solver for name, solver in cases.SOLVERS.items() if name != "AutoSRBA"}
TRANSCRIPTIONS = {name: transcription(type(solver)) for name, solver in TRANSCRIBED.items()}

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

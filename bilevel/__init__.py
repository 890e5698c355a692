"""Stochastic bilevel optimization on JAX."""

from bilevel import datasets, problems
from bilevel._cpu_loops import compile_small_loops_whole
from bilevel._types import Point
from bilevel.engine.logs import CSVLog, Log, TensorBoardLog
from bilevel.engine.result import RunResult, Status
from bilevel.engine.run import resume, run
from bilevel.problems import BilevelProblem
from bilevel.solvers import (
    ALSET,
    BOME,
    BSA,
    F2SA,
    FSLA,
    HOAG,
    ITD,
    MASOBA,
    MRBO,
    PZOBO,
    SABA,
    SOBA,
    SOLVERS,
    SPABA,
    SRBA,
    SUSTAIN,
    TTSA,
    VRBO,
    AmIGO,
    Exact,
    StocBiO,
)

__all__ = [
    "ALSET",
    "BOME",
    "BSA",
    "F2SA",
    "FSLA",
    "HOAG",
    "ITD",
    "MASOBA",
    "MRBO",
    "PZOBO",
    "SABA",
    "SOBA",
    "SOLVERS",
    "SPABA",
    "SRBA",
    "SUSTAIN",
    "TTSA",
    "VRBO",
    "AmIGO",
    "BilevelProblem",
    "CSVLog",
    "Exact",
    "Log",
    "Point",
    "RunResult",
    "Status",
    "StocBiO",
    "TensorBoardLog",
    "datasets",
    "problems",
    "resume",
    "run",
]
__version__ = "0.1.0"

compile_small_loops_whole()

"""Stochastic bilevel optimisation on JAX."""

from bilevel import datasets, problems
from bilevel.logs import CSVLog, Log, TensorBoardLog
from bilevel.problems import BilevelProblem
from bilevel.result import RunResult, Status
from bilevel.run import resume, run
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
from bilevel.types import Point
from bilevel.whole_loops import compile_small_loops_whole

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

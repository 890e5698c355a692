"""Stochastic bilevel optimization on JAX."""

from bilevel import datasets, problems
from bilevel._cpu_loops import fuse_cpu_loops
from bilevel._types import Point
from bilevel.engine.logs import CSVLog, Log, TensorBoardLog
from bilevel.engine.result import RunResult, Status
from bilevel.engine.run import Run, resume, run
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
    "Run",
    "RunResult",
    "Status",
    "StocBiO",
    "TensorBoardLog",
    "datasets",
    "fuse_cpu_loops",
    "problems",
    "resume",
    "run",
]
__version__ = "0.1.0"

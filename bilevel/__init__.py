"""Stochastic bilevel optimization on JAX."""

from typing import TYPE_CHECKING, Any

from bilevel import datasets, problems
from bilevel._cpu_loops import fuse_cpu_loops
from bilevel._types import Point
from bilevel.engine.logs import CSVLog, Log, TensorBoardLog
from bilevel.engine.result import RunResult, Status
from bilevel.engine.run import Run, resume, run
from bilevel.problems import BilevelProblem
from bilevel.solvers import SOLVERS

globals().update(SOLVERS)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Tell a type checker that the classes of `SOLVERS` are attributes."""


__all__ = ["SOLVERS", "BilevelProblem", "CSVLog", "Log", "Point", "Run", "RunResult", "Status", "TensorBoardLog"]
__all__ += ["datasets", "fuse_cpu_loops", "problems", "resume", "run", *SOLVERS]
__version__ = "0.1.0"

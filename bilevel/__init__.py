"""Stochastic bilevel optimization on JAX.

Names are imported when they are used, so that `bilevel.estimators` does not wait for JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "BilevelProblem": "problems",
    "CSVLog": "engine.logs",
    "EarlyStopping": "engine.driver",
    "HostData": "oracles.host_samples",
    "Hypergradient": "problems.hypergradient",
    "Log": "engine.logs",
    "Point": "_types",
    "Run": "engine.run",
    "RunResult": "engine.result",
    "SOLVERS": "solvers",
    "Status": "engine.result",
    "StepError": "engine.stopping",
    "TensorBoardLog": "engine.logs",
    "benchmark": "bench.benchmark",
    "fuse_cpu_loops": "_process",
    "hypergradient": "problems.hypergradient",
    "keep_programs": "_process",
    "plot": "engine.show",
    "resume": "engine.run",
    "run": "engine.run",
}
_OF_EXTRAS = ("benchmark",)  # not imported by `from bilevel import *`, which must work without
_MODULES = ("datasets", "problems")
_ROOMS = (*_MODULES, "engine", "estimators", "oracles", "solvers", "theory")

if TYPE_CHECKING:
    from bilevel import datasets as datasets
    from bilevel import problems as problems
    from bilevel._process import fuse_cpu_loops as fuse_cpu_loops
    from bilevel._process import keep_programs as keep_programs
    from bilevel._types import Point as Point
    from bilevel.bench.benchmark import benchmark as benchmark
    from bilevel.engine.driver import EarlyStopping as EarlyStopping
    from bilevel.engine.logs import CSVLog as CSVLog
    from bilevel.engine.logs import Log as Log
    from bilevel.engine.logs import TensorBoardLog as TensorBoardLog
    from bilevel.engine.result import RunResult as RunResult
    from bilevel.engine.result import Status as Status
    from bilevel.engine.run import Run as Run
    from bilevel.engine.run import resume as resume
    from bilevel.engine.run import run as run
    from bilevel.engine.show import plot as plot
    from bilevel.engine.stopping import StepError as StepError
    from bilevel.oracles.host_samples import HostData as HostData
    from bilevel.problems import BilevelProblem as BilevelProblem
    from bilevel.problems.hypergradient import Hypergradient as Hypergradient
    from bilevel.problems.hypergradient import hypergradient as hypergradient
    from bilevel.solvers import SOLVERS as SOLVERS


def __getattr__(name: str) -> Any:
    """Import a public name, or a solver, when it is first asked for."""
    if name in _ROOMS:
        return importlib.import_module(f"bilevel.{name}")
    if name == "__all__":
        return sorted([*(_HOME.keys() - set(_OF_EXTRAS)), *_MODULES, *_solvers()])
    if name in _HOME:
        found = getattr(importlib.import_module(f"bilevel.{_HOME[name]}"), name)
    elif not name.startswith("_") and name in _solvers():
        found = _solvers()[name]
    else:
        raise AttributeError(f"module 'bilevel' has no attribute {name!r}")
    globals()[name] = found
    return found


def _solvers() -> dict[str, Any]:
    return importlib.import_module("bilevel.solvers").SOLVERS


def __dir__() -> list[str]:
    return [*__getattr__("__all__"), *_OF_EXTRAS, "__version__"]

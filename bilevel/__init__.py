"""Stochastic bilevel optimization on JAX.

Names are imported when they are used, so that `bilevel.estimators` does not wait for JAX. `__init__.pyi` lists them for
editors and type checkers.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "BatchLoss": "oracles.autodiff",
    "BilevelProblem": "problems",
    "CSVLog": "engine.logs",
    "CertifiedTolerance": "engine.driver",
    "Checkpoints": "engine.result",
    "Differentiation": "problems.base",
    "EarlyStopping": "engine.driver",
    "HostData": "oracles.host_samples",
    "Hypergradient": "differentiation.hypergradient",
    "L1": "oracles.outer_terms",
    "Log": "engine.logs",
    "Point": "_core.types",
    "Run": "engine.run",
    "RunResult": "engine.result",
    "SOLVERS": "solvers",
    "Simplex": "oracles.outer_terms",
    "Status": "engine.result",
    "StepError": "engine.stopping",
    "adapt": "solvers.tasks",
    "benchmark": "bench.execute",
    "fuse_cpu_loops": "_process",
    "hypergradient": "differentiation.hypergradient",
    "implicit": "differentiation.implicit",
    "keep_programs": "_process",
    "plot": "engine.show",
    "resume": "engine.run",
    "run": "engine.run",
    "unrolled": "differentiation.unrolled",
    "unrolled_gradient": "differentiation.unrolled",
}
_OF_EXTRAS = ("benchmark",)  # not imported by `from bilevel import *`, which must work without
_MODULES = ("datasets", "problems")
_ROOMS = (*_MODULES, "engine", "estimators", "oracles", "solvers", "theory")


def __getattr__(name: str) -> Any:
    """Import a public name, or a solver, when it is first used."""
    if name in _ROOMS:
        return _import(name)
    if name == "__all__":
        return sorted([*(_HOME.keys() - set(_OF_EXTRAS)), *_MODULES, *_solvers()])
    if name in _HOME:
        found = getattr(_import(_HOME[name]), name)
    elif not name.startswith("_") and name in _solvers():
        found = _solvers()[name]
    else:
        raise AttributeError(f"module 'bilevel' has no attribute {name!r}")
    globals()[name] = found
    return found


def _import(module: str) -> Any:
    try:
        return importlib.import_module(f"bilevel.{module}")
    except ModuleNotFoundError as error:
        if error.name not in ("jax", "jaxlib", "optax"):
            raise
        text = f"This needs `{error.name}`: pip install jax optax. Only `bilevel.estimators` works without them."
        raise ImportError(text) from error


def _solvers() -> dict[str, Any]:
    return _import("solvers").SOLVERS


def __dir__() -> list[str]:
    try:
        names = __getattr__("__all__")
    except ImportError:
        names = [*_HOME, *_MODULES]
    return [*names, *_OF_EXTRAS, "__version__"]

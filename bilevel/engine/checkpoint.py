"""A run in one file: arrays and a JSON text in a NumPy archive, nothing pickled."""

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bilevel._io import replacing
from bilevel._precision import arithmetic
from bilevel.engine.metrics import cheap_metrics
from bilevel.engine.result import RunResult
from bilevel.problems import BilevelProblem
from bilevel.solvers import SOLVERS
from bilevel.solvers.base import SolverBase

_FORMAT = 1


@dataclass(frozen=True)
class SavedRun:
    """What a file holds, checked against the problem."""

    solver: SolverBase
    seed: int
    state_leaves: list[np.ndarray]
    rows: list[dict[str, Any]]


def save(result: RunResult, path: Path) -> None:
    """Write the run; the file appears whole or not at all."""
    about = {
        "format": _FORMAT,
        "solver": type(result.solver).__name__,
        "parameters": result.solver.parameters(),
        "seed": int(result.seed),
        "problem": result.problem.name,
        "fingerprint": result.problem.fingerprint(),
        "probe": _probe(result.problem),
        "columns": list(result.history),
        "jax": jax.__version__,
    }
    arrays = {f"state_{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(result.state))}
    arrays |= {f"history_{i}": column for i, column in enumerate(result.history.values())}
    with replacing(path) as file:
        np.savez(file, about=np.array(json.dumps(about)), **arrays)  # type: ignore[arg-type]


def load(path: Path, problem: BilevelProblem, solver: SolverBase | None = None) -> SavedRun:
    """Read a run, refusing a damaged file and one that belongs to another problem."""
    about, arrays = _read(path)
    if about["fingerprint"] != problem.fingerprint():
        raise ValueError(
            f"`{path}` was saved from another problem ({about['problem']}): data, start, bounds or dtype differ. "
            "Rebuild the problem with the arguments it had."
        )
    tolerance = 1e3 * np.finfo(problem.dtype).eps
    if not np.allclose(about["probe"], _probe(problem), rtol=tolerance, atol=tolerance):
        raise ValueError(f"`{path}`: the data are the same but the losses differ from those it was saved with.")
    names = about["columns"]
    history = [arrays[f"history_{i}"] for i in range(len(names))]
    rows = [dict(zip(names, values, strict=True)) for values in zip(*(c.tolist() for c in history), strict=True)]
    n_leaves = sum(name.startswith("state_") for name in arrays)
    leaves = [arrays[f"state_{i}"] for i in range(n_leaves)]
    return SavedRun(_solver(about, solver, path), about["seed"], leaves, rows)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    if not path.exists():
        raise FileNotFoundError(f"`{path}` does not exist; `result.save(path)` writes such a file.")
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        about = json.loads(str(arrays.pop("about")))
        known = about["format"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"`{path}` is not a saved run, or is damaged: {error}") from error
    if known != _FORMAT:
        raise ValueError(f"`{path}` has format {known}; this version reads format {_FORMAT}.")
    return about, arrays


def _solver(about: dict[str, Any], given: SolverBase | None, path: Path) -> SolverBase:
    if given is None:
        if about["solver"] not in SOLVERS:
            raise ValueError(f"`{path}` was made by `{about['solver']}`, not in SOLVERS; pass it as `solver=`.")
        return SOLVERS[about["solver"]](**about["parameters"])
    if (type(given).__name__, given.parameters()) != (about["solver"], about["parameters"]):
        raise ValueError(f"`{path}` was made by {about['solver']} with {about['parameters']}, not by {given!r}.")
    return given


def _probe(problem: BilevelProblem) -> list[float]:
    """Return numbers that betray a change of the losses, which a digest of the data cannot see."""
    with arithmetic(problem.dtype):
        return [float(value) for value in cheap_metrics(problem.oracles, problem.start).values()]

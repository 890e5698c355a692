"""A run in one file: arrays and a JSON text in a NumPy archive, nothing pickled."""

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from bilevel._io import replacing
from bilevel._precision import arithmetic
from bilevel._types import Point
from bilevel.engine.metrics import cheap_metrics
from bilevel.problems import BilevelProblem
from bilevel.solvers import SOLVERS
from bilevel.solvers.base import SolverBase

_FORMAT = 1


class Best(NamedTuple):
    """The best point of a run by its exact value h, and its row in the history."""

    point: Point
    value: float
    row: int


@dataclass(frozen=True)
class SavedRun:
    """What a file holds."""

    solver: SolverBase
    seed: int
    state_leaves: list[np.ndarray]
    rows: list[dict[str, Any]]
    best: Best | None


def save(path: Path, problem: BilevelProblem, run: SavedRun) -> None:
    """Write the run; the file appears whole or not at all."""
    names = list(dict.fromkeys(name for row in run.rows for name in row))
    about = {
        "format": _FORMAT,
        "solver": type(run.solver).__name__,
        "parameters": run.solver.parameters(),
        "seed": int(run.seed),
        "problem": problem.name,
        "fingerprint": problem.fingerprint(),
        "probe": _probe(problem),
        "columns": names,
        "best": None if run.best is None else [run.best.value, run.best.row],
        "jax": jax.__version__,
    }
    best = [] if run.best is None else jax.tree.leaves(run.best.point)
    history = [np.array([row.get(name, np.nan) for row in run.rows]) for name in names]
    groups = {"state": run.state_leaves, "history": history, "best": best}
    arrays = {f"{group}_{i}": np.asarray(leaf) for group, leaves in groups.items() for i, leaf in enumerate(leaves)}
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
    state, history, best = ([arrays[name] for name in _numbered(arrays, of)] for of in ("state", "history", "best"))
    rows = [
        dict(zip(about["columns"], values, strict=True))
        for values in zip(*(column.tolist() for column in history), strict=True)
    ]
    return SavedRun(_solver(about, solver, path), about["seed"], state, rows, _best(about, best, problem))


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


def _numbered(arrays: dict[str, np.ndarray], group: str) -> list[str]:
    return [f"{group}_{i}" for i in range(sum(name.startswith(f"{group}_") for name in arrays))]


def _best(about: dict[str, Any], leaves: list[np.ndarray], problem: BilevelProblem) -> Best | None:
    if about.get("best") is None:  # no exact values, or a file of a version that kept none
        return None
    return Best(jax.tree.unflatten(jax.tree.structure(problem.start), leaves), *about["best"])


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

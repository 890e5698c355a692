"""A run in one file: arrays and a JSON text in a NumPy archive, nothing pickled."""

import json
import zipfile
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
from bilevel.solvers.base import SolverBase, State

_FORMAT = 1


class Best(NamedTuple):
    """The evaluated point with the smallest exact value h, and its row in the history; None without exact values."""

    point: Point | None = None
    value: float = np.inf
    row: int = -1


class SavedRun(NamedTuple):
    """What a file holds; ``state`` is read back as its leaves."""

    solver: SolverBase
    seed: int
    state: State
    history: dict[str, np.ndarray]
    best: Best


def save(path: Path, problem: BilevelProblem, run: SavedRun) -> None:
    """Write a run; the file appears whole or not at all."""
    solver, seed, state, history, best = run
    about = {
        "format": _FORMAT,
        "solver": type(solver).__name__,
        "parameters": solver.parameters(),
        "seed": int(seed),
        "problem": problem.name,
        "fingerprint": problem.fingerprint(),
        "probe": _probe(problem),
        "columns": list(history),
        "best": best[1:],
        "jax": jax.__version__,
    }
    groups = {"state": jax.tree.leaves(state), "history": history.values(), "best": jax.tree.leaves(best.point)}
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
    history = dict(zip(about["columns"], _group(arrays, "history"), strict=True))
    best, point = Best(), _group(arrays, "best")
    if point:  # there are none without exact values, or in files of older versions
        best = Best(jax.tree.unflatten(jax.tree.structure(problem.start), point), *about["best"])
    return SavedRun(_solver(about, solver, path), about["seed"], _group(arrays, "state"), history, best)


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


def _group(arrays: dict[str, np.ndarray], name: str) -> list[np.ndarray]:
    return [arrays[f"{name}_{i}"] for i in range(sum(key.startswith(f"{name}_") for key in arrays))]


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

"""Results of runs, and how they are saved and read: a NumPy archive with a JSON text, nothing pickled."""

import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import inf
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from bilevel._core import trees
from bilevel._core.compilation import Compiled, arithmetic
from bilevel._core.files import as_path, read_stored_arrays, replacing
from bilevel._core.types import Calls, Point, PyTree, is_number
from bilevel.engine import metrics, show
from bilevel.engine.logs import warn_user
from bilevel.oracles import Oracles
from bilevel.problems import BilevelProblem
from bilevel.problems.base import NOT_SOLVED
from bilevel.problems.certificate import Certificate, Certifier
from bilevel.solvers.base import SolverBase, find_imported_solver, name_solver
from bilevel.solvers.fields import ARRAY_BOUNDS
from bilevel.solvers.moves import describe_transformations

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FORMAT = 3  # 1 has the values of the losses only at the start; 2 has the untuned solver as a setting of SRBA
_KEYS = {"solver", "parameters", "transformations", "seed", "columns", "best", "arrays"}  # of every file
_KEYS |= {"problem", "fingerprint", "probe"}
# Losses are compared at these distances from the start, which are halved until all numbers are finite.
_PROBE_RADII, _MOST_HALVINGS = (1.0, 1e-3), 60
_SAME = 1e-6  # relative difference; rounding errors stay below, even if a loss casts to float32
# The evaluated point with the smallest exact value h, that value, and its row in the history.
Best: TypeAlias = tuple[Point | None, float, int]
NO_BEST: Best = (None, np.inf, -1)  # without exact values
_NOTABLE = 1e-3  # relative difference between the last and the lowest value


class Status(StrEnum):
    """How a run ended; compares equal to its name. If a run has several reasons to end, the first of these counts."""

    failed = "failed"
    interrupted = "interrupted"
    diverged = "diverged"
    converged = "converged"
    stopped_early = "stopped_early"
    out_of_budget = "out_of_budget"

    @property
    def sentence(self) -> str:
        """An explanation for users."""
        return {
            "converged": "The run reached a tolerance, or the solver's own criterion; `result.reason` says which.",
            "out_of_budget": "A budget was used up.",
            "diverged": "The iterates became non-finite; `point` is the last finite one. A solver with a `step_size` "
            "needs a smaller one or a larger `outer_ratio`; else scale the data, or bound the outer variable.",
            "interrupted": "The run was stopped from the keyboard; save it and continue with `resume`.",
            "failed": "A loss raised, rows could not be read, or a process was lost; `point` is the last one before. "
            "Save the run, and `resume` it after removing the cause.",
            "stopped_early": "The metric of `EarlyStopping` no longer improved; `best_point` has its best one.",
        }[self.value]


@dataclass(frozen=True)
class RunResult:
    """The result of a run.

    Attributes
    ----------
    status : "converged", "out_of_budget", "diverged", "interrupted", "failed" or "stopped_early"; ``status.sentence``
        explains
    point : the final iterate, NumPy arrays in the problem's dtype
    history : columns, one entry per evaluation: ``step``, ``seconds`` (of steps alone, without compilation and
        evaluation), ``calls`` (all kinds together), ``calls_<kind>``, ``epochs`` = calls / (n + m), and the
        metrics of :mod:`bilevel.engine.metrics`
    best_point, best_value, best_row : the evaluated point with the smallest exact value h, that value, and its row in
        the history; None, inf and -1 if no exact value is known. With `EarlyStopping`, the best by its metric
    solver, seed : the solver, with its defaults filled in, and the seed
    reason : why the run ended; if a solver ends by itself, its explanation
    compile_seconds : time spent on compilation, which `seconds` does not include
    """

    status: Status
    point: Point
    history: dict[str, np.ndarray]
    solver: SolverBase
    seed: int
    compile_seconds: float
    problem: BilevelProblem
    state: Any
    best_point: Point | None
    best_value: float
    best_row: int
    reason: str = ""

    @property
    def calls(self) -> Calls:
        """The oracle calls of the run, by kind."""
        return Calls(*(int(self.history[f"calls_{kind}"][-1]) for kind in Calls._fields))

    @cached_property
    def certificate(self) -> Certificate:
        """A bound of the distance between D_x at the final iterate and ∇h; computed on first use."""
        return Certifier(self.problem)(self.point)

    def summary(self) -> str:
        """Return the run in a few lines."""
        last = {name: column[-1] for name, column in self.history.items()}
        parameters = ", ".join(f"{name}={value}" for name, value in self.solver.parameters().items())
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in self.calls._asdict().items() if count)
        lines = [
            f"{type(self.solver).__name__}({parameters}) on {self.problem.name}, seed {self.seed}",
            f"status   {self.status}: {self.reason or self.status.sentence}",
            f"steps    {last['step']:,} in {last['seconds']:.3g} s (compilation {self.compile_seconds:.3g} s apart)",
            f"calls    {last['calls']:,} = {last['epochs']:.4g} epochs ({kinds or 'none'})",
        ]
        for name, entry in metrics.METRICS.items():
            if (entry.in_tables or entry.in_summary) and name in last:
                lines.append(f"{name:<17} {self.history[name][0]:.6g} -> {last[name]:.6g}")
        by_value = "value" in last and self.history["value"][self.best_row] == self.best_value
        if by_value and last["value"] - self.best_value > _NOTABLE * abs(self.best_value):
            steps = f"{self.history['step'][self.best_row]:,}"
            lines.append(f"lowest value      {self.best_value:.6g} after {steps} steps: `best_point`")
        if self.problem.exact_solver is None:
            unknown = "the problem is not declared strongly convex"
            lines.append(f"No exact hypergradient: {NOT_SOLVED if self.problem.oracles.is_on_host else unknown}.")
        return "\n".join(lines)

    __repr__ = summary

    def to_dataframe(self) -> Any:
        """Return the history as a pandas DataFrame, with columns for solver, problem and seed."""
        return show.as_dataframe(self)

    def plot(self, metric: str | None = None) -> "Figure":
        """Plot a metric against calls and against seconds; by default ‖∇h‖² if it is known, otherwise F."""
        return show.plot(self, metric)

    def save(self, path: str | Path) -> None:
        """Write the run to one file, from which :func:`bilevel.resume` continues bit for bit.

        If the file cannot be written, OSError is raised and an older file is kept.
        """
        write(self, as_path("path", path), identify(self.problem, failed=self.status is Status.failed))


def identify(problem: BilevelProblem, *, failed: bool = False) -> dict[str, Any]:
    """Return the properties by which a saved run recognizes its problem; takes a few passes over all rows."""
    probe = None if failed else _probe(problem)  # a loss that raises cannot be compared
    return {"problem": problem.name, "fingerprint": problem.fingerprint(), "probe": probe}


def write(result: RunResult, path: Path, identity: dict[str, Any], position: tuple[Any, ...] | None = None) -> None:
    """Write a run to a file; ``position`` (step, calls by kind, seconds) is needed if it is beyond its last row."""
    solver, best = result.solver, (result.best_value, result.best_row)
    about = {"format": _FORMAT, "jax": jax.__version__, "columns": list(result.history), "best": best}
    about |= {"solver": name_solver(type(solver)), "parameters": solver.parameters(), "seed": int(result.seed)}
    about["transformations"] = describe_transformations(solver, result.problem.start)
    about |= identity | ({} if position is None else {"position": position})
    groups = {"state": result.state, "history": list(result.history.values()), "best": result.best_point}
    leaves = {f"{name}_{i}": leaf for name, tree in groups.items() for i, leaf in enumerate(jax.tree.leaves(tree))}
    about["arrays"] = list(leaves)
    arrays = {name: np.asarray(leaf) for name, leaf in leaves.items()}
    try:
        with replacing(path) as file:
            np.savez(file, about=np.array(json.dumps(about)), **arrays)  # type: ignore[arg-type]
    except OSError as error:
        kept = "; the older file there is kept" if os.path.exists(path) else ""  # a name too long is nowhere
        raise type(error)(f"`{path}` cannot be written ({error.strerror or error}){kept}.") from error


def load(
    path: Path, problem: BilevelProblem, solver: SolverBase | None = None
) -> tuple[SolverBase, int, list[np.ndarray], list[dict[str, Any]], Best, tuple[Any, ...]]:
    """Return solver, seed, leaves of the state, rows, best and position of a saved run of this problem."""
    about, groups = _read(path)
    name, parameters = about["solver"], about["parameters"]
    if about["fingerprint"] != problem.fingerprint():
        differ = f"saved from another problem ({about['problem']}): data, start, bounds or dtype differ"
        raise ValueError(f"`{path}` was {differ}. Build the problem with the same arguments as then.")
    if about["probe"] is not None and not _agree(about["probe"], _probe(problem)):
        raise ValueError(f"`{path}`: the data are the same but the losses differ from those it was saved with.")
    made_by = find_imported_solver(name) if solver is None else type(solver)
    if made_by is None:
        way = f"import `{name.partition(':')[0]}` first, or " if ":" in name else ""
        raise ValueError(f"`{path}` was made by `{name}`, which is not in SOLVERS; {way}pass it as `solver=`.")
    if solver is None and any(str(value).startswith("optax ") for value in parameters.values()):
        raise ValueError(f"`{path}` was made by {name} with a transformation of optax; pass it as `solver=`.")
    if solver is None and ARRAY_BOUNDS in parameters.values():
        raise ValueError(f"`{path}` was made by {name} with `outer_bounds` that are arrays; pass it as `solver=`.")
    if solver is not None and (made_by.__name__, solver.parameters()) != (re.split("[:.]", name)[-1], parameters):
        raise ValueError(f"`{path}` was made by {name} with {parameters}, not by {solver!r}.")
    solver = made_by(**parameters) if solver is None else solver
    moves = describe_transformations(solver, problem.start)
    if others := [key for key, found in about["transformations"].items() if not _agree(found, moves[key])]:
        made = f"was made with another transformation, or one with other settings, in `{others[0]}`"
        raise ValueError(f"`{path}` {made}; pass the solver that it was made with.")
    columns, best = [column.tolist() for column in groups["history"]], NO_BEST
    rows = [dict(zip(about["columns"], values, strict=True)) for values in zip(*columns, strict=True)]
    if groups["best"]:
        best = jax.tree.unflatten(jax.tree.structure(problem.start), groups["best"]), *about["best"]
    at_last_row = rows[-1]["step"], [rows[-1][f"calls_{kind}"] for kind in Calls._fields], rows[-1]["seconds"]
    return solver, about["seed"], groups["state"], rows, best, about.get("position", at_last_row)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, list[np.ndarray]]]:
    if not path.exists():
        raise FileNotFoundError(f"`{path}` does not exist; `result.save(path)` writes such a file.")
    with path.open("rb") as file:
        try:
            arrays = read_stored_arrays(file)
            about = json.loads(str(arrays.pop("about")))
            known = about["format"]
            if known == _FORMAT and not about.keys() >= _KEYS:
                raise ValueError(f"it lacks {', '.join(sorted(_KEYS - about.keys()))}")
        # Damage raises errors of a dozen types in zipfile, struct, NumPy or json.
        except Exception as error:
            raise ValueError(f"`{path}` is not a saved run, or is damaged: {error}") from error
    if known != _FORMAT:
        format_differs = f"`{path}` has format {known}, of another version of bilevel; this one reads format {_FORMAT}"
        raise ValueError(f"{format_differs}. Resume it with the version that wrote it, or run again from the start.")
    if set(about["arrays"]) != set(arrays):
        raise ValueError(f"`{path}` is damaged: arrays are missing.")
    names = {group: [n for n in about["arrays"] if n.startswith(f"{group}_")] for group in ("state", "history", "best")}
    return about, {group: [arrays[name] for name in found] for group, found in names.items()}


def _probe(problem: BilevelProblem) -> list[float]:
    """Return values and sizes of derivatives of the losses at fixed random points, in float64.

    A digest of the data does not depend on the losses. At the start itself a variable may be 0, which hides factors.
    Close to the start the losses have the sizes that occur in a run, so that no term dominates the others.
    """
    rng = np.random.default_rng(0)
    moves = jax.tree.map(lambda leaf: rng.uniform(-1, 1, np.shape(leaf)), problem.start)
    numbers: list[float] = []
    with arithmetic(np.float64, problem):
        oracles, start = problem.oracles.in_float64(), trees.to_numpy(problem.start, np.float64)
        for radius in _PROBE_RADII:
            for halvings in range(_MOST_HALVINGS):
                point = trees.add(start, trees.scale(radius / 2**halvings, moves))._replace(v=moves.v)
                found = _sizes(oracles, point._replace(outer_var=oracles.project(point.outer_var)))
                if trees.is_finite(found):
                    break
            numbers += trees.flat(found).tolist()
    return numbers


@Compiled
def _sizes(oracles: Oracles, point: Point) -> PyTree:
    squares = jax.tree.map(lambda leaf: jnp.sum(leaf**2), oracles.direction(point))
    return oracles.inner_value(point), oracles.outer_value(point), squares


def _agree(saved: list[float], found: list[float]) -> bool:
    """Return True if numbers of any size are equal up to rounding errors."""
    return len(saved) == len(found) and np.allclose(saved, found, rtol=_SAME, atol=0.0, equal_nan=True)


# Checkpoints


@dataclass(frozen=True)
class Checkpoints:
    """Where and how often a run is written while it continues.

    Each file is complete or does not exist, and contains all that `bilevel.resume` needs to continue bit for bit. A
    checkpoint evaluates nothing: the history of a run that is killed and resumed is that of an uninterrupted run.

    Parameters
    ----------
    folder : folder of the files, such as ``step-0000001000.npz``; created if it does not exist
    every : an integer number of steps, or a float number of seconds of the wall clock; None means only at the end
    keep : number of files to keep, the latest ones
    """

    folder: str | Path
    every: int | float | None = None
    keep: int = 3

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", as_path("checkpoint", self.folder))
        is_seconds = isinstance(self.every, float) and 0 < self.every < inf
        if not (self.every is None or is_seconds or (is_number(self.every, Integral) and self.every >= 1)):
            raise ValueError(
                f"`Checkpoints(every={self.every!r})`: must be steps, as 1000, or seconds, as 60.0, above 0."
            )
        if not is_number(self.keep, Integral) or self.keep < 1:
            raise ValueError(f"`Checkpoints(keep={self.keep!r})`: must be an integer of at least 1.")


class CheckpointWriter:
    """Writes the checkpoints of one run by its function ``save``; without settings or function it never writes."""

    def __init__(self, checkpoint: str | Path | Checkpoints | None = None, resumed: Path | None = None) -> None:
        given = checkpoint is None or isinstance(checkpoint, Checkpoints)
        self.settings: Checkpoints | None = checkpoint if given else Checkpoints(checkpoint)  # type: ignore[assignment,arg-type]
        every = None if self.settings is None else self.settings.every
        self._seconds = every if isinstance(every, float) else inf
        self._steps = every if isinstance(every, Integral) else None
        self._last, self._done = time.monotonic(), -1
        self.save: Callable[[Path], None] | None = None
        found = [] if self.settings is None else written(self.settings.folder)
        if self.settings and found and (resumed is None or found[-1].resolve() != latest(resumed).resolve()):
            raise FileExistsError(
                f"`checkpoint={str(self.settings.folder)!r}`: the folder has {found[-1].name} of another run. Continue "
                "that run with `bilevel.resume`, delete the file, or give another folder."
            )

    def next_step(self, step: int) -> float:
        """Return the step of the next checkpoint; infinity without an interval in steps."""
        return inf if self._steps is None else step - step % self._steps + self._steps

    def write_if_due(self, step: int) -> None:
        """Write the run if a checkpoint is due."""
        due = self._steps is not None and step % self._steps == 0
        if due or time.monotonic() - self._last >= self._seconds:
            self.write(step)

    def write(self, step: int) -> None:
        """Write the run after ``step``, once. If it cannot be written, warn and continue."""
        if self.settings is None or self.save is None or step == self._done:
            return
        try:
            self.save(Path(self.settings.folder) / f"step-{step:010d}.npz")
            self._done = step
            for old in written(self.settings.folder)[: -self.settings.keep]:
                old.unlink(missing_ok=True)
        except OSError as error:
            warn_user(f"`checkpoint`: {error} The run continues without this one.")
        self._last = time.monotonic()


def written(folder: str | Path) -> list[Path]:
    """Return the checkpoints of a folder, the earliest first."""
    return sorted(Path(folder).glob(f"step-{10 * '[0-9]'}.npz"))


def latest(path: Path) -> Path:
    """Return a path to a file unchanged, and for a folder its latest checkpoint."""
    if not path.is_dir():
        return path
    if not (found := written(path)):
        raise FileNotFoundError(f"`{path}` has no checkpoint; `run(…, checkpoint={str(path)!r})` writes some.")
    return found[-1]

"""Run an experiment of the paper (sweep, selection, timing), and keep and read its results."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bilevel._core.files import replacing
from bilevel._core.types import Calls
from bilevel.bench.config import SWEEP, TIMING, CellBudget, Experiment, GridSetting, load_config
from bilevel.bench.distribution import Where
from bilevel.bench.execute import execute
from bilevel.bench.live import Watcher
from bilevel.bench.select import Section, make_sections
from bilevel.bench.store import Frame, Store, list_metrics
from bilevel.engine.metrics import METRICS
from paper.parts import PARTS, PUBLISHED, UNTUNED

_VERSIONS = ("python", "jax", "bilevel", "revision", "written_at")


def reproduce(
    name: str,
    stores: Path,
    kept: Path,
    watcher: Watcher,
    *,
    quick: bool = False,
    phases: Collection[str] = (SWEEP, TIMING),
    where: Where = Where(),  # noqa: B008
) -> int:
    """Run the tasks of a part that are not in its store, keep its results, and return the number of failed tasks.

    Parameters
    ----------
    name : key of `paper.parts.PARTS`
    stores : folder with a store for each part
    kept : folder of kept results, into which the whole store is written as one file
    watcher : shows the progress, see :class:`bilevel.bench.live.Watcher`
    quick : run one published setting of each solver on a smaller problem
    phases : which phases to run, "sweep" or "timing" or both. The sweep can be run on one machine and the timing on
        another; the store has to be copied in between
    where : processes, Dask scheduler and device
    """
    experiment, store = load_config(name), Store(stores / name)
    if quick:
        experiment = shrink(experiment, PARTS[name].little)
    failures = execute(experiment, store, watcher, phases=phases, where=where)
    _keep(store.read(), experiment.metric, PARTS[name].draws, kept / f"{name}.parquet")
    Store(kept).keep_config(experiment)
    return failures


def _keep(rows: Frame, selecting: str, drawn: str, path: Path) -> None:
    """Write what the page and the audit need to one small file of a store.

    It omits other metrics, calls by kind and versions, and in the sweep also the drawn metric and costs except rounded
    epochs. It numbers the cells of an experiment instead of using their hashes, so nothing can be resumed from it.
    """
    rows = rows[rows["final"] | (rows["phase"] == TIMING)].sort_values(["phase", "solver", "cell"], kind="stable")
    if rows.empty:  # a file without rows counts as damaged
        return
    dropped = {*METRICS, *_VERSIONS, *(f"calls_{kind}" for kind in Calls._fields)} - {selecting, drawn}
    rows = rows.drop(columns=[*dropped.intersection(rows)]).dropna(axis="columns", how="all")
    cells = {cell: f"{place:06}" for place, cell in enumerate(rows["cell"].unique())}
    rows["cell"] = rows["experiment"] + " " + rows["cell"].map(cells)
    is_timed, only_timed = rows["phase"] == TIMING, ["seconds", "step", "calls", *({drawn} - {selecting})]
    rows = rows.sort_values(["cell", "step"])
    rows[only_timed] = rows[only_timed].where(is_timed)
    rows["epochs"] = rows["epochs"].where(is_timed, rows["epochs"].round())
    with np.errstate(over="ignore"):
        rows = rows.astype(dict.fromkeys(["seconds", "epochs", *list_metrics(rows)], np.float32))
    with replacing(path) as file:
        rows.to_parquet(file, index=False, compression="zstd", compression_level=19)


def shrink(experiment: Experiment, little: dict[str, Any]) -> Experiment:
    """Return the experiment with one published setting of each solver and AutoSRBA, for two seeds and an epoch.

    The problem is made with the arguments in ``little``.
    """
    chosen: dict[tuple[str, str], GridSetting] = {}
    for setting in experiment.settings:
        for column in {PUBLISHED, UNTUNED}.intersection(setting.columns):
            chosen.setdefault((setting.solver, column), setting)
    arguments = tuple(sorted((dict(experiment.problem_arguments) | little).items()))
    budget, settings = CellBudget(epochs=1.0, seconds=0.1), tuple(chosen.values())
    return replace(experiment, seeds=(0, 1), problem_arguments=arguments, settings=settings, budget=budget)


def read_kept(kept: Path) -> dict[str, Section]:
    """Return the results of each part in the folder, by name."""
    store = Store(kept)
    table = store.read()
    if table.empty:
        raise FileNotFoundError(f"`{kept}` has no kept results; `python -m paper reproduce` makes them.")
    metrics = {experiment.name: experiment.metric for experiment in store.experiments()}
    found = {}
    for name in PARTS:
        rows = table[table["experiment"] == name]
        if len(rows):
            (found[name],) = make_sections(rows, metrics[name])
    return found

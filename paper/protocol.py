"""Run an experiment of the paper (sweep, selection, timing), and keep and read its results."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bilevel._core.types import Calls
from bilevel.bench.config import SWEEP, TIMING, Experiment, GridSetting, find_config, load_config
from bilevel.bench.distribution import Where
from bilevel.bench.execute import execute
from bilevel.bench.live import Watcher
from bilevel.bench.select import Section, make_sections
from bilevel.bench.store import Frame, Store
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
    watcher : shows the progress, see :func:`bilevel.bench.live.watch`
    quick : run one published setting of each solver on a smaller problem
    phases : which phases to run, "sweep" or "timing" or both. The sweep can be run on one machine and the timing on
        another; the store has to be copied in between
    where : processes, Dask scheduler and device
    """
    experiment, store = load_config(name), Store(stores / name)
    if quick:
        experiment = shrink(experiment, PARTS[name].little)
    failures = execute(experiment, store, watcher, phases=phases, where=where, config=find_config(name))
    _Slim(stores / name, experiment.metric, PARTS[name].draws).keep(kept / f"{name}.parquet")
    Store(kept).keep_config(find_config(name))
    return failures


class _Slim(Store):
    """A store that reads only what the page and the audit need, so that the kept file is small.

    It omits other metrics, calls by kind and versions, and in the sweep also the drawn metric and costs except rounded
    epochs. It numbers the cells of an experiment instead of using their hashes, so nothing can be resumed from it.
    """

    def __init__(self, folder: Path, selecting: str, drawn: str) -> None:
        super().__init__(folder)
        self._dropped = {*METRICS, *_VERSIONS, *(f"calls_{kind}" for kind in Calls._fields)} - {selecting, drawn}
        self._only_timed = ["seconds", "step", "calls", *({drawn} - {selecting})]

    def read(self, phase: str | None = None) -> Frame:
        rows = super().read(phase)
        rows = rows.drop(columns=[*self._dropped.intersection(rows)]).dropna(axis="columns", how="all")
        rows = rows.sort_values(["phase", "solver", "cell"], kind="stable")
        cells = {cell: f"{place:06}" for place, cell in enumerate(rows["cell"].unique())}
        rows["cell"] = rows["experiment"] + " " + rows["cell"].map(cells)
        rows = rows.astype({"seconds": np.float32, "epochs": np.float32})
        is_timed = rows["phase"] == TIMING
        rows[self._only_timed] = rows[self._only_timed].where(is_timed)
        rows["epochs"] = rows["epochs"].where(is_timed, rows["epochs"].round())
        return rows


def shrink(experiment: Experiment, little: dict[str, Any]) -> Experiment:
    """Return the experiment with one published setting of each solver and AutoSRBA, for two seeds and an epoch.

    The problem is made with the arguments in ``little``.
    """
    chosen: dict[tuple[str, str], GridSetting] = {}
    for setting in experiment.settings:
        for column in {PUBLISHED, UNTUNED}.intersection(setting.columns):
            chosen.setdefault((setting.solver, column), setting)
    arguments = tuple(sorted((dict(experiment.problem_arguments) | little).items()))
    limits: dict[str, Any] = {"max_calls": None, "epochs": 1.0, "timing_epochs": None, "max_seconds": 0.1}
    settings = tuple(chosen.values())
    return replace(experiment, seeds=(0, 1), problem_arguments=arguments, settings=settings, **limits)


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

"""The experiments of the paper, swept, selected, timed and kept; or all of it in little, in a minute."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from bilevel.bench.cells import SWEEP, TIMING, Setting
from bilevel.bench.config import Experiment, load_config
from bilevel.bench.execute import Watcher, Where, execute
from bilevel.bench.sections import Section, make_sections
from bilevel.bench.store import Store
from bilevel.bench.tables import find_config
from paper.parts import PARTS, PUBLISHED, UNTUNED


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
    """Run what is missing of a part, keep all of it, and return how many tasks failed.

    Parameters
    ----------
    name : a key of `paper.parts.PARTS`
    stores : a folder with a store for each part; what is in it is not run again
    kept : the folder of kept results
    quick : one published setting of each solver, on a small problem
    phases, where : as for :func:`bilevel.bench.execute.execute`
    """
    experiment, store = load_config(name), Store(stores / name)
    if quick:
        experiment = shrink(experiment, PARTS[name].little)
    failures = execute(experiment, store, watcher, phases=phases, where=where, config=find_config(name))
    store.keep(kept / f"{name}.parquet")
    Store(kept).keep_config(find_config(name))
    return failures


def shrink(experiment: Experiment, little: dict[str, Any]) -> Experiment:
    """Return the experiment with a published setting of each solver and the untuned one, two seeds, and an epoch."""
    chosen: dict[tuple[str, str], Setting] = {}
    for setting in experiment.settings:
        for column in {PUBLISHED, UNTUNED}.intersection(setting.columns):
            chosen.setdefault((setting.solver, column), setting)
    arguments = tuple(sorted((dict(experiment.problem_arguments) | little).items()))
    limits: dict[str, Any] = {"max_calls": None, "epochs": 1.0, "timing_epochs": None, "max_seconds": 0.1}
    settings = tuple(chosen.values())
    return replace(experiment, seeds=(0, 1), problem_arguments=arguments, settings=settings, **limits)


def read_kept(kept: Path) -> dict[str, Section]:
    """Return the section of each part whose results are kept."""
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

"""``bilevel run``: the command that computes."""

import logging
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from bilevel._optional import require
from bilevel.cli.terminal import FAILED, err, errors_in_a_line, exit_stopped, out, say, spell, typer

if TYPE_CHECKING:
    from bilevel.bench.distribution import Where

_LAST_SEED = 1_000_000  # a range beyond it is a slip of the finger
Device = StrEnum("Device", ["cpu", "gpu"])
Phase = StrEnum("Phase", ["sweep", "timing"])
Jobs = Annotated[int, typer.Option(min=1, help="processes on this machine")]
Scheduler = Annotated[str | None, typer.Option(help="address of a Dask scheduler")]
ChosenDevice = Annotated[Device | None, typer.Option(help="where to compute; JAX's choice by default")]
SinglePhase = Annotated[Phase | None, typer.Option(help="sweep on one machine, time on another; both by default")]


def _complete_config(begun: str) -> list[str]:
    from bilevel.bench.config import list_configs

    return [path.stem for path in list_configs() if path.stem.startswith(begun)]


def run(
    config: Annotated[
        str, typer.Argument(help="a TOML file, or a name of `bilevel list configs`", autocompletion=_complete_config)
    ],
    store: Annotated[Path | None, typer.Option(help="folder of the results; results/NAME by default")] = None,
    only: Annotated[list[str] | None, typer.Option(help="run this solver alone; may be repeated")] = None,
    seeds: Annotated[str | None, typer.Option(help="seeds FIRST:STOP, as 0:3 for 0, 1 and 2")] = None,
    jobs: Jobs = 1,
    dask: Scheduler = None,
    device: ChosenDevice = None,
    phase: SinglePhase = None,
) -> None:
    """Run an experiment: sweep its grid, select, time the selected settings. What is in the store is not run again."""
    from bilevel.bench.config import load_config
    from bilevel.bench.execute import execute
    from bilevel.bench.live import watch
    from bilevel.bench.store import Store

    with errors_in_a_line():
        _find_modules_here()
        experiment = load_config(config)
        where = choose_where(jobs, dask, device)
        folder = store or Path("results") / experiment.name
        options = {"only": only, "seeds": seeds, "jobs": jobs if jobs > 1 else None, "dask": dask, "device": device}
        again = spell("run", config, store=folder, **options, phase=phase)
        chosen: dict[str, Any] = {"seeds": _seed_range(seeds), "only": only or None}
        chosen |= {"phases": [phase.value]} if phase else {}
        say(err, f"{experiment.budgets}; results go to {folder}")
        try:
            with watch(experiment.metric, err) as watcher:
                failures = execute(experiment, Store(folder), watcher, **chosen, where=where, config=config)
        except KeyboardInterrupt:
            exit_stopped(f"what is finished is in {folder}. To go on: {again}")
    if failures:
        say(err, f"{count_failures(failures)}; all else is in {folder}. To try again: {again}")
        raise typer.Exit(FAILED)
    say(out, f"results in {folder}; next: {spell('report', folder, out=f'{folder}-report')}")


def count_failures(failures: int) -> str:
    """Return how many tasks did not do all of their work."""
    return f"{failures} task{'s' * (failures > 1)} failed or lost results"


def choose_where(jobs: int, dask: str | None, device: Device | None) -> "Where":
    """Return where to compute from the options of the command line."""
    from bilevel.bench.distribution import Where

    if dask is not None:
        # Importing distributed sets the level of its loggers, so this comes later. Only the command line, which owns
        # its process, silences the client: a lost scheduler is reported in one line for each task.
        require("distributed", "bench")
        logging.getLogger("distributed.client").setLevel(logging.CRITICAL)
    return Where(jobs, dask, device.value if device else None)


def _find_modules_here() -> None:
    """Let a config name modules of the current folder, as ``python -m`` does."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def _seed_range(text: str | None) -> range | None:
    if text is None:
        return None
    first, colon, stop = text.partition(":")
    if not (colon and first.isdecimal() and stop.isdecimal() and int(first) < int(stop) <= _LAST_SEED):
        raise ValueError(f"`--seeds {text}`: must be FIRST:STOP with FIRST below STOP <= {_LAST_SEED:,}, as 0:3.")
    return range(int(first), int(stop))

"""``bilevel run``, ``reproduce`` and ``complexity``: the commands that compute."""

import sys
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from bilevel._optional import require
from bilevel.cli.terminal import FAILED, OutFolder, err, errors_in_a_line, exit_stopped, out, say, spell, typer

_progress = require("rich.progress", "bench")
_LAST_SEED = 1_000_000  # a range beyond it is a slip of the finger
MEASURED = {"complexity": "complexity", "theory": "lower_bound"}  # parts without a store, and their rows
Device = StrEnum("Device", ["cpu", "gpu"])
Phase = StrEnum("Phase", ["sweep", "timing"])
Reproduced = StrEnum(
    "Reproduced", ["all", "quadratic", "ijcnn1", "cleaning", "cleaning70", "cleaning90", "complexity", "theory"]
)
Jobs = Annotated[int, typer.Option(min=1, help="processes on this machine")]
Scheduler = Annotated[str | None, typer.Option(help="address of a Dask scheduler")]
ChosenDevice = Annotated[Device | None, typer.Option(help="where to compute; JAX's choice by default")]
SinglePhase = Annotated[Phase | None, typer.Option(help="sweep on one machine, time on another; both by default")]
KEPT, PAGE = Path("reports") / "reproduction", Path("docs") / "reproduction.md"  # of a checkout
KeptFolder = Annotated[Path, typer.Option("--kept", help="folder of kept results")]


def _complete_config(begun: str) -> list[str]:
    from bilevel.bench.tables import list_configs

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
    from bilevel.bench.execute import Where, execute
    from bilevel.bench.live import watch
    from bilevel.bench.store import Store

    with errors_in_a_line():
        _find_modules_here()
        experiment = load_config(config)
        where = Where(jobs, dask, device.value if device else None)
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
        say(err, f"{failures} task{'s' * (failures > 1)} failed; all else is in {folder}. To try again: {again}")
        raise typer.Exit(FAILED)
    say(out, f"results in {folder}; next: {spell('report', folder, out=f'{folder}-report')}")


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


def reproduce_(
    part: Annotated[Reproduced, typer.Argument(help="an experiment of the paper")] = Reproduced.all,
    stores: Annotated[Path, typer.Option(help="folder with a store for each part")] = Path("results") / "reproduce",
    kept: KeptFolder = KEPT,
    page: Annotated[Path, typer.Option(help="the page to write")] = PAGE,
    quick: Annotated[bool, typer.Option("--quick", help="all of it in little, in a minute or two")] = False,
    from_kept: Annotated[
        bool, typer.Option("--from-kept", help="run nothing: page and figures from kept results")
    ] = False,
    phase: SinglePhase = None,
    jobs: Jobs = 1,
    dask: Scheduler = None,
    device: ChosenDevice = None,
) -> None:
    """Run the experiments of the SRBA paper, keep their results, and write the page. What is done is not run again."""
    from bilevel.bench.config import load_config
    from bilevel.bench.execute import Where
    from bilevel.bench.live import watch
    from bilevel.reproduction.page import write_page
    from bilevel.reproduction.protocol import PARTS, reproduce

    with errors_in_a_line():
        if quick and not from_kept:  # beside what was run in full, not over it
            stores, kept, page = (Path("results") / "reproduce-quick" / name for name in ("stores", "kept", "page.md"))
        names = [] if from_kept else [*PARTS, *MEASURED] if part is Reproduced.all else [part.value]
        failures = 0
        for place, name in enumerate(names, start=1):
            say(err, f"{name} ({place} of {len(names)})")
            if name in MEASURED:
                _measure_theory(kept, [MEASURED[name]], quick=quick)
                continue
            options: dict[str, Any] = {"quick": quick, "where": Where(jobs, dask, device.value if device else None)}
            options |= {"phases": [phase.value]} if phase else {}
            with watch(load_config(name).metric, err) as watcher:
                failures += reproduce(name, stores, kept, watcher, **options)
        for path in write_page(kept, page):
            say(out, str(path))
    if failures:
        say(err, f"{failures} tasks failed; all else is kept. The same command tries them again.")
        raise typer.Exit(FAILED)


def complexity(
    out_folder: OutFolder = Path("complexity"),
    quick: Annotated[bool, typer.Option("--quick", help="few sizes and solvers, in half a minute")] = False,
) -> None:
    """Measure oracle calls to a stationary point against n + m and 1/epsilon, and queries against the lower bound."""
    with errors_in_a_line():
        say(out, "\n".join(map(str, _measure_theory(out_folder, [*MEASURED.values()], quick=quick))))


def _measure_theory(folder: Path, names: list[str], *, quick: bool) -> list[Path]:
    from bilevel.theory import tables

    if not err.is_terminal:
        return tables.write_measurements(folder, names, quick=quick, reporter=_lines)
    with _progress.Progress(console=err) as bar:
        return tables.write_measurements(folder, names, quick=quick, reporter=partial(_add_bar, bar))


def _lines(title: str) -> Callable[[float, str], None]:
    return lambda share, text: say(err, f"{title}: {100 * share:.0f} %, {text}")


def _add_bar(bar: Any, title: str) -> Callable[[float, str], None]:
    task = bar.add_task(title, total=1.0)
    return lambda share, text: bar.update(task, completed=share, description=text)

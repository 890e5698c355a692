"""``bilevel run``, and the commands that read its results: ``select``, ``report``, ``figure`` and ``check``."""

import json
import logging
import sys
import warnings
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from bilevel._core.extras import require
from bilevel.cli.terminal import (
    FAILED,
    OutFolder,
    err,
    errors_in_a_line,
    exit_stopped,
    out,
    print_line,
    print_table,
    spell,
    typer,
)

if TYPE_CHECKING:
    from bilevel.bench.distribution import Where
    from bilevel.bench.store import Store

_LAST_SEED = 1_000_000  # a larger range is probably a mistake
Device = StrEnum("Device", ["cpu", "gpu"])
Phase = StrEnum("Phase", ["sweep", "timing"])
Jobs = Annotated[int, typer.Option(min=1, help="processes on this machine")]
Scheduler = Annotated[str | None, typer.Option(help="address of a Dask scheduler")]
ChosenDevice = Annotated[Device | None, typer.Option(help="where to compute; JAX's choice by default")]
SinglePhase = Annotated[Phase | None, typer.Option(help="sweep on one machine, time on another; both by default")]

ResultsFolder = Annotated[Path, typer.Argument(help="folder of results, the --store of a run")]
_SELECTION = "metric to select settings by, not of test rows; the config's by default"
SelectionMetric = Annotated[str | None, typer.Option("--select", help=_SELECTION)]
DrawnMetric = Annotated[str | None, typer.Option("--draw", help="metric to draw; the one that selects by default")]
Earlier = Annotated[Path | None, typer.Option(help="an earlier store, to compare with: before / after")]
Format = StrEnum("Format", ["table", "csv", "json"])


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
        print_line(err, f"{experiment.budgets}; results go to {folder}")
        try:
            with watch(experiment.metric, err) as watcher:
                failures = execute(experiment, Store(folder), watcher, **chosen, where=where, config=config)
        except KeyboardInterrupt:
            exit_stopped(f"finished results are in {folder}. To continue: {again}")
    if failures:
        print_line(err, f"{count_failures(failures)}; all other results are in {folder}. To try again: {again}")
        raise typer.Exit(FAILED)
    print_line(out, f"results in {folder}; next: {spell('report', folder, out=f'{folder}-report')}")


def count_failures(failures: int) -> str:
    """Return the number of failures in words."""
    return f"{failures} task{'s' * (failures > 1)} failed or lost results"


def choose_where(jobs: int, dask: str | None, device: Device | None) -> "Where":
    """Return the processes and the device that the options of a command select."""
    from bilevel.bench.distribution import Where

    if dask is not None:
        # A lost scheduler is reported in one line per task, so the messages of the client are not needed. The level is
        # set after the import, which sets it too.
        require("distributed", "bench")
        logging.getLogger("distributed.client").setLevel(logging.CRITICAL)
    return Where(jobs, dask, device.value if device else None)


def _find_modules_here() -> None:
    """Make modules of the current folder importable by a config, as ``python -m`` does."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def _seed_range(text: str | None) -> range | None:
    if text is None:
        return None
    first, colon, stop = text.partition(":")
    if not (colon and first.isdecimal() and stop.isdecimal() and int(first) < int(stop) <= _LAST_SEED):
        raise ValueError(f"`--seeds {text}`: must be FIRST:STOP with FIRST below STOP <= {_LAST_SEED:,}, as 0:3.")
    return range(int(first), int(stop))


def select_(
    store: ResultsFolder,
    metric: Annotated[str | None, typer.Option("--metric", help=_SELECTION)] = None,
    format: Annotated[Format, typer.Option("--format", help="a table to read, or all columns for programs")] = (
        Format.table
    ),
) -> None:
    """Show each solver's best setting in the sweep."""
    from bilevel.bench.select import select

    with errors_in_a_line():
        results, metric = _open_store(store, metric)
        best = select(_read(results), metric or "value")
    if format is not Format.table:
        known = best.dropna(axis="columns", how="all")
        return print_line(out, known.to_csv(index=False).rstrip("\n") if format is Format.csv else _as_json(known))
    columns = ["experiment", "solver", "setting", best["metric"].iloc[0], "20 – 80 %", "seeds", "diverged"]
    print_table(columns, map(_describe_selection, best.to_dict("records")))
    if best["edges"].any():
        print_line(out, "(least), (largest): at an end of its grid; a better value may lie beyond.")


def _as_json(table: Any) -> str:
    """Return the rows as JSON; infinite values, of settings that diverged, become null."""
    rows = table.astype(object).where(table.notna(), None).to_dict("records")
    finite = ({name: None if value in (inf, -inf) else value for name, value in row.items()} for row in rows)
    return json.dumps(list(finite), indent=1)


def _describe_selection(row: dict[str, Any]) -> tuple[str, ...]:
    ends = {name: f" ({end})" for end, name in (edge.split() for edge in row["edges"].split(", ") if edge)}
    named = {name.removeprefix("param_"): value for name, value in row.items() if name.startswith("param_")}
    numbers = {name: value for name, value in named.items() if type(value) in (int, float) and value == value}
    setting = ", ".join(f"{name}={value:g}{ends.get(name, '')}" for name, value in numbers.items())
    spread = (f"{row['median']:.6g}", f"{row['p20']:.4g} – {row['p80']:.4g}")
    return row["experiment"], row["label"], setting, *spread, str(row["n_seeds"]), str(row["n_diverged"])


def report(
    store: ResultsFolder, out_folder: OutFolder = Path("report"), select: SelectionMetric = None, before: Earlier = None
) -> None:
    """Write the results as one page that needs no network."""
    from bilevel.bench.page import write_report

    with errors_in_a_line():
        results, select = _open_store(store, select)
        budgets = "; ".join(experiment.budgets for experiment in results.experiments())
        runs = (spell("run", path, store=store) for path in results.configs())
        commands = [*runs, spell("report", store, out=out_folder, before=before)]
        notices: list[str] = []
        earlier = before and _read(_open_store(before, None)[0], notices)
        options: dict[str, Any] = {"select": select, "budgets": budgets, "commands": commands, "before": earlier}
        page = write_report(_read(results, notices), out_folder, notices=notices, **options)
    print_line(out, f"open in a browser: {page}")


def figure(
    store: ResultsFolder,
    out_folder: OutFolder = Path("figures"),
    select: SelectionMetric = None,
    draw: DrawnMetric = None,
) -> None:
    """Write figures for print, as PDF and PNG."""
    from bilevel.bench.page import write_figures

    with errors_in_a_line():
        results, select = _open_store(store, select)
        for path in write_figures(_read(results), out_folder, select=select, draw=draw):
            print_line(out, str(path))


def _open_store(folder: Path, metric: str | None) -> "tuple[Store, str | None]":
    """Return a store and the metric to select by: the given one, or the one that all its experiments state."""
    from bilevel.bench.store import Store

    if not folder.exists():
        raise FileNotFoundError(f"`{folder}`: no such folder; `bilevel run CONFIG --store {folder}` makes it.")
    metrics = {experiment.metric for experiment in Store(folder).experiments()}
    return Store(folder), metric or (metrics.pop() if len(metrics) == 1 else None)


def _read(results: "Store", notices: list[str] | None = None) -> Any:
    """Return all rows of a store; print its unfinished phases, and append them to the notices."""
    from bilevel.bench.store import list_finished

    table = results.read()
    for text in results.list_unfinished(list_finished(table)):
        print_line(err, text)
        if notices is not None:
            notices.append(f"{results.folder}: {text}")
    return table


def check(
    store: ResultsFolder,
    set_aside: Annotated[
        bool, typer.Option("--set-aside", help="rename damaged files, so that they are not read")
    ] = False,
) -> None:
    """Show which files of a store are damaged; this machine is shown by `doctor`."""
    with errors_in_a_line():
        results, _ = _open_store(store, None)
        damaged = results.damaged()
        for path, problem in damaged.items():
            print_line(out, f"{path}: damaged ({problem})")
        for path in results.set_aside(damaged) if set_aside else []:
            print_line(out, f"set aside as {path}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the damaged files are printed above
            finished = results.finished()
        for text in results.list_unfinished(finished):
            print_line(out, text)
        print_line(out, f"{len(finished):,} finished cells, {len(damaged)} damaged files")
    if damaged and not set_aside:
        raise typer.Exit(FAILED)

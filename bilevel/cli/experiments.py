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
from bilevel.bench.live import Watcher, print_line
from bilevel.cli.terminal import FAILED, OutFolder, errors_in_a_line, exit_stopped, print_table, spell, typer

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
LogAxes = StrEnum("LogAxes", ["x", "y", "xy", "none"])
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
    from bilevel.bench.select import select
    from bilevel.bench.store import Store

    with errors_in_a_line():
        _find_modules_here()
        experiment = load_config(config)
        where = choose_where(jobs, dask, device)
        folder = store or Path("results") / experiment.name
        options = {"only": only, "seeds": seeds, "jobs": jobs if jobs > 1 else None, "dask": dask, "device": device}
        again = spell("run", config, store=folder, **options, phase=phase)
        phases = [one.value for one in ((phase,) if phase else Phase)]
        chosen: dict[str, Any] = {"seeds": _seed_range(seeds), "only": only or None, "phases": phases}
        print_line(f"{experiment.name}: {experiment.budget}; results go to {folder}", err=True)
        try:
            failures = execute(experiment, Store(folder), Watcher(), **chosen, where=where)
        except KeyboardInterrupt:
            exit_stopped(f"finished results are in {folder}. To continue: {again}")
    if failures:
        print_line(f"{count_failures(failures)}; all other results are in {folder}. To try again: {again}", err=True)
        raise typer.Exit(FAILED)
    if Phase.sweep in phases:
        rows = Store(folder).read()
        _print_selection(select(rows[rows["experiment"] == experiment.name], experiment.metric))
    print_line(f"results in {folder}; next: {spell('report', folder, out=f'{folder}-report')}")


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
        table, metric, _ = _read(_open_store(store), metric)
        best = select(table, metric or "value")
    if format is not Format.table:
        known = best.dropna(axis="columns", how="all")
        return print_line(known.to_csv(index=False).rstrip("\n") if format is Format.csv else _as_json(known))
    _print_selection(best)


def _print_selection(best: Any) -> None:
    ends = best["metric"].iloc[0], "20 – 80 %", "seeds", "diverged", "at an end of its grid"
    rows = map(_describe_selection, best.to_dict("records"))
    print_table(["experiment", "problem", "solver", "setting", *ends], rows)


def _as_json(table: Any) -> str:
    """Return the rows as JSON; infinite values, of settings that diverged, become null."""
    rows = table.astype(object).where(table.notna(), None).to_dict("records")
    finite = ({name: None if value in (inf, -inf) else value for name, value in row.items()} for row in rows)
    return json.dumps(list(finite), indent=1)


def _describe_selection(row: dict[str, Any]) -> tuple[str, ...]:
    named = {name.removeprefix("param_"): value for name, value in row.items() if name.startswith("param_")}
    numbers = {name: value for name, value in named.items() if type(value) in (int, float) and value == value}
    setting = ", ".join(f"{name}={value:g}" for name, value in numbers.items())
    counts = str(row["n_seeds"]), str(row["n_diverged"])
    spread = f"{row['median']:.6g}", f"{row['p20']:.4g} – {row['p80']:.4g}"
    return row["experiment"], row["problem"], row["label"], setting, *spread, *counts, row["edges"]


def report(store: ResultsFolder, out_folder: OutFolder = Path("report"), select: SelectionMetric = None) -> None:
    """Write the results as one page that needs no network."""
    from bilevel.bench.config import parse_budget
    from bilevel.bench.page import write_report

    with errors_in_a_line():
        results = _open_store(store)
        table, select, notices = _read(results, select)
        budgets = "; ".join(f"{one.name}: {parse_budget(one.budget)}" for one in results.experiments())
        runs = (spell("run", path, store=store) for path in results.configs())
        commands = [*runs, spell("report", store, out=out_folder)]
        page = write_report(table, out_folder, select=select, budgets=budgets, commands=commands, notices=notices)
    print_line(f"open in a browser: {page}")


def figure(
    store: ResultsFolder,
    out_folder: OutFolder = Path("figures"),
    select: SelectionMetric = None,
    draw: DrawnMetric = None,
    only: Annotated[list[str] | None, typer.Option(help="draw this solver; may be repeated, all by default")] = None,
    label: Annotated[list[str] | None, typer.Option(help="SOLVER=TEXT for the legend; may be repeated")] = None,
    width: Annotated[float, typer.Option(min=1.0, help="inches; 3.3 is a column of most journals")] = 3.3,
    height: Annotated[float, typer.Option(min=0.5, help="of each panel, in inches")] = 1.9,
    log: Annotated[LogAxes | None, typer.Option(help="axes with a log scale; the metric's choice by default")] = None,
) -> None:
    """Write figures for print, as PDF and PNG."""
    from bilevel.bench.page import Layout, write_figures

    with errors_in_a_line():
        pairs = [text.partition("=")[::2] for text in label or []]
        if wrong := [text for text, (_, words) in zip(label or [], pairs, strict=True) if not words]:
            raise ValueError(f"`--label {wrong[0]}`: must be SOLVER=TEXT, as SRBA='our method'.")
        layout = Layout(width, height, None if log is None else log.value.replace("none", ""), dict(pairs))
        table, select, _ = _read(_open_store(store), select)
        for path in write_figures(table, out_folder, select=select, draw=draw, only=only or (), layout=layout):
            print_line(str(path))


def _open_store(folder: Path) -> "Store":
    from bilevel.bench.store import Store

    if not folder.exists():
        raise FileNotFoundError(f"`{folder}`: no such folder; `bilevel run CONFIG --store {folder}` makes it.")
    return Store(folder)


def _read(store: "Store", metric: str | None) -> tuple[Any, str | None, list[str]]:
    """Return rows, the metric to select by, and a sentence for each unfinished phase, which is printed too.

    If no metric is given, it is the one that all experiments of the store state.
    """
    from bilevel.bench.store import list_finished

    table = store.read()
    notices = store.list_unfinished(list_finished(table))
    for text in notices:
        print_line(text, err=True)
    metrics = {experiment.metric for experiment in store.experiments()}
    return table, metric or (metrics.pop() if len(metrics) == 1 else None), notices


def check(
    store: ResultsFolder,
    set_aside: Annotated[
        bool, typer.Option("--set-aside", help="rename damaged files, so that they are not read")
    ] = False,
) -> None:
    """Show which files of a store are damaged; this machine is shown by `doctor`."""
    with errors_in_a_line():
        results = _open_store(store)
        damaged = results.damaged()
        for path, problem in damaged.items():
            print_line(f"{path}: damaged ({problem})")
        for path in results.set_aside(damaged) if set_aside else []:
            print_line(f"set aside as {path}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the damaged files are printed above
            finished = results.finished()
        for text in results.list_unfinished(finished):
            print_line(text)
        print_line(f"{len(finished):,} finished cells, {len(damaged)} damaged files")
    if damaged and not set_aside:
        raise typer.Exit(FAILED)

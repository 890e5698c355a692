"""``bilevel select``, ``report``, ``figure`` and ``check``: the commands that read results."""

import json
import warnings
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from bilevel.cli.terminal import FAILED, OutFolder, err, errors_in_a_line, out, print_table, say, spell, typer

if TYPE_CHECKING:
    from bilevel.bench.store import Store

ResultsFolder = Annotated[Path, typer.Argument(help="folder of results, the --store of a run")]
_SELECTION = "metric to select settings by, not of test rows; the config's by default"
SelectionMetric = Annotated[str | None, typer.Option("--select", help=_SELECTION)]
DrawnMetric = Annotated[str | None, typer.Option("--draw", help="metric to draw; the one that selects by default")]
Earlier = Annotated[Path | None, typer.Option(help="an earlier store, to compare with: before / after")]
Format = StrEnum("Format", ["table", "csv", "json"])


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
        return say(out, known.to_csv(index=False).rstrip("\n") if format is Format.csv else _as_json(known))
    columns = ["experiment", "solver", "setting", best["metric"].iloc[0], "20 – 80 %", "seeds", "diverged"]
    print_table(columns, map(_describe_selection, best.to_dict("records")))
    if best["edges"].any():
        say(out, "(least), (largest): at an end of its grid; a better value may lie beyond.")


def _as_json(table: Any) -> str:
    """Return the rows as JSON, which has no infinity: a setting that diverged has null there."""
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
        told: dict[str, Any] = {"select": select, "budgets": budgets, "commands": commands, "notices": notices}
        earlier = before and _read(_open_store(before, None)[0], notices)
        page = write_report(_read(results, notices), out_folder, **told, before=earlier)
    say(out, f"open in a browser: {page}")


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
            say(out, str(path))


def _open_store(folder: Path, metric: str | None) -> "tuple[Store, str | None]":
    """Return a store, and the metric to select by: the given one, or that of all its experiments, if they agree."""
    from bilevel.bench.store import Store

    if not folder.exists():
        raise FileNotFoundError(f"`{folder}`: no such folder; `bilevel run CONFIG --store {folder}` makes it.")
    metrics = {experiment.metric for experiment in Store(folder).experiments()}
    return Store(folder), metric or (metrics.pop() if len(metrics) == 1 else None)


def _read(results: "Store", notices: list[str] | None = None) -> Any:
    """Return all rows of a store, and print, and list, what is unfinished in it."""
    from bilevel.bench.store import list_finished

    table = results.read()
    for text in results.list_unfinished(list_finished(table)):
        say(err, text)
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
            say(out, f"{path}: damaged ({problem})")
        for path in results.set_aside(damaged) if set_aside else []:
            say(out, f"set aside as {path}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # said above
            finished = results.finished()
        for text in results.list_unfinished(finished):
            say(out, text)
        say(out, f"{len(finished):,} finished cells, {len(damaged)} damaged files")
    if damaged and not set_aside:
        raise typer.Exit(FAILED)

"""The command line: ``bilevel list | run | select | report | figure | reproduce | audit | complexity | check``."""

import contextlib
import inspect
import shlex
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import jax

from bilevel import datasets
from bilevel._cpu_loops import fuse_cpu_loops
from bilevel._optional import require
from bilevel.bench.config import load_config
from bilevel.bench.execute import Where, execute
from bilevel.bench.live import LiveBar
from bilevel.bench.report import write_figures, write_report
from bilevel.bench.select import select
from bilevel.bench.store import Store
from bilevel.engine.metrics import METRICS
from bilevel.problems import PROBLEMS
from bilevel.reproduction.audit import list_claims
from bilevel.reproduction.page import PAGE, write_page
from bilevel.reproduction.protocol import KEPT, PARTS, read_kept, reproduce
from bilevel.solvers import SOLVERS

typer = require("typer", "bench")
_console = require("rich.console", "bench")
_markup = require("rich.markup", "bench")
_progress = require("rich.progress", "bench")
_table = require("rich.table", "bench")

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Benchmarks of stochastic bilevel optimization.")
out = _console.Console()
err = _console.Console(stderr=True)
_MISSING = "no file: will be downloaded"
_MODULES = ("sklearn", "pyarrow", "pandas", "msgspec", "jinja2", "plotly", "matplotlib", "joblib", "distributed")
_LAST_SEED = 1_000_000  # a range beyond it is a slip of the finger
ResultsFolder = Annotated[Path, typer.Argument(help="folder of results, the --store of a run")]
OutFolder = Annotated[Path, typer.Option("--out", help="folder to write to")]
_SELECTION = "metric to select settings by, not of test rows; the config's by default"
SelectionMetric = Annotated[str | None, typer.Option("--select", help=_SELECTION)]
DrawnMetric = Annotated[str | None, typer.Option("--draw", help="metric to draw; the one that selects by default")]
Kind = StrEnum("Kind", ["solvers", "problems", "datasets", "metrics"])
Device = StrEnum("Device", ["cpu", "gpu"])
Phase = StrEnum("Phase", ["sweep", "timing"])
MEASURED = {"complexity": "complexity", "theory": "lower_bound"}  # parts without a store, and their rows
Reproduced = StrEnum(
    "Reproduced", ["all", "quadratic", "ijcnn1", "cleaning", "cleaning70", "cleaning90", "complexity", "theory"]
)
Jobs = Annotated[int, typer.Option(min=1, help="processes on this machine")]
Scheduler = Annotated[str | None, typer.Option(help="address of a Dask scheduler")]
ChosenDevice = Annotated[Device | None, typer.Option(help="where to compute; JAX's choice by default")]
SinglePhase = Annotated[Phase | None, typer.Option(help="sweep on one machine, time on another; both by default")]
KeptFolder = Annotated[Path, typer.Option("--kept", help="folder of kept results")]


@contextlib.contextmanager
def _errors_in_a_line() -> Iterator[None]:
    """Turn errors of input into one line and exit code 2; warnings into one line each."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: err.print(f"[yellow]{_markup.escape(str(message))}[/]")
        try:
            yield
        except (ValueError, OSError, ImportError) as error:
            err.print(f"[red]error:[/] {_markup.escape(str(error))}", soft_wrap=True)
            raise typer.Exit(2) from error


@app.command("list")
def list_(kind: Annotated[Kind | None, typer.Argument(help="all by default")] = None) -> None:
    """Show what there is: solvers, problems, data sets, metrics."""
    for chosen in (kind,) if kind else tuple(Kind):
        _print_table(*_listing(chosen), title="data sets" if chosen is Kind.datasets else chosen.value)


def _listing(kind: Kind) -> tuple[Sequence[str], Iterable[Sequence[str]]]:
    if kind is Kind.datasets:
        return ("data set", "where"), ((name, str(datasets.locate(name) or _MISSING)) for name in datasets.names())
    if kind is Kind.metrics:
        rows = ((one.name, one.label, one.better or "–") for one in METRICS.values())
        return ("metric", "what it is", "better"), rows
    known: Mapping[str, Any] = SOLVERS if kind is Kind.solvers else PROBLEMS
    heads = ((inspect.getdoc(one) or "").partition("\n")[0] for one in known.values())
    arguments = (", ".join(inspect.signature(one).parameters) for one in known.values())
    columns = ("solver", "what it is", "parameters") if kind is Kind.solvers else ("problem", "what it is", "arguments")
    return columns, zip(known, heads, arguments, strict=True)


def _print_table(
    columns: Sequence[Any], rows: Iterable[Sequence[str]], title: str | None = None, *, lines: bool = False
) -> None:
    table = _table.Table(*columns, title=title, show_lines=lines, expand=lines)
    for row in rows:
        table.add_row(*map(_markup.escape, row))
    out.print(table)


@app.command()
def run(
    config: Annotated[str, typer.Argument(help="a TOML file, or the name of one in configs/")],
    store: Annotated[Path | None, typer.Option(help="folder of the results; results/NAME by default")] = None,
    only: Annotated[list[str] | None, typer.Option(help="run this solver alone; may be repeated")] = None,
    seeds: Annotated[str | None, typer.Option(help="seeds FIRST:STOP, as 0:3 for 0, 1 and 2")] = None,
    jobs: Jobs = 1,
    dask: Scheduler = None,
    device: ChosenDevice = None,
    phase: SinglePhase = None,
) -> None:
    """Run an experiment: sweep its grid, select, time the selected settings. What is in the store is not run again."""
    with _errors_in_a_line():
        experiment = load_config(config)
        where = Where(jobs, dask, device.value if device else None)
        folder = store or Path("results") / experiment.name
        options = {"only": only, "seeds": seeds, "jobs": jobs if jobs > 1 else None, "dask": dask, "device": device}
        options |= {"phase": phase}
        again = _command("run", config, store=folder, **options)
        chosen: dict[str, Any] = {"seeds": _seed_range(seeds), "only": only or None}
        chosen |= {"phases": [phase.value]} if phase else {}
        watcher = LiveBar(experiment.metric, err)
        with watcher.bar:
            try:
                failures = execute(experiment, Store(folder), watcher, **chosen, where=where, config=config)
            except KeyboardInterrupt:
                watcher.bar.stop()
                _say(err, f"stopped; what is finished is in {folder}. To go on: {again}")
                raise typer.Exit(130) from None
    if failures:
        tasks = "1 task" if failures == 1 else f"{failures} tasks"
        _say(err, f"{tasks} failed; all else is in {folder}. To try again: {again}")
        raise typer.Exit(1)
    _say(out, f"results in {folder}; next: {_command('report', folder, out=f'{folder}-report')}")


def _say(console: Any, text: str) -> None:
    """Print a line as it is: a folder's name may look like markup."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _command(name: str, *arguments: Any, **options: Any) -> str:
    """Return a command as it would be typed, without options that have no value."""
    words = ["bilevel", name, *arguments]
    for option, value in options.items():
        for one in value if isinstance(value, list) else [value]:
            words += [] if one is None else [f"--{option}", one]
    return shlex.join(map(str, words))


def _seed_range(text: str | None) -> range | None:
    if text is None:
        return None
    first, colon, stop = text.partition(":")
    if not (colon and first.isdecimal() and stop.isdecimal() and int(first) < int(stop) <= _LAST_SEED):
        raise ValueError(f"`--seeds {text}`: must be FIRST:STOP with FIRST below STOP <= {_LAST_SEED:,}, as 0:3.")
    return range(int(first), int(stop))


@app.command("select")
def select_(
    store: ResultsFolder, metric: Annotated[str | None, typer.Option("--metric", help=_SELECTION)] = None
) -> None:
    """Show each solver's best setting in the sweep."""
    with _errors_in_a_line():
        results, metric = _open_store(store, metric)
        best = select(results.read(), metric or "value")
    columns = ["experiment", "solver", _table.Column("setting", overflow="fold"), best["metric"].iloc[0]]
    _print_table([*columns, "20 – 80 %", "seeds", "diverged"], map(_describe_selection, best.to_dict("records")))
    if best["edges"].any():
        _say(out, "(least), (largest): at an end of its grid; a better value may lie beyond.")


def _describe_selection(row: dict[str, Any]) -> tuple[str, ...]:
    ends = {name: f" ({end})" for end, name in (edge.split() for edge in row["edges"].split(", ") if edge)}
    named = {name.removeprefix("param_"): value for name, value in row.items() if name.startswith("param_")}
    numbers = {name: value for name, value in named.items() if type(value) in (int, float) and value == value}
    setting = ", ".join(f"{name}={value:g}{ends.get(name, '')}" for name, value in numbers.items())
    spread = (f"{row['median']:.6g}", f"{row['p20']:.4g} – {row['p80']:.4g}")
    return row["experiment"], row["label"], setting, *spread, str(row["n_seeds"]), str(row["n_diverged"])


@app.command()
def report(store: ResultsFolder, out_folder: OutFolder = Path("report"), select: SelectionMetric = None) -> None:
    """Write the results as one page that needs no network."""
    with _errors_in_a_line():
        results, select = _open_store(store, select)
        budgets = "; ".join(experiment.budgets for experiment in results.experiments())
        runs = (_command("run", path, store=store) for path in results.configs())
        commands = [*runs, _command("report", store, out=out_folder)]
        page = write_report(results.read(), out_folder, select=select, budgets=budgets, commands=commands)
    _say(out, f"report: {page}")


@app.command()
def figure(
    store: ResultsFolder,
    out_folder: OutFolder = Path("figures"),
    select: SelectionMetric = None,
    draw: DrawnMetric = None,
) -> None:
    """Write figures for print, as PDF and PNG."""
    with _errors_in_a_line():
        results, select = _open_store(store, select)
        for path in write_figures(results.read(), out_folder, select=select, draw=draw):
            _say(out, str(path))


def _open_store(folder: Path, metric: str | None) -> tuple[Store, str | None]:
    """Return a store, and the metric to select by: the given one, or that of all its experiments, if they agree."""
    if not folder.exists():
        raise FileNotFoundError(f"`{folder}`: no such folder; `bilevel run CONFIG --store {folder}` makes it.")
    metrics = {experiment.metric for experiment in Store(folder).experiments()}
    return Store(folder), metric or (metrics.pop() if len(metrics) == 1 else None)


@app.command("reproduce")
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
    with _errors_in_a_line():
        if quick and not from_kept:  # beside what was run in full, not over it
            stores, kept, page = (Path("results") / "reproduce-quick" / name for name in ("stores", "kept", "page.md"))
        names = [] if from_kept else [*PARTS, *MEASURED] if part is Reproduced.all else [part.value]
        failures = 0
        for place, name in enumerate(names, start=1):
            _say(err, f"{name} ({place} of {len(names)})")
            if name in MEASURED:
                _measure_theory(kept, [MEASURED[name]], quick=quick)
                continue
            watcher = LiveBar(load_config(name).metric, err)
            options: dict[str, Any] = {"quick": quick, "where": Where(jobs, dask, device.value if device else None)}
            options |= {"phases": [phase.value]} if phase else {}
            with watcher.bar:
                failures += reproduce(name, stores, kept, watcher, **options)
        for path in write_page(kept, page):
            _say(out, str(path))
    if failures:
        _say(err, f"{failures} tasks failed; all else is kept. The same command tries them again.")
        raise typer.Exit(1)


@app.command()
def audit(kept: KeptFolder = KEPT) -> None:
    """Show each claim of the paper with its verdict, what was found, the command and the evidence."""
    with _errors_in_a_line():
        claims = list_claims(read_kept(kept), kept)
    rows = [(f"{c.id}\n{c.verdict}", f"{c.claim}\n→ {c.finding}", f"{c.command}\n{c.evidence}") for c in claims]
    shares = {"verdict": 2, "claim → what was found": 5, "command, evidence": 4}
    _print_table([_table.Column(name, overflow="fold", ratio=n) for name, n in shares.items()], rows, lines=True)
    counts = Counter(one.verdict for one in claims)
    _say(out, ", ".join(f"{count} {verdict}" for verdict, count in counts.items()))


@app.command()
def complexity(
    out_folder: OutFolder = Path("complexity"),
    quick: Annotated[bool, typer.Option("--quick", help="few sizes and solvers, in half a minute")] = False,
) -> None:
    """Measure oracle calls to a stationary point against n + m and 1/epsilon, and queries against the lower bound."""
    with _errors_in_a_line():
        _say(out, "\n".join(map(str, _measure_theory(out_folder, [*MEASURED.values()], quick=quick))))


def _measure_theory(folder: Path, names: list[str], *, quick: bool) -> list[Path]:
    from bilevel.theory import tables

    with _progress.Progress(console=err) as bar:
        return tables.write_measurements(folder, names, quick=quick, reporter=partial(_add_bar, bar))


def _add_bar(bar: Any, title: str) -> Callable[[float, str], None]:
    task = bar.add_task(title, total=1.0)
    return lambda share, text: bar.update(task, completed=share, description=text)


@app.command()
def check(
    store: Annotated[Path | None, typer.Argument(help="a folder of results to check; this machine by default")] = None,
    set_aside: Annotated[
        bool, typer.Option("--set-aside", help="rename damaged files, so that they are not read")
    ] = False,
) -> None:
    """Show what this machine offers (devices, precision, data, extras), or which files of a store are damaged."""
    if store is not None:
        with _errors_in_a_line():
            _check_store(_open_store(store, None)[0], set_aside)
        return
    rows = [
        ("JAX", f"{jax.__version__}, devices: {', '.join(str(device) for device in jax.devices())}"),
        ("float64", "in every problem built with dtype='float64', whatever JAX_ENABLE_X64 says"),
        *((f"data: {name}", _verify(name)) for name in datasets.names()),
        *((f"module: {name}", "yes" if find_spec(name) else "no: pip install 'bilevel[all]'") for name in _MODULES),
    ]
    _print_table(("what", "found"), rows, "this machine")


def _check_store(store: Store, set_aside: bool) -> None:
    damaged = store.damaged()
    for path, problem in damaged.items():
        _say(out, f"{path}: damaged ({problem})")
    for path in store.set_aside(damaged) if set_aside else []:
        _say(out, f"set aside as {path}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # said above
        _say(out, f"{len(store.finished()):,} finished cells, {len(damaged)} damaged files")
    if damaged and not set_aside:
        raise typer.Exit(1)


def _verify(name: str) -> str:
    place = datasets.locate(name)
    try:
        if place is not None:
            datasets.load(name)
    except (ValueError, ImportError) as error:
        return str(error)
    return f"{place}, verified" if place else _MISSING


def main() -> None:
    """Run the command line, with fused loops; before anything is computed."""
    fuse_cpu_loops()
    app()


if __name__ == "__main__":
    main()

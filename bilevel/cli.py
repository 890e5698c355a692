"""The command line: ``bilevel list | run | select | report | figure | check``."""

import contextlib
import inspect
import shlex
import warnings
from collections.abc import Iterator
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from bilevel import datasets
from bilevel._cpu_loops import fuse_cpu_loops
from bilevel._optional import require

typer = require("typer", "bench")
_console = require("rich.console", "bench")
_markup = require("rich.markup", "bench")
_progress = require("rich.progress", "bench")
_table = require("rich.table", "bench")

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Stochastic bilevel optimization: benchmark and report."
)
out = _console.Console()
err = _console.Console(stderr=True)


_LAST_SEED = 1_000_000  # a range beyond it is a slip of the finger


class Kind(StrEnum):
    """What there is to list."""

    solvers = "solvers"
    problems = "problems"
    datasets = "datasets"


class Device(StrEnum):
    """Where to compute."""

    cpu = "cpu"
    gpu = "gpu"


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Turn errors of input into one line and exit code 2; warnings into one line each."""
    from bilevel.bench.config import ConfigError

    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: err.print(f"[yellow]{_markup.escape(str(message))}[/]")
        try:
            yield
        except (ConfigError, ValueError, OSError, ImportError) as error:
            err.print(f"[red]error:[/] {_markup.escape(str(error))}", soft_wrap=True)
            raise typer.Exit(2) from error


@app.command("list")
def list_(
    kind: Annotated[Kind | None, typer.Argument(help="solvers, problems or datasets; all by default")] = None,
) -> None:
    """Show what there is: solvers, problems, data sets."""
    for chosen in (kind,) if kind else tuple(Kind):
        {Kind.solvers: _list_solvers, Kind.problems: _list_problems, Kind.datasets: _list_datasets}[chosen]()


def _list_solvers() -> None:
    from bilevel.solvers import SOLVERS

    table = _table.Table("solver", "what it is", "parameters", title="solvers")
    for name, solver in SOLVERS.items():
        table.add_row(name, _first_line(solver), ", ".join(inspect.signature(solver).parameters))
    out.print(table)


def _list_problems() -> None:
    from bilevel.problems import PROBLEMS

    table = _table.Table("problem", "what it is", "arguments", title="problems")
    for name, problem in PROBLEMS.items():
        table.add_row(name, _first_line(problem), ", ".join(inspect.signature(problem).parameters))
    out.print(table)


def _first_line(documented: Any) -> str:
    return (inspect.getdoc(documented) or "").partition("\n")[0]


def _list_datasets() -> None:
    table = _table.Table("data set", "found", title="data sets")
    for name in datasets.names():
        place = datasets.locate(name)
        table.add_row(name, "no file: will be downloaded" if place is None else str(place))
    out.print(table)


@app.command()
def run(
    config: Annotated[str, typer.Argument(help="a TOML file, or the name of one in configs/")],
    store: Annotated[Path | None, typer.Option(help="folder of the results; results/NAME by default")] = None,
    only: Annotated[list[str] | None, typer.Option(help="run this solver alone; may be repeated")] = None,
    seeds: Annotated[str | None, typer.Option(help="seeds FIRST:STOP, as 0:3 for 0, 1 and 2")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="processes on this machine")] = 1,
    dask: Annotated[str | None, typer.Option(help="address of a Dask scheduler")] = None,
    device: Annotated[Device | None, typer.Option(help="where to compute; JAX's choice by default")] = None,
) -> None:
    """Run an experiment: sweep its grid, select, time the selected settings. What is in the store is not run again."""
    from bilevel.bench.config import load_config
    from bilevel.bench.execute import Where, execute
    from bilevel.bench.store import Store

    with _refusing():
        experiment = load_config(config)
        chosen = _seed_range(seeds)
        where = Where(jobs, dask, device.value if device else None)
        folder = store or Path("results") / experiment.name
        results = Store(folder)
        processes = jobs if jobs > 1 else None
        again = _command("run", config, store=folder, only=only, seeds=seeds, jobs=processes, dask=dask, device=device)
        with _Live(experiment.metric) as watcher:
            try:
                failures = execute(
                    experiment, results, watcher, seeds=chosen, only=only or None, where=where, config=config
                )
            except KeyboardInterrupt:
                watcher.stop()
                _say(err, f"stopped; what is finished is in {folder}. To go on: {again}")
                raise typer.Exit(130) from None
    if failures:
        tasks = "task" if failures == 1 else "tasks"
        _say(err, f"{failures} {tasks} failed; all else is in {folder}. To try again: {again}")
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
    store: Annotated[Path, typer.Argument(help="folder of results")],
    metric: Annotated[str | None, typer.Option(help="by which to select; the config's by default")] = None,
) -> None:
    """Show each solver's best setting in the sweep."""
    from bilevel.bench.select import select

    with _refusing():
        results = _opened(store)
        best = select(results.read(), metric or _metric(results) or "value")
    table = _table.Table(
        "experiment",
        "solver",
        _table.Column("setting", overflow="fold"),
        str(best["metric"].iloc[0]),
        "20 – 80 %",
        "seeds",
        "diverged",
    )
    for row in best.to_dict("records"):
        numbers = (f"{row['median']:.6g}", f"{row['p20']:.4g} – {row['p80']:.4g}", str(row["n_seeds"]))
        table.add_row(row["experiment"], row["solver"], _setting(row), *numbers, str(row["n_diverged"]))
    out.print(table)


def _setting(row: dict[str, Any]) -> str:
    named = {name.removeprefix("param_"): value for name, value in row.items() if name.startswith("param_")}
    return ", ".join(
        f"{name}={value:g}"
        for name, value in named.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and value == value
    )


@app.command()
def report(
    store: Annotated[Path, typer.Argument(help="folder of results")],
    out_folder: Annotated[Path, typer.Option("--out", help="folder of the page")] = Path("report"),
    metric: Annotated[str | None, typer.Option(help="by which to select; the config's by default")] = None,
) -> None:
    """Write the results as one page that needs no network."""
    from bilevel.bench.report import write_report

    with _refusing():
        results = _opened(store)
        commands = [shlex.join(["bilevel", "run", str(path), "--store", str(store)]) for path in results.configs()]
        page = write_report(
            results.read(),
            out_folder,
            metric=metric or _metric(results),
            budgets="; ".join(experiment.budgets for experiment in results.experiments()),
            commands=[*commands, f"bilevel report {store} --out {out_folder}"],
        )
    _say(out, f"report: {page}")


@app.command()
def figure(
    store: Annotated[Path, typer.Argument(help="folder of results")],
    out_folder: Annotated[Path, typer.Option("--out", help="folder of the figures")] = Path("figures"),
    metric: Annotated[str | None, typer.Option(help="by which to select; the config's by default")] = None,
) -> None:
    """Write figures for print, as PDF and PNG."""
    from bilevel.bench.figures import write_figures

    with _refusing():
        results = _opened(store)
        for path in write_figures(results.read(), out_folder, metric=metric or _metric(results)):
            _say(out, str(path))


def _metric(results: Any) -> str | None:
    """Return the metric that all experiments of a store select by, if there is one."""
    metrics = {experiment.metric for experiment in results.experiments()}
    return metrics.pop() if len(metrics) == 1 else None


def _opened(folder: Path) -> Any:
    from bilevel.bench.store import Store

    if not folder.exists():
        raise FileNotFoundError(f"`{folder}`: no such folder; `bilevel run CONFIG --store {folder}` makes it.")
    return Store(folder)


@app.command()
def complexity(
    out_folder: Annotated[Path, typer.Option("--out", help="folder of the figure and the measurements")] = Path(
        "complexity"
    ),
    largest: Annotated[int, typer.Option(min=1024, help="largest n + m; sizes grow by 4 from 256")] = 65536,
    n_seeds: Annotated[int, typer.Option("--seeds", min=1, help="runs of each stochastic solver at each size")] = 5,
) -> None:
    """Measure how calls to a stationary point grow with n + m and with 1/epsilon, beside what is proved."""
    from bilevel.theory.complexity import METHODS, SIZES, Measurement, figure, measure_complexity, table

    sizes = [size for size in SIZES if size <= largest]
    found: list[Measurement] = []
    with _refusing(), _progress.Progress(console=err) as bar:
        for method in METHODS:
            task = bar.add_task(method.name, total=None)
            found += measure_complexity(method, sizes, seeds=range(n_seeds))
            bar.update(task, total=1, completed=1)
        figure(found, out_folder / "complexity.png")
    lines = [",".join(Measurement._fields), *(",".join(map(str, row)) for row in found)]
    (out_folder / "measurements.csv").write_text("\n".join(lines) + "\n")
    print(table(found))


@app.command()
def check() -> None:
    """Show what this machine offers: devices, precision, data, extras."""
    import jax

    table = _table.Table("what", "found", title="this machine")
    table.add_row("JAX", f"{jax.__version__}, devices: {', '.join(str(device) for device in jax.devices())}")
    table.add_row("float64", "in every problem built with dtype='float64', whatever JAX_ENABLE_X64 says")
    for name in datasets.names():
        table.add_row(f"data: {name}", _found(name))
    for module in ("sklearn", "pyarrow", "pandas", "plotly", "matplotlib", "joblib", "distributed", "equinox"):
        table.add_row(f"module: {module}", "yes" if find_spec(module) else "no: pip install 'bilevel[all]'")
    out.print(table)


def _found(name: str) -> str:
    place = datasets.locate(name)
    if place is None:
        return "no file: will be downloaded"
    try:
        datasets.load(name)
    except (ValueError, ImportError) as error:
        return str(error)
    return f"{place}, verified"


class _Live:
    """A progress bar per phase, with the time left and the best value so far."""

    def __init__(self, metric: str) -> None:
        self.metric = metric
        self.bar = _progress.Progress(
            _progress.TextColumn("{task.description}"),
            _progress.BarColumn(bar_width=20),
            _progress.MofNCompleteColumn(),
            _progress.TimeRemainingColumn(),
            _progress.TextColumn("{task.fields[text]}"),
            console=err,
        )
        self.task: Any = None

    def __enter__(self) -> "_Live":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Leave the bars as they are."""
        self.bar.stop()

    def begin(self, phase: str, done: int, total: int) -> None:
        """Begin a bar."""
        self.task = self.bar.add_task(phase, total=total, completed=done, text=f"{done} cells were there")

    def advance(self, n_cells: int, title: str, best: float | None) -> None:
        """Move the bar."""
        words = title if best is None else f"{title}; best {self.metric} {best:.5g}"
        self.bar.update(self.task, advance=n_cells, text=words)

    def failed(self, title: str, error: str) -> None:
        """Say what failed, above the bar."""
        self.bar.console.print(f"[red]{_markup.escape(title)} failed:[/] {_markup.escape(error)}")


def main() -> None:
    """Run the command line, with fused loops; before anything is computed."""
    fuse_cpu_loops()
    app()


if __name__ == "__main__":
    main()

"""The application: all commands, and those about the package and this machine, ``bilevel list`` and ``doctor``."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

import bilevel
from bilevel.cli import doctor, experiments
from bilevel.cli.terminal import errors_in_a_line, out, print_line, print_table, typer

EPILOG = "Exit codes: 0 done, 1 some of the work failed, 2 refused, 130 and 143 stopped by Ctrl-C and SIGTERM."
_MISSING = "no file: will be downloaded"
Kind = StrEnum("Kind", ["solvers", "problems", "datasets", "metrics", "configs"])
app = typer.Typer(no_args_is_help=True, help="Benchmarks of stochastic bilevel optimization.", epilog=EPILOG)


def _print_version(wanted: bool) -> None:
    if wanted:
        print_line(out, f"bilevel {bilevel.__version__}")
        raise typer.Exit


@app.callback(epilog=EPILOG)
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version, and exit")
    ] = False,
) -> None:
    """Benchmarks of stochastic bilevel optimization."""


@app.command("list")
def list_(kind: Annotated[Kind | None, typer.Argument(help="all by default")] = None) -> None:
    """Show what is available: solvers, problems, data sets, metrics, configs."""
    with errors_in_a_line():
        for chosen in (kind,) if kind else tuple(Kind):
            print_table(*_make_listing(chosen), title="data sets" if chosen is Kind.datasets else chosen.value)


def _make_listing(kind: Kind) -> tuple[Sequence[str], Iterable[Sequence[str]]]:
    from bilevel import datasets
    from bilevel.bench.config import list_configs
    from bilevel.engine.metrics import METRICS
    from bilevel.problems import PROBLEMS
    from bilevel.solvers import SOLVERS

    if kind is Kind.datasets:
        return ("data set", "where"), ((name, str(datasets.locate(name) or _MISSING)) for name in datasets.names())
    if kind is Kind.metrics:
        rows = ((one.name, one.label, one.better or "–") for one in METRICS.values())
        return ("metric", "what it is", "better"), rows
    if kind is Kind.configs:
        return ("config", "file"), ((path.stem, str(path)) for path in list_configs())
    known: Mapping[str, Any] = SOLVERS if kind is Kind.solvers else PROBLEMS
    heads = ((inspect.getdoc(one) or "").partition("\n")[0] for one in known.values())
    arguments = (", ".join(inspect.signature(one).parameters) for one in known.values())
    columns = ("solver", "what it is", "parameters") if kind is Kind.solvers else ("problem", "what it is", "arguments")
    return columns, zip(known, heads, arguments, strict=True)


app.command()(experiments.run)
app.command("select")(experiments.select_)
app.command()(experiments.report)
app.command()(experiments.figure)
app.command()(experiments.check)


@app.command("doctor")
def doctor_() -> None:
    """Show what this machine offers: versions, devices, extras and how to install them, data verified, caches."""
    from bilevel import datasets

    with errors_in_a_line():
        rows = [*doctor.examine(), *((f"data set {name}", _verify(name)) for name in datasets.names())]
        print_table(("what", "found"), rows, "this machine")


def _verify(name: str) -> str:
    from bilevel import datasets

    try:
        place = datasets.locate(name)
        if place is not None:
            datasets.load(name)
    except (ValueError, OSError, ImportError) as error:
        return str(error)
    return f"{place}, verified" if place else _MISSING

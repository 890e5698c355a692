"""The application: all commands, and those about the package and this machine, ``bilevel list`` and ``doctor``."""

import inspect
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Annotated, Any

import bilevel
from bilevel import datasets
from bilevel.bench.live import print_line
from bilevel.cli import doctor, experiments
from bilevel.cli.terminal import errors_in_a_line, print_table, typer

EPILOG = "Exit codes: 0 done, 1 some of the work failed, 2 refused, 130 and 143 stopped by Ctrl-C and SIGTERM."
Kind = StrEnum("Kind", ["solvers", "problems", "datasets", "metrics", "configs"])
app = typer.Typer(no_args_is_help=True, help="Benchmarks of stochastic bilevel optimization.", epilog=EPILOG)


def _print_version(wanted: bool) -> None:
    if wanted:
        print_line(f"bilevel {bilevel.__version__}")
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
            print_table(("name", "what it is"), _list_names(chosen), chosen.value)


def _list_names(kind: Kind) -> Iterable[tuple[str, str]]:
    from bilevel.bench.config import list_configs
    from bilevel.engine.metrics import METRICS
    from bilevel.problems import PROBLEMS
    from bilevel.solvers import SOLVERS

    if kind is Kind.datasets:
        return ((name, str(datasets.locate(name) or doctor.WILL_BE_DOWNLOADED)) for name in datasets.names())
    if kind is Kind.metrics:
        return ((one.name, one.label) for one in METRICS.values())
    if kind is Kind.configs:
        return ((path.stem, str(path)) for path in list_configs())
    known: Mapping[str, Any] = SOLVERS if kind is Kind.solvers else PROBLEMS
    return ((name, (inspect.getdoc(one) or "").partition("\n")[0]) for name, one in known.items())


app.command()(experiments.run)
app.command("select")(experiments.select_)
app.command()(experiments.report)
app.command()(experiments.figure)
app.command()(experiments.check)


@app.command("doctor")
def doctor_() -> None:
    """Show what this machine offers: versions, devices, extras and how to install them, data verified, caches."""
    with errors_in_a_line():
        print_table(("what", "found"), doctor.examine(), "this machine")

"""The commands, each a function of a module of its group."""

from typing import Annotated

import bilevel
from bilevel.cli import about, results, runs
from bilevel.cli.terminal import out, say, typer

EPILOG = "Exit codes: 0 done, 1 some of the work failed, 2 refused, 130 and 143 stopped by Ctrl-C and SIGTERM."
app = typer.Typer(no_args_is_help=True, help="Benchmarks of stochastic bilevel optimization.", epilog=EPILOG)


def _tell_version(asked: bool) -> None:
    if asked:
        say(out, f"bilevel {bilevel.__version__}")
        raise typer.Exit


@app.callback(epilog=EPILOG)
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="tell the version, and exit")
    ] = False,
) -> None:
    """Benchmarks of stochastic bilevel optimization."""


app.command("list")(about.list_)
app.command()(runs.run)
app.command("select")(results.select_)
app.command()(results.report)
app.command()(results.figure)
app.command()(results.check)
app.command("doctor")(about.doctor_)

"""``python -m paper reproduce``, ``audit`` and ``complexity``."""

from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from bilevel._process import fuse_cpu_loops
from bilevel.bench.live import Watcher, print_line
from bilevel.cli.app import EPILOG
from bilevel.cli.experiments import ChosenDevice, Jobs, Scheduler, SinglePhase, choose_where, count_failures
from bilevel.cli.terminal import FAILED, OutFolder, errors_in_a_line, handle_signals, print_table, typer
from paper.parts import KEPT, MEASURED, NOTICE, PAGE, PARTS, QUICK_NOTICE, read_notice

KeptFolder = Annotated[Path, typer.Option("--kept", help="folder of kept results")]
Reproduced = StrEnum("Reproduced", ["all", *PARTS, *MEASURED])  # type: ignore[misc]
_ALL = Reproduced("all")

app = typer.Typer(
    no_args_is_help=True, help="Reproduction and audit of the SRBA paper.", epilog=EPILOG, add_completion=False
)


def main() -> None:
    """Run the command line, with the same treatment of signals and loops as the command `bilevel`."""
    handle_signals()
    fuse_cpu_loops()
    app()


@app.command()
def reproduce(
    part: Annotated[Reproduced, typer.Argument(help="an experiment of the paper")] = _ALL,
    stores: Annotated[Path, typer.Option(help="folder with a store for each part")] = Path("results") / "reproduce",
    kept: KeptFolder = KEPT,
    page: Annotated[Path, typer.Option(help="the page to write")] = PAGE,
    quick: Annotated[bool, typer.Option("--quick", help="smaller problems, in a minute or two")] = False,
    from_kept: Annotated[
        bool, typer.Option("--from-kept", help="run nothing: page and figures from kept results")
    ] = False,
    phase: SinglePhase = None,
    jobs: Jobs = 1,
    dask: Scheduler = None,
    device: ChosenDevice = None,
) -> None:
    """Run the experiments of the SRBA paper, keep their results, and write the page. What is done is not run again."""
    from paper import protocol
    from paper.page import write_page

    with errors_in_a_line():
        if quick and not from_kept:  # in folders of its own, so that the results of full runs stay
            stores, kept, page = (Path("results") / "reproduce-quick" / name for name in ("stores", "kept", "page.md"))
            kept.mkdir(parents=True, exist_ok=True)
            (kept / NOTICE).write_text(QUICK_NOTICE, encoding="utf-8")
        names = [] if from_kept else [*PARTS, *MEASURED] if part is _ALL else [part.value]
        failures = 0
        for place, name in enumerate(names, start=1):
            print_line(f"{name} ({place} of {len(names)})", err=True)
            if name in MEASURED:
                _measure_theory(kept, [MEASURED[name]], quick=quick)
                continue
            options: dict[str, Any] = {"quick": quick, "where": choose_where(jobs, dask, device)}
            options |= {"phases": [phase.value]} if phase else {}
            failures += protocol.reproduce(name, stores, kept, Watcher(), **options)
        for path in write_page(kept, page):
            print_line(str(path))
    if failures:
        print_line(
            f"{count_failures(failures)}; all other results are kept. Run the same command again to retry.", err=True
        )
        raise typer.Exit(FAILED)


@app.command()
def audit(kept: KeptFolder = KEPT) -> None:
    """Show each claim of the paper with its verdict, what was found, the command and the evidence."""
    from paper.audit import list_claims
    from paper.protocol import read_kept

    with errors_in_a_line():
        claims = list_claims(read_kept(kept), kept)
    rows = [(f"{c.id}\n{c.verdict}", f"{c.claim}\n→ {c.finding}", f"{c.command}\n{c.evidence}") for c in claims]
    if notice := read_notice(kept):
        print_line(notice, err=True)
    print_table(("verdict", "claim → what was found", "command, evidence"), rows)
    counts = Counter(one.verdict for one in claims)
    print_line(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))


@app.command()
def complexity(
    out_folder: OutFolder = Path("complexity"),
    quick: Annotated[bool, typer.Option("--quick", help="few sizes and solvers, in half a minute")] = False,
) -> None:
    """Measure calls to a stationary point against n + m, 1/epsilon and condition numbers, and against lower bounds."""
    with errors_in_a_line():
        print_line("\n".join(map(str, _measure_theory(out_folder, [*MEASURED.values()], quick=quick))))


def _measure_theory(folder: Path, names: list[str], *, quick: bool) -> list[Path]:
    from paper.theory_page import write_measurements

    return write_measurements(folder, names, quick=quick, reporter=_lines)


def _lines(title: str) -> Callable[[float, str], None]:
    return lambda share, text: print_line(f"{title}: {100 * share:.0f} %, {text}", err=True)

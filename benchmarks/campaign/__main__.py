"""Run the sections, each in a process of its own, print the table, write the page."""

import argparse
import contextlib
import importlib
import inspect
import json
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks.campaign import table, workshop
from bilevel.bench.execute import environment

SECTIONS = (  # in the order of the report
    "kills",
    "writers",
    "full_disk",
    "read_only",
    "damage",
    "signals",
    "inputs",
    "long_runs",
)
LONG = ("long_runs", "inputs", "kills")  # begun first, so that none of them is left alone at the end
RULE = """\
A case survives if nothing is lost and a message says what happened. Where a store is filled, it is compared in the end,
cell by cell, with the store of a run that nothing happened to: every number of the sweep the same to the last bit, the
same cells timed, no stray file, no process left behind."""
DEFECTS = Path(__file__).with_name("defects.md")


def main(arguments=None):
    """Return 1 if anything was lost."""
    given = parse(arguments)
    if given.rows is not None:
        write_section(given)
        return 0
    parts, every, spent = [], [], 0.0
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(given.jobs))
        begun = sorted(given.only, key=lambda name: name not in LONG)
        found = dict(zip(begun, pool.map(partial(run_section, given, stack), begun), strict=True))
    for name in given.only:
        rows, seconds, revision = found[name]
        parts.append(f"{describe(name)}\n\n{table.write(rows)}\n\n(`{name}`, {seconds:.0f} s, at {revision})")
        every, spent = every + rows, spent + seconds
    tried, lost = (sum(getattr(row, name) for row in every) for name in ("tried", "lost"))
    sums = f"{len(every)} kinds of faults, {tried:,} tried, {lost:,} lost; sections took {spent / 60:.0f} minutes."
    print("\n\n".join([*parts, sums]))
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(page(given, sums, parts), encoding="utf-8")
        print(f"written: {given.out}")
    return int(lost > 0)


def load(name):
    return importlib.import_module(f"benchmarks.campaign.{name}")


def describe(name):
    """The heading of a section, and what it says of itself."""
    head, _, text = inspect.cleandoc(load(name).__doc__).partition("\n\n")
    return f"## {head.rstrip('.')}\n\n{text}".strip()


def run_section(given, stack, name):
    """Return the rows of a section, how long it took, and of which revision; what it loses it says at once."""
    with tempfile.TemporaryDirectory() as folder:
        file = (given.kept or Path(folder)) / f"{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            began = time.monotonic()
            print(f"{name} …", file=sys.stderr, flush=True)
            own = [
                "--only",
                name,
                "--rows",
                str(file),
                "--seed",
                str(given.seed),
                *(["--quick"] if given.quick else []),
            ]
            words = [sys.executable, "-m", "benchmarks.campaign", *own]
            process = subprocess.Popen(words, env=workshop.environment(), cwd=workshop.ROOT)
            stack.callback(process.terminate)
            if process.wait() != 0:
                raise RuntimeError(f"section `{name}` ended with code {process.returncode}.")
            print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        found = json.loads(file.read_text())
    return [table.Row(**row) for row in found["rows"]], found["seconds"], found["revision"]


def write_section(given):
    """Leave the rows of one section, the seconds and the revision in a file."""
    began, revision = time.monotonic(), environment()["revision"] or "?"
    rows = [asdict(row) for row in load(given.only[0]).rows(given.seed, given.quick)]
    given.rows.write_text(json.dumps({"rows": rows, "seconds": time.monotonic() - began, "revision": revision}))


def page(given, sums, parts):
    """The whole report."""
    options = [f"--seed {given.seed}", *(["--quick"] if given.quick else []), f"--out {given.out}"]
    if given.only != list(SECTIONS):
        options.insert(0, f"--only {','.join(given.only)}")
    command = f"    python -m benchmarks.campaign {' '.join(options)}"
    known = environment()
    versions = f"Python {known['python']}, JAX {known['jax']}, bilevel {known['bilevel']} at {known['revision'] or '?'}"
    facts = textwrap.fill(f"{known['machine']}; {versions}; written at {known['written_at']}.", 120)
    return "\n\n".join(["# Faults on purpose", command, RULE, sums, facts, *parts, DEFECTS.read_text().strip()]) + "\n"


def parse(arguments):
    parser = argparse.ArgumentParser(description="Faults on purpose: what is tried, what survives, what is lost.")
    some = f"some of {', '.join(SECTIONS)}, with commas"
    parser.add_argument("--only", type=choose, default=list(SECTIONS), metavar="SECTIONS", help=some)
    parser.add_argument("--quick", action="store_true", help="few of each, in two minutes")
    parser.add_argument("--seed", type=int, default=0, help="of the moments, bits and inputs")
    parser.add_argument("--jobs", type=int, default=2, help="sections at the same time")
    parser.add_argument("--kept", type=Path, help="folder of finished sections: what was stopped goes on from there")
    parser.add_argument("--out", type=Path, help="file of the report; by default it is only printed")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)  # where the process of one section leaves them
    return parser.parse_args(arguments)


def choose(text):
    names = text.split(",")
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(SECTIONS)}")
    return names


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what it mounted and started goes with it
    sys.exit(main())

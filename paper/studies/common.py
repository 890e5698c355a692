"""Helpers of the studies: sweeps, results kept as CSV, tables in Markdown pages, and figures."""

import argparse
import csv
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import matplotlib
import numpy as np
from jax.tree_util import Partial

import bilevel
from bilevel.engine.driver import sweep
from bilevel.engine.steps import prepare

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "reports" / "reproduction"
QUADRATIC = {"step_size": (0.01, 0.1), "outer_ratio": (0.1, 1.0, 10.0, 100.0)}


def parse(about, argv=None):
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="run for a few seconds, to see that it works")
    parser.add_argument("--resume", action="store_true", help="measure only what the CSV lacks")
    parser.add_argument("--from-kept", action="store_true", help="run nothing; draw tables and figure from the CSV")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    arguments = parser.parse_args(argv)
    if arguments.quick and arguments.folder == FOLDER:
        parser.error("--quick would overwrite the kept results; pass another --folder.")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    return arguments


def study(about, name, parts, show, argv=None):
    """Measure, and write the CSV, the tables and the figure.

    ``parts(quick)`` yields pairs: a dict of the columns that the rows of a part share, and a function that returns
    the rows.
    """
    arguments = parse(about, argv)
    path = arguments.folder / f"{name}.csv"
    if not arguments.from_kept:
        rows = read(path) if arguments.resume and path.exists() else []
        for common, work in parts(arguments.quick):
            if not any(common.items() <= row.items() for row in rows):
                began = time.perf_counter()
                rows += [common | row for row in work()]
                keep(rows, path)
                print(f"{common}: {time.perf_counter() - began:.0f} s", flush=True)
    show(read(path), arguments.folder)


def keep(rows, path):
    """Write rows as CSV; the dicts may have different keys."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: short(value) for key, value in row.items()} for row in rows)


def short(value):
    if not isinstance(value, float | np.floating):
        return value
    return str(int(value)) if value == np.round(value) and abs(value) < 1e12 else f"{value:.6g}"


def read(path):
    """Return the rows of a CSV file, with numbers converted to float and empty cells to None."""
    if not path.exists():
        sys.exit(f"{path} does not exist; run without --from-kept first.")
    with path.open(newline="", encoding="utf-8") as file:
        return [{key: parsed(text) for key, text in row.items()} for row in csv.DictReader(file)]


def parsed(text):
    if text in ("", None):
        return None
    try:
        return float(text)
    except ValueError:
        return text


def tables(folder, name, **by_mark):
    """Write tables between their marks in the page of a study, which is created if it does not exist."""
    path = folder / f"{name}.md"
    page = path.read_text(encoding="utf-8") if path.exists() else ""
    for mark, text in by_mark.items():
        opening, closing = f"<!-- {mark} -->", f"<!-- end of {mark} -->"
        if opening not in page:
            page += f"\n{opening}\n{closing}\n"
        before, _, rest = page.partition(opening)
        page = f"{before}{opening}\n\n{text}\n\n{closing}{rest.partition(closing)[2]}"
    path.write_text(page, encoding="utf-8")


def draw(folder, name, n_columns, plot, size=(4.2, 3.4)):
    """Draw panels into an SVG file; equal numbers give equal bytes."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(size[0] * n_columns, size[1]), layout="constrained")
        plot(figure.subplots(1, n_columns, squeeze=False)[0])
        FigureCanvasSVG(figure).print_svg(folder / f"{name}.svg", metadata={"Date": None})


def _largest_x(point):
    return jnp.max(jnp.abs(point.outer_var))


def _lowest_x(point):
    return jnp.min(point.outer_var)


def _largest_z(point):
    return jnp.max(jnp.abs(point.inner_var))


def watched(problem):
    """Return the problem with the sizes of x and z as additional metrics."""
    sizes = {"largest_x": Partial(_largest_x), "lowest_x": Partial(_lowest_x), "largest_z": Partial(_largest_z)}
    return replace(problem, metrics=problem.metrics | sizes)


def run_cells(problem, solvers, seeds, calls):
    """Run settings of one class in one program and return (solver, seed, cell) of each."""
    solvers = [prepare(problem, solver).solver for solver in solvers]
    found = sweep(problem, solvers, seeds, calls)
    return [
        (solver, seed, cell)
        for seed, cells in zip(seeds, found, strict=True)
        for solver, cell in zip(solvers, cells, strict=True)
    ]


def small_quadratic():
    return watched(bilevel.problems.quadratic(512, 256, 8, 4, common_linear=0.5, dtype="float64"))


def paper_quadratic():
    return watched(bilevel.problems.quadratic(dtype="float32"))


def ijcnn1():
    return watched(bilevel.problems.ijcnn1(dtype="float32"))


def epochs(problem, count):
    return int(count * (problem.n_inner + problem.n_outer))

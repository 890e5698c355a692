"""F²SA: which part of the published method makes its iterates go to infinity?

    python benchmarks/f2sa_parts.py [--from-kept] [--quick --folder FOLDER]

Every combination of four parts, over a grid of step sizes, ratios and δ_0 with λ_0 = 1: the growth of λ, the step of y,
the step of x, and one inner batch or two in the move of x. Numbers are kept in reports/reproduction/f2sa.csv. A run
"went away" when it became non-finite or ended with an entry of z or x above 1000; x itself may go slowly to -∞ on
IJCNN1, where some penalties are best at 0.
"""

import sys
import time
from itertools import product

import numpy as np
from markdown import number, table
from studies import ROOT, draw, epochs, ijcnn1, paper_quadratic, run_cells, small_quadratic, study
from studies import tables as write_tables

import bilevel

sys.path.append(str(ROOT / "examples"))
from published_differences import PartsF2SA

FAR = 1e3
PARTS = {
    "growth": {"t^1/7": 6 / 7, "t^6/7": 1 / 7},
    "y_step": {"paper": 0.0, "published": 1.0},
    "x_step": {"t^-5/7": 5 / 7, "t^-4/7": 4 / 7},
    "batches": {"shared": True, "two": False},
}
PUBLISHED = {name: list(levels)[1] for name, levels in PARTS.items()}
FIELDS = {"growth": "growth_power", "y_step": "y_with_penalty", "x_step": "outer_power", "batches": "shared_batch"}
SMALL, PAPER, REAL = "small quadratics", "quadratics", "IJCNN1"
GRIDS = {
    SMALL: ((0.01, 0.1), (0.1, 1.0, 10.0, 100.0), (0.01, 0.1, 1.0)),
    PAPER: ((0.01, 0.1), (0.1, 1.0, 10.0), (0.01, 0.1, 1.0)),
    REAL: ((2.0**-5, 2.0**-2, 2.0**-1, 2.0), (0.01, 0.1, 1.0), (0.01, 0.1, 1.0)),
}
STATED_STEP = {SMALL: 0.1, PAPER: 0.1, REAL: 0.25}  # the largest of the paper's grid


def measure(quick):
    problems = {SMALL: (small_quadratic, 1000)} | ({} if quick else {PAPER: (paper_quadratic, 50), REAL: (ijcnn1, 100)})
    rows = []
    for name, (build, count) in problems.items():
        problem = build()
        for batches in PARTS["batches"]:
            began = time.perf_counter()
            calls = epochs(problem, 20 if quick else count)
            rows += combinations(name, problem, batches, calls, quick)
            print(f"{name}, {batches}: {time.perf_counter() - began:.0f} s", flush=True)
    return rows


def combinations(name, problem, batches, calls, quick):
    """All levels of the other three parts, in one program."""
    grid = ((0.1,), (1.0,), (1.0,)) if quick else GRIDS[name]
    others = [part for part in PARTS if part != "batches"]
    levels = [dict(zip(others, chosen, strict=True)) for chosen in product(*(PARTS[part] for part in others))]
    settings = list(product(levels, product(*grid)))
    batch = 16 if name == SMALL else 64
    solvers = [make(level | {"batches": batches}, *setting, batch) for level, setting in settings]
    found = run_cells(problem, solvers, [0], calls)
    rows = []
    for (level, setting), (_, _, cell) in zip(settings, found, strict=True):
        row = {"problem": name} | level | {"batches": batches}
        row |= dict(zip(("step_size", "outer_ratio", "delta_0"), setting, strict=True))
        kept = ("step", "calls", "value", "hypergrad_norm_sq", "largest_x", "largest_z")
        last = cell.rows[-1]
        rows.append(row | {"status": cell.status.value} | {key: last[key] for key in kept})
    return rows


def make(levels, step_size, ratio, delta, batch):
    parts = {FIELDS[part]: PARTS[part][level] for part, level in levels.items()}
    return PartsF2SA(step_size, ratio, batch, delta_0=delta, **parts)


# What the table and the figure show of the rows.


def went_away(row):
    sizes = [row["largest_x"], row["largest_z"]]
    return row["status"] == "diverged" or not np.all(np.isfinite(sizes)) or max(sizes) > FAR


def in_stated_grid(row):
    return row["step_size"] <= STATED_STEP[row["problem"]]


def share(rows):
    return f"{sum(map(went_away, rows))} of {len(rows)}" if rows else None


def best(rows):
    metric = "value" if rows[0]["problem"] == REAL else "hypergrad_norm_sq"
    values = [row[metric] for row in rows if not went_away(row) and row[metric] is not None]
    return number(min(values)) if values else None


def combination_table(rows):
    lines = []
    for problem in dict.fromkeys(row["problem"] for row in rows):
        for levels in product(*PARTS.values()):
            chosen = dict(zip(PARTS, levels, strict=True))
            here = [row for row in rows if row["problem"] == problem and chosen.items() <= row.items()]
            stated = [row for row in here if in_stated_grid(row)]
            lines.append([problem, *levels, share(stated), share(here), best(here)])
    columns = ["problem", "growth of λ", "y step", "x step", "batches", "went away, stated steps", "all steps", "best"]
    return table(columns, lines)


def effects(rows):
    """By problem and part: share of runs that went away with the published level less that with the other one."""
    found = {}
    for problem in dict.fromkeys(row["problem"] for row in rows):
        of_problem = [row for row in rows if row["problem"] == problem]
        for part, levels in PARTS.items():
            shares = [
                np.mean([went_away(row) for row in of_problem if row[part] == level]) if of_problem else 0.0
                for level in levels
            ]
            found[problem, part] = shares
        for pair in (("growth", "y_step"), ("growth", "x_step")):
            both, neither = (
                [r for r in of_problem if all((r[part] == PUBLISHED[part]) == value for part in pair)]
                for value in (True, False)
            )
            found[problem, " and ".join(pair)] = [np.mean([went_away(r) for r in group]) for group in (neither, both)]
    return found


def effect_table(rows):
    lines = [
        [problem, part, f"{100 * without:.0f} %", f"{100 * with_it:.0f} %"]
        for (problem, part), (without, with_it) in effects(rows).items()
    ]
    return table(["problem", "part", "went away without it", "with it as published"], lines)


def show(rows, folder):
    write_tables(folder, "f2sa", combinations=combination_table(rows), effects=effect_table(rows))
    problems = list(dict.fromkeys(row["problem"] for row in rows))
    draw(folder, "f2sa", len(problems), lambda axes: plot(rows, problems, axes))


def plot(rows, problems, axes):
    """The share of runs that went away, by growth of λ and δ_0, for the steps of y and x."""
    deltas = sorted({row["delta_0"] for row in rows})
    for axis, problem in zip(axes, problems, strict=True):
        for place, (growth, y_step, x_step) in enumerate(product(*list(PARTS.values())[:3])):
            chosen = {"problem": problem, "growth": growth, "y_step": y_step, "x_step": x_step}
            here = [row for row in rows if chosen.items() <= row.items()]
            by_delta = [np.mean([went_away(r) for r in here if r["delta_0"] == d]) for d in deltas]
            dash = "-" if growth == "t^6/7" else ":"
            color, marker = ("C3" if y_step == "published" else "C0"), ("s" if x_step == "t^-4/7" else "o")
            label = f"λ ~ {growth}, y {y_step}, x {x_step}"
            shift = 1 + 0.03 * (place - 3.5)
            axis.plot(np.array(deltas) * shift, by_delta, dash + marker, color=color, label=label, markersize=4)
        axis.set(title=problem, xscale="log", xlabel="δ_0", ylabel="share of runs that went away", ylim=(-0.03, 1.03))
    axes[0].legend(fontsize=6)


if __name__ == "__main__":
    bilevel.fuse_cpu_loops()
    study(__doc__, "f2sa", measure, show)

"""Which part of the published F²SA sends its iterates to infinity.

    python -m paper.studies.f2sa_parts [--from-kept] [--resume] [--quick --folder FOLDER]

All combinations of four parts run over a grid of step sizes, ratios and δ_0 with λ_0 = 1: the growth of λ, the step of
y, the step of x, and one inner batch or two in the move of x. Results are kept in reports/reproduction/f2sa.csv. A run
is "non-finite" if an iterate became so, and "far" if it is finite with an entry of z or x above 1000. On IJCNN1 some
penalties are best at 0, so x goes to -∞ if a method works well: there "far" is not a failure, and h shows the quality.
"""

import functools
import sys
from itertools import product

import numpy as np

import bilevel
from benchmarks.markdown import number
from bilevel.problems.exact import norm_sq
from paper.markdown import markdown_table as table
from paper.studies.common import ROOT, draw, epochs, ijcnn1, paper_quadratic, run_cells, small_quadratic, study
from paper.studies.common import tables as write_tables

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
SMALL, PAPER, REAL, LONG, LONGEST = "small quadratics", "quadratics", "IJCNN1", "IJCNN1, long", "IJCNN1, longest"
NO_PENALTIES = "IJCNN1, no penalties"
LAMBDAS = {"IJCNN1, λ_0 = 10": 10.0, "IJCNN1, λ_0 = 100": 100.0}  # 1 elsewhere
ON_DATA = (REAL, LONG, LONGEST, *LAMBDAS)
# Builder of the problem, epochs, batch size, and grid of step sizes, ratios and δ_0.
STUDIES = {
    SMALL: (small_quadratic, 1000, 16, ((0.01, 0.1), (0.1, 1.0, 10.0, 100.0), (0.01, 0.1, 1.0))),
    PAPER: (paper_quadratic, 50, 64, ((0.01, 0.1), (0.1, 1.0), (0.01, 1.0))),
    REAL: (ijcnn1, 50, 64, ((2.0**-5, 2.0**-2, 2.0**-1, 2.0), (0.01, 0.1, 1.0), (0.01, 1.0))),
    LONG: (ijcnn1, 450, 64, ((2.0**-2, 2.0**-1), (0.1, 1.0), (1.0,))),
    LONGEST: (ijcnn1, 10_000, 64, ((2.0**-2,), (1.0,), (1.0,))),
    **dict.fromkeys(LAMBDAS, (ijcnn1, 50, 64, ((2.0**-5, 2.0**-2, 2.0**-1), (0.01, 0.1, 1.0), (0.01, 1.0)))),
}


def parts(quick):
    for name in [SMALL] if quick else STUDIES:
        # ∇x G of IJCNN1 does not depend on rows, so the number of batches makes no difference.
        for batches in ["shared"] if name in (LONG, LONGEST, *LAMBDAS) else PARTS["batches"]:
            yield {"problem": name, "batches": batches}, functools.partial(combinations, name, batches, quick)
    if not quick:
        yield {"problem": NO_PENALTIES}, without_penalties


def without_penalties():
    """Return h of IJCNN1 at x = -50, where each penalty is 2e-22: the limit if x goes to -∞."""
    problem = ijcnn1()
    x = np.full_like(problem.start.outer_var, -50, dtype=np.float64)
    exact = problem.exact_solver(x, None)
    sizes = {"largest_x": 50.0, "lowest_x": -50.0, "largest_z": float(np.abs(exact.inner_var).max())}
    return [{"status": "exact", "value": exact.value, "hypergrad_norm_sq": norm_sq(exact.hypergrad)} | sizes]


def combinations(name, batches, quick):
    """Run all levels of the other three parts in one program; the longest runs and larger λ_0 have none or all."""
    build, count, batch, grid = STUDIES[name]
    if quick:
        count, grid = 20, ((0.1,), (1.0,), (1.0,))
    problem, others = build(), [part for part in PARTS if part != "batches"]
    levels = [dict(zip(others, chosen, strict=True)) for chosen in product(*(PARTS[part] for part in others))]
    settings = list(product([levels[0], levels[-1]] if name in (LONGEST, *LAMBDAS) else levels, product(*grid)))
    penalty = LAMBDAS.get(name, 1.0)
    solvers = [make(level | {"batches": batches}, *setting, batch, penalty) for level, setting in settings]
    found = run_cells(problem, solvers, [0], epochs(problem, count))
    rows = []
    for (level, setting), (_, _, cell) in zip(settings, found, strict=True):
        row = level | dict(zip(("step_size", "outer_ratio", "delta_0"), setting, strict=True))
        kept = ("step", "calls", "value", "hypergrad_norm_sq", "largest_x", "lowest_x", "largest_z")
        last = cell.rows[-1]
        rows.append(row | {"status": cell.status.value} | {key: last[key] for key in kept})
    return rows


def make(levels, step_size, ratio, delta, batch, penalty):
    parts = {FIELDS[part]: PARTS[part][level] for part, level in levels.items()}
    return PartsF2SA(step_size, ratio, batch, lambda_0=penalty, delta_0=delta, **parts)


# Tables and figure


def is_non_finite(row):
    return row["status"] == "diverged" or not np.isfinite(row["value"] or np.nan)


def is_far(row):
    return not is_non_finite(row) and max(row["largest_x"], row["largest_z"]) > FAR


def left(row):
    return is_non_finite(row) or is_far(row)


def is_stated(row):
    """Return True if the step size is in the grid of the paper, which ends at 0.1 or 0.25."""
    return row["step_size"] <= (0.25 if row["problem"] in ON_DATA else 0.1)


def metric(problem):
    return "value" if problem in ON_DATA else "hypergrad_norm_sq"


def best(rows):
    return number(min((row[metric(row["problem"])] for row in rows), default=None))


def combination_table(rows):
    lines = []
    for problem in dict.fromkeys(row["problem"] for row in rows):
        for levels in product(*PARTS.values()):
            chosen = dict(zip(PARTS, levels, strict=True))
            here = [row for row in rows if row["problem"] == problem and chosen.items() <= row.items()]
            stated = [row for row in here if is_stated(row)]
            if here:
                counts = [sum(map(is_non_finite, stated)), sum(map(is_far, stated)), len(stated)]
                finite = [row for row in here if not is_non_finite(row)]
                bests = best([row for row in finite if not is_far(row)]), best([row for row in finite if is_far(row)])
                lines.append([problem, *levels, f"{counts[0]}, {counts[1]} of {counts[2]}", *bests])
    columns = ["problem", "growth of λ", "y step", "x step", "batches", "non-finite, far", "best", "best of the far"]
    return table(columns, lines)


def effects(rows):
    """Return, by problem and part, the shares of non-finite or far runs without and with the published part."""
    found = {}
    for problem in (SMALL, PAPER, REAL):
        of_problem = [row for row in rows if row["problem"] == problem and is_stated(row)]
        for chosen in (*((part,) for part in PARTS), ("growth", "y_step"), tuple(PARTS)):
            groups = [
                [left(row) for row in of_problem if all((row[p] == PUBLISHED[p]) == value for p in chosen)]
                for value in (False, True)
            ]
            if all(groups):
                found[problem, chosen] = [float(np.mean(group)) for group in groups]
    return found


def effect_table(rows):
    words = {"growth": "growth of λ", "y_step": "step of y", "x_step": "step of x", "batches": "two batches"}
    lines = [
        [problem, " and ".join(words[part] for part in chosen), *(f"{100 * share:.0f} %" for share in shares)]
        for (problem, chosen), shares in effects(rows).items()
    ]
    return table(["problem", "part", "non-finite or far without", "with it as published"], lines)


def show(rows, folder):
    write_tables(folder, "f2sa", combinations=combination_table(rows), effects=effect_table(rows))
    problems = [name for name in (SMALL, PAPER, REAL, LONG) if any(row["problem"] == name for row in rows)]
    draw(folder, "f2sa", len(problems), lambda axes: plot(rows, problems, axes), size=(3.4, 3.2))


def plot(rows, problems, axes):
    """Draw the shares of non-finite and far runs of the stated grid, and h of the long runs."""
    combinations = list(reversed(list(product(*list(PARTS.values())[:3]))))
    for axis, problem in zip(axes, problems, strict=True):
        for place, levels in enumerate(combinations):
            chosen = dict(zip(PARTS, levels, strict=False)) | {"problem": problem}
            here = [row for row in rows if chosen.items() <= row.items()]
            if problem == LONG:
                axis.plot([row["value"] for row in here], [place] * len(here), "oC0", markersize=4)
            else:
                plot_shares(axis, place, [row for row in here if is_stated(row)])
        axis.set(title=problem, xlabel="h" if problem == LONG else "share of runs")
        axis.set_yticks(range(len(combinations)), [""] * len(combinations))
    for row in rows:
        if row["problem"] == NO_PENALTIES:
            axes[-1].axvline(row["value"], color="k", linestyle=":", label="no penalties")
    labels = [f"λ ~ {growth}, y {y_step}, x {x_step}" for growth, y_step, x_step in combinations]
    axes[0].set_yticks(range(len(combinations)), labels)
    for axis in {axes[0], axes[-1]}:
        axis.legend()


def plot_shares(axis, place, rows):
    bad, far = (np.mean([test(row) for row in rows]) for test in (is_non_finite, is_far))
    axis.barh(place, bad, color="C3", label="non-finite" if place == 0 else None)
    axis.barh(place, far, left=bad, color="C1", label="far" if place == 0 else None)
    axis.set_xlim(0, 1)


if __name__ == "__main__":
    bilevel.fuse_cpu_loops()
    study(__doc__, "f2sa", parts, show)

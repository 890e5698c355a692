"""h of every solver after equal oracle calls, with equal tuning; writes reports/equal_calls.md.

    python benchmarks/equal_calls.py --jobs 2
    python benchmarks/equal_calls.py --small                          # writes reports/equal_calls_small.md
    python benchmarks/equal_calls.py --only SRBA --only SABA          # run only these; the page has all kept results
    python benchmarks/equal_calls.py --quick --out quick/calls.md     # smaller problems

The experiments are equal_*.toml in bilevel/bench/configs, which have every solver. With --small the problem is small
and the budget has thousands of passes over its rows, so that methods which solve the inner problem in each step take
many steps. Results are kept in a store, by default results/equal_calls or results/equal_calls_small. Runs in the store
are not repeated, except for solvers that are named by --again.
"""

import argparse
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
from markdown import number, table

import bilevel
from bilevel._core.files import replacing
from bilevel.bench.config import SWEEP, CellBudget, build_problem, load_config
from bilevel.bench.distribution import Where
from bilevel.bench.execute import drop_duplicates, execute
from bilevel.bench.live import Watcher
from bilevel.bench.select import final_values, make_sections
from bilevel.bench.store import Store, list_metrics
from bilevel.engine.metrics import METRICS
from bilevel.solvers import HostSolver

PROBLEMS = {"equal_quadratic": "quadratics, h - h*", "equal_ijcnn1": "IJCNN1, h", "equal_cleaning": "cleaning, h"}
SMALL = {"equal_small": "small quadratics, h - h*"}
TITLES = PROBLEMS | SMALL
QUICK = {
    "equal_quadratic": ("quadratic", {"n_inner": 256, "n_outer": 64, "dim_inner": 8, "dim_outer": 4}),
    "equal_ijcnn1": ("breast_cancer", {}),
    "equal_cleaning": ("digits_cleaning", {"corruption": 0.5, "n_train": 200, "n_val": 100}),
    "equal_small": ("quadratic", {"n_inner": 128, "n_outer": 64, "dim_inner": 8, "dim_outer": 4}),
}
KEPT = "runs.parquet"
SELECTING = ("value_gap", "value")  # the metrics of the experiments
VERSIONS = ("python", "jax", "bilevel", "revision")
TUNED = "tuned"
UNTUNED = {"untuned": "", "untuned diagonal": ", diagonal"}
INTRODUCTION = """# Equal oracle calls, equal tuning

h of every solver after the same number of oracle calls, on random quadratics, penalty selection on IJCNN1 and data
cleaning on a part of MNIST. Each solver has the same grid on a problem, the same seeds and the same budget. This
command runs everything and writes this page:

    python benchmarks/equal_calls.py --jobs 2

The budgets are 50 to 100 passes over all rows, of one derivative each. Methods that first solve the inner problem
accurately cannot take a step of x within them, and have the h of the start: `Exact`, `MAID` and `AutoSRBA` on all three
problems, `HOAG` and `DTFBO` on quadratics. `AutoSRBA` first fits z by at least 76 n calls, which is most of these
budgets or all of them; with `preconditioner="diagonal"` x moves from the start. Their places in this table therefore
say nothing about longer runs, for which they are meant: [a larger budget on a small problem](equal_calls_small.md).
"""
SMALL_INTRODUCTION = """# Equal oracle calls with a larger budget

h of every solver after the same number of oracle calls on small random quadratics. The budget is thousands of passes
over all rows, of one derivative each, so that methods which solve the inner problem in each step take many steps;
[the comparison on larger problems](equal_calls.md) has 50 to 100 passes. Each solver has the same grid, the same seeds
and the same budget. This command runs everything and writes this page:

    python benchmarks/equal_calls.py --small

Values below 1e-25 are rounding errors, so the ranks among them mean nothing.
"""
TEXT = """{introduction}
Each cell has the median over {seeds} seeds, at the best setting of the solver, and in brackets the best seed. h is
exact: the inner problem is solved again at the last x. Solvers are sorted by their mean rank. The last column counts
the diverged runs of all settings and seeds on each problem. `AutoSRBA` has a single setting. A step of
{host} may exceed the budget; their result is the last point within the
budget, which may be the start.{missing}

{results}

## How settings were chosen

Settings are selected by the lowest median of the number that is shown, so all solvers profit equally from the
selection. The grid is the product of the step sizes and ratios below; other parameters have their defaults, with
batches of 64. Solvers whose step has another meaning (`F2SAp` and `AdaBiO` move x by a length; for `STFBO` and `DTFBO`
it is a bound) have the same grid. Solvers that adapt their steps have one setting. Longer series or inner loops, which
reduce the bias of some methods, were not tried: these are results of {n_settings} settings.

Settings that were tuned on other codes may not carry over: in the authors' codes of `StocBiO`, `MRBO` and `VRBO` v is
about 1/η times as large as in the papers and here, and in that of `PZOBO` the estimate is divided by the size of x.

{grids}

## The settings

Step size and ratio. A star marks an end of the grid: a better setting may lie beyond it.

{settings}

{machines}
"""


def shrink(experiment):
    """Return a small version of the experiment on data that need no file."""
    problem, arguments = QUICK[experiment.name]
    arguments |= {"dtype": dict(experiment.problem_arguments)["dtype"], "seed": 0}
    first = defaultdict(list)
    for setting in experiment.settings:
        first[setting.solver, setting.columns].append(setting)
    settings = tuple(setting for some in first.values() for setting in some[:2])
    little = {"problem": problem, "problem_arguments": tuple(sorted(arguments.items())), "settings": settings}
    return replace(experiment, **little, seeds=(0, 1), budget=CellBudget(calls=10_000))


def run(experiment, store, only, where):
    """Run the missing tasks and return the number of failed tasks."""
    known = [name for name in only or experiment.solvers if name in experiment.solvers]
    return execute(experiment, store, Watcher(), only=known, phases=[SWEEP], where=where)


def compact(folder, without=()):
    """Write the final rows, except those of some solvers, to one file with the columns of the page."""
    rows, kept = Store(folder).read(), folder / KEPT
    dropped = [name for name in rows if name.startswith("calls_") or (name in METRICS and name not in SELECTING)]
    rows = rows[rows["final"] & ~rows["solver"].isin(without)].drop(columns=[*dropped, *VERSIONS])
    rows = rows.dropna(axis="columns", how="all").sort_values(["cell", "step"])
    with np.errstate(over="ignore"), replacing(kept) as file:
        rows = rows.astype(dict.fromkeys(list_metrics(rows), np.float32))
        rows.to_parquet(file, index=False, compression="zstd", compression_level=19)
    for path in folder.glob("*.parquet"):
        if path != kept:
            path.unlink()


def section_of(experiment, rows):
    """Return the solvers at their best settings, from the rows of the current cells of the experiment."""
    problem = build_problem(experiment.problem, experiment.problem_arguments)
    cells = drop_duplicates(experiment.cells(problem.n_inner, problem.n_outer), problem)
    (section,) = make_sections(rows[rows["cell"].isin({cell.id for cell in cells})], experiment.metric)
    return section


def name_of(contender):
    solver, _, column = contender.label.rstrip(")").partition(" (")
    return f"`{solver}`" + UNTUNED.get(column, "")


def outcome(contender, experiment):
    """Return the median and the best of the seeds, and the number of diverged runs."""
    values = final_values(contender.rows, experiment.metric)
    ends = contender.swept[contender.swept["final"]]
    diverged = f"{(ends['status'] == 'diverged').sum()}/{len(ends)}"
    if contender.parameters is None:
        return np.inf, np.inf, diverged
    return float(np.median(values)), float(values.min()), diverged


def show(median, best, _):
    return f"{number(median, 4)} ({number(best, 4)})" if np.isfinite(median) else "diverged"


def mean_ranks(outcomes):
    """Return the mean over problems of the rank of each solver by its median; missing solvers rank last."""
    ranks = defaultdict(list)
    for found in outcomes.values():
        medians = {name: one[0] for name, one in found.items()}
        for name in {name for others in outcomes.values() for name in others}:
            own = medians.get(name, np.inf)
            ranks[name].append(1 + sum(other < own for other in medians.values()))
    return {name: float(np.mean(those)) for name, those in ranks.items()}


def results(outcomes):
    ranks, rows = mean_ranks(outcomes), []
    for name in sorted(ranks, key=lambda name: (ranks[name], name)):
        found = [those.get(name) for those in outcomes.values()]
        cells = [None if one is None else show(*one) for one in found]
        diverged = ", ".join("–" if one is None else one[-1] for one in found)
        rows.append([name, f"{ranks[name]:.1f}", *cells, diverged])
    return table(["solver", "mean rank", *(TITLES[name] for name in outcomes), "diverged"], rows)


def settings(sections):
    shown = defaultdict(dict)
    for place, section in sections.items():
        for one in section.contenders:
            has_grid = one.parameters is not None and one.swept["param_step_size"].nunique() > 1
            steps = one.parameters if has_grid else {}
            words = [f"{steps[name]:g}" + "*" * (name in one.edges) for name in ("step_size", "outer_ratio") if steps]
            shown[name_of(one)][place] = ", ".join(words) or None
    order = sorted(shown)
    return table(["solver", *sections], [[name, *(shown[name].get(place) for place in sections)] for name in order])


def grids(experiments):
    rows = []
    for one in experiments:
        tuned = [dict(setting.parameters) for setting in one.settings if setting.columns == (TUNED,)]
        values = ({parameters[name] for parameters in tuned} for name in ("step_size", "outer_ratio"))
        lists = [", ".join(f"{value:g}" for value in sorted(those)) for those in values]
        given = {name: value for name, value in one.problem_arguments if name.startswith("n_")}
        sizes = ", ".join(f"{name} = {value}" for name, value in given.items())
        rows.append([TITLES[one.name].partition(",")[0], sizes or None, f"{one.budget.calls:,}", *lists])
    return table(["problem", "rows", "oracle calls", "step sizes", "ratios"], rows)


def write(experiments, store, path):
    """Write the page from all results of the store."""
    frame = store.read(SWEEP)
    sections = {one.name: section_of(one, frame[frame["experiment"] == one.name]) for one in experiments}
    outcomes = {
        one.name: {name_of(other): outcome(other, one) for other in sections[one.name].contenders}
        for one in experiments
    }
    host = [f"`{name}`" for name, cls in bilevel.SOLVERS.items() if issubclass(cls, HostSolver)]
    partial = [name for name in bilevel.SOLVERS if any(name not in one.solvers for one in experiments)]
    listed = ", ".join(f"`{name}`" for name in partial)
    text = TEXT.format(
        introduction=SMALL_INTRODUCTION if experiments[0].name in SMALL else INTRODUCTION,
        seeds=len(experiments[0].seeds),
        host=f"{', '.join(host[:-1])} or {host[-1]}",
        missing=listed and f"\nA solver ranks last without the constants that it needs: {listed}.",
        results=results(outcomes),
        n_settings=len([one for one in experiments[0].settings if one.solver == "SRBA" and one.columns == (TUNED,)]),
        grids=grids(experiments),
        settings=settings({TITLES[name].partition(",")[0]: one for name, one in sections.items()}),
        machines=f"Run on: {'; '.join(sorted(frame['machine'].unique()))}.",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the page; by default reports/equal_calls.md or equal_calls_small.md")
    parser.add_argument("--small", action="store_true", help="a small problem with a larger budget")
    parser.add_argument(
        "--store", type=Path, help="folder of kept results; by default results/ and the name of the page"
    )
    parser.add_argument("--only", action="append", help="run only this solver; may be repeated")
    parser.add_argument("--again", action="append", default=[], help="first discard the kept results of this solver")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--quick", action="store_true", help="smaller problems; requires another --out")
    given = parser.parse_args(arguments)
    for name in [*(given.only or ()), *given.again]:
        if name not in bilevel.SOLVERS:
            parser.error(f"{name}: unknown solver; there are {', '.join(bilevel.SOLVERS)}.")
    given.out = given.out or Path("reports") / f"equal_calls{'_small' * given.small}.md"
    experiments = [load_config(name) for name in (SMALL if given.small else PROBLEMS)]
    store = Store(given.store or Path("results") / given.out.stem)
    experiments = [shrink(one) if given.quick else one for one in experiments]
    if given.again and store.folder.exists():
        compact(store.folder, given.again)
    failures = sum(run(one, store, given.only, Where(given.jobs)) for one in experiments)
    compact(store.folder)
    write(experiments, store, given.out)
    return 1 if failures else 0


if __name__ == "__main__":
    bilevel.fuse_cpu_loops()
    sys.exit(main())

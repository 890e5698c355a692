"""The untuned setting of SRBA against tuned baselines: seconds and calls until h is near the best value known.

    python benchmarks/auto.py [--sets IJCNN1,separable] [--seconds 3] [--folder results/auto]

Each data set is a unit of its own and leaves a JSON file in the folder; whatever lies there is joined into the tables,
written to auto.md beside the files, and the figure reports/auto.png. IJCNN1 and Covertype are looked for as
`bilevel.datasets` does.

Seconds are those of stepping alone; baselines have ten times as many. The plain methods are tuned by a sweep, which
costs them nothing here: of 70 pairs of step and ratio the best after as many calls as the untuned setting took; what a
file of the folder says is not tuned again. Exact has nothing to tune. The best known h of a set is the least of all
these runs and of a longer one of the untuned setting, with another seed.
"""

import argparse
import json
import warnings
from itertools import product
from pathlib import Path

import jax
import numpy as np
from auto_sets import SETS
from markdown import number, table

import bilevel
from bilevel import _tree as trees
from bilevel._precision import arithmetic
from bilevel.engine.sweep import sweep

AUTO, LONG = "SRBA auto", "SRBA auto, longer"
TUNED = {"SRBA tuned": bilevel.SRBA, "SABA tuned": bilevel.SABA, "AmIGO tuned": bilevel.AmIGO}
BASELINES = (*TUNED, "Exact")
STEPS, RATIOS = np.geomspace(1 / 32, 16, 10), np.geomspace(1e-3, 1, 7)  # steps are relative to 1 / L
TOLERANCES = {"1 %": 1e-2, "0.1 %": 1e-3}
SETTLED, PATIENCE = 3, 10  # times the seconds, for the longer run and for the baselines
FIGURE = Path(__file__).parents[1] / "reports" / "auto.png"


def measured(name, seconds, known):
    """One data set: its runs by solver; ``known`` holds the tuned parameters, as far as they are."""
    problem = SETS[name]()
    runs = {AUTO: timed(problem, bilevel.SRBA("auto"), seconds)}
    calls = int(runs[AUTO]["history"]["calls"][-1])
    for title, cls in TUNED.items():
        solver = cls(*known[title]) if known.get(title) else tuned(problem, cls, calls)
        runs[title] = timed(problem, solver, PATIENCE * seconds)
        print(f"  {name}: {title} {runs[title]['setting']}", flush=True)
    runs["Exact"] = timed(problem, bilevel.Exact(), PATIENCE * seconds)
    runs[LONG] = timed(problem, bilevel.SRBA("auto"), SETTLED * seconds, seed=1)
    return {"set": name, "n_inner": problem.n_inner, "n_outer": problem.n_outer, "seconds": seconds, "runs": runs}


def timed(problem, solver, seconds, seed=0):
    """A run against the clock; a setting that is None found nothing that stays finite."""
    if solver is None:
        return {"status": "diverged", "setting": "all 70 diverged", "rollbacks": 0, "history": {}, "parameters": None}
    result = bilevel.run(problem, solver, seed=seed, max_seconds=seconds)
    kept = {key: result.history[key].tolist() for key in ("seconds", "calls", "value")}
    parameters = result.solver.parameters()
    setting = f"step {parameters['step_size']:.2g}, ratio {parameters['outer_ratio']:.2g}"
    rollbacks = float(result.history["rollbacks"][-1]) if "rollbacks" in result.history else 0
    return {
        "status": result.status.value,
        "setting": setting,
        "parameters": [parameters["step_size"], parameters["outer_ratio"]],
        "rollbacks": rollbacks,
        "history": kept,
    }


def tuned(problem, cls, calls):
    """The best of the grid after so many calls, by h."""
    curvature = largest_curvature(problem)
    with arithmetic(problem.dtype):
        oracles = problem.oracles.with_batches(64, "blocks")
        settings = [cls(step / curvature, ratio).resolve(oracles) for step, ratio in product(STEPS, RATIOS)]
    (cells,) = sweep(problem, settings, [0], calls)
    values = [cell.rows[-1].get("value", np.nan) if cell.status != "diverged" else np.nan for cell in cells]
    return None if np.isnan(values).all() else settings[int(np.nanargmin(values))]


def largest_curvature(problem, products=30):
    """Of ∇²zz G at the start, by the power method."""
    with arithmetic(problem.dtype):
        product_with = jax.jit(lambda v: problem.oracles.hvp(problem.start._replace(v=v)))
        v = trees.ones_like(problem.start.inner_var)
        for _ in range(products):
            v = product_with(trees.scale(1 / np.sqrt(float(trees.norm_sq(v))), v))
        return float(np.sqrt(float(trees.norm_sq(v))))


def best_known(found):
    """The least h that any run has seen."""
    values = [value for run in found["runs"].values() for value in run["history"].get("value", []) if value == value]
    return min(values)


def reached(run, target):
    """Seconds and calls at the first evaluation with h at most the target, or None."""
    history = run["history"]
    for seconds, calls, value in zip(*(history.get(key, []) for key in ("seconds", "calls", "value")), strict=True):
        if value <= target:
            return seconds, calls
    return None


def set_table(found):
    """The runs of one data set."""
    best, rows = best_known(found), []
    for solver in (AUTO, *BASELINES):
        run = found["runs"][solver]
        cells = [reached(run, best * (1 + tolerance)) for tolerance in TOLERANCES.values()]
        numbers = [number(cell[part]) if cell else None for part in (0, 1) for cell in cells]
        last = run["history"]["value"][-1] if run["history"] else None
        rows.append([solver, *numbers, number(last, 5), run["status"], run["setting"]])
    columns = ["solver", *(f"s to {t}" for t in TOLERANCES), *(f"calls to {t}" for t in TOLERANCES)]
    title = f"**{found['set']}** ({found['n_inner']} + {found['n_outer']} rows), best known h = {best:.6g}"
    return f"{title}\n\n{table([*columns, 'last h', 'status', 'setting'], rows)}"


def ratio(found, baseline, tolerance):
    """time(auto) / time(baseline); a baseline that never arrives counts with all its seconds, auto as infinite."""
    target = best_known(found) * (1 + tolerance)
    ours, theirs = (reached(found["runs"][solver], target) for solver in (AUTO, baseline))
    if ours is None:
        return np.inf
    return ours[0] / (PATIENCE * found["seconds"] if theirs is None else theirs[0])


def summary(everything):
    """Medians over the sets."""
    rows = []
    for baseline, (title, tolerance) in product(BASELINES, TOLERANCES.items()):
        ratios = [ratio(found, baseline, tolerance) for found in everything]
        never = sum(reached(f["runs"][baseline], best_known(f) * (1 + tolerance)) is None for f in everything)
        rows.append([baseline, title, number(float(np.median(ratios))), f"{never} of {len(everything)}"])
    columns = ["baseline", "to within", "median of time(auto) / time(baseline)", "sets where it never arrived"]
    ended = [
        f"{found['set']}: {found['runs'][AUTO]['status']}, {found['runs'][AUTO]['rollbacks']:g} rollbacks"
        for found in everything
    ]
    return table(columns, rows) + "\n\nHow the untuned runs ended: " + "; ".join(ended) + "."


def draw(everything, path):
    """A panel per set: the gap to the best known h against seconds."""
    from matplotlib.figure import Figure

    across = 3
    figure = Figure(figsize=(11, 2.9 * -(-len(everything) // across)), layout="constrained")
    axes = figure.subplots(-(-len(everything) // across), across, squeeze=False).ravel()
    for axis, found in zip(axes, everything, strict=False):
        best = best_known(found)
        for solver in (AUTO, *BASELINES):
            history = found["runs"][solver]["history"]
            gap = np.array(history.get("value", [])) / best - 1
            axis.loglog(history.get("seconds", []), np.maximum(gap, 1e-5), label=solver)
        axis.axhline(1e-3, color="grey", linewidth=0.5)
        axis.set(title=found["set"], xlabel="seconds", ylabel="h / best − 1")
    for axis in axes[len(everything) :]:
        axis.set_axis_off()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=1 + len(BASELINES))
    figure.savefig(path, dpi=110)


def file_of(folder, name):
    return folder / f"{name.replace(' ', '-')}.json"


def tuned_before(file):
    """The parameters of each solver in a file of an earlier measurement."""
    runs = json.loads(file.read_text())["runs"] if file.exists() else {}
    return {solver: run["parameters"] for solver, run in runs.items()}


def chosen(names):
    unknown = set(names) - set(SETS)
    if unknown:
        raise SystemExit(f"no set is called {', '.join(sorted(unknown))}; there are {', '.join(SETS)}.")
    return names


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", default=",".join(SETS), help="names with commas between; '' only joins what is there")
    parser.add_argument("--seconds", type=float, default=3.0, help="of the untuned run; baselines have ten times these")
    parser.add_argument("--folder", type=Path, default=Path("results/auto"))
    parser.add_argument("--figure", type=Path, default=FIGURE)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore", RuntimeWarning)  # of drift, at the floor of float32
    for name in chosen([name for name in arguments.sets.split(",") if name]):
        file = file_of(arguments.folder, name)
        file.write_text(json.dumps(measured(name, arguments.seconds, tuned_before(file))))
    files = [file_of(arguments.folder, name) for name in SETS]
    everything = [json.loads(file.read_text()) for file in files if file.exists()]
    text = "\n\n".join([summary(everything), *map(set_table, everything)])
    (arguments.folder / "auto.md").write_text(text + "\n")
    draw(everything, arguments.figure)
    print(text)


if __name__ == "__main__":
    bilevel.fuse_cpu_loops()
    main()

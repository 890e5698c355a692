"""The untuned solver compared with baselines: seconds and calls until h is close to the best known value.

    python benchmarks/auto.py [--sets "IJCNN1;separable"] [--solvers "SRBA tuned;Exact"] [--jobs 2]

The results of each data set are kept in a JSON file in the folder, which is written after each solver; results in a
file are not computed again. All files of the folder are combined into the tables, in auto.md next to the files, and
into the figure reports/auto.png. `bilevel.datasets` loads IJCNN1, Covertype and MNIST.

Seconds are those of steps alone. The untuned run ends by itself, or after 4 seconds. Plain methods are tuned by a sweep
over 20 pairs of step size and ratio, whose cost is not counted. The selected setting is the best after the number of
calls that the untuned solver needed to come within 0.1 % of its own final value; then SRBA has 40 seconds and the
others have 10. Exact and methods that claim to be tuning-free run with their defaults for 5 seconds. The best known h
of a set is the lowest value of all these runs and of L-BFGS on exact values of h from four starts, one of which is the
end of the untuned run.
"""

import argparse
import contextlib
import json
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import jax
import numpy as np
from auto_problems import SETS
from markdown import number, table
from scipy.optimize import minimize

import bilevel
from bilevel._core import trees
from bilevel._core.compilation import arithmetic
from bilevel.engine.driver import sweep
from bilevel.engine.steps import prepare

AUTO, STARTS = "AutoSRBA", "L-BFGS from four starts"
TUNED = {"SRBA tuned": bilevel.SRBA, "SABA tuned": bilevel.SABA, "AmIGO tuned": bilevel.AmIGO}
FREE = {"Exact": bilevel.Exact, "D-TFBO": bilevel.DTFBO, "S-TFBO": bilevel.STFBO, "Ada-BiO": bilevel.AdaBiO}
BASELINES = (*TUNED, *FREE)
SECONDS = {AUTO: 4.0} | dict.fromkeys(TUNED, 10.0) | dict.fromkeys(FREE, 5.0) | {"SRBA tuned": 40.0}
STEPS, RATIOS = np.geomspace(1 / 8, 8, 5), np.geomspace(1e-3, 1, 4)  # steps are relative to 1 / L
TOLERANCES = {"1 %": 1e-2, "0.1 %": 1e-3}
BATCH = 64  # or all rows of a smaller level
START_SECONDS = 20  # of L-BFGS, for all starts together
FIGURE = Path(__file__).parents[1] / "reports" / "auto.png"


def measure(name, solvers, folder):
    """Add the missing runs of these solvers to the file of a data set."""
    warnings.simplefilter("ignore", RuntimeWarning)  # about drift at the rounding errors of float32
    file = file_of(folder, name)
    problem = SETS[name]()
    found = {"set": name, "n_inner": problem.n_inner, "n_outer": problem.n_outer, "runs": {}, "starts": None}
    if file.exists():
        found = json.loads(file.read_text())
    for title in (AUTO, *(solver for solver in BASELINES if solver in solvers)):
        if title not in found["runs"]:
            found["runs"][title] = one_run(problem, title, found)
            file.write_text(json.dumps(found))
            print(f"{name}: {title}", flush=True)
        if found["starts"] is None:
            found["starts"] = multi_start(problem, found["runs"][AUTO]["outer_var"])
            file.write_text(json.dumps(found))


def one_run(problem, title, found):
    if title in TUNED:
        return timed(problem, tuned(problem, TUNED[title], calls_of_auto(found)), SECONDS[title])
    if title == AUTO:
        return timed(problem, bilevel.AutoSRBA(), SECONDS[title])
    batch = min(BATCH, problem.n_inner, problem.n_outer)
    return timed(problem, FREE[title](batch_size=batch), SECONDS[title])


def calls_of_auto(found):
    """Return the calls of the untuned run until it is within 0.1 % of its own final value."""
    run = found["runs"][AUTO]
    reach = reached(run, run["history"]["value"][-1] * 1.001)
    return int(run["history"]["calls"][-1] if reach is None else reach[1])


def multi_start(problem, end):
    """Return the lowest h that L-BFGS finds from each of four starts within the time limit."""
    first, began = np.asarray(trees.flat(problem.start.outer_var)), time.perf_counter()
    values = []
    for start in (np.array(end), first, np.full_like(first, -2.0), np.full_like(first, -6.0)):
        bounds = [problem.oracles.wide_bounds or (None, None)] * len(first)
        if time.perf_counter() - began < START_SECONDS and problem.exact_solver is not None:
            values.append(descend(problem, start, bounds, began))
    return values


def descend(problem, start, bounds, began):
    guess, seen = None, [np.inf]

    def value(x):
        nonlocal guess
        if time.perf_counter() - began > START_SECONDS:
            raise StopIteration
        try:
            exact = problem.exact_solver(x.reshape(np.shape(problem.start.outer_var)), guess)
        except (np.linalg.LinAlgError, ValueError):
            return 1e10, np.zeros_like(x)
        if not np.isfinite(exact.value):
            return 1e10, np.zeros_like(x)
        guess = exact
        seen.append(float(exact.value))
        return seen[-1], trees.flat(exact.hypergrad)

    with contextlib.suppress(StopIteration):
        minimize(value, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 200})
    return min(seen)


def timed(problem, solver, seconds, seed=0):
    """Run a solver for some seconds; None stands for a sweep in which every setting diverged."""
    if solver is None:
        return {"status": "diverged", "setting": "all diverged", "rollbacks": 0, "history": {}, "reason": ""}
    result = bilevel.run(problem, solver, seed=seed, max_seconds=seconds)
    kept = {key: result.history[key].tolist() for key in ("seconds", "calls", "value", "outer_value")}
    parameters = result.solver.parameters()
    setting = f"step {parameters['step_size']:.2g}, ratio {parameters['outer_ratio']:.2g}"
    rollbacks = float(result.history["rollbacks"][-1]) if "rollbacks" in result.history else 0
    return {
        "status": result.status.value,
        "setting": setting,
        "reason": result.reason,
        "seconds": seconds,
        "outer_var": trees.flat(result.point.outer_var).tolist() if isinstance(solver, bilevel.AutoSRBA) else None,
        "rollbacks": rollbacks,
        "history": kept,
    }


def tuned(problem, cls, calls):
    """Return the setting of the grid with the lowest h after this number of calls."""
    curvature = largest_curvature(problem)
    batch = min(BATCH, problem.n_inner, problem.n_outer)
    grid = [cls(step / curvature, ratio, batch) for step, ratio in product(STEPS, RATIOS)]
    settings = [prepare(problem, setting).solver for setting in grid]
    (cells,) = sweep(problem, settings, [0], calls)
    values = [cell.rows[-1].get("value", np.nan) if cell.status != "diverged" else np.nan for cell in cells]
    return None if np.isnan(values).all() else settings[int(np.nanargmin(values))]


def largest_curvature(problem, products=30):
    """Return the largest eigenvalue of ∇²zz G at the start, by the power method."""
    with arithmetic(problem.dtype):
        product_with = jax.jit(lambda v: problem.oracles.hvp(problem.start._replace(v=v)))
        v = trees.ones_like(problem.start.inner_var)
        for _ in range(products):
            v = product_with(trees.scale(1 / np.sqrt(float(trees.norm_sq(v))), v))
        return float(np.sqrt(float(trees.norm_sq(v))))


def best_known(found):
    """Return the lowest h of all runs and of L-BFGS."""
    seen = [value for run in found["runs"].values() for value in run["history"].get("value", []) if value == value]
    return min([*seen, *found["starts"]])


def reached(run, target):
    """Return seconds and calls at the first evaluation with h <= target, or None."""
    history = run["history"]
    for seconds, calls, value in zip(*(history.get(key, []) for key in ("seconds", "calls", "value")), strict=True):
        if value <= target:
            return seconds, calls
    return None


def set_table(found):
    """Return the table of one data set."""
    best, rows = best_known(found), []
    for solver, run in found["runs"].items():
        cells = [reached(run, best * (1 + tolerance)) for tolerance in TOLERANCES.values()]
        numbers = [number(cell[part]) if cell else None for part in (0, 1) for cell in cells]
        last = run["history"]["value"][-1] if run["history"] else None
        rows.append([solver, *numbers, number(last, 5), run["status"], run["setting"]])
    columns = ["solver", *(f"s to {t}" for t in TOLERANCES), *(f"calls to {t}" for t in TOLERANCES)]
    title = f"**{found['set']}** ({found['n_inner']} + {found['n_outer']} rows), best known h = {best:.6g}"
    return f"{title}\n\n{table([*columns, 'last h', 'status', 'setting'], rows)}"


def ratio(found, baseline, target):
    """Return time(untuned) / time(baseline) to a target, or None if both miss it.

    A baseline that misses the target counts with all of its seconds, the untuned run with infinite time.
    """
    ours, theirs = (reached(found["runs"][solver], target) for solver in (AUTO, baseline))
    if ours is None:
        return None if theirs is None else np.inf
    if theirs is not None and theirs[0] == 0:
        return 1.0  # the start already meets the target
    return ours[0] / (SECONDS[baseline] if theirs is None else theirs[0])


def own_best(run):
    """Return the lowest h of a run."""
    return min([value for value in run["history"].get("value", []) if value == value], default=np.inf)


def summary(everything):
    """Return medians over the sets where one of both reaches the target: best known h, and best h of the baseline."""
    rows = []
    for baseline, (title, tolerance) in product(BASELINES, TOLERANCES.items()):
        ran = [found for found in everything if baseline in found["runs"]]
        if not ran:
            continue
        targets = [best_known(found) * (1 + tolerance) for found in ran]
        never = sum(reached(f["runs"][baseline], target) is None for f, target in zip(ran, targets, strict=True))
        own = [own_best(found["runs"][baseline]) * (1 + tolerance) for found in ran]
        medians = [middle_ratio(ran, baseline, aims) for aims in (targets, own)]
        rows.append([baseline, title, *medians, f"{never} of {len(ran)}"])
    columns = [
        "baseline",
        "to within",
        "of the best known h",
        "of the baseline's best h",
        "sets where it missed the target",
    ]
    return table(columns, rows)


def middle_ratio(ran, baseline, targets):
    """Return the median of time(untuned) / time(baseline) and the number of sets."""
    ratios = [ratio(found, baseline, target) for found, target in zip(ran, targets, strict=True)]
    known = [one for one in ratios if one is not None]
    return f"{number(float(np.median(known)))} ({len(known)} sets)"


def ends(everything):
    """Return the table of the ends of the untuned runs."""
    rows = []
    for found in everything:
        run = found["runs"][AUTO]
        best, history = best_known(found), run["history"]
        last, lag = history["value"][-1], history["outer_value"][-1] - history["value"][-1]
        gap, behind = (f"{100 * part:.2g} %" for part in (last / best - 1, lag / max(abs(last), 1e-300)))
        seconds = history["seconds"][-1]
        rows.append([found["set"], run["status"], number(seconds), number(last, 5), number(best, 5), gap, behind])
    columns = ["set", "untuned run", "seconds", "last h", "best known h", "gap", "F(z, x) − h(x)"]
    return table(columns, rows)


def draw(everything, path):
    """Draw the gap to the best known h against seconds, one panel per set."""
    from matplotlib.figure import Figure

    across = 5
    figure = Figure(figsize=(15, 2.4 * -(-len(everything) // across)), layout="constrained")
    axes = figure.subplots(-(-len(everything) // across), across, squeeze=False).ravel()
    for axis, found in zip(axes, everything, strict=False):
        best = best_known(found)
        for solver, run in found["runs"].items():
            history = run["history"]
            gap = np.array(history.get("value", [])) / best - 1
            axis.loglog(history.get("seconds", []), np.maximum(gap, 1e-5), label=solver)
        axis.axhline(1e-3, color="grey", linewidth=0.5)
        axis.set(title=found["set"], xlabel="seconds", ylabel="h / best − 1")
    for axis in axes[len(everything) :]:
        axis.set_axis_off()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=1 + len(BASELINES))
    figure.savefig(path, dpi=110)


def file_of(folder, name):
    return folder / f"{name.replace(',', '').replace(' ', '-')}.json"


def chosen(names, known):
    names = [name for name in names.split(";") if name]
    if unknown := set(names) - set(known):
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; there are {'; '.join(known)}.")
    return names


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", default=";".join(SETS), help="names, separated by ;; '' only combines existing files")
    parser.add_argument("--solvers", default=";".join(BASELINES), help="baselines, separated by ;; '' for none")
    parser.add_argument("--jobs", type=int, default=1, help="data sets at the same time")
    parser.add_argument("--folder", type=Path, default=Path("results/auto"))
    parser.add_argument("--figure", type=Path, default=FIGURE)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    solvers = chosen(arguments.solvers, BASELINES)
    with ProcessPoolExecutor(arguments.jobs, get_context("spawn"), max_tasks_per_child=1) as pool:
        tasks = [pool.submit(measure, name, solvers, arguments.folder) for name in chosen(arguments.sets, SETS)]
        for task in tasks:
            task.result()
    files = [file_of(arguments.folder, name) for name in SETS]
    everything = [json.loads(file.read_text()) for file in files if file.exists()]
    text = "\n\n".join([summary(everything), ends(everything), *map(set_table, everything)])
    (arguments.folder / "auto.md").write_text(text + "\n")
    draw(everything, arguments.figure)
    print(text)


bilevel.fuse_cpu_loops()  # in every process

if __name__ == "__main__":
    main()

"""Our estimators against what a scikit-learn user would take instead, at equal seconds of fitting.

    python benchmarks/estimators.py [--sets IJCNN1,diabetes] [--folder results/estimators] [--quick]

Each data set and seed is measured in a process of its own, one at a time. Each data set leaves a JSON file in
the folder; seeds that it holds are not measured again (delete it to do so), and whatever lies there is joined into the
tables, written to estimators.md beside the files, and into the figure reports/estimators.png. IJCNN1 and Covertype are
left out where `bilevel.datasets` has no file of them. Needs pip install 'bilevel[compare]'.

Of what a method has found within some seconds, the model counts that is best by the method's own score: the loss on
its validation rows, or its cross-validation. Test rows choose nothing.
"""

import argparse
import json
import time
import warnings
from pathlib import Path

import machine
import numpy as np
from estimator_sets import SETS, Effort, Found, baselines
from markdown import number, table
from own_process import answer

import bilevel

FULL = Effort((1, 5, 20), (3, 10, 30), 100, 10_000, (10, 100, 1000, 10_000), ("per_feature", "single"))
QUICK = Effort((1, 60), (3,), 4, 8, (30,), ("per_feature",))
QUICK_SETS = ("breast cancer", "diabetes")
WARM = ", second fit"
COLOURS = (
    "bilevel per_feature",
    "bilevel single",
    "LogisticRegressionCV",
    "GridSearchCV",
    "GridSearchCV, L1",
    "Optuna, one penalty",
    "Optuna, per feature",
    "RidgeCV",
    "LassoCV",
)
FIGURE = Path(__file__).parents[1] / "reports" / "estimators.png"


def measured(name, seed, effort):
    """One data set and seed: of each method rows of seconds, its own score, test loss and test score."""
    import jax
    from sklearn.exceptions import ConvergenceWarning
    from threadpoolctl import threadpool_limits

    warnings.simplefilter("ignore", ConvergenceWarning)
    threadpool_limits(1)  # two threads of BLAS wait for each other wherever anything else uses a core
    jax.config.update("jax_enable_compilation_cache", False)  # what an earlier process has compiled does not count
    kind = SETS[name]
    rows = kind.rows(seed)
    # Baselines first: they need not share the process with the threads of JAX.
    found = {name: list(points(rows, seed, effort)) for name, points in baselines(kind, rows.X.shape[1]).items()}
    compiling = {}
    for penalty in effort.penalties:
        warm, compiling[penalty] = ours(kind, penalty, rows, seed, effort)
        found[title(penalty)] = [point._replace(seconds=point.seconds + compiling[penalty]) for point in warm]
        found[title(penalty) + WARM] = warm
    curves = {method: [evaluation_point(kind, point, rows) for point in points] for method, points in found.items()}
    facts = machine.facts()[:-1]
    return {"seed": seed, "facts": facts, "shape": rows.X.shape, "compiling": compiling, "curves": curves}


def title(penalty):
    return f"bilevel {penalty}"


def ours(kind, penalty, rows, seed, effort):
    """Points without compilation, and its seconds: what a first fit takes longer than a second one."""
    import jax

    jax.clear_caches()  # one kind of penalty gains nothing from what another has compiled
    first = fitted(kind, penalty, effort.steps[0], rows, seed)
    points = [fitted(kind, penalty, effort.steps[0], rows, seed)]
    for steps in effort.steps[1:]:
        if points[-1].model.status_ == "converged" or points[-1].seconds > effort.seconds:
            break
        points.append(fitted(kind, penalty, steps, rows, seed))
    return points, first.seconds - points[0].seconds


def fitted(kind, penalty, steps, rows, seed):
    from bilevel.estimators import BilevelLogisticRegression, BilevelRidge

    model = (BilevelLogisticRegression if kind.classes else BilevelRidge)(penalty, max_iter=steps, random_state=seed)
    began = time.perf_counter()
    model.fit(rows.X, rows.y)
    return Found(time.perf_counter() - began, -float(np.nanmin(model.history_["value"])), model)


def evaluation_point(kind, point, rows):
    """Seconds, own score, test log-loss (or root of the mean square) and accuracy (or R²)."""
    from sklearn.metrics import accuracy_score, log_loss, r2_score, root_mean_squared_error

    predicted = point.model.predict(rows.X_test)
    if kind.classes:
        loss = log_loss(rows.y_test, point.model.predict_proba(rows.X_test))
        return [point.seconds, point.score, loss, accuracy_score(rows.y_test, predicted)]
    loss = root_mean_squared_error(rows.y_test, predicted)
    return [point.seconds, point.score, loss, r2_score(rows.y_test, predicted)]


def after(curve, seconds):
    """Test loss and test score of what a method has by then: the best by its own score; None where it has nothing."""
    in_time = [point for point in curve if point[0] <= seconds]
    return max(in_time, key=lambda point: point[1])[2:] if in_time else None


def over_seeds(runs, method, seconds, part):
    """Test losses (part 0) or scores (part 1) of the seeds; a seed without a model counts as the worst."""
    worst = (np.inf, -np.inf)[part]
    held = [after(run["curves"][method], seconds) for run in runs]
    return np.array([worst if values is None else values[part] for values in held])


def cell(values):
    """The median, and the least and the largest where there are several seeds."""
    middle = float(np.median(values))
    if not np.isfinite(middle):
        return None
    ends = "–".join(number(float(end)) if np.isfinite(end) else "none" for end in (values.min(), values.max()))
    return number(middle, 4) + (f" ({ends})" if len(values) > 1 else "")


def measures(name):
    return ("log-loss", "accuracy") if SETS[name].classes else ("RMSE", "R²")


def set_table(name, runs, effort):
    """The methods on one data set."""
    rows = []
    for method in runs[0]["curves"]:
        firsts = [run["curves"][method][0][0] for run in runs if run["curves"][method]]
        cells = [cell(over_seeds(runs, method, seconds, part)) for part in (0, 1) for seconds in effort.budgets]
        rows.append([method, number(float(np.median(firsts)), 2) if firsts else None, *cells])
    columns = [f"{measure}, {seconds:g} s" for measure in measures(name) for seconds in effort.budgets]
    n, features = runs[0]["shape"]
    compiling = [number(float(np.median([run["compiling"][p] for run in runs])), 2) for p in effort.penalties]
    about = f"({n} training rows, {features} features, seeds: {len(runs)}; compilation: {' and '.join(compiling)} s)"
    return f"**{name}** {about}\n\n{table(['method', 'first model, s', *columns], rows)}"


def summary(everything, effort):
    """A row per set: ours and the best baseline, by test loss at the last budget."""
    rows = []
    for name, runs in everything.items():
        losses = {m: float(np.median(over_seeds(runs, m, effort.seconds, 0))) for m in runs[0]["curves"]}
        others = {method: loss for method, loss in losses.items() if not method.startswith("bilevel")}
        best = min(others, key=others.get)
        own = [number(losses[title(p)], 4) if np.isfinite(losses[title(p)]) else None for p in effort.penalties]
        plain = next(method for method in others if method.endswith("CV"))
        rows.append([name, measures(name)[0], *own, number(others[plain], 4), f"{number(others[best], 4)}, {best}"])
    columns = ["set", f"after {effort.seconds:g} s", *map(title, effort.penalties), "LogisticRegressionCV, RidgeCV"]
    return table([*columns, "best baseline"], rows)


def draw(everything, effort, path):
    """Two panels per set: test loss and test score of what each method has, against seconds of fitting."""
    from matplotlib.figure import Figure

    lines = -(-len(everything) // 2)
    figure = Figure(figsize=(15, 2.8 * lines), layout="constrained")
    axes = figure.subplots(lines, 4, squeeze=False).reshape(-1, 2)
    handles = {}
    for pair, (name, runs) in zip(axes, everything.items(), strict=False):
        for part, axis in enumerate(pair):
            handles |= draw_panel(axis, runs, effort, part)
            axis.set(title=name, xlabel="seconds of fitting", ylabel="test " + measures(name)[part], xscale="log")
    for axis in axes[len(everything) :].ravel():
        axis.set_axis_off()
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=6)
    figure.savefig(path, dpi=100)


def draw_panel(axis, runs, effort, part):
    """Medians over seeds, from where most seeds have a model; a color per method, the same in all panels."""
    times, handles, curves = np.geomspace(0.01, effort.seconds, 300), {}, []
    for method in runs[0]["curves"]:
        medians = np.array([np.median(over_seeds(runs, method, seconds, part)) for seconds in times])
        curves.append(np.where(np.isfinite(medians), medians, np.nan))
        dashes, width = "--" if method.endswith(WARM) else "-", 2.2 if method.startswith("bilevel") else 1.2
        handles[method] = axis.plot(times, curves[-1], dashes, lw=width, color=color(method))[0]
    axis.set_ylim(*visible(np.array(curves), part))
    return handles


def visible(curves, part):
    """From the best value to the worst at the end: what a search passes through at first would squeeze the rest."""
    best, worst = (np.nanmin, np.nanmax) if part == 0 else (np.nanmax, np.nanmin)
    ends = best(curves), worst(curves[:, -1])
    margin = 0.1 * abs(ends[1] - ends[0]) or 1e-3
    return min(ends) - margin, max(ends) + margin


def color(method):
    return f"C{COLOURS.index(method.removesuffix(WARM))}"


def measure_set(name, effort, file, flags):
    """Measure the seeds that the file lacks, each in a process of its own, and keep each as soon as it is there."""
    kept = json.loads(file.read_text()) if file.exists() else {}
    same = kept.get("effort") == json.loads(json.dumps(effort))
    runs = kept["runs"] if same else []
    for seed in range(1 if effort is QUICK else SETS[name].seeds):
        if seed not in [run["seed"] for run in runs]:
            began = time.perf_counter()
            runs.append(answer("estimators.py", "--one", name, seed, *flags))
            file.write_text(json.dumps({"effort": effort, "runs": runs}))
            print(f"{name}, seed {seed}: {time.perf_counter() - began:.0f} s, load {machine.load_after()}", flush=True)


def available(names):
    """The sets that are there; a sentence for each that is not."""
    import bilevel

    unknown = set(names) - set(SETS)
    if unknown:
        raise SystemExit(f"no set is called {', '.join(sorted(unknown))}; there are {', '.join(SETS)}.")
    missing = [n for n in names if SETS[n].file and bilevel.datasets.locate(SETS[n].file) is None]
    for name in missing:
        print(f"{name} is left out: there is no file of it. Set BILEVEL_DATA to the folder that holds it.")
    return [name for name in names if name not in missing]


def main(arguments=None):
    options = parsed(arguments)
    effort = QUICK if options.quick else FULL
    if options.one:
        print(json.dumps(measured(options.one[0], int(options.one[1]), effort)))
        return
    names = available(wanted(options))
    folder = options.folder or Path("results/estimators-quick" if options.quick else "results/estimators")
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: folder / f"{name.replace(' ', '-')}.json" for name in SETS}
    for name in names:
        measure_set(name, effort, files[name], ["--quick"] if options.quick else [])
    everything = {name: json.loads(file.read_text())["runs"] for name, file in files.items() if file.exists()}
    text = joined(everything, effort)
    (folder / "estimators.md").write_text(text + "\n")
    draw(everything, effort, options.figure or (folder / "estimators.png" if options.quick else FIGURE))
    print(text)


def wanted(options):
    if options.sets is None:
        return QUICK_SETS if options.quick else tuple(SETS)
    return [name for name in options.sets.split(",") if name]


def joined(everything, effort):
    """What was measured on, and the tables."""
    facts = dict.fromkeys(fact for runs in everything.values() for run in runs for fact in run["facts"])
    tables = [set_table(name, runs, effort) for name, runs in everything.items()]
    return "\n\n".join(["\n".join(f"- {fact}" for fact in facts), summary(everything, effort), *tables])


def parsed(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", help="names with commas between; '' only joins what is there")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--quick", action="store_true", help="two small sets and little effort: numbers mean nothing")
    parser.add_argument("--one", nargs=2, metavar=("SET", "SEED"), help="print the measurement of one seed, as JSON")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    bilevel.fuse_cpu_loops()
    main()

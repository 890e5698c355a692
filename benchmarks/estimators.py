"""Estimators of this library compared with the alternatives of a scikit-learn user, on public tables.

    python benchmarks/estimators.py                                    # about two hours on one core
    python benchmarks/estimators.py --sets sonar,hitters --models RidgeCV,bilevel --kept mine.csv
    python benchmarks/estimators.py --from-kept reports/estimators.csv --figure reports/estimators.svg

Every fit is a line of the file of results, which is written immediately, so that a stopped run can be resumed. Each set
and model has its own process with one thread, one at a time. The first fit of a process is timed separately, because it
includes imports and compilation. Times are processor seconds. A fit that takes too long is a "timeout", and later
splits of that set and model are not tried. Sets and splits: `estimator_sets.py`.
"""

import argparse
import csv
import json
import os
import resource
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import estimator_sets
from estimator_models import Unavailable, every_name, models

KEPT = Path("results/estimators.csv")
COLUMNS = ("set", "split", "model", "status", "loss", "error", "first", "second", "structure", "version")
KEY = COLUMNS[:3]
ONE_THREAD = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"),
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "JAX_ENABLE_COMPILATION_CACHE": "0",  # compilation is timed
}
PATIENCE = 20  # largest ratio of wall seconds to processor seconds on a busy machine


def read_kept(path):
    """Return the lines of a file of results, without a line that was cut off."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = [dict(zip(COLUMNS, row, strict=True)) for row in csv.reader(file) if len(row) == len(COLUMNS)]
    return [row for row in rows if row["set"] != "set"]


def keep(path, rows):
    """Write a file of results atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    with partial.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    partial.replace(path)


def append(path, row):
    with path.open("a", newline="") as file:
        csv.DictWriter(file, COLUMNS, lineterminator="\n").writerow(row)


def missing(rows, name, model):
    """Return the missing splits of a set and model."""
    there = {tuple(row[key] for key in KEY) for row in rows}
    return [split for split in range(estimator_sets.SPLITS) if (name, str(split), model) not in there]


def run_all(names, wanted, path, python, folder):
    """Run the fits that the file lacks, set by set."""
    # Skipped models are tried again, because packages may have been installed in the meantime.
    keep(path, rows := [row for row in read_kept(path) if not row["status"].startswith("skipped")])
    for name in names:
        try:
            kind = estimator_sets.load(name, folder)
        except estimator_sets.Unavailable as reason:
            print(f"{name} is skipped: {reason}", flush=True)
            continue
        for model, settings in models(kind).items():
            splits = missing(rows, name, model) if model in wanted else []
            for row in run_model(name, model, splits, settings.seconds, python, folder):
                append(path, row)
                print(*(row[key] for key in (*KEY, "status", "loss", "first", "second")), flush=True)


def run_model(name, model, splits, seconds, python=sys.executable, folder=None):
    """Yield the rows of the splits of a set and model, from their own process."""
    left = list(splits)
    if not left:
        return
    command = [python, __file__, "--one", name, model, ",".join(map(str, left)), str(seconds)]
    command += ["--folder", str(folder)] if folder else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **ONE_THREAD}) as process:
        for line in process.stdout:
            yield row_of(name, left.pop(0), model, **json.loads(line))
    status = "timeout" if process.returncode in (-signal.SIGXCPU, -signal.SIGALRM) else "failed"
    if status == "failed" and left:
        print(f"{name}, {model}: the process ended with {process.returncode}", flush=True)
    for split in left:
        yield row_of(name, split, model, status=status)


def row_of(name, split, model, **found):
    return dict.fromkeys(COLUMNS, "") | {"set": name, "split": str(split), "model": model} | found


def measure(name, model, splits, seconds, folder):
    """Print the results of each split as a line; the first fit of the process is timed twice."""
    warnings.simplefilter("ignore")
    kind = estimator_sets.load(name, folder)
    first = ""
    for place, split in enumerate(splits):
        rows = kind.rows(split)
        limit(seconds)
        try:
            settings = models(kind)[model]
            if place == 0:
                _, first = fit(settings, kind, rows)
            limit(seconds)
            fitted, second = fit(settings, kind, rows)
        except Unavailable as reason:
            print(json.dumps({"status": f"skipped: {reason}"}), flush=True)
            continue
        found = evaluate(kind.task, fitted, rows) | {"first": first, "second": second, "version": version(model)}
        print(json.dumps(found | {"status": "ok", "structure": settings.describe(fitted)}), flush=True)
        first = ""


def limit(seconds):
    """Let a signal end this process after this number of processor seconds, or many more wall seconds."""
    soft = int(time.process_time() + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(PATIENCE * seconds) + 1)


def fit(settings, kind, rows):
    began = time.process_time()
    fitted = settings.build(kind).fit(rows.X, rows.y)
    return fitted, f"{time.process_time() - began:.3g}"


def evaluate(task, fitted, rows):
    """Return log-loss and error on the test rows, or RMSE and 1 - R² of a regression."""
    from sklearn.metrics import accuracy_score, log_loss, r2_score, root_mean_squared_error

    predicted = fitted.predict(rows.X_test)
    if task == "regression":
        loss, error = root_mean_squared_error(rows.y_test, predicted), 1 - r2_score(rows.y_test, predicted)
    else:
        loss = log_loss(rows.y_test, fitted.predict_proba(rows.X_test), labels=range(rows.classes))
        error = 1 - accuracy_score(rows.y_test, predicted)
    return {"loss": f"{loss:.6g}", "error": f"{error:.4g}"}


def version(model):
    """Return package and version of a model."""
    from importlib.metadata import version

    if model.startswith("bilevel"):
        import bilevel

        git = ["git", "-C", str(Path(bilevel.__file__).parent), "rev-parse", "--short", "HEAD"]
        revision = subprocess.run(git, capture_output=True, text=True).stdout.strip()
        return f"bilevel {bilevel.__version__} at {revision or '?'}"
    package = {"himalaya": "himalaya", "sparho": "sparho", "Optuna": "optuna"}.get(model.split()[0], "scikit-learn")
    return f"{package} {version(package)}"


def chosen(text, there, what):
    """Return names of a comma-separated list after a check; all names without a list."""
    wanted = [name.strip() for name in text.split(",")] if text else list(there)
    if unknown := [name for name in wanted if name not in there]:
        raise SystemExit(f"unknown {what} {unknown[0]!r}; there are {'; '.join(there)}.")
    return wanted


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", help="names, separated by commas")
    parser.add_argument("--models", help="names, separated by commas")
    parser.add_argument("--kept", type=Path, default=KEPT, help="the file of results, which is continued")
    parser.add_argument("--from-kept", type=Path, nargs="+", help="only print the tables of these files and draw")
    parser.add_argument("--figure", type=Path, help="an SVG file")
    parser.add_argument("--folder", type=Path, help="folder of wheels")
    parser.add_argument("--python", default=sys.executable, help="the Python that fits the models")
    parser.add_argument("--one", nargs=4, metavar=("SET", "MODEL", "SPLITS", "SECONDS"), help="fit and print JSON")
    return parser.parse_args(arguments)


def main(arguments=None):
    options = parse(arguments)
    if options.one:
        name, model, splits, seconds = options.one
        measure(name, model, list(map(int, splits.split(","))), float(seconds), options.folder)
        return
    if not options.from_kept:
        names = chosen(options.sets, estimator_sets.names(), "set")
        wanted = chosen(options.models, every_name(), "model")
        run_all(names, wanted, options.kept, options.python, options.folder)
    import estimator_tables

    rows = [row for path in options.from_kept or [options.kept] for row in read_kept(path)]
    print(estimator_tables.page(rows))
    if options.figure:
        estimator_tables.draw(rows, options.figure)


if __name__ == "__main__":
    main()

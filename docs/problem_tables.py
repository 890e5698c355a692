"""Print the tables of reports/problems.md, measured on this machine.

python docs/problem_tables.py ijcnn1           solvers on IJCNN1, tuned, then run for 5e8 calls
python docs/problem_tables.py cleaning         data cleaning on MNIST, 10 seconds, against plain fits
python docs/problem_tables.py exact_solutions  time of an exact solution between two evaluations of a run
python docs/problem_tables.py folds            cross-validation of many rows, by AutoSRBA() and by exact fits
python docs/problem_tables.py memory           peak memory of each problem, each in a process of its own
"""

import resource
import subprocess
import sys
import time
from dataclasses import replace
from itertools import product

import numpy as np

import bilevel
from bilevel import problems
from bilevel.engine.driver import sweep

SECONDS = 10  # of data cleaning
STEP_SIZES, OUTER_RATIOS = (0.25, 0.5, 1.0, 2.0), (0.03, 0.1, 0.3, 1.0)
TUNING_CALLS, SHOWN_AT = 10**8, (0, 2e7, 7e7, 2e8, 5e8)
ON_IJCNN1 = bilevel.SRBA(2.0, 1.0, 64)
ON_CLEANING = bilevel.SRBA(0.003, 1e-5, 64, period=64)


def ijcnn1():
    problem = problems.ijcnn1(dtype="float32")
    problem = replace(problem, metrics={"largest_x": lambda point: abs(point.outer_var).max()})
    print("| solver | step_size, outer_ratio | calls | h | ‖∇h‖² | largest abs x |\n" + "| --- " * 6 + "|")
    for name in ("SRBA", "SABA", "AmIGO", "Exact"):
        solver = bilevel.Exact() if name == "Exact" else tune(problem, bilevel.SOLVERS[name])
        setting = "" if name == "Exact" else f"{solver.step_size:g}, {solver.outer_ratio:g}"
        result = bilevel.run(problem, solver, max_calls=int(SHOWN_AT[-1]))
        history = result.history
        for i in sorted({int(np.searchsorted(history["calls"], at, side="right")) - 1 for at in SHOWN_AT}):
            calls, value, norm_sq, largest = (history[key][i] for key in KEYS)
            end = ", then diverged" if i + 1 == len(history["calls"]) and result.status == "diverged" else ""
            cells = name, setting, f"{calls:.2e}{end}", f"{value:.4f}", f"{norm_sq:.1e}", f"{largest:.3g}"
            print("| " + " | ".join(cells) + " |", flush=True)


KEYS = ("calls", "value", "hypergrad_norm_sq", "largest_x")


def tune(problem, kind):
    """The setting with the least h after the calls of the tuning; a diverged one is the worst."""
    settings = [kind(step, ratio, 64).configure(problem) for step, ratio in product(STEP_SIZES, OUTER_RATIOS)]
    (cells,) = sweep(problem, settings, [0], TUNING_CALLS)
    values = [np.inf if cell.status == "diverged" else cell.rows[-1]["value"] for cell in cells]
    return settings[int(np.nanargmin(values))]


def cleaning():
    print("| corruption | fit | h | test error | AUC of the weights |\n| --- | --- | --- | --- | --- |")
    for corruption in (0.5, 0.7, 0.9):
        problem = problems.mnist_cleaning(corruption=corruption, dtype="float32")
        everything = np.full(problem.n_inner, 30.0)  # sigmoid = 1
        fits = {
            "softmax on the noisy labels": (problem, everything),
            "softmax on the clean labels": (problems.mnist_cleaning(corruption=0, dtype="float32"), everything),
            "start of SRBA": (problem, problem.start.outer_var.astype(np.float64)),
            "only the clean rows": (problem, known_weights(problem)),
        }
        for name, (fitted, logits) in fits.items():
            print(f"| {corruption} | {name} | {plain_fit(fitted, logits)} | |", flush=True)
        last = {
            key: column[-1] for key, column in bilevel.run(problem, ON_CLEANING, max_seconds=SECONDS).history.items()
        }
        numbers = f"{last['value']:.4f} | {last['test_error']:.4f} | {last['weight_auc']:.4f} |"
        print(f"| {corruption} | SRBA after {last['seconds']:.0f} s | {numbers}", flush=True)


def plain_fit(problem, logits):
    """h and the test error of the exact fit with these weights."""
    solution = problem.exact_solver(logits, None)
    point = problem.start._replace(inner_var=solution.inner_var.astype(np.float32))
    return f"{solution.value:.4f} | {float(problem.metrics['test_error'](point)):.4f}"


def known_weights(problem):
    """The weights of somebody who knows which rows are corrupted."""
    clean_rows = problem.metrics["weight_auc"].args[0]
    logits = np.full(problem.n_inner, -30.0)
    logits[clean_rows] = 30.0
    return logits


def exact_solutions():
    print("| problem | median ms | largest ms | largest residual |\n| --- | --- | --- | --- |")
    for name, solver in (("ijcnn1", ON_IJCNN1), ("mnist_cleaning", ON_CLEANING)):
        problem = problems.PROBLEMS[name](dtype="float32")
        times, residuals, solution = [], [], None
        for point in iterates(problem, solver):
            began = time.perf_counter()
            solution = problem.exact_solver(point, solution)
            times.append(1e3 * (time.perf_counter() - began))
            residuals.append(max(solution.inner_residual, solution.v_residual))
        warm = times[2:]  # the first compiles, the second may
        print(f"| {name} | {np.median(warm):.0f} | {max(warm):.0f} | {max(residuals):.0e} |")


def iterates(problem, solver, count=12):
    """Outer variables along a run, further and further apart, as a run evaluates them."""
    for exponent in range(count):
        run = bilevel.run(problem, solver, max_steps=2**exponent, eval_every=2**exponent)
        yield run.point.outer_var.astype(np.float64)


def folds():
    columns = "rows × features, classes | way | processor s to 1 % | to 0.1 % | to 0.01 % | calls to 0.01 %"
    print(f"| {columns} |\n" + "| --- " * 6 + "|")
    for n, p, n_classes in ((20_000, 100, 2), (50_000, 200, 2), (50_000, 500, 2), (20_000, 100, 5)):
        X, labels, fold = many_rows(n, p, n_classes)
        exact = exact_path(X, labels, fold)
        best = min(value for _, _, value in exact)
        for name, path in (("exact fits", exact), ("AutoSRBA()", srba_path(X, labels, fold, best))):
            reached = [next((row for row in path if row[2] <= best * (1 + gap)), None) for gap in (1e-2, 1e-3, 1e-4)]
            seconds = " | ".join("not" if row is None else f"{row[0]:.1f}" for row in reached)
            calls = f"{reached[-1][1]:.1e}" if reached[-1] and reached[-1][1] else ""
            print(f"| {n} × {p}, {n_classes} | {name} | {seconds} | {calls} |", flush=True)


def many_rows(n, p, n_classes):
    """Rows of which a tenth of the columns matter, classes, and the fold of each."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((n, p), dtype=np.float32)
    sizes = np.where(np.arange(p) < p // 10, 4 / np.sqrt(p), 0.2 / np.sqrt(p))
    scores = X @ (sizes[:, None] * rng.standard_normal((p, n_classes))) + rng.gumbel(size=(n, n_classes))
    return X, scores.argmax(axis=1), rng.permutation(np.arange(n) % 5)


def exact_path(X, labels, fold):
    """Processor seconds and h of each evaluation by which the estimators would minimize the same objective."""
    from bilevel.estimators import selection
    from bilevel.estimators.losses import Logistic, Softmax
    from bilevel.estimators.ridge import RidgeGLM

    (n, p), held_out, n_classes = X.shape, fold == np.arange(5)[:, None], labels.max() + 1
    loss, y = (Logistic(), labels[:, None] * 1.0) if n_classes == 2 else (Softmax(), np.eye(n_classes)[labels])
    selection._WRONG_LABELS = 0.0  # labels as they are, as in the problem
    model = RidgeGLM(X.astype(np.float64), y, loss, intercept=False)
    weights = selection.Folds.of_rows(1.0 * ~held_out, 1.0 * held_out)
    objective = selection.Objective(model, weights, selection.Structure("per_feature", np.arange(p), PRIOR_SCALE))
    path, began, evaluate = [], time.process_time(), objective._evaluate

    def timed(log_penalties):
        found = evaluate(log_penalties)
        path.append((time.process_time() - began, 0, objective.values[-1] / n))
        return found

    objective._evaluate = timed
    selection.minimize_objective(objective, np.full(p, np.log(n) - 2), (-10.0, 30.0), tol=1e-6 * n, max_iter=200)
    return path


def srba_path(X, labels, fold, best):
    """Processor seconds, compilation included, calls and h along a run, until h is within 0.01 % of the best."""
    began = time.process_time()
    loss, y = ("logistic", 2 * labels - 1) if labels.max() == 1 else ("softmax", labels)
    problem = problems.cross_validation(X, y, fold, loss=loss, prior_scale=PRIOR_SCALE, dtype="float32")
    run = bilevel.Run(problem, bilevel.AutoSRBA(), exact=False)
    spent, solution, path = time.process_time() - began, None, []
    while not path or (path[-1][2] > best * (1 + 1e-4) and run.step < 30_000):
        began = time.process_time()
        run.advance(max(100, run.step // 4))
        spent += time.process_time() - began
        solution = problem.exact_solver(run.point.outer_var.astype(np.float64), solution)
        path.append((spent, sum(run.calls), solution.value))
    return path


PRIOR_SCALE = 0.5


def memory():
    print("| problem | built, MB | with an exact solution | after a run of SRBA |\n| --- | --- | --- | --- |")
    for name in ("quadratic", "ijcnn1", "mnist_cleaning", "covtype", "breast_cancer"):
        print(
            subprocess.run(
                [sys.executable, __file__, "--peak", name], capture_output=True, text=True, check=True
            ).stdout.strip()
        )


def peak_of(name):
    """Megabytes above a process that has imported JAX and run one operation."""
    import jax

    jax.block_until_ready(jax.numpy.zeros(3) + 1)
    floor = peak()
    problem = problems.PROBLEMS[name](dtype="float32")
    built = peak() - floor
    problem.exact_solver(problem.start.outer_var.astype(np.float64), None)
    solved = peak() - floor
    bilevel.run(problem, bilevel.SRBA(0.01, 1.0, 64), max_steps=200, eval_every=200)
    print(f"| {name} | {built:.0f} | {solved:.0f} | {peak() - floor:.0f} |")


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    tables = {function.__name__: function for function in (ijcnn1, cleaning, exact_solutions, folds, memory)}
    what = sys.argv[1] if len(sys.argv) == 2 else ""
    if "--peak" in sys.argv:
        peak_of(sys.argv[-1])
    elif what in tables:
        tables[what]()
    else:
        sys.exit(__doc__)

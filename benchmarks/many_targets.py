"""Many targets of a few feature spaces, with fewer rows than features: seconds and test R² of ridge regressions.

    python benchmarks/many_targets.py --shapes small medium --device cpu
    python benchmarks/many_targets.py --device gpu --repeat 2      # the second fit of each, without compilation

Spaces differ in size, and every second is noise. Targets share the spaces that they depend on, or each has a mix of
its own: BilevelRidge learns penalties that all targets share, himalaya learns some for each target. himalaya is no
dependency, and is skipped where it is not installed.
"""

import argparse
import time
from pathlib import Path

import numpy as np
from markdown import number, table
from sklearn.linear_model import RidgeCV

from bilevel.estimators import BilevelRidge

SHAPES = {  # rows, features, targets, spaces
    "small": (500, 5_000, 100, 3),
    "medium": (1_000, 10_000, 1_000, 4),
    "large": (2_000, 20_000, 5_000, 6),
}
TEST_ROWS, SHARE = 500, 0.4  # of the variance of a target that features explain
ALPHAS = np.logspace(-1, 7, 25)
ITERATIONS = 20  # of himalaya's random search


def draw(shape, mixes, seed=0):
    """Rows, targets and the space of each feature; features of a space are combinations of fewer, of falling weight."""
    n, p, targets, spaces = SHAPES[shape]
    rng, rows = np.random.default_rng(seed), n + TEST_ROWS
    sizes = np.diff(np.round(p * np.linspace(0, 1, spaces + 1) ** 1.5)).astype(int)
    groups, X, signal = np.repeat(np.arange(spaces), sizes), np.empty((rows, p)), np.zeros((rows, targets))
    useful = np.arange(spaces) % 2 == 0
    weight = (
        rng.dirichlet(np.full(useful.sum(), 0.5), targets).T if mixes == "own" else np.ones((useful.sum(), targets))
    )
    for space, size in enumerate(sizes):
        rank = min(size, n) // 4
        latent = rng.standard_normal((rows, rank)) / np.sqrt(1 + np.arange(rank) / 20)
        X[:, groups == space] = latent @ rng.standard_normal((rank, size)) + 0.5 * rng.standard_normal((rows, size))
        if useful[space]:
            part = latent @ rng.standard_normal((rank, targets))
            signal += np.sqrt(weight[space // 2]) * part / part.std(axis=0)
    signal *= np.sqrt(SHARE) / signal.std(axis=0)
    y = signal + np.sqrt(1 - SHARE) * rng.standard_normal(signal.shape)
    X = (X - X[:n].mean(axis=0)) / X[:n].std(axis=0)
    return X[:n], y[:n], X[n:], y[n:], groups


def score(y, found):
    """R², in the mean over targets."""
    return float(np.mean(1 - np.sum((y - found) ** 2, axis=0) / np.sum((y - y.mean(axis=0)) ** 2, axis=0)))


def himalaya_ridge(groups, solver):
    """himalaya's ridge with a kernel of each space, and penalties of each target by random search or by gradients."""
    from himalaya.kernel_ridge import ColumnKernelizer, Kernelizer, MultipleKernelRidgeCV
    from sklearn.pipeline import make_pipeline

    columns = [(str(group), Kernelizer(), np.flatnonzero(groups == group)) for group in np.unique(groups)]
    options = {"progress_bar": False, "n_targets_batch": 500}
    if solver == "random_search":
        options |= {"n_iter": ITERATIONS, "alphas": ALPHAS, "n_targets_batch_refit": 500}
    else:
        options |= {"initial_deltas": "ridgecv", "hyper_gradient_method": "direct"}
    ridge = MultipleKernelRidgeCV("precomputed", solver=solver, solver_params=options, cv=5, random_state=0)
    return make_pipeline(ColumnKernelizer(columns), ridge)


def models(groups, device):
    """What is compared: each as a function that builds it."""
    options = {"groups": groups, "random_state": 0, "device": device}
    found = {
        "BilevelRidge": lambda: BilevelRidge(**options),
        "BilevelRidge, one penalty": lambda: BilevelRidge("single", random_state=0, device=device),
    }
    if device == "gpu":
        found["BilevelRidge, float32"] = lambda: BilevelRidge(**options, dtype="float32")
    found["RidgeCV"] = lambda: RidgeCV(ALPHAS)
    found["himalaya, random search"] = lambda: himalaya_ridge(groups, "random_search")
    found["himalaya, gradients"] = lambda: himalaya_ridge(groups, "hyper_gradient")
    return found


def measure(build, data):
    """Wall and processor seconds of a fit, test R², and what was learned; or why there is nothing to measure."""
    X, y, X_test, y_test, groups = data
    try:
        model = build()
    except ImportError as reason:
        return f"skipped: {reason}"
    began, used = time.perf_counter(), time.process_time()
    model.fit(X, y)
    seconds = time.perf_counter() - began, time.process_time() - used
    told = None
    if isinstance(model, BilevelRidge):
        first = [np.flatnonzero(groups == group)[0] for group in np.unique(groups)]
        told = f"{model.penalty_structure_}: " + ", ".join(f"{model.penalties_[k]:.2g}" for k in first)
    return *seconds, score(y_test, np.asarray(model.predict(X_test))), told


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--mixes", nargs="+", default=["shared", "own"], choices=["shared", "own"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "gpu"])
    parser.add_argument("--only", default="", help="models whose names begin so")
    parser.add_argument("--repeat", type=int, default=1, help="fits of each; the last is reported")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    lines = []
    for shape in options.shapes:
        for mixes in options.mixes:
            data = draw(shape, mixes)
            for name, build in models(data[-1], options.device).items():
                if not name.startswith(options.only):
                    continue
                for _ in range(options.repeat):
                    found = measure(build, data)
                sizes = " × ".join(map(str, SHAPES[shape]))
                cells = (
                    [found, "", "", ""]
                    if isinstance(found, str)
                    else [*map(number, found[:2]), f"{found[2]:.4f}", found[3]]
                )
                lines.append([sizes, mixes, name, *cells])
                print(*lines[-1], sep=" | ", flush=True)
    heads = ["rows × features × targets × spaces", "mixes", "model", "seconds", "of the processor", "R²", "penalties"]
    text = table(heads, lines)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()

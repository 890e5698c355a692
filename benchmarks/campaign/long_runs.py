"""Long runs and many of them.

Memory is looked at along a run of many steps, and along runs on many different problems in one process. Estimators are
fitted in threads, in processes and as copies. Runs are repeated in other processes, on one processor and on two.
"""

import copy
import hashlib
import json
import os
import pickle
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.campaign.table import Counter

ROOT = Path(__file__).parents[2]
MOST_MAPS = 30_000  # of 65 530, beyond which XLA crashes
GROWTH = 1.15  # of the memory of a process, from its first half to its second
QUICK_GROWTH = 1.3  # few problems leave the allocator no time to settle; kept programs would give 1.4


def rows(seed, quick):
    return [
        long_run(20_000 if quick else 10**6, 100 if quick else 1000),
        many_problems(16, 28, QUICK_GROWTH) if quick else many_problems(500, 64, GROWTH),
        copies_of_estimators(seed),
        same_bits(quick),
    ]


# --- memory


def long_run(n_steps, n_evaluations):
    """One run: no tenth of it may hold more memory than the first, but for what its history takes."""
    note = f"{n_steps:,} steps with {n_evaluations:,} exact evaluations"
    megabytes = [size for _, size in answer("steps", n_steps, n_evaluations)]
    counter = Counter("long run", f"{note}; {megabytes[len(megabytes) // 10]:.0f} to {megabytes[-1]:.0f} MB")
    first, *others = np.array_split(megabytes, 10)
    for number, part in enumerate(others, start=2):
        with counter.case(f"tenth {number}"):
            assert max(part) <= max(first) + 30, f"{max(first):.0f} MB, then {max(part):.0f}"
    return counter.row()


def many_problems(n_problems, kept, growth):
    """Runs on different problems: each compiles its own programs, of which few are kept."""
    found = answer("problems", n_problems, kept)
    maps, megabytes = np.array(found).T
    half = n_problems // 2
    note = f"one process, {kept} programs kept; at most {max(megabytes[:half]):.0f} MB in the first half "
    note += f"and {max(megabytes[half:]):.0f} in the second, {max(maps):,.0f} memory maps"
    counter = Counter("different problems", note)
    bound = growth * max(megabytes[:half])
    for number, (places, size) in enumerate(found):
        with counter.case(f"problem {number}"):
            assert places < MOST_MAPS, f"{places:,} memory maps"
            assert number < half or size <= bound, f"{size:.0f} MB, above {bound:.0f}"
    return counter.row()


def answer(*arguments, cpus=None):
    """What this file prints when it is run with arguments, on some processors."""
    prefix = [] if cpus is None else ["taskset", "-c", cpus]
    command = [*prefix, sys.executable, "-m", "benchmarks.campaign.long_runs", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def steps(n_steps, n_evaluations):
    import dataclasses

    import bilevel
    from benchmarks.many_problems import held

    found = []
    problem = bilevel.problems.quadratic(512, 256, 8, 4, common_linear=0.5)
    watched = dataclasses.replace(problem, metrics={"held": lambda point: found.append(held()) or 0.0})
    solver = bilevel.SRBA(step_size=0.05, outer_ratio=2.0, batch_size=16)
    result = bilevel.run(watched, solver, max_steps=n_steps, eval_every=n_steps // n_evaluations)
    assert result.history["step"][-1] == n_steps and len(found) >= n_evaluations
    return found


def problems(n_problems, kept):
    import bilevel
    from benchmarks.many_problems import solve
    from bilevel import _programs

    _programs.MAX_PROGRAMS = kept
    return list(solve(n_problems, bilevel.SRBA(0.05, 1.0, 8), "own", max_steps=30))


# --- estimators


def copies_of_estimators(seed):
    """Every estimator, fitted here and elsewhere: the predictions are the same to the last bit."""
    import joblib
    from sklearn.base import clone

    from bilevel import estimators

    counter = Counter("estimators elsewhere", "in threads, in loky processes, pickled, deep-copied, cloned")
    made = [getattr(estimators, name)(random_state=seed) for name in estimators.__all__]
    data = [table_for(estimator, seed) for estimator in made]
    here = [predictions(estimator, *table) for estimator, table in zip(made, data, strict=True)]
    jobs = list(zip(made, data, strict=True))
    with ThreadPoolExecutor(2) as pool:
        threads = list(pool.map(lambda job: predictions(clone(job[0]), *job[1]), jobs))
    work = (joblib.delayed(predictions)(estimator, *table) for estimator, table in jobs)
    processes = joblib.Parallel(n_jobs=2, backend="loky")(work)
    for estimator, (X, y), expected, *others in zip(made, data, here, threads, processes, strict=True):
        copies = {"thread": others[0], "process": others[1], "clone": predictions(clone(estimator), X, y)}
        copies["pickle"] = pickle.loads(pickle.dumps(estimator)).predict(X)
        copies["deep copy"] = copy.deepcopy(estimator).predict(X)
        for way, found in copies.items():
            with counter.case(f"{type(estimator).__name__}, {way}"):
                assert np.array_equal(found, expected)
    return counter.row()


def predictions(estimator, X, y):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return estimator.fit(X, y).predict(X)


def table_for(estimator, seed):
    from sklearn.base import is_classifier

    from bilevel.estimators import BilevelCoxPH

    rng = np.random.default_rng(seed)
    X = rng.standard_normal((60, 4))
    y = X @ [1.0, -1.0, 0.5, 0.0] + 0.3 * rng.standard_normal(60)
    if isinstance(estimator, BilevelCoxPH):
        return X, np.array(list(zip(y > -1, np.exp(y), strict=True)), [("event", bool), ("time", float)])
    return X, (y > 0).astype(int) if is_classifier(estimator) else np.exp(y / 2)


# --- the same seed


def same_bits(quick):
    """Points and histories of runs with one seed, by their digests."""
    counter = Counter("same seed, same bits", "again, in another process, on one processor and on two; a sweep twice")
    here = digests(quick)
    ways = {"again": digests(quick)}
    if not quick:  # those on some processors are other processes too
        ways["another process"] = answer("digests", int(quick))
    processors = sorted(os.sched_getaffinity(0))
    ways["one processor"] = answer("digests", int(quick), cpus=str(processors[0]))
    if len(processors) > 1:
        ways["two processors"] = answer("digests", int(quick), cpus=",".join(map(str, processors[:2])))
    for way, found in ways.items():
        for name, expected in here.items():
            with counter.case(f"{name}, {way}"):
                assert found[name] == expected
    return counter.row()


def digests(quick):
    import bilevel
    from bilevel.engine.driver import sweep
    from bilevel.engine.steps import prepare

    rng, n = np.random.default_rng(0), 2000 if quick else 20_000
    X = rng.standard_normal((n, 20))
    y = np.sign(X @ rng.standard_normal(20) + rng.logistic(size=n))
    problem = bilevel.problems.logistic_selection(X[::2], y[::2], X[1::2], y[1::2], dtype="float32")
    solvers = {"SRBA": bilevel.SRBA(0.05, 5.0), "auto": bilevel.AutoSRBA(), "Exact": bilevel.Exact()}
    if not quick:
        solvers |= {"SABA": bilevel.SABA(0.05, 5.0), "full batch": bilevel.SOBA(0.05, 5.0, sampling="full")}
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, solver in solvers.items():
            result = bilevel.run(problem, solver, max_steps=3 if name == "Exact" else 200, eval_every=100)
            found[name] = digest([*result.point, result.history["value"]])
        settings = [prepare(problem, bilevel.SRBA(step, 5.0)).solver for step in (0.02, 0.05)]
        cells = sweep(problem, settings, [0, 1], max_calls=20 * n)
    found["sweep"] = digest([[row["value"] for row in cell.rows[-1:]] for of_seed in cells for cell in of_seed])
    return found


def digest(arrays):
    found = hashlib.sha256()
    for array in arrays:
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    work = {"steps": steps, "problems": problems, "digests": digests}[sys.argv[1]]
    print(json.dumps(work(*map(int, sys.argv[2:]))))

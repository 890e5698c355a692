"""Microseconds per step, compared with the reference benchmark of the field, benchopt/benchmark_bilevel.

    python benchmarks/beside_reference.py --reference PATH       # a checkout of it; needs IJCNN1 and MNIST
    python benchmarks/beside_reference.py                        # only this library
    python benchmarks/beside_reference.py --reference PATH --problems cleaning --solvers SRBA,SOBA --rounds 3

Batch 64, float32, T = Q = 10, on IJCNN1, quadratics (4 096 and 1 024 samples, p = 100, d = 10) and data cleaning on
MNIST. Each side has one process for a problem, and the two take turns, one round at a time. This library has fused
loops, as in the command line; the reference runs as its own command runs it. Draws and full-batch passes are included
(after every half epoch for SRBA, every sixteenth for VRBO), evaluations are not. Other work on the machine affects the
best rounds least; `--clock processors` measures processor time instead of wall time.

`--python` is an interpreter with the dependencies of the reference: benchopt, jaxopt, libsvmdata, scikit-learn. The
reference uses its own data sets and solvers; only its downloads are replaced by the arrays of `bilevel.datasets`.
"""

import argparse
import importlib.util
import os
import pickle
import sys
import tempfile
import time
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

import numpy as np
from markdown import number, table
from processes import Turns, answer_turns

HERE = Path(__file__).resolve()
STEP_SIZES = {"IJCNN1": 0.05, "quadratics": 0.002, "cleaning": 0.001}
SOLVERS = ("SRBA", "SABA", "SOBA", "StocBiO", "AmIGO", "MRBO", "VRBO", "F2SA")
PERIOD_FRACTIONS = {"SRBA": 1 / 2, "VRBO": 1 / 16}
AT_ONCE = {"IJCNN1": 512, "quadratics": 64, "cleaning": 64}  # steps of a loop of solvers without a period
CLOCKS = {"wall": time.perf_counter, "processors": time.process_time}
SECONDS = 0.25  # of one solver in one round, or longer if its loop takes longer
GOALS = {
    "IJCNN1": dict.fromkeys(("SRBA", "SOBA", "MRBO", "VRBO", "F2SA", "AmIGO", "StocBiO"), 4),
    "quadratics": dict.fromkeys(SOLVERS, 50),
    "cleaning": {"SRBA": 2, "SOBA": 2},
}


def be_ours(problem, solvers, clock):
    """Take turns with the steps of this library."""
    import bilevel

    bilevel.fuse_cpu_loops()
    from shapes import quadratic_problem, without_exact_solver

    builders = {
        "IJCNN1": lambda: without_exact_solver(bilevel.problems.ijcnn1(dtype="float32")),
        "quadratics": lambda: quadratic_problem(n_inner=4_096),  # the size in the reference
        "cleaning": lambda: without_exact_solver(bilevel.problems.mnist_cleaning(dtype="float32")),
    }
    built, contenders = builders[problem](), {}
    for name in solvers:
        steps, settings = AT_ONCE[problem], {}
        if name in PERIOD_FRACTIONS:
            steps = settings["period"] = int((built.n_inner + built.n_outer) * PERIOD_FRACTIONS[name] / 64)
        solver = bilevel.SOLVERS[name](STEP_SIZES[problem], 1.0, 64, **settings)
        contenders[name] = repeat(our_steps(built, solver, steps), steps, clock)
    answer_turns(contenders)


def our_steps(problem, solver, steps):
    """Return a function that draws and takes this number of steps several times in a row."""
    import jax
    from stepping import steps_of

    from bilevel._core.compilation import arithmetic

    stepping = steps_of(problem, solver)
    with arithmetic(problem.dtype):
        start = stepping.init()

    def take(times):
        state = start
        with arithmetic(problem.dtype):
            for i in range(times):
                state = stepping.take(state, stepping.draw(i * steps, steps), 0, steps)
            jax.block_until_ready(state)
        if not np.all(np.isfinite(jax.tree.leaves(state.point)[0])):
            raise RuntimeError(f"{solver!r} diverged on {problem.name}: timing NaN would be meaningless.")

    return take


SETS = {"IJCNN1": "ijcnn1", "quadratics": "simulated", "cleaning": "mnist"}
# An eighth of the inner samples of the paper, because the reference compiles p × p constants for each sample.
QUADRATICS = {"n_samples_inner": 4_096, "n_samples_outer": 1_024, "dim_inner": 100, "dim_outer": 10}


class Reference:
    """A problem of the reference, and its solvers on it."""

    def __init__(self, checkout, problem):
        self.checkout = Path(checkout).resolve()
        if not (self.checkout / "solvers" / "srba.py").exists():
            raise FileNotFoundError(
                f"`--reference {checkout}`: has no solvers/srba.py; pass a checkout of benchopt/benchmark_bilevel."
            )
        sys.path.insert(0, str(self.checkout))
        os.chdir(tempfile.mkdtemp())  # it writes into the working directory
        module = self._module("datasets", SETS[problem])
        give_data(problem, module)
        settings = QUADRATICS if problem == "quadratics" else {}
        with redirect_stdout(sys.stderr):
            self.objective = self._module("", "objective").Objective.get_instance()
            self.objective.set_data(**module.Dataset.get_instance(**settings).get_data())

    def _module(self, folder, name):
        spec = importlib.util.spec_from_file_location(f"reference_{name}", self.checkout / folder / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def contender(self, name, step_size, period_fraction, at_once):
        """Return a function that takes a period of steps, or ``at_once``, several times; and this number of steps."""
        cls, settings = self._module("solvers", name.lower()).Solver, {"step_size": step_size, "batch_size": 64}
        if period_fraction is not None:
            settings["period_frac"] = period_fraction
            at_once = int((self.objective.n_samples_inner + self.objective.n_samples_outer) * period_fraction / 64)
        solver = cls.get_instance(**settings, eval_freq=at_once)
        with redirect_stdout(sys.stderr):
            solver.set_objective(**self.objective.get_objective())
        return partial(run_loop, solver), at_once


def run_loop(solver, times):
    """Run the loop of a solver this number of times."""
    import jax

    left = iter(range(times))
    solver.run(lambda: next(left, None) is not None)
    jax.block_until_ready((solver.inner_var, solver.outer_var))


def give_data(problem, module):
    """Replace what the reference would download or keep on disk."""
    from bilevel.datasets import load

    if problem == "IJCNN1":
        data = load("ijcnn1")
        found = {"ijcnn1": (data.X_train, data.y_train), "ijcnn1_test": (data.X_test, data.y_test)}
        module.fetch_libsvm = found.__getitem__
    elif problem == "quadratics":
        module.gen_matrices = module.gen_matrices.func
    else:
        data = load("mnist")
        names = "training_images", "training_labels", "test_images", "test_labels"
        images = (part.reshape(len(part), -1) for part in (data.X_train, data.X_test))
        arrays = next(images), data.y_train, next(images), data.y_test
        Path("mnist.pkl").write_bytes(pickle.dumps(dict(zip(names, arrays, strict=True))))


def be_reference(problem, solvers, checkout, clock):
    """Take turns with the steps of the reference."""
    known, contenders = Reference(checkout, problem), {}
    for name in solvers:
        take, steps = known.contender(name, STEP_SIZES[problem], PERIOD_FRACTIONS.get(name), AT_ONCE[problem])
        contenders[name] = repeat(take, steps, clock)
    answer_turns(contenders)


def repeat(take, steps, clock):
    """Return a function that takes steps for about `SECONDS` and returns microseconds per step."""
    take(1)  # compiles

    def micros(times):
        began = CLOCKS[clock]()
        take(times)
        return 1e6 * (CLOCKS[clock]() - began) / (times * steps)

    times = max(1, round(SECONDS / (1e-6 * micros(1) * steps)))
    return lambda: micros(times)


def compare(problem, options):
    """Return the rows of one problem."""
    common = ["--problems", problem, "--solvers", ",".join(options.solvers), "--clock", options.clock]
    sides = [Turns([HERE, "--be", "ours", *common])]
    if options.reference:
        words = [HERE, "--be", "reference", "--reference", options.reference.resolve(), *common]
        sides.append(Turns(words, options.python, PYTHONPATH=str(HERE.parents[1])))
    rounds = [[side.take() for side in sides] for _ in range(options.rounds)]
    for side in sides:
        side.end()
    micros = {name: np.array([[side[name] for side in taken] for taken in rounds]) for name in options.solvers}
    return [row(problem, name, found) for name, found in micros.items()]


def row(problem, solver, micros):
    """Return a row with best and median times, and with both ratios and the goal if there is a reference."""
    best, middle = micros.min(axis=0), np.median(micros, axis=0)
    cells = [problem, solver, *(number(time) for pair in zip(best, middle, strict=True) for time in pair)]
    if micros.shape[1] == 1:
        return cells
    goal, of_rounds = GOALS[problem].get(solver), np.median(micros[:, 1] / micros[:, 0])
    return [*cells, f"{best[1] / best[0]:.3g}", f"{of_rounds:.3g}", "–" if goal is None else f"{goal}"]


def parsed():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=Path, help="a checkout of benchopt/benchmark_bilevel")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that runs the reference")
    parser.add_argument("--problems", type=split, default=tuple(STEP_SIZES), help="names, separated by commas")
    parser.add_argument("--solvers", type=split, default=SOLVERS, help="names, separated by commas")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="processor time is for busy machines")
    parser.add_argument("--be", choices=("ours", "reference"), help=argparse.SUPPRESS)
    return parser.parse_args()


def split(names):
    return tuple(names.split(","))


def main():
    options = parsed()
    if options.be == "ours":
        be_ours(options.problems[0], options.solvers, options.clock)
    elif options.be == "reference":
        be_reference(options.problems[0], options.solvers, options.reference, options.clock)
    else:
        lines = []
        for problem in options.problems:
            lines += compare(problem, options)
            print(*(" ".join(line) for line in lines[-len(options.solvers) :]), sep="\n", flush=True)
        columns = ["problem", "solver", "bilevel, best µs", "median"]
        if options.reference:
            columns += ["reference, best µs", "median", "reference / bilevel, best", "median of rounds", "goal"]
        print(table(columns, lines))
        if not options.reference:
            print("\nWithout the reference, because `--reference PATH` was not given.")


if __name__ == "__main__":
    main()

"""Time per step of this revision compared with another one, in interleaved rounds.

    git worktree add ../before REVISION
    python benchmarks/revisions.py ../before [--rounds 20]
    python benchmarks/revisions.py . --plain      # this revision without and with fused loops: the table of the README

Each revision has one process for the whole measurement. They take turns, one round at a time, so that a slow phase of
the machine affects both. Full-batch passes and draws are included, evaluations are not.
"""

import argparse
import dataclasses
from pathlib import Path

import numpy as np
from markdown import number, table
from processes import Turns, answer_turns

SOLVERS = ("SRBA", "SABA", "SOBA", "StocBiO", "AmIGO", "MRBO", "VRBO", "F2SA")
STEPS = 256  # the number of steps per round is a multiple of it
SECONDS = 0.2  # per solver and round
HERE = Path(__file__).resolve()


def worker(fused):
    """Take turns with the microseconds per step of every solver on every problem."""
    import bilevel

    fuse = getattr(bilevel, "fuse_cpu_loops", None)  # early revisions fuse loops by default
    if fused and fuse is not None:
        fuse()
    contenders = {
        f"{name} {solver}": Contender(problem, bilevel.SOLVERS[solver](step, 1.0, 64))
        for name, (problem, step) in problems(bilevel).items()
        for solver in SOLVERS
    }
    answer_turns({name: contender.micros for name, contender in contenders.items()})


def problems(bilevel):
    """Return each problem with a step size at which no solver diverges."""
    rng = np.random.default_rng(0)
    features = rng.standard_normal((49_990 + 91_701, 22))
    signs = np.sign(features[:, 0] + rng.standard_normal(len(features)))
    images = rng.standard_normal((25_000, 784)).astype(np.float32)
    digits = rng.integers(0, 10, len(images))
    cut, images_cut = 49_990, 20_000
    rows = features[:cut], signs[:cut], features[cut:], signs[cut:]
    pictures = images[:images_cut], digits[:images_cut], images[images_cut:], digits[images_cut:]
    start = {"inner_var": np.zeros(22), "outer_var": np.zeros(22), "dtype": "float32"}
    names = {"penalty_selection", "logistic_selection"} & set(dir(bilevel.problems))  # the second in early ones
    select = getattr(bilevel.problems, names.pop())
    return {
        "IJCNN1": (without_exact_solver(select(*rows, **start)), 0.05),
        "quadratics": (without_exact_solver(bilevel.problems.quadratic(dtype="float32")), 0.01),
        "cleaning": (without_exact_solver(bilevel.problems.data_cleaning(*pictures, dtype="float32")), 0.01),
    }


def without_exact_solver(problem):
    (name,) = {field.name for field in dataclasses.fields(problem)} & {"exact_solver", "referee"}
    return dataclasses.replace(problem, **{name: None})


class Contender:
    """One solver on one problem."""

    def __init__(self, problem, solver):
        self.problem, self.solver, self.steps = problem, solver, STEPS
        self.micros()
        self.steps = STEPS * max(1, round(SECONDS / (STEPS * 1e-6 * self.micros())))

    def micros(self):
        """Return the time per step by the clock of a run."""
        import bilevel

        result = bilevel.run(self.problem, self.solver, max_steps=self.steps, eval_every=self.steps)
        if result.status == "diverged":
            raise RuntimeError(f"{self.solver!r} diverged on {self.problem.name}.")
        clock = result.history["seconds"]
        return 1e6 * (clock[-1] - clock[0]) / self.steps


def compare(other, rounds, fused):
    """Print best and median times and their ratios, and if the other side is plain also the table of the README."""
    words = HERE, "--worker"
    before = Turns([*words, *([] if fused else ["--plain"])], PYTHONPATH=str(other))
    now = Turns(words, PYTHONPATH=str(HERE.parents[1]))
    pairs = [(before.take(), now.take()) for _ in range(rounds)]
    before.end(), now.end()
    rows, best = [], {}
    sides = ("before", "now") if fused else ("plain", "fused")
    for name in pairs[0][0]:
        old, new = (np.array([pair[side][name] for pair in pairs]) for side in (0, 1))
        ratios = new.min() / old.min(), np.median(new / old)
        rows.append([name, *(f"{time:.2f}" for time in (old.min(), new.min())), *(f"{ratio:.3f}" for ratio in ratios)])
        for side, times in zip(sides, (old, new), strict=True):
            best.setdefault(f"{name.split()[0]}, {side}", []).append(number(times.min()))
    first, second = sides
    columns = [f"{first}, best µs", f"{second}, best µs", f"{second} / {first}, best", "median of ratios"]
    print(table(["problem, solver", *columns], rows))
    if not fused:
        print()
        print(table(["µs per step", *SOLVERS], [[name, *times] for name, times in best.items()]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", nargs="?", type=Path, help="a checkout of the revision to compare with")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--plain", action="store_true", help="the other revision without fused loops")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(not arguments.plain)
    elif arguments.other is None:
        parser.error("pass a checkout of the revision to compare with")
    else:
        compare(arguments.other.resolve(), arguments.rounds, not arguments.plain)

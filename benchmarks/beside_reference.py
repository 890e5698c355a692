"""Microseconds per step, ours beside the field's reference benchmark, benchopt/benchmark_bilevel.

    python benchmarks/beside_reference.py --reference PATH       # a checkout of it; BILEVEL_DATA has ijcnn1 and mnist
    python benchmarks/beside_reference.py                        # ours alone
    python benchmarks/beside_reference.py --reference PATH --problems cleaning --solvers SRBA,SOBA --rounds 3

Batch 64, float32, T = Q = 10, on IJCNN1, quadratics (4 096 and 1 024 samples, p = 100, d = 10) and data cleaning on
MNIST. One process for each side lives through the measurement of a problem; they take turns, one round at a time. Ours
has fused loops, as in the command line; the reference runs as its own command has it. Full-batch passes and draws are
included, every half pass over both levels for SRBA, every sixteenth for VRBO on both sides, evaluations are not. Other
work on the machine disturbs the best rounds least, and least of all `--clock processors`, the seconds that processors
spent on it.
`--python` names an interpreter that has what the reference asks for: benchopt, jaxopt, libsvmdata, scikit-learn.
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np
from markdown import number, table
from turns import Turns, answer_turns

HERE = Path(__file__).resolve()
STEP_SIZES = {"IJCNN1": 0.05, "quadratics": 0.002, "cleaning": 0.001}
SOLVERS = ("SRBA", "SABA", "SOBA", "StocBiO", "AmIGO", "MRBO", "VRBO", "F2SA")
PERIOD_FRACTIONS = {"SRBA": 1 / 2, "VRBO": 1 / 16}
AT_ONCE = {"IJCNN1": 512, "quadratics": 64, "cleaning": 64}  # steps of a loop; where there is a period, it is that
CLOCKS = {"wall": time.perf_counter, "processors": time.process_time}
SECONDS = 0.25  # of one solver in one round, or longer where its loop takes longer
GOALS = {
    "IJCNN1": dict.fromkeys(("SRBA", "SOBA", "MRBO", "VRBO", "F2SA", "AmIGO", "StocBiO"), 4),
    "quadratics": dict.fromkeys(SOLVERS, 50),
    "cleaning": {"SRBA": 2, "SOBA": 2},
}


def be_ours(problem, solvers, clock):
    """Take turns with our steps."""
    import bilevel

    bilevel.fuse_cpu_loops()
    from shapes import quadratic_problem, without_exact_solver

    builders = {
        "IJCNN1": lambda: without_exact_solver(bilevel.problems.ijcnn1(dtype="float32")),
        "quadratics": lambda: quadratic_problem(n_inner=4_096),  # as the reference has them
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
    """A function that draws and takes so many steps, from where the last ones ended, several times."""
    import jax

    from bilevel._precision import arithmetic
    from bilevel.engine.loop import advance, draw_page, for_one_run, initial_state, run_key

    with arithmetic(problem.dtype):
        oracles = problem.oracles.with_batches(64, "blocks")
        solver = solver.configure(problem).cast(problem.dtype)
        start = initial_state(solver, oracles, problem.start)

    def take(times):
        state = start
        with arithmetic(problem.dtype):
            for i in range(times):
                page = draw_page(solver, oracles, run_key(0), np.int32(i * steps), steps)
                state = advance(solver, for_one_run(oracles), state, page, np.int32(0), np.int32(steps))
            jax.block_until_ready(state)
        if not np.all(np.isfinite(jax.tree.leaves(state.point)[0])):
            raise RuntimeError(f"{solver!r} diverged on {problem.name}: a time of NaN would be worth nothing.")

    return take


def be_reference(problem, solvers, checkout, clock):
    """Take turns with the steps of the reference."""
    from reference import Reference

    known, contenders = Reference(checkout, problem), {}
    for name in solvers:
        take, steps = known.contender(name, STEP_SIZES[problem], PERIOD_FRACTIONS.get(name), AT_ONCE[problem])
        contenders[name] = repeat(take, steps, clock)
    answer_turns(contenders)


def repeat(take, steps, clock):
    """A function that times about so many seconds of steps, and returns microseconds per step."""
    take(1)  # it compiles

    def micros(times):
        began = CLOCKS[clock]()
        take(times)
        return 1e6 * (CLOCKS[clock]() - began) / (times * steps)

    times = max(1, round(SECONDS / (1e-6 * micros(1) * steps)))
    return lambda: micros(times)


def compare(problem, options):
    """The rows of one problem."""
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
    """A line: best and median, and where there is a reference both ratios and the goal."""
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
    parser.add_argument("--problems", type=split, default=tuple(STEP_SIZES), help="names with commas between")
    parser.add_argument("--solvers", type=split, default=SOLVERS, help="names with commas between")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="of processors: for a machine that is not quiet"
    )
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
        columns = ["problem", "solver", "ours, best µs", "median"]
        if options.reference:
            columns += ["reference, best µs", "median", "reference / ours, best", "median of rounds", "goal"]
        print(table(columns, lines))
        if not options.reference:
            print("\nOurs alone: no `--reference PATH` was given.")


if __name__ == "__main__":
    main()

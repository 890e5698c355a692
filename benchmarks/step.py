"""Time per step of every compiled solver on three problems, compared with its textbook version, a floor and a goal.

Full-batch passes and draws are included, evaluations are not. The solvers of a problem take turns within one process,
so that their ratios are reliable. Loops and Neumann series have ten iterations.
"""

from dataclasses import dataclass, field, replace

import floor
import jax
import machine
import numpy as np
import shapes
import textbook
from markdown import number, table

import bilevel
from bilevel.engine.result import Status
from bilevel.engine.steps import PAGE_LENGTH, prepare
from bilevel.oracles import RowwiseOracles
from bilevel.solvers import Solver

# Goals in microseconds.
GOALS = {
    "IJCNN1": {
        **{"SRBA": 3.2, "SABA": 3, "SOBA": 2},
        **{"AmIGO": 14, "StocBiO": 14, "MRBO": 14, "VRBO": 140, "F2SA": 22},
    },
    "quadratics": {"SRBA": 12, "SABA": 14, "SOBA": 8},
    "cleaning": {"SRBA": 180, "SABA": 210, "SOBA": 105},
}
OURS, TEXTBOOK = "ours", "textbook"
FEW = ("SRBA", "SABA", "SOBA")
EVERY = tuple(name for name, cls in bilevel.SOLVERS.items() if issubclass(cls, Solver))


@dataclass
class Contender:
    """A function ``timed(steps)`` that returns seconds. Each round consists of complete periods."""

    timed: object
    period: int
    steps: int = 0
    micros: list = field(default_factory=list)

    def prepare(self, seconds):
        """Compile, and choose the number of steps that takes about this long, or longer if a page takes longer."""
        self.timed(self.period)
        each = self._seconds_per_step(max(0.1, seconds / 2))
        # The library draws a page of steps at a time, so rounds are complete pages unless a page takes too long.
        unit = PAGE_LENGTH if PAGE_LENGTH * each < 8 * seconds else self.period
        self.steps = unit * max(1, round(seconds / each / unit))

    def _seconds_per_step(self, at_least):
        steps = self.period
        while (elapsed := self.timed(steps)) < at_least:
            steps *= 4
        return elapsed / steps

    def take_round(self):
        self.micros.append(1e6 * self.timed(self.steps) / self.steps)


def measure(quick):
    """Return the tables of all problems."""
    solvers = FEW if quick else EVERY
    rounds, seconds = (2, 0.02) if quick else (7, 0.25)
    parts = []
    for name, build in shapes.BY_NAME.items():
        parts += [f"### {name}", problem_table(build(), shapes.BATCH, solvers, rounds, seconds)]
        print(f"\n{parts[-1]}\n", flush=True)
        jax.clear_caches()
    return "\n\n".join(parts)


def problem_table(shape, batch, solvers, rounds, seconds):
    """Time the solvers on one problem in turn and return the table."""
    speed = machine.speed(floor.row_bytes(shape.problem.oracles))
    found = contenders(shape, batch, solvers)
    for label, contender in found.items():
        contender.prepare(seconds)
        print(f"  {shape.name}: {' '.join(label)} compiled, {contender.steps} steps per round", flush=True)
    for i in range(rounds):
        for contender in found.values():
            contender.take_round()
        print(f"  {shape.name}: round {i + 1} of {rounds}", flush=True)
    columns = ["solver", "best µs", "median µs", "textbook best", "textbook median", "textbook / ours", "floor", "goal"]
    lines = table(columns, [row(shape, batch, name, found, speed) for name, kind in found if kind == OURS])
    return f"{lines}\n\nThe floor follows from the speeds measured just before: {speed}."


def contenders(shape, batch, solvers):
    """Return what is timed, by name and kind."""
    found = {}
    for name in solvers:
        solver = solver_of(name, shape, batch)
        found[name, OURS] = Contender(timed_run(shape.problem, solver), period_of(shape, solver))
        if name in textbook.METHODS:
            method = textbook.build(textbook.METHODS[name], shape, batch)
            found[name, TEXTBOOK] = Contender(textbook.timed(method, shape, batch), period_of(shape, solver))
    if isinstance(shape.problem.oracles, RowwiseOracles) and "SABA" in solvers:
        solver = replace(solver_of("SABA", shape, batch), memory="rows")
        found["SABA, memory of rows", OURS] = Contender(timed_run(shape.problem, solver), 1)
    if shape.from_losses is not None:
        for name in ("SRBA", "SABA"):
            solver = solver_of(name, shape, batch)
            label = f"{name}, per-sample losses"
            found[label, OURS] = Contender(timed_run(shape.from_losses, solver), period_of(shape, solver))
    return found


def solver_of(name, shape, batch):
    # The length of a normalized step does not depend on the gradient.
    ratio = 100.0 if name == "F2SAp" else 1.0
    return bilevel.SOLVERS[name](shape.step_size, ratio, batch)


def period_of(shape, solver):
    """Return the steps from one full-batch pass to the next, or 1 for solvers without passes."""
    return prepare(shape.problem, solver).solver.parameters().get("period") or 1


def timed_run(problem, solver):
    """Return a function from steps to seconds, by the clock of the run and without the initial state."""

    def seconds(steps):
        result = bilevel.run(problem, solver, max_steps=steps, eval_every=steps)
        if result.status is Status.diverged:
            raise RuntimeError(f"{solver!r} diverged on {problem.name}: timing NaN would be meaningless.")
        clock = result.history["seconds"]
        return clock[-1] - clock[0]

    return seconds


def row(shape, batch, label, found, speed):
    """Return one row of the table; the ratio is that of the medians."""
    name = label.partition(",")[0]
    ours, baseline = found[label, OURS].micros, found.get((name, TEXTBOOK))
    theirs = [None] * 3
    if baseline is not None:
        theirs = [min(baseline.micros), np.median(baseline.micros), np.median(baseline.micros) / np.median(ours)]
    least = 1e6 * floor.floor_seconds(shape, solver_of(name, shape, batch), speed)
    goal = GOALS[shape.name].get(label)
    numbers = min(ours), np.median(ours), *theirs, least
    return [label, *map(number, numbers), goal and str(goal)]

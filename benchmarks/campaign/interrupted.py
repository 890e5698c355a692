"""A process that sends itself a signal in the so-manyth of its compilations, steps, evaluations or writes.

python -m benchmarks.campaign.interrupted PHASE NUMBER SIGNAL run CONFIG --store STORE    # a command
python -m benchmarks.campaign.interrupted PHASE NUMBER SIGNAL FOLDER                      # `bilevel.run`, by hand
"""

import os
import sys
from pathlib import Path

from jax._src import compiler

import bilevel
from benchmarks.campaign.written import STEPS, problem, solve
from bilevel import cli
from bilevel.engine.driver import Driver
from bilevel.engine.steps import CompiledSteps

PHASES = {
    "compilation": (compiler, "compile_or_get_cached"),
    "steps": (CompiledSteps, "advance"),
    "evaluation": (Driver, "evaluate"),
    "write": (os, "fsync"),
}


def send(phase, number, signal):
    """Send the signal to this process at the beginning of a call."""
    place, name = PHASES[phase]
    function, calls = getattr(place, name), iter(range(1, 10**9))

    def sending(*arguments, **options):
        if next(calls) == number:
            os.kill(os.getpid(), signal)
        return function(*arguments, **options)

    setattr(place, name, sending)


def run(folder):
    """Save the run that Ctrl-C ended."""
    result = solve(log=bilevel.CSVLog(folder / "run.csv"))
    result.save(folder / "run.npz")
    print(result.status)


if __name__ == "__main__":
    phase, number, signal, *words = sys.argv[1:]
    if len(words) == 1:
        bilevel.run(problem(), bilevel.SOBA(0.05, batch_size=8), **STEPS)  # what is compiled for each run is there
        send(phase, int(number), int(signal))
        run(Path(words[0]))
    else:
        send(phase, int(number), int(signal))
        sys.argv[1:] = words
        cli.main()

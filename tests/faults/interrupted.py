"""A process that sends itself a signal at a given call of a compilation, steps, an evaluation or a write.

python -m tests.faults.interrupted PHASE NUMBER SIGNAL run CONFIG --store STORE    # a command
python -m tests.faults.interrupted PHASE NUMBER SIGNAL FOLDER                      # `bilevel.run` in Python
"""

import os
import sys
from pathlib import Path

import jax

import bilevel
from bilevel import cli
from bilevel.engine.driver import Driver
from bilevel.engine.steps import CompiledSteps
from tests.faults.files import STEPS, problem, solve

BEFORE_XLA = "/jax/core/compile/jaxpr_to_mlir_module_duration"  # XLA begins to compile at its end
PHASES = {
    "compilation": None,
    "steps": (CompiledSteps, "advance"),
    "evaluation": (Driver, "evaluate"),
    "write": (os, "fsync"),
}


def send(phase, number, signal):
    """Send the signal to this process at the beginning of a call."""
    calls = iter(range(1, 10**9))

    def count():
        if next(calls) == number:
            os.kill(os.getpid(), signal)

    if phase == "compilation":
        jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: event == BEFORE_XLA and count())
        return
    place, name = PHASES[phase]
    function = getattr(place, name)

    def sending(*arguments, **options):
        count()
        return function(*arguments, **options)

    setattr(place, name, sending)


def run(folder):
    """Run until the signal arrives, and save the result."""
    result = solve(log=bilevel.CSVLog(folder / "run.csv"))
    result.save(folder / "run.npz")
    print(result.status)


if __name__ == "__main__":
    phase, number, signal, *words = sys.argv[1:]
    if len(words) == 1:
        bilevel.run(problem(), bilevel.SOBA(0.05, batch_size=8), **STEPS)  # compiles what every run compiles
        send(phase, int(number), int(signal))
        run(Path(words[0]))
    else:
        send(phase, int(number), int(signal))
        sys.argv[1:] = words
        cli.main()

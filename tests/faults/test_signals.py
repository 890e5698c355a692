"""Ctrl-C and SIGTERM end a command with a message that says how to resume, and no result is lost.

The process sends itself the signal at the beginning of a compilation, of steps, of an evaluation or of a write, or
receives it from outside at a random moment. The exit code is 130 or 143.
"""

import os
import signal
import time

import pytest

import bilevel
from tests.faults import LONG, repeats, rng, sweeps
from tests.faults.files import STEPS, check_same, problem
from tests.faults.interrupted import PHASES

pytestmark = pytest.mark.slow
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
# Calls of each kind that a command makes at least.
N_CALLS = {"compilation": 20, "steps": 12, "evaluation": 12, "write": 8}
CASES = [(phase, number) for phase in PHASES for number in CODES] if LONG else [("write", signal.SIGTERM)]


def check_stopped(process, number, folder):
    output = process.end(code=None)
    assert process.popen.returncode == CODES[number], f"{process.popen.returncode}: {output}"
    assert f"finished results are in {folder}. To continue: bilevel run" in " ".join(output.split()), output
    sweeps.check_whole(folder)


@pytest.mark.parametrize(("phase", "number"), CASES)
def test_a_signal_in_a_phase_of_a_command_loses_no_result(phase, number):
    random = rng()
    for _ in range(repeats(1, 4)):
        folder, call = sweeps.new_folder("stopped"), random.randint(1, N_CALLS[phase])
        own = ("-m", "tests.faults.interrupted", phase, call, int(number))
        process = sweeps.Process(*own, "run", sweeps.config(), "--store", folder)
        check_stopped(process, number, folder)
        sweeps.finish(folder)


@pytest.mark.parametrize("number", CODES if LONG else [signal.SIGINT])
@pytest.mark.parametrize("jobs", [1, 2] if LONG else [2])
def test_a_signal_from_outside_loses_no_result(jobs, number):
    random, left = rng(), repeats(1, 4)
    while left > 0:
        folder = sweeps.new_folder("stopped")
        process = sweeps.start_run(folder, "--jobs", jobs)
        while not (folder / "_steady.toml").exists() and process.popen.poll() is None:
            time.sleep(0.01)
        time.sleep(random.uniform(0.0, 0.4) * sweeps.undisturbed()[1])
        if n_files(folder) == n_files(sweeps.undisturbed()[0].folder):  # the sweep ended before the signal
            process.end()
            continue
        # A terminal sends the signal to all processes of a command.
        (os.kill if jobs == 1 else os.killpg)(process.pid, number)
        check_stopped(process, number, folder)
        sweeps.finish(folder)
        left -= 1


def n_files(folder):
    return len(list(folder.glob("*.parquet")))


@pytest.mark.parametrize("phase", ["steps", "evaluation", "write"] if LONG else ["steps"])
def test_an_interrupted_run_is_saved_and_resumed_as_if_it_had_not_been_stopped(phase):
    random = rng()
    for _ in range(repeats(1, 4)):
        # The first call of steps or of an evaluation compiles.
        folder, call = sweeps.new_folder("by-hand"), 1 if phase == "write" else random.randint(2, 5)
        own = ("-m", "tests.faults.interrupted", phase, call, int(signal.SIGINT))
        output = sweeps.Process(*own, folder).end()
        assert output.strip().endswith("interrupted"), output
        log = bilevel.CSVLog(folder / "run.csv")
        check_same(bilevel.resume(folder / "run.npz", problem(), log=log, **STEPS))
        assert sorted(path.name for path in folder.iterdir()) == ["run.csv", "run.npz"]

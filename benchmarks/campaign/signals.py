"""Ctrl-C and SIGTERM.

The process sends itself the signal at the beginning of a compilation, of steps, of an evaluation or of a write; or it
gets it from outside, at a random moment. It says how to go on, and its exit code is 130 or 143. The same command is
then given again.
"""

import os
import random
import signal
import time

import bilevel
from benchmarks.campaign import workshop
from benchmarks.campaign.interrupted import PHASES
from benchmarks.campaign.table import Counter
from benchmarks.campaign.written import STEPS, check_same, problem

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
MOST = {"compilation": 20, "steps": 12, "evaluation": 12, "write": 8}  # calls of each kind that a command surely makes


def rows(seed, quick):
    rng = random.Random(seed)
    if quick:
        found = [stop_in("write", signal.SIGTERM, rng, 1), stop_jobs(signal.SIGINT, rng, 1)]
        return [*found, stop_by_hand(["steps"], rng, 1)]
    found = [stop_in(phase, number, rng, 4) for phase in PHASES for number in CODES]
    found += [kind(number, rng, 4) for kind in (stop_outside, stop_jobs) for number in CODES]
    return [*found, stop_by_hand(["steps", "evaluation", "write"], rng, 4)]


def check_stopped(process, number, folder):
    said = process.end(code=None)
    assert process.popen.returncode == CODES[number], f"{process.popen.returncode}: {said}"
    assert f"finished results are in {folder}. To continue: bilevel run" in " ".join(said.split()), said
    workshop.check_whole(folder)


def stop_in(phase, number, rng, n_times):
    """In the midst of a phase."""
    counter = Counter(f"{NAMES[number]}: {phase}", "`bilevel run`, at the beginning of one of them")
    for _ in range(n_times):
        folder, call = workshop.new_folder("stopped"), rng.randint(1, MOST[phase])
        with counter.case(f"call {call}"):
            own = ("-m", "benchmarks.campaign.interrupted", phase, call, int(number))
            process = workshop.Process(*own, "run", workshop.config(), "--store", folder)
            check_stopped(process, number, folder)
            workshop.finish(folder)
    return counter.row()


def stop_outside(number, rng, n_times):
    """Wherever it happens to be."""
    counter = Counter(f"{NAMES[number]}: any moment", "`bilevel run`, once it has begun")
    stop(counter, number, rng, n_times, lambda process: os.kill(process.pid, number))
    return counter.row()


def stop_jobs(number, rng, n_times):
    """As a terminal or a batch system does: all processes at once."""
    counter = Counter(
        f"{NAMES[number]}: two workers", "`bilevel run --jobs 2`, all processes at once, as a terminal does"
    )
    stop(counter, number, rng, n_times, lambda process: os.killpg(process.pid, number), "--jobs", 2)
    return counter.row()


def stop(counter, number, rng, n_times, send, *options):
    while counter.survived + counter.lost < n_times:
        folder = workshop.new_folder("stopped")
        process = workshop.start_run(folder, *options)
        while not (folder / "_steady.toml").exists() and process.popen.poll() is None:
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 0.4) * workshop.undisturbed()[1])
        if n_files(folder) == n_files(workshop.undisturbed()[0].folder):  # too late: all is done
            process.end()
            continue
        with counter.case(folder.name):
            send(process)
            check_stopped(process, number, folder)
            workshop.finish(folder)


def n_files(folder):
    return len(list(folder.glob("*.parquet")))


def stop_by_hand(phases, rng, n_times):
    """`bilevel.run` returns what it has; saved and resumed, it is as if it had not been stopped."""
    counter = Counter("Ctrl-C: `bilevel.run`", f"in {', '.join(phases)}: `interrupted`, saved and resumed")
    for phase in phases:
        for _ in range(n_times):
            folder, call = workshop.new_folder("by-hand"), 1 if phase == "write" else rng.randint(2, 5)  # 1: compiles
            with counter.case(f"{phase}, call {call}"):
                own = ("-m", "benchmarks.campaign.interrupted", phase, call, int(signal.SIGINT))
                said = workshop.Process(*own, folder).end()
                assert said.strip().endswith("interrupted"), said
                log = bilevel.CSVLog(folder / "run.csv")
                check_same(bilevel.resume(folder / "run.npz", problem(), log=log, **STEPS))
                assert sorted(path.name for path in folder.iterdir()) == ["run.csv", "run.npz"]
    return counter.row()

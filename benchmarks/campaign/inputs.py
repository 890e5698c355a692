"""Bad input, generated: everything a user can hand over ends in a result or in one sentence that names the argument.

    python -m benchmarks.campaign --only inputs             # 10 000 inputs
    python -m benchmarks.campaign --only inputs --quick     # 500

A defect is: an error that no `raise` of the library has made, a sentence without the name of an argument, nonsense that
is accepted, such as a value that is NaN in a run that says nothing, a case over its time, and the death of the process.
Each chunk of cases is drawn by Hypothesis from its own seed, in a process of its own:
`python -m benchmarks.campaign.inputs AREA --seed S --cases N` repeats one and shows its defects.
"""

import argparse
import importlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from benchmarks.campaign.table import Row

ROOT = Path(__file__).parents[2]
# Of each area: what it is, and how many of 10 000 inputs.
AREAS = {
    "solvers": ("constructors of solvers", 3500),
    "problems": ("builders of problems", 2500),
    "losses": ("losses of one's own", 800),
    "runs": ("run and resume", 500),
    "estimators": ("estimators", 700),
    "configs": ("configs", 1200),
    "commands": ("command lines", 800),
}
CHUNK = 250
PATIENCE = 240  # seconds without a word from a process: it hangs where no signal is heard
FINE = ("result", "refused")


def judge_here(area, seed, cases):
    """Judge so many cases drawn from a seed, and print each, then its verdict, as JSON."""
    from hypothesis import HealthCheck, Phase, assume, given, settings
    from hypothesis import seed as seeded

    from benchmarks.campaign.bad_input.judge import judge

    strategy = importlib.import_module(f"benchmarks.campaign.bad_input.{area}").cases()
    seen = set()
    quiet = {"database": None, "deadline": None, "phases": [Phase.generate], "suppress_health_check": list(HealthCheck)}

    @seeded(seed)
    @settings(max_examples=cases, **quiet)
    @given(strategy)
    def each(case):
        assume(case.what not in seen)
        seen.add(case.what)
        print(json.dumps({"begun": case.what[:1000]}), flush=True)
        print(json.dumps(asdict(judge(case))), flush=True)

    each()


def collect(area, seed, cases):
    """Yield the verdicts of a chunk from a process of its own; that it hangs or dies is a verdict too."""
    command = [sys.executable, "-m", __spec__.name, area, "--seed", str(seed), "--cases", str(cases), "--here"]
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)  # some inputs are names of files
    below = Path(folder.name) / "a" / "b"
    below.mkdir(parents=True)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(
        command, cwd=below, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    lines, errors, begun = queue.Queue(), [], None
    readers = [
        threading.Thread(target=_read, args=(process.stdout, lines.put)),
        threading.Thread(target=_read, args=(process.stderr, errors.append)),
    ]
    for reader in readers:
        reader.start()
    try:
        while line := lines.get(timeout=PATIENCE):
            said = json.loads(line)
            begun = said.get("begun")
            if begun is None:
                yield said
    except queue.Empty:
        process.kill()
        yield {"kind": "hung", "what": begun, "message": f"no word in {PATIENCE} s", "where": "C code"}
    finally:
        status = process.wait()
        for reader in readers:
            reader.join()
        folder.cleanup()
    if status not in (0, -9):
        last = next((line.strip() for line in reversed(errors) if line.strip()), "")
        if begun is None:
            raise RuntimeError(f"{' '.join(command)} failed between two cases: {last}")
        yield {"kind": "crashed", "what": begun, "message": f"exit status {status}: {last}", "where": "the process"}


def _read(stream, take):
    with stream:
        for line in stream:
            take(line)
    take("")


def judge_area(area, seed, cases):
    """Return the verdicts of so many cases of an area, chunk after chunk."""
    found, chunk = {}, 0
    while len(found) < cases:
        # An input that was drawn twice counts once.
        new = {verdict["what"]: verdict for verdict in collect(area, 1000 * seed + chunk, min(CHUNK, cases))}
        found, chunk = new | found, chunk + 1
    return [*found.values()][:cases]


def rows(seed, quick):
    """Return a row for each area."""
    table = []
    for area, (title, cases) in AREAS.items():
        found = judge_area(area, seed, cases // 20 if quick else cases)
        defects = [verdict for verdict in found if verdict["kind"] not in FINE]
        show(defects, sys.stderr)
        kinds = Counter(verdict["kind"] for verdict in found)
        note = f"{kinds['refused']:,} refused in a sentence that names the argument, {kinds['result']:,} with a result"
        table.append(Row(f"bad input: {title}", len(found), len(found) - len(defects), len(defects), note))
    return table


def show(defects, file):
    """Print defects by kind and place, the most frequent first."""
    groups = {}
    for defect in defects:
        groups.setdefault((defect["kind"], defect["where"]), []).append(defect)
    for (kind, where), members in sorted(groups.items(), key=lambda item: -len(item[1])):
        print(f"LOST {len(members)}, {kind} at {where}", file=file)
        for member in members[:3]:
            print(f"    {member['what'][:300]}\n        {member['message'][:300]}", file=file, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("area", choices=AREAS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=CHUNK)
    parser.add_argument("--here", action="store_true", help="in this process; verdicts are printed as JSON")
    given = parser.parse_args()
    if given.here:
        return judge_here(given.area, given.seed, given.cases)
    found = judge_area(given.area, given.seed, given.cases)
    print(dict(Counter(verdict["kind"] for verdict in found)))
    show([verdict for verdict in found if verdict["kind"] not in FINE], sys.stdout)


if __name__ == "__main__":
    main()

"""Generated invalid input, judged in processes of their own.

    python -m tests.faults.inputs AREA --seed S --cases N    # repeat some cases and show the defects among them

Every input must give a result or an error of one sentence that names the argument. A defect is an error that no `raise`
of the library has made, a sentence without the name of an argument, accepted nonsense such as a NaN value in a run
without a warning, a case that takes too long, and a process that crashes. Hypothesis draws each chunk of cases from its
own seed.
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

ROOT = Path(__file__).parents[2]
AREAS = {  # number of cases of the long form
    "solvers": 3500,
    "problems": 2500,
    "losses": 800,
    "runs": 500,
    "estimators": 700,
    "configs": 1200,
    "commands": 800,
}
CHUNK = 250
PATIENCE = 240  # seconds without output after which a process counts as hung
FINE = ("result", "refused")


def judge_here(area, seed, cases):
    """Judge cases in this process; print each case and then its verdict as JSON."""
    from hypothesis import HealthCheck, Phase, assume, given, settings
    from hypothesis import seed as seeded

    from tests.faults.bad_input.judge import judge

    strategy = importlib.import_module(f"tests.faults.bad_input.{area}").cases()
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
    """Yield the verdicts of a chunk that is judged in another process, which may hang or crash."""
    command = [sys.executable, "-m", "tests.faults.inputs", area, "--seed", str(seed), "--cases", str(cases), "--here"]
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
            found = json.loads(line)
            begun = found.get("begun")
            if begun is None:
                yield found
    except queue.Empty:
        process.kill()
        yield {"kind": "hung", "what": begun, "message": f"no output for {PATIENCE} s", "where": "C code"}
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
    """Return the verdicts of different cases of an area, drawn chunk by chunk."""
    found, chunk = {}, 0
    while len(found) < cases:
        new = {verdict["what"]: verdict for verdict in collect(area, 1000 * seed + chunk, min(CHUNK, cases))}
        found, chunk = new | found, chunk + 1
    return [*found.values()][:cases]


def describe_defects(verdicts):
    """Return the defects by kind and place, the most frequent first, or an empty string."""
    groups, lines = {}, []
    for verdict in verdicts:
        if verdict["kind"] not in FINE:
            groups.setdefault((verdict["kind"], verdict["where"]), []).append(verdict)
    for (kind, where), members in sorted(groups.items(), key=lambda item: -len(item[1])):
        lines.append(f"{len(members)} {kind} at {where}")
        for member in members[:3]:
            lines += [f"    {member['what'][:300]}", f"        {member['message'][:300]}"]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("area", choices=AREAS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=CHUNK)
    parser.add_argument("--here", action="store_true", help="judge in this process and print verdicts as JSON")
    given = parser.parse_args()
    if given.here:
        return judge_here(given.area, given.seed, given.cases)
    found = judge_area(given.area, given.seed, given.cases)
    print(dict(Counter(verdict["kind"] for verdict in found)))
    print(describe_defects(found))


if __name__ == "__main__":
    main()

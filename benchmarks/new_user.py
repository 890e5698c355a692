"""First steps in a clean environment: install the wheel, run the examples of the README, run a benchmark.

    python -m benchmarks.new_user --out reports/new_user.md

Each step is a process in an empty folder, without a compilation cache.
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path

from benchmarks.machine import facts, load
from benchmarks.markdown import table
from tests import wheel

STEPS = ("first example of the README", "user-defined losses", "one benchmark and its page")


def take_step(programs, step, folder):
    """Take a step as the README describes it; return its output, wall seconds and processor seconds."""
    estimator, own_losses, _ = wheel.blocks("README.md", "python")
    (command,) = (line for line in wheel.commands("README.md") if line.startswith("bilevel run"))
    began, compiles = _clocks(), {"JAX_ENABLE_COMPILATION_CACHE": "0"}
    if step == STEPS[2]:
        shown = wheel.call("/bin/sh", "-ec", command, cwd=folder, PATH=f"{programs}:/usr/bin:/bin", **compiles)
    else:
        (folder / "step.py").write_text(estimator if step == STEPS[0] else own_losses)
        shown = wheel.call(programs / "python", "step.py", cwd=folder, **compiles)
    return shown, _since(began)


def _clocks():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter(), used.ru_utime + used.ru_stime


def _since(began):
    return tuple(now - then for now, then in zip(_clocks(), began, strict=True))


def measure(folder):
    """Yield each step with its wall and processor seconds."""
    built, began = wheel.build_wheel(folder / "wheel"), _clocks()
    programs = wheel.make_environment(folder / "environment", f"{built}[estimators,bench]")
    yield "new environment, and installation of the wheel with `estimators` and `bench`", _since(began)
    for step in STEPS:
        place = folder / step.replace(" ", "-")
        place.mkdir()
        yield step, take_step(programs, step, place)[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("results") / "new_user.md")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [[step, *(f"{seconds:.0f}" for seconds in found)] for step, found in measure(Path(folder))]
    known = "\n".join(f"- {fact}" for fact in [*facts(), f"load {load(own=1)}"])
    text = f"# First steps of a new user\n\n    python -m benchmarks.new_user --out reports/new_user.md\n\n{known}\n\n"
    text += "Times are from the start of a process to its end, in a new environment without a compilation cache.\n\n"
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(text + table(["step", "seconds", "processor seconds"], rows) + "\n")
    print(given.out.read_text())


if __name__ == "__main__":
    main()

"""Measure the library on this machine, and write one Markdown file of tables.

    python benchmarks/bench.py [--only step,memory,…] [--out results/bench.md] [--quick]

step      time per step of each solver on three problems, compared with a textbook version, a floor and a goal
memory    peak memory of a run, and the size of the state of a solver
compile   seconds of compilation
sweep     many cells in one program compared with one after another
target    time to a value of h on IJCNN1; needs the data in the folder BILEVEL_DATA
scaling   time and memory against the numbers of rows and features
device    agreement of solvers on an accelerator with the CPU
graphs    loops on a GPU, launched kernel by kernel or as a CUDA graph
gpu       thousands of cells in one program and large batches on an accelerator
"""

import argparse
import os
import time
from pathlib import Path

import device
import machine
import memory
import scaling
import step
import sweep
import target

import bilevel

PARTS = {
    "step": ("Time per step", step.measure),
    "memory": ("Memory", memory.measure),
    "compile": ("Compilation", memory.measure_compilation),
    "sweep": ("Sweeps", sweep.measure),
    "target": ("Time to a target", target.measure),
    "scaling": ("Scaling", scaling.measure),
    "device": ("Devices", device.compare_with_cpu),
    "graphs": ("Loops as graphs", device.measure_loops),
    "gpu": ("GPU", device.measure_throughput),
}


def main():
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"  # compilation is measured
    arguments = parsed()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    lines = [*machine.facts(), f"load average at the beginning: {machine.load()}"]
    print("\n".join(lines), flush=True)
    sections = []
    for name in arguments.only:
        print(f"{name} …", flush=True)
        began = time.perf_counter()
        title, measure = PARTS[name]
        text = measure(arguments.quick)
        seconds = f"{time.perf_counter() - began:.0f} s"
        sections.append(f"## {title}\n\n{text}\n\n({seconds}; load average after it: {machine.load_after()})")
        # Finished parts are written, even if a later part fails.
        arguments.out.write_text(page(lines, sections, arguments.quick))
        print(f"{name}: {seconds}\n\n{text}\n", flush=True)
    print(f"load average at the end: {machine.load_after()}\nwritten: {arguments.out}")


def page(lines, sections, quick):
    title = "# Measurements" + (" (quick run: the numbers are meaningless)" if quick else "")
    return "\n\n".join([title, "\n".join(f"- {line}" for line in lines), *sections]) + "\n"


def parsed():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=chosen, default=list(PARTS), metavar="PARTS", help="parts, separated by commas")
    parser.add_argument("--out", type=Path, default=Path("results/bench.md"))
    parser.add_argument("--quick", action="store_true", help="tiny rounds, to check that everything runs")
    return parser.parse_args()


def chosen(text):
    names = text.split(",")
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(PARTS)}")
    return names


if __name__ == "__main__":
    bilevel.fuse_cpu_loops()
    main()

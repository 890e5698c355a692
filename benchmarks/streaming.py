"""SRBA on rows of a file that never fit into memory: time per pass compared with plain reads, time per step, memory.

    python benchmarks/streaming.py [--rows 100000000] [--features 22] [--folder .] [--keep]

Logistic penalty selection in float32. Standard normal training rows and labels from a logistic model are first written
to two files in ``--folder``, which are deleted at the end unless ``--keep`` is given. A pass computes ∇z G, the
Hessian-vector product and the cross product. Before each pass and each plain read, the file is dropped from the page
cache of the system, so that both read from the disk.
"""

import argparse
import os
import shutil
import time
from pathlib import Path

import jax
import numpy as np
from markdown import head, line

import bilevel
from bilevel._core.compilation import arithmetic
from bilevel.engine.steps import PAGE_LENGTH

N_VALIDATION = 1_000_000
WRITTEN = 2**18  # rows that are written at a time
BUFFER = 2**24  # bytes of a plain read
MARGIN = 2**30  # bytes of disk to leave free


def truth(features):
    return np.random.default_rng(1).standard_normal(features).astype(np.float32) / np.sqrt(features)


def make_rows(rng, n, features):
    rows = rng.standard_normal((n, features), dtype=np.float32)
    share_of_ones = 1 / (1 + np.exp(-rows @ truth(features)))
    return rows, np.where(rng.random(n, dtype=np.float32) < share_of_ones, 1, -1).astype(np.int8)


def write(folder, n, features):
    """Write rows and labels in parts, unless the disk is too small."""
    needed, free = n * (4 * features + 1), shutil.disk_usage(folder).free
    if needed + MARGIN > free:
        raise SystemExit(f"`--rows {n}` takes {needed / 1e9:.1f} GB, and {folder} has {free / 1e9:.1f} GB free.")
    rng, paths = np.random.default_rng(0), (folder / "streaming_rows.bin", folder / "streaming_labels.bin")
    with paths[0].open("wb") as rows_file, paths[1].open("wb") as labels_file:
        for begin in range(0, n, WRITTEN):
            rows, labels = make_rows(rng, min(WRITTEN, n - begin), features)
            rows.tofile(rows_file)
            labels.tofile(labels_file)
        for file in (rows_file, labels_file):
            file.flush()
            os.fsync(file.fileno())
    return paths


def forget(paths):
    """Drop the files from the page cache of the system."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def plain_read(paths):
    """Return the seconds to read the files from beginning to end."""
    forget(paths)
    buffer, began = bytearray(BUFFER), time.perf_counter()
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - began


@jax.jit
def whole_pass(oracles, point):
    return oracles.inner(point)


def one_pass(problem, paths):
    """Return wall and processor seconds of a pass; processor seconds depend less on other work on the machine."""
    forget(paths)
    began = time.perf_counter(), time.process_time()
    jax.block_until_ready(whole_pass(problem.oracles, problem.start))
    return time.perf_counter() - began[0], time.process_time() - began[1]


def memory():
    """Return the megabytes of this process by kind; the last is the peak, including mapped files."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return {name: int(lines[name].split()[0]) / 1024 for name in ("RssAnon", "RssShmem", "RssFile", "VmHWM")}


def print_memory(when, most):
    found = memory()
    own = found["RssAnon"] + found["RssShmem"]
    print(f"memory {when}: {own:,.0f} MB, peak {found['VmHWM']:,.0f} MB with mapped files", flush=True)
    return max(most, own)


def build(paths, n, features):
    X = np.memmap(paths[0], np.float32, "r", shape=(n, features))
    y = np.memmap(paths[1], np.int8, "r", shape=(n,))
    X_val, y_val = make_rows(np.random.default_rng(2), min(N_VALIDATION, n), features)
    train = bilevel.HostData(X, shuffle=False)
    start = {"inner_var": np.zeros(features), "outer_var": np.full(features, -9.0)}
    return bilevel.problems.penalty_selection(train, y, X_val, y_val, dtype="float32", **start)


def time_passes(problem, paths, repeats, gigabytes):
    with arithmetic(problem.dtype):
        print(head(["plain read, s", "pass, s", "processors, s", "pass / plain", "pass, GB/s"]))
        for _ in range(repeats):
            plain, (passed, cores) = plain_read(paths), one_pass(problem, paths)
            seconds = (f"{value:.1f}" for value in (plain, passed, cores))
            print(line([*seconds, f"{passed / plain:.2f}", f"{gigabytes / passed:.2f}"]), flush=True)


def time_steps(problem, paths, solver, n_steps):
    """Run SRBA; print the times of pass and steps, and the distance of the end from the true model."""
    forget(paths)
    run = bilevel.Run(problem, solver, exact=False)
    began = time.perf_counter()
    run.advance(1)
    passed = time.perf_counter() - began
    run.advance(n_steps - 1)
    model = truth(problem.start.inner_var.size)
    errors = [np.linalg.norm(z - model) / np.linalg.norm(model) for z in (problem.start.inner_var, run.point.inner_var)]
    print(f"first step, with a pass: {passed:.1f} s")
    print(f"{n_steps} steps, {run.calls.inner_grad / problem.n_inner:.2f} passes of gradients", flush=True)
    print(f"relative error of z: {errors[0]:.3f} at the start, {errors[1]:.5f} at the end", flush=True)


def time_draws(problem, paths, batch):
    """Print the time per step of the second page of steps, without passes and with rows from the disk."""
    run = bilevel.Run(problem, bilevel.SOBA(0.1, 1.0, batch), exact=False)
    run.advance(PAGE_LENGTH)
    forget(paths)
    began = time.perf_counter()
    run.advance(PAGE_LENGTH)
    print(f"steps of SOBA, batch {batch}: {1e6 * (time.perf_counter() - began) / PAGE_LENGTH:.0f} µs each", flush=True)


def parsed():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=lambda text: int(float(text)), default=100_000_000)
    parser.add_argument("--features", type=int, default=22)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--keep", action="store_true", help="keep the files")
    return parser.parse_args()


def main():
    options = parsed()
    n, gigabytes = options.rows, options.rows * (4 * options.features + 1) / 1e9
    paths, most = write(options.folder, n, options.features), 0.0
    try:
        print(f"JAX {jax.__version__}, {os.cpu_count()} cores; {n:,} rows, {gigabytes:.1f} GB")
        most = print_memory("before", most)
        problem = build(paths, n, options.features)
        time_passes(problem, paths, options.repeats, gigabytes)
        most = print_memory("after the passes", most)
        solver = bilevel.SRBA(0.5, 1.0, options.batch, period=options.steps // 4, outer_optimizer="adam")
        print("\nSRBA")
        time_draws(problem, paths, options.batch)
        time_steps(problem, paths, solver, options.steps)
        most = print_memory("after the run", most)
        print(f"\nlargest of these: {most:,.0f} MB")
    finally:
        for path in () if options.keep else paths:
            path.unlink()


if __name__ == "__main__":
    main()

"""Solvers on an accelerator: agreement with the CPU, loops as graphs, many cells in one program, large batches."""

import time

import jax
import numpy as np
import shapes
import sweep
from markdown import number, table

import bilevel
from bilevel.solvers import Solver

NONE = "Not measured: the default device of this machine is its CPU."
PEAK_FLOPS = {"NVIDIA H200": 67e12}  # float32 without tensor cores, according to the manufacturer
EPOCHS = 60
CELLS = ((25, 10), (100, 10), (200, 10))
BATCHES = (64, 512, 4096, 16384)
PUBLISHED = ("SRBA", "SABA", "SOBA", "StocBiO", "AmIGO", "MRBO", "VRBO", "F2SA")  # compared in the paper
ROUNDS, ROUND_SECONDS = 3, 0.2


def compare_with_cpu(quick):
    """Return the largest relative difference of the final points, or the reason why there is no table."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return NONE
    found = problems()
    names = [name for name, cls in bilevel.SOLVERS.items() if issubclass(cls, Solver)][: 3 if quick else None]
    rows = [compared(name, label, problem_of, device) for name in names for label, problem_of in found.items()]
    return f"On {device.device_kind}, float64.\n\n" + table(["solver", "problem", "difference", "µs per step"], rows)


def problems():
    """Return functions that build each problem on the default device at the time of the call."""
    rng = np.random.default_rng(0)
    X, X_val = rng.standard_normal((1000, 20)), rng.standard_normal((700, 20))
    y, y_val = np.sign(X[:, 0] + 0.3), np.sign(X_val[:, 0] + 0.3)
    labels, labels_val = rng.integers(0, 3, 1000), rng.integers(0, 3, 700)
    return {
        "quadratic": lambda: bilevel.problems.quadratic(1000, 700, 20, 5, dtype="float64"),
        "logistic": lambda: bilevel.problems.penalty_selection(X, y, X_val, y_val, dtype="float64"),
        "cleaning": lambda: bilevel.problems.data_cleaning(X, labels, X_val, labels_val, dtype="float64"),
    }


def compared(name, label, problem_of, device):
    """Return one row of the table."""
    solver = bilevel.SOLVERS[name](step_size=0.05, outer_ratio=2.0)
    here, result = final_point(problem_of, solver, device)
    there, _ = final_point(problem_of, solver, jax.devices("cpu")[0])
    gap = np.linalg.norm(here - there) / np.linalg.norm(there)
    micros = 1e6 * result.history["seconds"][-1] / result.history["step"][-1]
    print(f"  {name} {label}: difference {gap:.1e}, {micros:.0f} µs per step", flush=True)
    return [name, label, f"{gap:.1e}", number(micros)]


def final_point(problem_of, solver, device):
    with jax.default_device(device):
        result = bilevel.run(problem_of(), solver, max_steps=40)
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(result.point)]), result


def measure_loops(quick):
    """Return µs per step of each solver with its loop launched kernel by kernel, and as a CUDA graph."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return NONE
    compiled = [name for name, cls in bilevel.SOLVERS.items() if issubclass(cls, Solver) and name != "AutoSRBA"]
    rows = []
    for label, build in shapes.PROBLEMS.items():
        problem = build()
        for name in compiled[:2] if quick else compiled if label == "IJCNN1" else PUBLISHED:
            kernels, graph = loop_micros(problem, name)
            rows.append([label, name, number(kernels), number(graph), number(kernels / graph)])
            print(f"  {rows[-1]}", flush=True)
    header = ["problem", "solver", "kernel by kernel, µs", "graph, µs", "kernel by kernel / graph"]
    return f"On {device.device_kind}, best of {ROUNDS} rounds in turns.\n\n" + table(header, rows)


def loop_micros(problem, name):
    """Return the best µs per step with the loop launched kernel by kernel, and as a graph."""
    cls = bilevel.SOLVERS[name]
    default = cls.faster_without_cuda_graph
    run = bilevel.Run(problem, cls(step_size=1e-3, outer_ratio=1.0), exact=False)

    def seconds_of(n_steps, *, without_graph):
        cls.faster_without_cuda_graph = without_graph  # read when the loop is called
        run.restart()
        began = time.perf_counter()
        run.advance(n_steps)
        return time.perf_counter() - began

    try:
        for without_graph in (True, False):
            seconds_of(1, without_graph=without_graph)  # compiles
        n_steps = 64
        while seconds_of(n_steps, without_graph=True) < ROUND_SECONDS and n_steps < 2**14:
            n_steps *= 2
        rounds = [[seconds_of(n_steps, without_graph=way) for way in (True, False)] for _ in range(ROUNDS)]
    finally:
        cls.faster_without_cuda_graph = default
    return 1e6 * np.min(rounds, axis=0) / n_steps


def measure_throughput(quick):
    """Return both tables, or the reason for their absence."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return NONE
    return f"On {device.device_kind}.\n\n{cells_table(quick)}\n\n{batches_table(quick, device)}"


def cells_table(quick):
    """Return wall times of sweeps of SRBA without compilation, and of additional steps alone.

    The time of additional steps is the difference of a long and a short sweep: evaluations are evenly spaced on a
    logarithmic scale of calls, so the second half of a sweep has few.
    """
    problem = shapes.logistic_problem()
    epoch = problem.n_inner + problem.n_outer
    rows = []
    for n_settings, n_seeds in CELLS[:1] if quick else CELLS:
        solvers, seeds = sweep.grid(n_settings, problem), list(range(n_seeds))
        sweep.together(problem, solvers, seeds, 5 * epoch)  # compiles
        short, long = (sweep.together(problem, solvers, seeds, n * epoch)[1:] for n in (EPOCHS, 10 * EPOCHS))
        whole = 1e6 * long[0] / long[1]
        marginal = 1e6 * (long[0] - short[0]) / (long[1] - short[1])
        rows.append([f"{n_settings} × {n_seeds}", f"{long[1]:,}", *map(number, (long[0], whole, marginal))])
        print(f"  {rows[-1]}", flush=True)
    return table(["settings × seeds", "cell-steps", "seconds", "µs per cell-step", "of more steps"], rows)


def batches_table(quick, device):
    """Return times of steps of SRBA on data cleaning with growing batches, and the share of peak arithmetic."""
    problem = shapes.cleaning_problem(n_val=20_000)
    peak, rows = PEAK_FLOPS.get(device.device_kind), []
    for batch in BATCHES[:2] if quick else BATCHES:
        seconds = seconds_per_step(problem, bilevel.SRBA(1e-4, 1.0, batch, period=10**6))
        flops = difference_flops(problem, batch)
        share = f"{100 * flops / seconds / peak:.1f} %" if peak else None
        rows.append([str(batch), number(1e6 * seconds), number(flops / seconds / 1e12), share])
        print(f"  {rows[-1]}", flush=True)
    return table(["batch", "µs per step", "TFLOP/s", "of peak"], rows)


def seconds_per_step(problem, solver, steps=2000):
    """Return seconds by the clock of the run, without the full-batch pass of the first step."""
    history = bilevel.run(problem, solver, max_steps=2 * steps, eval_every=steps).history
    return (history["seconds"][2] - history["seconds"][1]) / (history["step"][2] - history["step"][1])


def difference_flops(problem, batch):
    """Return the operations with rows: six products with inner rows and three with outer rows."""
    size = np.size(problem.start.inner_var)
    return 2 * batch * size * (4 + 2 + 2 + 1)

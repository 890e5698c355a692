"""A GPU at what it is good at: many cells in one program, and large batches of long rows."""

import jax
import numpy as np
import shapes
import sweep
from markdown import number, table

import bilevel

PEAK_FLOPS = {"NVIDIA H200": 67e12}  # float32, as its maker states it, without tensor cores
EPOCHS = 60
CELLS = ((25, 10), (100, 10), (200, 10))
BATCHES = (64, 512, 4096, 16384)


def measure(quick):
    """Both tables, or why there are none."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return "Not measured: the default device of this machine is its CPU."
    return f"On {device.device_kind}.\n\n{cells_table(quick)}\n\n{batches_table(quick, device)}"


def cells_table(quick):
    """Wall time of whole sweeps of SRBA, without compilation; of a longer one less a shorter one, steps nearly alone.

    Evaluations are evenly spaced on a log scale of calls, so that the second half of a sweep has few.
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
    """Steps of SRBA on data cleaning with ever larger batches, and the share of the device's arithmetic they use."""
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
    """Seconds of the library's clock, without the full-batch pass of the first step."""
    history = bilevel.run(problem, solver, max_steps=2 * steps, eval_every=steps).history
    return (history["seconds"][2] - history["seconds"][1]) / (history["step"][2] - history["step"][1])


def difference_flops(problem, batch):
    """Multiplications and additions with rows: four products with the inner ones and two back, two and one outer."""
    size = np.size(problem.start.inner_var)
    return 2 * batch * size * (4 + 2 + 2 + 1)

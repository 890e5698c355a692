"""A made-up store: curves in closed form, divergence, gaps, and strings that contain markup."""

import json

import numpy as np
import pandas as pd

from bilevel import SOLVERS
from bilevel._core.types import Calls
from bilevel.bench.config import Cell

HOSTILE = "<script>window.hacked = 1</script>"
HOSTILE_ARGUMENT = '</script><img src="x" onerror="window.hacked = 1">\u2028$x_'
TAG = '"><img src=x onerror="window.hacked = 1"><a href="javascript:1">'
EXACT = ("value", "hypergrad_norm_sq", "inner_distance_sq", "v_distance_sq", "value_gap")
CHEAP = ("outer_value", "inner_residual_sq", "v_residual_sq", "direction_norm_sq", "test_error")
UNUSED = ("exact_inner_residual", "exact_v_residual", "weight_auc", "drift", "rollbacks", "step_scale")
PROBLEMS = {"quadratic": (("name", HOSTILE_ARGUMENT),), "digits_cleaning": ()}
ABSENT = {"quadratic": "test_error", "digits_cleaning": "value_gap"}
RATES = {"SRBA": 4.0, "SABA": 3.0, "SOBA": 1.5, "StocBiO": 0.0}
STEP_SIZES = (0.01, 0.1, 1.0)
EVALUATIONS = 41
ROWS_PER_EPOCH = 1000
SWEEP_SEEDS, TIMING_SEEDS = 3, 10
HYPER_PARAMETERS = sorted({name for solver in SOLVERS.values() for name in solver().parameters()})


def store():
    """Two problems; SRBA, SABA and SOBA swept and timed at step_size 0.1, StocBiO diverged wherever it went."""
    rows = []
    for problem in PROBLEMS:
        for solver in RATES:
            for step_size in STEP_SIZES:
                for seed in range(SWEEP_SEEDS):
                    rows += cell_rows(problem, solver, step_size, seed, "sweep")
            if solver != "StocBiO":
                for seed in range(TIMING_SEEDS):
                    rows += cell_rows(problem, solver, 0.1, seed, "timing")
    return pd.DataFrame(rows)


def hostile(table):
    """Return the table with markup in every text, and in the name of a metric."""
    texts = ("experiment", "columns", "machine", "python", "jax", "bilevel", "revision", "written_at")
    return table.assign(**dict.fromkeys(texts, TAG), **{TAG: table["value"]}, problem=table["problem"] + TAG)


def has_diverged(solver, step_size, seed, phase):
    return solver == "StocBiO" or step_size == 1.0 or (solver == "SOBA" and phase == "timing" and seed < 3)


def cell_rows(problem, solver, step_size, seed, phase):
    parameters = SOLVERS[solver]().parameters() | {"step_size": step_size}
    cell = Cell(HOSTILE, problem, PROBLEMS[problem], solver, tuple(sorted(parameters.items())), seed, phase)
    diverged = has_diverged(solver, step_size, seed, phase)
    count = 8 + seed if diverged else EVALUATIONS
    fixed = {f"param_{name}": parameters.get(name) for name in HYPER_PARAMETERS} | {
        "cell": cell.id,
        "experiment": HOSTILE,
        "phase": phase,
        "problem": problem,
        "problem_arguments": json.dumps(dict(PROBLEMS[problem])),
        "solver": solver,
        "seed": seed,
        "status": "diverged" if diverged else "out_of_budget",
        "machine": "Processor & Sons, 2 cores",
        "python": "3.11.2",
        "jax": "0.10.0",
        "bilevel": "0.1.0",
        "revision": "0123456789abcdef",
        "written_at": "2024-05-06T07:08:09+00:00",
    }
    return [fixed | evaluation(cell, step, step == count - 1) for step in range(count)]


def evaluation(cell, step, final):
    parameters = dict(cell.parameters)
    calls = 500 * step
    decay = np.exp(-RATES[cell.solver] * step / 10 * np.sqrt(parameters["step_size"] * 10))
    noise = 1 + 0.1 * cell.seed
    metrics = dict.fromkeys(EXACT, decay * noise) | dict.fromkeys(CHEAP, 0.1 + decay * noise)
    metrics |= dict.fromkeys(UNUSED, np.nan) | {ABSENT[cell.problem]: np.nan}
    if cell.phase == "sweep" and not final:
        metrics |= dict.fromkeys(EXACT, np.nan)
    return metrics | {
        "final": final,
        "step": step * 10,
        "seconds": np.nan if cell.phase == "sweep" else 0.05 * step * (1 + 0.02 * cell.seed),
        "calls": calls,
        **{f"calls_{kind}": calls if kind == "inner_grad" else 0 for kind in Calls._fields},
        "epochs": calls / ROWS_PER_EPOCH,
        "memory_bytes": 8.0 * 1024 if final else np.nan,
    }

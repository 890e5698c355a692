"""Every solver on this machine's default device beside its CPU: largest relative difference of the final points."""

import jax
import numpy as np
from markdown import number, table

import bilevel
from bilevel.solvers import Solver


def measure(quick):
    """The table, or why there is none."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return "Not measured: the default device of this machine is its CPU."
    found = problems()
    names = [name for name, cls in bilevel.SOLVERS.items() if issubclass(cls, Solver)][: 3 if quick else None]
    rows = [compared(name, label, problem_of, device) for name in names for label, problem_of in found.items()]
    return f"On {device.device_kind}, float64.\n\n" + table(["solver", "problem", "difference", "µs per step"], rows)


def problems():
    """Functions that build each problem on the device that is the default then."""
    rng = np.random.default_rng(0)
    X, X_val = rng.standard_normal((1000, 20)), rng.standard_normal((700, 20))
    y, y_val = np.sign(X[:, 0] + 0.3), np.sign(X_val[:, 0] + 0.3)
    labels, labels_val = rng.integers(0, 3, 1000), rng.integers(0, 3, 700)
    return {
        "quadratic": lambda: bilevel.problems.quadratic(1000, 700, 20, 5, dtype="float64"),
        "logistic": lambda: bilevel.problems.logistic_selection(X, y, X_val, y_val, dtype="float64"),
        "cleaning": lambda: bilevel.problems.data_cleaning(X, labels, X_val, labels_val, dtype="float64"),
    }


def compared(name, label, problem_of, device):
    """One line of the table."""
    solver = bilevel.SOLVERS[name](0.05, 2.0)
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

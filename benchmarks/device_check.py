"""Every solver on this machine's default device beside its CPU: largest relative difference of the final points.

python benchmarks/device_check.py
"""

import jax
import numpy as np

import bilevel


def final_point(problem_of, solver, device):
    with jax.default_device(device):
        result = bilevel.run(problem_of(), solver, max_steps=40)
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(result.point)]), result


def main():
    rng = np.random.default_rng(0)
    X, X_val = rng.standard_normal((1000, 20)), rng.standard_normal((700, 20))
    y, y_val = np.sign(X[:, 0] + 0.3), np.sign(X_val[:, 0] + 0.3)
    labels, labels_val = rng.integers(0, 3, 1000), rng.integers(0, 3, 700)
    print(f"Python with JAX {jax.__version__} on {jax.devices()[0].device_kind}")
    problems = {
        "quadratic": lambda: bilevel.problems.quadratic(1000, 700, 20, 5, dtype="float64"),
        "logistic": lambda: bilevel.problems.logistic_selection(X, y, X_val, y_val, dtype="float64"),
        "cleaning": lambda: bilevel.problems.data_cleaning(X, labels, X_val, labels_val, dtype="float64"),
    }
    for name, cls in bilevel.SOLVERS.items():
        for label, problem_of in problems.items():
            here, result = final_point(problem_of, cls(0.05, 2.0), jax.devices()[0])
            there, _ = final_point(problem_of, cls(0.05, 2.0), jax.devices("cpu")[0])
            gap = np.linalg.norm(here - there) / np.linalg.norm(there)
            micros = 1e6 * result.history["seconds"][-1] / result.history["step"][-1]
            print(f"{name:<8} {label:<10} difference {gap:.1e}   {micros:8.0f} µs per step", flush=True)


if __name__ == "__main__":
    main()

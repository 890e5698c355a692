"""Print the table of reports/certificates.md.

python docs/certificate_table.py           # minutes; sklearn's and IJCNN1's data
"""

import jax
import numpy as np

import bilevel
from bilevel import problems
from bilevel._core.compilation import arithmetic
from bilevel._core.types import Point

SRBA = bilevel.SRBA
STEPS = [4**k for k in range(8)]
HEADER = ("problem", "along a run", "0.001 away", "1 away", "‖∇h‖ ≤", "‖∇h‖")


def diabetes(**kwargs):
    from sklearn.datasets import load_diabetes

    X, y = load_diabetes(return_X_y=True)
    X, y = X / X.std(0), (y - y.mean()) / y.std()
    return problems.penalty_selection(X[::2], y[::2], X[1::2], y[1::2], loss="squared", dtype="float32", **kwargs)


def digits(per):
    from sklearn.datasets import load_digits

    X, y = load_digits(return_X_y=True)
    X = (X - X.mean(0)) / np.maximum(X.std(0), 1)
    return problems.penalty_selection(X[::2], y[::2], X[1::2], y[1::2], loss="softmax", per=per, dtype="float32")


PROBLEMS = {
    "quadratic, 1024/256 rows": (lambda: problems.quadratic(1024, 256, 20, 5, dtype="float32"), SRBA(0.02, 20.0, 16)),
    "logistic, breast_cancer": (problems.breast_cancer, SRBA(0.1, 1.0, 16)),
    "logistic, ijcnn1": (problems.ijcnn1, SRBA(2.0, 1.0, 64)),
    "ridge, diabetes": (diabetes, SRBA(0.05, 1.0, 16)),
    "ridge, diabetes, 2 groups": (lambda: diabetes(groups=np.arange(10) % 2), SRBA(0.05, 1.0, 16)),
    "softmax per class, digits": (lambda: digits("class"), SRBA(0.05, 100.0, 64)),
    "softmax per feature, digits": (lambda: digits("feature"), SRBA(0.05, 100.0, 64)),
    "cleaning, digits": (problems.digits_cleaning, SRBA(0.01, 1e-3, 64)),
}


@jax.jit
def direction(oracles, point):
    return oracles.direction(point).outer_var


def ratio(problem, certifier, point, solution):
    """Return bound / truth of the error of D_x."""
    with arithmetic(np.float64):
        found = np.asarray(direction(problem.oracles.in_float64(), jax.tree.map(np.float64, point)))
    return certifier(point).error_bound / np.linalg.norm(found - solution.hypergrad)


def along_a_run(problem, certifier, solver):
    ratios = []
    for steps in STEPS:
        point = bilevel.run(problem, solver, max_steps=steps, eval_every=steps).point
        solution = problem.exact_solver(point.outer_var.astype(np.float64), None)
        ratios.append(ratio(problem, certifier, point, solution))
    return ratios, point, solution


def away(problem, certifier, x, solution, size, rng, count=25):
    """Return ratios where z and v are this far, relative to ||z*|| and ||v*||, in random directions."""

    def move(part):
        noise = rng.standard_normal(part.shape)
        return part + size * np.linalg.norm(part) / np.linalg.norm(noise) * noise

    points = (Point(move(solution.inner_var), x, move(solution.v)) for _ in range(count))
    return [ratio(problem, certifier, point, solution) for point in points]


def row(name):
    """Return the cells of one problem: medians and worst of bound / truth, and the last bound of a run."""
    build, solver = PROBLEMS[name]
    problem, rng = build(), np.random.default_rng(0)
    certifier = problem.certifier()
    ratios, point, solution = along_a_run(problem, certifier, solver)
    x = point.outer_var.astype(np.float64)
    groups = [ratios, *(away(problem, certifier, x, solution, size, rng) for size in (1e-3, 1.0))]
    cells = [f"{np.median(group):.2g} / {max(group):.2g}" for group in groups]
    assert all(min(group) >= 1 for group in groups)
    last = certifier(point).hypergrad_norm_bound, np.linalg.norm(solution.hypergrad)
    return name, *cells, *(f"{value:.2g}" for value in last)


if __name__ == "__main__":
    print("| " + " | ".join(HEADER) + " |\n" + "| --- " * len(HEADER) + "|")
    for name in PROBLEMS:
        print("| " + " | ".join(row(name)) + " |", flush=True)

"""Count the accepted steps of MAID on random problems, and those that decrease h by less than proved; prints a table.

    python benchmarks/certified_descent.py                # 10,000 steps, minutes
    python benchmarks/certified_descent.py --steps 200

h is computed apart from the library: z*(x) by Newton's method with gradients in extended precision, and F in extended
precision, whose rounding errors are 2000 times smaller than those of float64.
"""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import bilevel
from bilevel.problems import penalty_selection, quadratic

WIDE = np.longdouble
MOST_STEPS = 120  # of one run


class Exact:
    """h of one problem in extended precision.

    Parameters
    ----------
    gradient, hessian : of G with respect to the flat z, functions of z and x
    value : F, a function of z and x
    """

    def __init__(self, gradient: Callable, hessian: Callable, value: Callable) -> None:
        self.gradient, self.hessian, self.value = gradient, hessian, value

    def __call__(self, z: np.ndarray, x: np.ndarray) -> Any:
        """Return h(x), from a z near z*(x)."""
        z, x, last = np.asarray(z, WIDE).ravel(), np.asarray(x, WIDE), np.inf
        for _ in range(100):
            grad = self.gradient(z, x)
            move = np.linalg.solve(np.asarray(self.hessian(z, x), float), np.asarray(grad, float))
            size = float(np.linalg.norm(move))
            if size >= last:
                break
            while size > 1e-3 and np.linalg.norm(self.gradient(z - move, x)) >= np.linalg.norm(grad):
                move = move / 2  # far from the solution
            z, last = z - move, size if size < 1e-6 else np.inf
        assert last < 1e-12 * (1 + float(np.linalg.norm(np.asarray(z, float)))), "Newton's method failed"
        return self.value(z, x)


def quadratics(rng):
    p, d = [(4, 2), (8, 4), (20, 10)][rng.integers(3)]
    sizes = 8 * p + 40, 6 * (p + d) + 20
    condition = [1e-1, 1e-2, 1e-3][rng.integers(3)]
    for _ in range(50):
        numbers = {"smallest_eigenvalue": condition, "coupling": 0.1 * np.sqrt(condition)}
        try:
            seed = int(rng.integers(2**31))
            problem = quadratic(*sizes, p, d, seed, **numbers, common_linear=float(rng.uniform(0, 2)), dtype="float64")
        except ValueError:  # the draw is not convex
            continue
        break
    levels = problem.oracles.inner_samples.leaves, problem.oracles.outer_samples.leaves
    inner, outer = ([np.asarray(leaf, WIDE) for leaf in level] for level in levels)
    a, b, linear = inner[0].T @ inner[0], inner[3].T @ inner[2], inner[4].sum(0)
    n = len(inner[0])

    def value(z, x):
        a, c, e, f, d_z, d_x = outer
        return np.mean(((a @ z) ** 2 + (c @ x) ** 2) / 2 + (e @ x) * (f @ z) + d_z @ z + d_x @ x)

    return problem, Exact(lambda z, x: (a @ z + b @ x + linear) / n, lambda z, x: a / n, value)


def table(rng, classes):
    """Draw rows of features with different scales, and their scores in each class."""
    p = int(rng.choice([3, 8, 15]))
    features = rng.standard_normal((int(rng.choice([60, 200])), p)) * 10 ** rng.uniform(-1, 1, p)
    return features, features @ rng.standard_normal((p, classes)) * rng.uniform(0.1, 2) / np.sqrt(p)


def linear_model(rng, loss, targets, losses):
    """Draw a selection of penalties; ``losses`` returns l, l' and l'' of scores and targets."""
    features, scores = table(rng, 1)
    labels = targets(scores[:, 0])
    groups = rng.integers(0, 2, features.shape[1]) if rng.random() < 0.5 else None
    groups = None if groups is None or len(set(groups)) < 2 else groups
    index = np.arange(features.shape[1]) if groups is None else groups
    parts = features[::2], labels[::2], features[1::2], labels[1::2]
    start = rng.uniform(-3, 2, index.max() + 1)
    problem = penalty_selection(*parts, loss=loss, groups=groups, outer_var=start, dtype="float64")
    rows, y, others, y_others = (np.asarray(part, WIDE) for part in parts)

    def gradient(z, x):
        return losses(rows @ z, y)[1] @ rows / len(y) + np.exp(x)[index] * z

    def hessian(z, x):
        return (rows.T * losses(rows @ z, y)[2]) @ rows / len(y) + np.diag(np.exp(x)[index])

    return problem, Exact(gradient, hessian, lambda z, x: np.mean(losses(others @ z, y_others)[0]))


def logistic(rng):
    def losses(scores, y):
        p = 1 / (1 + np.exp(y * scores))
        return np.logaddexp(0, -y * scores), -y * p, p * (1 - p)

    return linear_model(rng, "logistic", lambda s: np.where(s + rng.logistic(size=len(s)) > 0, 1, -1), losses)


def ridge(rng):
    def losses(scores, y):
        return (scores - y) ** 2 / 2, scores - y, np.ones_like(scores)

    return linear_model(rng, "squared", lambda s: s + rng.standard_normal(len(s)), losses)


def softmax(rng):
    classes = 3
    features, scores = table(rng, classes)
    labels = np.argmax(scores + rng.gumbel(size=scores.shape), axis=1)
    labels[: 2 * classes] = np.repeat(np.arange(classes), 2)
    per = ["class", "feature"][rng.integers(2)]
    shape = classes, features.shape[1]
    start = rng.uniform(-3, 2, shape[0 if per == "class" else 1])
    parts = features[::2], labels[::2], features[1::2], labels[1::2]
    problem = penalty_selection(*parts, loss="softmax", per=per, outer_var=start, dtype="float64")
    rows, others = np.asarray(parts[0], WIDE), np.asarray(parts[2], WIDE)

    def probabilities(z, rows):
        s = rows @ z.reshape(shape).T
        raised = np.exp(s - s.max(axis=1, keepdims=True))
        return raised / raised.sum(axis=1, keepdims=True)

    def penalties(x):
        return np.broadcast_to(np.exp(x)[:, None] if per == "class" else np.exp(x), shape).ravel()

    def gradient(z, x):
        residual = probabilities(z, rows) - np.eye(classes)[parts[1]]
        return (residual.T @ rows / len(rows)).ravel() + penalties(x) * z

    def hessian(z, x):
        p = np.asarray(probabilities(z, rows), float)
        blocks = p[:, :, None] * np.eye(classes) - p[:, :, None] * p[:, None, :]
        features = np.asarray(rows, float)
        matrix = np.einsum("nab,ni,nj->aibj", blocks, features, features, optimize=True) / len(rows)
        return matrix.reshape(z.size, z.size) + np.diag(penalties(x))

    def value(z, x):
        s = others @ z.reshape(shape).T
        top = s.max(axis=1)
        return np.mean(top + np.log(np.exp(s - top[:, None]).sum(axis=1)) - s[np.arange(len(s)), parts[3]])

    return problem, Exact(gradient, hessian, value)


FAMILIES = {"quadratics": quadratics, "logistic": logistic, "ridge": ridge, "softmax": softmax}


class Count(NamedTuple):
    """Problems, accepted steps, steps with a smaller decrease of h than proved, the smallest decrease, ended runs."""

    problems: int
    steps: int
    failures: int
    smallest_decrease: float
    ended: int


def follow(problem, exact):
    """Run MAID; return the decrease of h in each step with the proved one, and whether the run ended by itself."""
    run, pairs = bilevel.Run(problem, bilevel.MAID(), exact=False), []
    x, value = run.state.point.outer_var, exact(run.state.point.inner_var, run.state.point.outer_var)
    for _ in range(MOST_STEPS):
        run.advance(1)
        (z, x_new, _), state = run.state.point, run.state
        if state.outer_step == 0:
            return pairs, True
        last, value = value, exact(z, x_new)
        proved = np.sum((x_new - x) ** 2) * 0.1 / (state.outer_step / 1.2)
        # The bound of h must hold too.
        pairs.append((float(last - value) if value <= state.value_bound else -np.inf, float(proved)))
        x = x_new
    return pairs, False


def count(family, steps, rng):
    """Return the counts of runs on random problems of a family, with at least this many steps together."""
    pairs, problems, ended = [], 0, 0
    while len(pairs) < steps:
        found, by_itself = follow(*FAMILIES[family](rng))
        pairs, problems, ended = pairs + found, problems + 1, ended + by_itself
    decreases, proved = np.array(pairs).T
    return Count(problems, len(pairs), int(np.sum(decreases < proved)), float(decreases.min()), ended)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10_000, help="steps in total")
    steps = parser.parse_args().steps
    print("| " + " | ".join(("family", *Count._fields)) + " |\n" + "| --- " * (len(Count._fields) + 1) + "|")
    for family in FAMILIES:
        found = count(family, steps // len(FAMILIES), np.random.default_rng(0))
        cells = (family, *found[:3], f"{found.smallest_decrease:.1e}", found.ended)
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)

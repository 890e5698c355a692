"""Small problems, and draws for the transcriptions."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from .problems import LogisticSelection, Problem, Quadratic

N, M, P, D = 40, 24, 5, 3
B, T, Q, K = 4, 3, 4, 2


def factors(rng: np.random.Generator, size: int, p: int, d: int) -> dict[str, np.ndarray]:
    """Return random factors of one level, whose means keep the solution away from 0."""
    return {
        "a": rng.normal(size=(size, p)),
        "c": rng.normal(size=(size, d)),
        "e": 0.3 * rng.normal(size=(size, d)) + 0.2,
        "f": 0.3 * rng.normal(size=(size, p)) + 0.2,
        "dz": rng.normal(size=(size, p)) + 0.5 * rng.normal(size=p),
        "dx": rng.normal(size=(size, d)) + 0.5 * rng.normal(size=d),
    }


def make_quadratic() -> Quadratic:
    rng = np.random.default_rng(0)
    return Quadratic(factors(rng, N, P, D), factors(rng, M, P, D))


def make_logistic() -> LogisticSelection:
    rng = np.random.default_rng(1)
    truth = rng.normal(size=P)
    x_train, x_val = rng.normal(size=(N, P)), rng.normal(size=(M, P))
    y_train = np.sign(x_train @ truth + rng.normal(size=N))
    y_val = np.sign(x_val @ truth + rng.normal(size=M))
    return LogisticSelection(x_train, y_train, x_val, y_val)


def point(problem: Problem, seed: int = 3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=problem.p), 0.5 * rng.normal(size=problem.d) - 1.0, rng.normal(size=problem.p)


def slope(f: Callable[[np.ndarray], Any], at: np.ndarray, h: float = 1e-5) -> np.ndarray:
    """Return central differences, one row per coordinate of the argument."""
    return np.stack([(np.asarray(f(at + h * e)) - np.asarray(f(at - h * e))) / (2 * h) for e in np.eye(len(at))])


def make_draw(problem: Problem, rng: np.random.Generator, length: int = 2) -> SimpleNamespace:
    """Return the draw of one step, with the fields of all algorithms except VRBO."""

    def inner() -> np.ndarray:
        return rng.integers(problem.n, size=B)

    def outer() -> np.ndarray:
        return rng.integers(problem.m, size=B)

    return SimpleNamespace(
        inner=inner(),
        inner_at_z=inner(),
        outer=outer(),
        cross=inner(),
        inner_loop=[inner() for _ in range(T)],
        linear_loop=[inner() for _ in range(T)],
        y_inner_loop=[inner() for _ in range(T)],
        y_outer_loop=[outer() for _ in range(T)],
        neumann=[inner() for _ in range(Q)],
        length=length,
        v_inner=inner(),
        v_outer=outer(),
        x_inner=inner(),
        x_outer=outer(),
        refresh=False,
        inner_block=int(rng.integers(problem.n // B)),
        outer_block=int(rng.integers(problem.m // B)),
        gaussians=rng.normal(size=(K, problem.d)),
        signs=None,
        inner_loops={j: [inner() for _ in range(T)] for j in (-1, 0, 1)},
        outer_loops={j: [outer() for _ in range(T)] for j in (-1, 1)},
        pair=[SimpleNamespace(outer=outer(), neumann=[inner() for _ in range(Q)], cross=inner()) for _ in range(2)],
    )


def make_loop_draw(problem: Problem, rng: np.random.Generator) -> SimpleNamespace:
    """Return the draw of one step of VRBO: lists over k = 0..T."""
    return SimpleNamespace(
        inner=[rng.integers(problem.n, size=B) for _ in range(T + 1)],
        outer=[rng.integers(problem.m, size=B) for _ in range(T + 1)],
        cross=[rng.integers(problem.n, size=B) for _ in range(T + 1)],
        neumann=[[rng.integers(problem.n, size=B) for _ in range(Q)] for _ in range(T + 1)],
    )


def make_draws(problem: Problem, steps: int, seed: int = 5) -> list[SimpleNamespace]:
    rng = np.random.default_rng(seed)
    return [make_draw(problem, rng) for _ in range(steps)]


ALL = SimpleNamespace(
    inner=None,
    inner_at_z=None,
    outer=None,
    cross=None,
    inner_loop=[None] * T,
    linear_loop=[None] * T,
    y_inner_loop=[None] * T,
    y_outer_loop=[None] * T,
    neumann=[None] * Q,
    length=2,
    v_inner=None,
    v_outer=None,
    x_inner=None,
    x_outer=None,
    refresh=False,
)
ALL_LOOP = SimpleNamespace(
    inner=[None] * (T + 1), outer=[None] * (T + 1), cross=[None] * (T + 1), neumann=[[None] * Q] * (T + 1)
)
STEPS = {"step_size": 0.1, "outer_ratio": 2.0}


def blocks(size: int) -> list[np.ndarray]:
    return np.split(np.arange(size), range(B, size, B))


def assert_same(one: list[dict[str, Any]], two: list[dict[str, Any]], keys: str = "inner_var outer_var") -> None:
    assert len(one) == len(two)
    for left, right in zip(one, two, strict=True):
        for key in keys.split():
            np.testing.assert_allclose(left[key], right[key], rtol=1e-10, atol=1e-12)

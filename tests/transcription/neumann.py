"""Truncated (N1) and random-length (N2) Neumann estimates of v = -H^{-1} fz, and their hypergradients."""

from collections.abc import Sequence

from .problems import Array, Problem, Rows


def n1(problem: Problem, z: Array, x: Array, outer: Rows, batches: Sequence[Rows], eta: float) -> Array:
    """-eta * sum over k = 0..Q of (I - eta H_k)...(I - eta H_1) fz: Q products, Q + 1 terms."""
    w = problem.fz(z, x, outer)
    total = w
    for rows in batches:
        w = w - eta * problem.hv(z, x, w, rows)
        total = total + w
    return -eta * total


def n2(
    problem: Problem,
    z: Array,
    x: Array,
    outer: Rows,
    batches: Sequence[Rows],
    length: int,
    q: int,
    eta: float,
) -> Array:
    """-eta * Q * (I - eta H_P)...(I - eta H_1) fz with P = length in 0..Q-1."""
    w = problem.fz(z, x, outer)
    for rows in batches[:length]:
        w = w - eta * problem.hv(z, x, w, rows)
    return -eta * q * w


def hyp1(problem: Problem, z: Array, x: Array, outer: Rows, batches: Sequence[Rows], cross: Rows, eta: float) -> Array:
    """Hypergradient with v from N1; the cross product has its own rows."""
    v = n1(problem, z, x, outer, batches, eta)
    return problem.cr(z, x, v, cross) + problem.fx(z, x, outer)


def hyp2(
    problem: Problem,
    z: Array,
    x: Array,
    outer: Rows,
    batches: Sequence[Rows],
    length: int,
    q: int,
    cross: Rows,
    eta: float,
) -> Array:
    """Hypergradient with v from N2; the cross product has its own rows."""
    v = n2(problem, z, x, outer, batches, length, q, eta)
    return problem.cr(z, x, v, cross) + problem.fx(z, x, outer)

"""All sequences of draws of a tiny problem, with their probabilities.

The number of sequences grows like ((rows of G)(rows of F))^steps.
"""

from itertools import permutations, product
from math import ceil, factorial
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.flatten_util import ravel_pytree

from bilevel._core import trees
from bilevel._core.types import Point, PyTree, Rows
from bilevel.oracles import Oracles, Samples
from bilevel.problems import BilevelProblem
from bilevel.solvers import Solver

MOST_SEQUENCES = 200_000

S = TypeVar("S", bound=Solver)


class Sides(NamedTuple):
    """Both sides of an identity: NumPy arrays in float64, or points of them."""

    lhs: Any
    rhs: Any


class Sequences(NamedTuple):
    """Sequences of draws in the form that oracles take, (sequences, steps, ...), and their probabilities."""

    rows: Any
    probability: np.ndarray


def every_sequence(samples: Samples, steps: int) -> Sequences:
    """Return all sequences that ``samples`` may draw in the first ``steps`` steps, with their probabilities.

    Raises
    ------
    ValueError
        If nothing is drawn, or if there are more than `MOST_SEQUENCES` sequences.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"`steps={steps!r}`: must be an integer of at least 1.")
    if samples.sampling == "full":
        raise ValueError("`sampling='full'` draws nothing; use 'iid', 'blocks' or 'reshuffle'.")
    _check_count(_count_sequences(samples, steps))
    if samples.sampling == "iid":
        singles = list(product(range(samples.n), repeat=samples.batch_size * steps))
        rows = np.array(singles, np.int32).reshape(-1, steps, samples.batch_size)
        return Sequences(rows, _even(len(rows)))
    if samples.sampling == "reshuffle":
        passes = product(permutations(range(samples.n_blocks)), repeat=ceil(steps / samples.n_blocks))
        rows = np.array([np.concatenate(orders)[:steps] for orders in passes], np.int32)
        return Sequences(rows, _even(len(rows)))
    rows = np.array(list(product(range(samples.n_blocks), repeat=steps)), np.int32)
    return Sequences(rows, np.prod(shares(samples)[rows], axis=1))


def _count_sequences(samples: Samples, steps: int) -> int:
    if samples.sampling == "iid":
        return samples.n ** (samples.batch_size * steps)
    if samples.sampling == "reshuffle":
        return factorial(samples.n_blocks) ** ceil(steps / samples.n_blocks)
    return samples.n_blocks**steps


def _check_count(count: int) -> None:
    if count > MOST_SEQUENCES:
        raise ValueError(
            f"there are {count:.3g} sequences of draws, more than {MOST_SEQUENCES}: use fewer steps or fewer rows."
        )


def _even(count: int) -> np.ndarray:
    return np.full(count, 1 / count)


def shares(samples: Samples) -> np.ndarray:
    """Return w_i = (rows of block i)/n."""
    ends = np.minimum(samples.batch_size * np.arange(1, samples.n_blocks + 1), samples.n)
    return np.diff(ends, prepend=0) / samples.n


def pair_levels(inner: Sequences, outer: Sequences) -> Sequences:
    """Return all pairs of an inner and an outer sequence, which are drawn independently."""
    _check_count(len(inner.rows) * len(outer.rows))
    i, j = np.indices((len(inner.rows), len(outer.rows))).reshape(2, -1)
    return Sequences(Rows(inner.rows[i], outer.rows[j]), inner.probability[i] * outer.probability[j])


def every_draw(oracles: Oracles, steps: int) -> Sequences:
    """Return all sequences of draws of both levels."""
    return pair_levels(every_sequence(oracles.inner_samples, steps), every_sequence(oracles.outer_samples, steps))


def widen(problem: BilevelProblem, batch_size: int, sampling: str) -> tuple[Oracles, Point]:
    """Return the oracles and the start of a problem in float64."""
    oracles = problem.oracles.astype(np.float64).with_batches(batch_size, sampling)
    return oracles, trees.to_numpy(problem.start, np.float64)


def prepare(problem: BilevelProblem, solver: S) -> tuple[Oracles, Point, S]:
    """Return the oracles, the start and the configured solver in float64."""
    oracles, start = widen(problem, solver.batch_size, solver.sampling)
    return oracles, start, solver.configure(problem).cast(np.float64)


def at_step(rows: Any, step: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[step], rows)


def flatten(point: Point) -> Point:
    return Point(*(ravel_pytree(part)[0] for part in point))


def mean_over(probability: np.ndarray, values: PyTree, axis: int = 0) -> Any:
    return jax.tree.map(lambda leaf: np.tensordot(probability, np.asarray(leaf), (0, axis)), values)

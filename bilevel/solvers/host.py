"""Solvers that are stepped from Python, because the number of derivatives in a step depends on its iterates.

Their steps call SciPy on flat float64 vectors, with compiled full-batch derivatives.
"""

import dataclasses
import math
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from bilevel._core.compilation import compiled
from bilevel._core.trees import flat
from bilevel._core.types import Calls, Point, PyTree
from bilevel.oracles import Oracles
from bilevel.problems.exact import hessian, unflatten
from bilevel.solvers.base import SolverBase, State
from bilevel.solvers.fields import one_of
from bilevel.solvers.moves import move_outer

_DEADLINE: ContextVar[float] = ContextVar("deadline", default=math.inf)  # of the current step, by `time.perf_counter`
OUTER = ("outer_value", "outer_grad", "outer_grad_outer")
# Solvers that choose their own steps reset these parameters, so that settings which differ only in them are equal.
UNUSED: dict[str, Any] = {"step_size": 0.1, "outer_ratio": 1.0, "batch_size": 64}

T = TypeVar("T")


class OutOfTime(Exception):
    """The time limit was reached within a step, which is then discarded."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` when a derivative is requested later than ``seconds`` from now."""
    token = _DEADLINE.set(time.perf_counter() + seconds)
    try:
        yield
    finally:
        _DEADLINE.reset(token)


@dataclasses.dataclass(frozen=True)
class HostSolver(SolverBase[State], Generic[State]):
    """A solver that `run` steps from Python, with oracles and start in float64 whatever the dtype of the problem.

    Its state consists of NumPy arrays. The field ``calls`` of the state contains the oracle calls so far, by kind.

    Parameters
    ----------
    sampling : "full" only
    """

    sampling: str = one_of(("full",), default="full", kw_only=True)

    takes_outer_term = False
    derivative_groups: ClassVar[tuple[tuple[str, ...], ...]] = ()  # the derivatives that steps evaluate together

    def warm_up(self, oracles: Oracles, start: Point) -> None:
        """Compile and import everything that steps call, before the clock starts."""
        import scipy.optimize
        import scipy.sparse.linalg  # noqa: F401

        full = FullBatch(oracles, start)
        z, x, v = full.vectors()
        for kinds in self.derivative_groups:
            full.evaluate(kinds, z, x, v)

    @abstractmethod
    def step(self, oracles: Oracles, state: State, index: int) -> State:
        """Return the state after step ``index``, which counts from 0."""


class FullBatch:
    """Full-batch derivatives of a problem at flat vectors z, x and v.

    Parameters
    ----------
    oracles : derivatives of the problem, in float64
    like : a point with the structure and shapes of the variables, in float64
    calls : oracle calls so far, by kind; None means none. Every request is added to the attribute ``calls``
    """

    def __init__(self, oracles: Oracles, like: Point, calls: np.ndarray | None = None) -> None:
        self.oracles, self.like = oracles, like
        self.calls = np.zeros(len(Calls._fields), np.int64) if calls is None else np.array(calls, np.int64)

    def vectors(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return z, x and v of the point that this object was created with."""
        return flat(self.like.inner_var), flat(self.like.outer_var), flat(self.like.v)

    def point(self, z: np.ndarray, x: np.ndarray, v: np.ndarray) -> Point:
        """Return the point with these flat variables."""
        like = self.like
        return Point(unflatten(z, like.inner_var), unflatten(x, like.outer_var), unflatten(v, like.inner_var))

    def move_outer(self, x: np.ndarray, direction: np.ndarray, step: float) -> np.ndarray:
        """Return x after a step along a direction, within the bounds of the problem and with its outer term."""
        at, along = (unflatten(part, self.like.outer_var) for part in (x, direction))
        return flat(move_outer(self.oracles, self.like._replace(outer_var=at), along, step).outer_var)

    def evaluate(self, kinds: tuple[str, ...], z: np.ndarray, x: np.ndarray, v: np.ndarray | None = None) -> list:
        """Return the derivatives of these kinds, each as a flat vector. The kinds "hvp" and "cross" require v."""
        for kind in kinds:
            self.count(kind)
        return [flat(answer) for answer in _evaluate(self.oracles, self.point(z, x, z if v is None else v), kinds)]

    def hessian(self, z: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Return the matrix ∇²zz G, at the cost of p products."""
        self.count("hvp", times=z.size)
        return np.asarray(hessian(self.oracles, self.point(z, x, z)))

    def product(self, z: np.ndarray, x: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Return (∇²zz G) v."""
        return self.evaluate(("hvp",), z, x, v)[0]

    def conjugate_gradients(
        self,
        z: np.ndarray,
        x: np.ndarray,
        right_side: np.ndarray,
        guess: np.ndarray,
        *,
        rtol: float,
        atol: float,
        limit: int | None = None,
    ) -> np.ndarray:
        """Return v with ||(∇²zz G) v - right_side|| <= max(atol, rtol ||right_side||), starting at ``guess``."""
        from scipy.sparse.linalg import cg

        # With rounding errors, ill-conditioned systems take more than p iterations.
        limit = 10 * z.size + 100 if limit is None else limit
        return cg(self.operator(z, x), right_side, x0=guess, rtol=rtol, atol=atol, maxiter=limit)[0]

    def operator(self, z: np.ndarray, x: np.ndarray) -> object:
        """Return ∇²zz G as a linear operator of SciPy."""
        from scipy.sparse.linalg import LinearOperator

        return LinearOperator((z.size, z.size), matvec=partial(self.product, z, x), dtype=np.float64)

    def count(self, kind: str, times: int = 1) -> None:
        """Count full-batch passes; raise `OutOfTime` if the time limit has passed."""
        if time.perf_counter() > _DEADLINE.get():
            raise OutOfTime
        rows = self.oracles.n_outer if kind.startswith("outer") else self.oracles.n_inner
        self.calls[Calls._fields.index(kind)] += times * rows


@compiled("kinds")
def _evaluate(oracles: Oracles, point: Point, kinds: tuple[str, ...]) -> list[PyTree]:
    return [getattr(oracles, kind)(point) for kind in kinds]


def remember_last(function: Callable[[np.ndarray], T]) -> Callable[[np.ndarray], T]:
    """Return a function that stores its last value, because line searches evaluate the accepted point again."""
    last: tuple[np.ndarray, T] | None = None

    def remembered(x: np.ndarray) -> T:
        nonlocal last
        if last is None or not np.array_equal(x, last[0]):
            last = x.copy(), function(x)
        return last[1]

    return remembered

"""Solvers that are not compiled: their work depends on their iterates.

`run` steps a `HostSolver` from Python. SciPy does the work, on full-batch derivatives at flat float64 vectors.
"""

import dataclasses
import math
import time
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, ClassVar, Generic

import numpy as np

from bilevel._programs import compiled
from bilevel._tree import flat
from bilevel._types import Calls, Point, PyTree
from bilevel.oracles import Oracles
from bilevel.problems.exact import hessian, unflatten
from bilevel.solvers.base import SolverBase, State
from bilevel.solvers.fields import one_of

_END: ContextVar[float] = ContextVar("end", default=math.inf)  # of the step being taken, by the clock
OUTER = ("outer_value", "outer_grad", "outer_grad_outer")
UNUSED: dict[str, Any] = {"step_size": 0.1, "outer_ratio": 1.0, "batch_size": 64}  # by solvers that find their steps


class OutOfTime(Exception):
    """A step is given up."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` where a derivative is asked for after so many seconds."""
    token = _END.set(time.perf_counter() + seconds)
    try:
        yield
    finally:
        _END.reset(token)


@dataclasses.dataclass(frozen=True)
class HostSolver(SolverBase[State], Generic[State]):
    """A solver that `run` steps from Python, with oracles and start in float64 whatever the dtype of the problem.

    Its state is of NumPy arrays and has a field ``calls``: the oracle calls so far, by kind.

    Parameters
    ----------
    sampling : "full" only
    """

    sampling: str = one_of(("full",), default="full", kw_only=True)

    asks: ClassVar[tuple[tuple[str, ...], ...]] = ()  # kinds of derivatives that steps ask for, together

    def warm_up(self, oracles: Oracles, start: Point) -> None:
        """Compile and import what steps will call, off the clock."""
        import scipy.optimize
        import scipy.sparse.linalg  # noqa: F401

        full = FullBatch(oracles, start)
        z, x, v = full.vectors()
        for kinds in self.asks:
            full.ask(kinds, z, x, v)

    @abstractmethod
    def step(self, oracles: Oracles, state: State, index: int) -> State:
        """Return the state after step ``index``, which counts from 0."""


class FullBatch:
    """A problem seen through flat vectors z, x and v, which adds its full-batch passes to ``calls``, by kind.

    ``like`` is a point with the structure and shapes of the variables, in float64 as the oracles are.
    """

    def __init__(self, oracles: Oracles, like: Point, calls: np.ndarray | None = None) -> None:
        self.oracles, self.like = oracles, like
        self.calls = np.zeros(len(Calls._fields), np.int64) if calls is None else np.array(calls, np.int64)

    def vectors(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return flat(self.like.inner_var), flat(self.like.outer_var), flat(self.like.v)

    def point(self, z: np.ndarray, x: np.ndarray, v: np.ndarray) -> Point:
        like = self.like
        return Point(unflatten(z, like.inner_var), unflatten(x, like.outer_var), unflatten(v, like.inner_var))

    def ask(self, kinds: tuple[str, ...], z: np.ndarray, x: np.ndarray, v: np.ndarray | None = None) -> list:
        """Return the derivatives of these kinds, each a vector; v is needed where a product is asked for."""
        for kind in kinds:
            self.count(kind)
        return [flat(answer) for answer in _answer(self.oracles, self.point(z, x, z if v is None else v), kinds)]

    def hessian(self, z: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Return the matrix ∇²zz G, at the price of a product with each unit vector."""
        self.count("hvp", times=z.size)
        return np.asarray(hessian(self.oracles, self.point(z, x, z)))

    def product(self, z: np.ndarray, x: np.ndarray, v: np.ndarray) -> np.ndarray:
        return self.ask(("hvp",), z, x, v)[0]

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
        """Return v with ||(∇²zz G) v - right_side|| <= max(atol, rtol ||right_side||), from a guess."""
        from scipy.sparse.linalg import cg

        # Rounding costs more than p iterations where the curvature is spread widely.
        limit = 10 * z.size + 100 if limit is None else limit
        return cg(self._operator(z, x), right_side, x0=guess, rtol=rtol, atol=atol, maxiter=limit)[0]

    def smallest_eigenvalue(self, z: np.ndarray, x: np.ndarray) -> float:
        """Return the smallest eigenvalue of ∇²zz G to a hundredth, by Lanczos' method; 0 where it fails."""
        from scipy.sparse.linalg import ArpackError, eigsh

        start = np.random.default_rng(0).standard_normal(z.size)  # SciPy's own would differ from run to run
        if z.size == 1:
            return self.product(z, x, np.ones(1)).item()
        try:
            values = eigsh(self._operator(z, x), k=1, which="SA", v0=start, tol=1e-2, return_eigenvectors=False)
        except ArpackError:
            return 0.0
        return values.item()

    def _operator(self, z: np.ndarray, x: np.ndarray) -> object:
        from scipy.sparse.linalg import LinearOperator

        return LinearOperator((z.size, z.size), matvec=partial(self.product, z, x), dtype=np.float64)

    def count(self, kind: str, times: int = 1) -> None:
        """Count full-batch passes; raise `OutOfTime` where there is no time for them."""
        if time.perf_counter() > _END.get():
            raise OutOfTime
        rows = self.oracles.n_outer if kind.startswith("outer") else self.oracles.n_inner
        self.calls[Calls._fields.index(kind)] += times * rows


@compiled("kinds")
def _answer(oracles: Oracles, point: Point, kinds: tuple[str, ...]) -> list[PyTree]:
    return [getattr(oracles, kind)(point) for kind in kinds]

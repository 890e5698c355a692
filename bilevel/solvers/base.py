"""The contract of a solver.

A solver is a frozen dataclass of its hyperparameters. The decorator `solver` makes it a pytree: floats and bounds are
leaves, so that settings which differ in them share one compiled program, and the other fields are static.

`Solver` is the contract of solvers whose steps are compiled, and `HostSolver` in :mod:`bilevel.solvers.host` that of
solvers whose work depends on their iterates. `SolverBase` is what both have in common.
"""

import dataclasses
import difflib
import functools
import operator
import sys
import typing
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import jax
import numpy as np
from numpy.typing import DTypeLike

from bilevel._core.types import Array, Calls, Point
from bilevel.oracles import SAMPLINGS, Oracles
from bilevel.problems import BilevelProblem
from bilevel.solvers.fields import bounds, document, flag, fraction, one_of, positive, transformation, whole
from bilevel.solvers.moves import Moves

State = TypeVar("State", bound=Any)  # a NamedTuple with a field `point` and everything else that the next step needs
Draw = TypeVar("Draw", bound=Any)  # all random numbers of one step
S = TypeVar("S", bound="SolverBase[Any]")


class Complexity(NamedTuple):
    """Oracle calls that suffice for ||∇h||² <= ε, and the assumptions; "none" if nothing is proved.

    C^{p,k} means p times differentiable with Lipschitz derivatives up to order k; Õ hides a factor log(1/ε). G is
    strongly convex unless the setting states another condition. Unknown entries are empty.
    """

    calls: str
    setting: str = ""
    outer: str = ""  # smoothness of F
    inner: str = ""  # smoothness of G


class PointState(NamedTuple):
    """The iterate, and the states of the transformations that move it."""

    point: Point
    moves: Any = ()


class Monitor:
    """What a run reads from the states and the history of a solver, besides the standard metrics.

    A solver that ends by itself, warns its user or has diagnostics of its own returns a subclass.

    Attributes
    ----------
    max_steps : budget of a run that is given none; None if such a run is refused
    """

    max_steps: int | None = None

    def evaluation_point(self, state: Any) -> Point:
        """Return the point that metrics are evaluated at."""
        return typing.cast(Point, state.point)

    def diagnostics(self, state: Any) -> dict[str, Array]:
        """Return columns of the history, by name."""
        return {}

    def end(self, row: dict[str, Any]) -> str | None:
        """Return a sentence if the run is over by the last row of its history, else None."""
        return None

    def unfinished(self, row: dict[str, Any]) -> str:
        """Return sentences about a run that used up its budget."""
        return ""

    def warning(self, rows: list[dict[str, Any]], dtype: DTypeLike) -> str | None:
        """Return a warning about a finished run with these rows of its history, or None."""
        return None

    def inner_warning(self, oracles: Oracles, point: Point, row: dict[str, Any]) -> str | None:
        """Return a warning about z at the end of a run that was not interrupted, or None."""
        return None


@dataclasses.dataclass(frozen=True)
class SolverBase(ABC, Generic[State]):
    """Hyperparameters with their checks, and what a run reads from a state.

    Parameters
    ----------
    step_size : step of the inner variable and of v
    outer_ratio : the step of the outer variable is the step of the inner one divided by this
    batch_size : rows per batch, on both levels unless `outer_batch_size` is given
    sampling : "blocks", "iid", "reshuffle" or "full"
    """

    step_size: float = positive(default=0.1)
    outer_ratio: float = positive(default=1.0)
    batch_size: int = whole(default=64)
    sampling: str = one_of(SAMPLINGS, default="blocks", kw_only=True)

    needs_constants: ClassVar[bool] = False  # of the problem, so that most are refused; "*" leaves it out
    complexity: ClassVar[Complexity | None] = None  # required of the solvers in `SOLVERS`
    takes_outer_term: ClassVar[bool] = True  # does x move only by `Moves` or `FullBatch.move_outer`?

    @abstractmethod
    def init(self, oracles: Oracles, start: Point) -> State:
        """Return the state before the first step."""

    def configure(self, problem: BilevelProblem) -> Self:
        """Return the solver with the defaults that depend on the problem filled in, or refuse the problem."""
        return self

    @property
    def monitor(self) -> Monitor:
        """What a run reads from the states of this solver."""
        return Monitor()

    def batches(self) -> tuple[int, int]:
        """Return the rows per batch of each level."""
        return self.batch_size, self.batch_size

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, about = getattr(self, field.name), field.metadata
            if "rule" not in about or (value is None and about["optional"]):
                continue
            if "convert" in about:
                value = about["convert"](value)
                object.__setattr__(self, field.name, value)
            if complaint := about["rule"](value):
                raise ValueError(f"`{type(self).__name__}({field.name}={value!r})`: {complaint}")

    @typing.final
    def cast(self, dtype: DTypeLike) -> Self:
        """Return the solver with its floats as arrays of ``dtype``, so that 0.1, 1 and np.float64 share a trace."""
        return jax.tree.map(lambda leaf: np.asarray(leaf, dtype), self)

    @typing.final
    def parameters(self) -> dict[str, Any]:
        """Return the hyperparameters by name, as Python numbers and strings."""

        def plain(value: Any) -> Any:
            return value.item() if isinstance(value, np.generic | np.ndarray) else value

        fields = dataclasses.fields(self)
        return {field.name: field.metadata.get("text", plain)(getattr(self, field.name)) for field in fields}


@dataclasses.dataclass(frozen=True)
class Solver(SolverBase[State], Generic[State, Draw]):
    """A solver whose methods are compiled. Costs follow from the draws.

    Required are `init`, `step` and `calls`.

    Parameters
    ----------
    outer_batch_size : rows per batch of the outer level; None means `batch_size`. Default periods are for their mean
    inner_optimizer : "adam" or an optax transformation, with its schedule, that moves the inner variable instead of the
        plain step; v keeps its step. None keeps the plain step
    outer_optimizer : "adam" or an optax transformation that moves the outer variable instead of the step divided by
        `outer_ratio`; None keeps that step
    """

    outer_batch_size: int | None = whole(default=None, optional=True, hint="; use None for `batch_size`", kw_only=True)
    inner_optimizer: str | Any | None = transformation(("adam",), default=None, kw_only=True)  # noqa: RUF009
    outer_optimizer: str | Any | None = transformation(("adam",), default=None, kw_only=True)  # noqa: RUF009

    # Why z must move by the plain step; None if it may move by any transformation.
    needs_plain_step: ClassVar[str | None] = "its theory is of plain steps of z"
    needs_plain_outer_step: ClassVar[str | None] = None  # the same for x
    needs_finite_sum: ClassVar[bool] = False  # are derivatives of rows remembered, so that losses must not be random?
    keeps_tables: ClassVar[bool] = False  # is one row of large arrays in the state replaced in each step?
    faster_without_cuda_graph: ClassVar[bool] = False  # measured on an H200

    def __post_init__(self) -> None:
        SolverBase.__post_init__(self)
        reasons = {"inner_optimizer": self.needs_plain_step, "outer_optimizer": self.needs_plain_outer_step}
        for name, reason in reasons.items():
            if getattr(self, name) is not None and reason is not None:
                raise ValueError(
                    f"`{type(self).__name__}({name}=…)`: {reason}; leave it out, or use a solver such as SOBA, StocBiO "
                    "or AmIGO."
                )

    @property
    @typing.final
    def moves(self) -> Moves:
        """How the parameters of this solver move its variables."""
        return Moves.of(self)

    @typing.final
    def batches(self) -> tuple[int, int]:
        return self.batch_size, self.batch_size if self.outer_batch_size is None else self.outer_batch_size

    @abstractmethod
    def step(self, oracles: Oracles, state: State, index: Array, draw: Draw) -> State:
        """Return the state after step ``index``, which counts from 0."""

    @abstractmethod
    def calls(self, oracles: Oracles, draw: Draw, refresh: bool) -> Calls:
        """Return the exact cost of a step, or of a refresh."""

    def draw(self, oracles: Oracles, key: Array, index: Array) -> Draw:
        """Return all random numbers of step ``index``; by default one batch on each level.

        They must not depend on traced parameters: the settings of a sweep share their draws.
        """
        return typing.cast(Draw, oracles.draw(key, index))

    def refreshes(self, index: Array, draw: Draw) -> Array | None:
        """Return whether `refresh` is called instead of `step`; None if it never is."""
        return None

    def refresh(self, oracles: Oracles, state: State, index: Array, draw: Draw) -> State:
        """Return the state after a step that begins with a full-batch pass."""
        return self.step(oracles, state, index, draw)

    def init_calls(self, oracles: Oracles) -> Calls:
        """Return the exact cost of `init`."""
        return Calls()


SOLVERS: dict[str, type[SolverBase[Any]]] = {}  # those of this package, by name


def name_solver(cls: type[SolverBase[Any]]) -> str:
    """Return the name in `SOLVERS` of a class, or ``module:Class`` if it is not a solver of this package."""
    return cls.__name__ if SOLVERS.get(cls.__name__) is cls else f"{cls.__module__}:{cls.__qualname__}"


def find_imported_solver(name: str) -> type[SolverBase[Any]] | None:
    """Return the class with a name of `name_solver`, or None if its module has not been imported."""
    module, _, path = name.partition(":")
    try:
        found = SOLVERS.get(name) or operator.attrgetter(path)(sys.modules[module])
    except (KeyError, AttributeError):
        return None
    return found if isinstance(found, type) and issubclass(found, SolverBase) else None


@typing.dataclass_transform(
    frozen_default=True, field_specifiers=(positive, whole, one_of, fraction, flag, transformation, bounds)
)
def solver(cls: type[S]) -> type[S]:
    """Make a class a solver: a frozen dataclass and a pytree with strict keywords and a complete docstring.

    Solvers of this package are listed in `bilevel.SOLVERS` under their names, which no other solver may have.
    """
    known = SOLVERS.get(cls.__name__)
    if known is not None and known.__module__ != cls.__module__:
        raise ValueError(f"`{cls.__name__}` is the name of {known.__module__}.{cls.__name__}; rename your solver.")
    if cls.__module__.startswith(f"{__package__}."):
        SOLVERS[cls.__name__] = cls
    cls = dataclasses.dataclass(frozen=True)(cls)
    _register_pytree(cls)
    document(cls)
    _suggest_names(cls)
    return cls


def _register_pytree(cls: type[S]) -> None:
    # jax.tree_util.register_dataclass would call __init__, whose checks fail on tracers.
    hints = typing.get_type_hints(cls)
    fields = dataclasses.fields(cls)
    floats = [name for name, hint in hints.items() if float in (hint, *typing.get_args(hint))]
    traced = [field.name for field in fields if field.name in floats or field.metadata.get("traced")]
    static = [field.name for field in fields if field.name not in traced]

    def flatten(self: S) -> tuple[list[Any], tuple[Any, ...]]:
        return [getattr(self, name) for name in traced], tuple(getattr(self, name) for name in static)

    def unflatten(aux: tuple[Any, ...], leaves: list[Any]) -> S:
        self = object.__new__(cls)
        vars(self).update(zip([*traced, *static], [*leaves, *aux], strict=True))
        return self

    jax.tree_util.register_pytree_node(cls, flatten, unflatten)


def _suggest_names(cls: type[S]) -> None:
    plain_init = cls.__init__
    names = [field.name for field in dataclasses.fields(cls)]

    @functools.wraps(plain_init)
    def init(self: S, *args: Any, **kwargs: Any) -> None:
        for unknown in set(kwargs) - set(names):
            near = difflib.get_close_matches(unknown, names, n=1)
            hint = f"did you mean `{near[0]}`?" if near else "it takes " + ", ".join(names) + "."
            raise TypeError(f"`{cls.__name__}` has no parameter `{unknown}`; {hint}")
        plain_init(self, *args, **kwargs)

    cls.__init__ = init  # type: ignore[method-assign,assignment]

"""The contract of a solver.

A solver is a frozen dataclass of its hyper-parameters and nothing else. Declared with `@solver`, it is a
pytree: floats and bounds are traced, so many step sizes share one compiled program; the rest is static.

`SolverBase` holds what all solvers share. `Solver` is the contract of those whose steps are compiled;
:class:`bilevel.solvers.host.HostSolver` that of those whose work depends on their iterates.
"""

import dataclasses
import difflib
import functools
import math
import typing
from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import jax
import numpy as np
from numpy.typing import DTypeLike

from bilevel._types import Array, Calls, Point
from bilevel.oracles import SAMPLINGS, Oracles
from bilevel.solvers.parameters import bounds, document, flag, fraction, one_of, positive, transformation, whole


class Complexity(NamedTuple):
    """Calls that suffice for ||∇h||² <= ε, and under which assumptions; "none" where nothing is proved.

    C^{p,k} means p times differentiable with Lipschitz derivatives up to order k; Õ hides a factor log(1/ε). G is
    strongly convex in every case. What is not known is empty.
    """

    calls: str
    setting: str = ""
    outer: str = ""  # how smooth F must be
    inner: str = ""  # and G


State: typing.TypeAlias = Any  # a NamedTuple with a field `point` and what the next step needs
Draw: typing.TypeAlias = Any  # all randomness of one step
S = TypeVar("S", bound="SolverBase")


class PointState(NamedTuple):
    """The iterate, and the state of the transformation of its inner steps if there is one."""

    point: Point
    inner: Any = ()


@dataclasses.dataclass(frozen=True)
class SolverBase(ABC):
    """Hyper-parameters with their checks, and what a run reads from a state.

    Parameters
    ----------
    step_size : step of the inner variable and of v
    outer_ratio : the outer variable moves with the step of the inner one divided by this
    batch_size : rows per batch, on both levels unless `outer_batch_size` is given
    sampling : "blocks", "iid", "reshuffle" or "full"
    """

    step_size: float = positive(default=0.1)
    outer_ratio: float = positive(default=1.0)
    batch_size: int = whole(default=64)
    sampling: str = one_of(SAMPLINGS, default="blocks", kw_only=True)

    complexity: ClassVar[Complexity | None] = None  # what is proved; each registered solver says it
    needs_strong_convexity: ClassVar[bool] = False  # of the inner level: is z*(x) computed to rounding?
    table_order: ClassVar[float] = math.inf  # the place in `SOLVERS` and in tables; equals go by name

    @abstractmethod
    def init(self, oracles: Oracles, start: Point) -> State:
        """Return the state before the first step."""

    def fit_rows(self, n_inner: int, n_outer: int) -> Self:
        """Return the solver with batches that so many rows have; as it is where they were chosen by hand."""
        return self

    def resolve(self, oracles: Oracles) -> Self:
        """Return the solver with defaults that depend on the size of the problem filled in."""
        return self

    def fit_start(self, oracles: Oracles, start: Point) -> Self:
        """Return the solver fitted to the inner level at the start; asked where nobody says that it is convex."""
        return self

    def batches(self) -> tuple[int, int]:
        """Return the rows per batch of each level."""
        return self.batch_size, self.batch_size

    def check_start(self, start: Point) -> None:
        """Refuse a start that the resolved solver cannot begin from."""
        return None

    def check_losses(self, oracles: Oracles, start: Point) -> None:
        """Refuse losses whose values or derivatives at the start are too large or too small for the arithmetic."""
        return None

    def evaluation_point(self, state: State) -> Point:
        """Return the point that stands for the state: the iterate, unless the solver can roll back from it."""
        return typing.cast(Point, state.point)

    def diagnostics(self, state: State) -> dict[str, Array]:
        """Return numbers of the solver's own for the history."""
        return {}

    def may_leave_inner_behind(self, steps: int) -> bool:
        """Tell whether after so many steps z is to be compared with z*(x), since nobody chose the steps of z."""
        return False

    def own_max_steps(self) -> int | None:
        """Return how long a run may be that is given no budget; None where the solver does not end by itself."""
        return None

    def end(self, diagnostics: dict[str, float]) -> str | None:
        """Return why the run is over by the last diagnostics, a sentence; None lets it go on."""
        return None

    def shortfall(self, diagnostics: dict[str, float]) -> str:
        """Return what a run that its budget ended had not reached, sentences; nothing where that is not known."""
        return ""

    def warning(self, diagnostics: dict[str, float], dtype: DTypeLike) -> str | None:
        """Return a sentence for the user when the last diagnostics call for one."""
        return None

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

    def cast(self, dtype: DTypeLike) -> Self:
        """Return the solver with its floats as arrays of ``dtype``: 0.1, 1 and np.float64 share a trace."""
        return jax.tree.map(lambda leaf: np.asarray(leaf, dtype), self)

    def parameters(self) -> dict[str, Any]:
        """Return the hyper-parameters by name, as Python numbers and strings."""

        def plain(value: Any) -> Any:
            return value.item() if isinstance(value, np.generic | np.ndarray) else value

        fields = dataclasses.fields(self)
        return {field.name: field.metadata.get("text", plain)(getattr(self, field.name)) for field in fields}


@dataclasses.dataclass(frozen=True)
class Solver(SolverBase):
    """A solver whose steps are compiled: `init`, `draw` and `step` are traced, and costs follow from the draws.

    Parameters
    ----------
    outer_batch_size : rows per batch of the outer level; None means `batch_size`. Default periods are for their mean
    inner_optimizer : "adam" or an optax transformation, with its schedule, which moves the inner variable in the place
        of the plain step; v keeps its step. None keeps the plain step
    """

    outer_batch_size: int | None = whole(default=None, optional=True, hint="; use None for `batch_size`", kw_only=True)

    inner_optimizer: str | Any | None = transformation(("adam",), default=None, kw_only=True)  # noqa: RUF009

    # Why z must move by the plain step; None where it may move by any transformation.
    needs_plain_step: ClassVar[str | None] = "its theory is of plain steps of z"
    restarts: ClassVar[bool] = False  # does any step begin with a full-batch pass?
    needs_finite_sum: ClassVar[bool] = False  # does it remember derivatives of rows, which must then not be random?
    keeps_tables: ClassVar[bool] = False  # is one row of large arrays in the state replaced in each step?

    def __post_init__(self) -> None:
        SolverBase.__post_init__(self)
        if self.inner_optimizer is not None and self.needs_plain_step is not None:
            way = "leave it out, or take a solver such as SOBA, StocBiO or AmIGO"
            raise ValueError(f"`{type(self).__name__}(inner_optimizer=…)`: {self.needs_plain_step}; {way}.")

    def batches(self) -> tuple[int, int]:
        """Return the rows per batch of each level."""
        return self.batch_size, self.batch_size if self.outer_batch_size is None else self.outer_batch_size

    def init(self, oracles: Oracles, start: Point) -> State:
        return PointState(start)

    @abstractmethod
    def step(self, oracles: Oracles, state: State, index: Array, draw: Draw) -> State:
        """Return the state after step ``index``, which counts from 0."""

    @abstractmethod
    def calls(self, oracles: Oracles, draw: Draw, refresh: bool) -> Calls:
        """Return the exact cost of a step, or of a refresh."""

    def draw(self, oracles: Oracles, key: Array, index: Array) -> Draw:
        """Draw all randomness of step ``index``; one batch on each level unless a solver says more.

        Traced parameters must not matter here: the settings of a sweep share their draws.
        """
        return oracles.draw(key, index)

    def refreshes(self, index: Array, draw: Draw) -> Array:
        """Tell whether `refresh` is taken instead of `step`; asked only where `restarts` is true."""
        return index == 0

    def refresh(self, oracles: Oracles, state: State, index: Array, draw: Draw) -> State:
        """Take a step that begins with a full-batch pass."""
        return self.step(oracles, state, index, draw)

    def init_calls(self, oracles: Oracles) -> Calls:
        """Return the exact cost of `init`."""
        return Calls()


REGISTRY: dict[str, type[SolverBase]] = {}


@typing.dataclass_transform(
    frozen_default=True, field_specifiers=(positive, whole, one_of, fraction, flag, transformation, bounds)
)
def solver(cls: type[S]) -> type[S]:
    """Make a class a solver: a frozen dataclass and a pytree, strict about its keywords and fully documented.

    Solvers of this package are registered in `bilevel.SOLVERS` under their names, which no other solver may take.
    """
    known = REGISTRY.get(cls.__name__)
    if known is not None and known.__module__ != cls.__module__:
        raise ValueError(f"`{cls.__name__}` is the name of {known.__module__}.{cls.__name__}; rename your solver.")
    if cls.__module__.startswith(f"{__package__}."):
        REGISTRY[cls.__name__] = cls
    cls = dataclasses.dataclass(frozen=True)(cls)
    _register_pytree(cls)
    document(cls)
    _suggest_names(cls)
    return cls


def _register_pytree(cls: type[S]) -> None:
    # Not by jax.tree_util.register_dataclass: it calls __init__, whose checks no tracer would pass.
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

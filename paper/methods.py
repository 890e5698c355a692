"""The methods of Table 1 of the paper, each with a grid of settings, and the problems on which they are measured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple, TypeAlias

from bilevel.problems import BilevelProblem, quadratic
from bilevel.solvers import F2SA, MRBO, SABA, SOBA, SRBA, VRBO, AmIGO, Exact, SolverBase, StocBiO
from paper.valleys import valleys

DIM_INNER, DIM_OUTER = 10, 5


class Setting(NamedTuple):
    """A point of the grid of a method.

    Attributes
    ----------
    step : ρ at the smallest size
    ratio : ρ/γ
    batch : rows per batch
    extra : Q for methods with a Neumann series, λ_0 for F²SA
    """

    step: float
    ratio: float = 1.0
    batch: int = 1
    extra: float = 0.0


# Makes a solver from a setting, the size divided by the smallest size, and the size.
Maker: TypeAlias = Callable[[Setting, float, int], SolverBase]


@dataclass(frozen=True)
class Method:
    """A solver whose steps and period depend on the size as its theory prescribes.

    Attributes
    ----------
    name : name of the method
    bound : what is proved, as in Table 1
    in_size : proved exponent of N at a fixed ε, of the term with 1/ε
    in_accuracy : proved exponent of 1/ε at a fixed N
    make : makes the solver
    settings : the grid
    passes : full passes over the data that a run may take in addition to the budget of calls
    """

    name: str
    bound: str
    in_size: float
    in_accuracy: float
    make: Maker
    settings: tuple[Setting, ...]
    passes: int = 0


def _grid(
    steps: Sequence[float],
    ratios: Sequence[float] = (1,),
    batches: Sequence[int] = (1,),
    extras: Sequence[float] = (0,),
) -> tuple[Setting, ...]:
    grid = product(steps, ratios, batches, extras)
    return tuple(Setting(float(step), float(ratio), batch, float(extra)) for step, ratio, batch, extra in grid)


def _srba(setting: Setting, scale: float, size: int) -> SRBA:
    return SRBA(setting.step * scale**-0.5, setting.ratio, 1, period=size)


def _saba(setting: Setting, scale: float, size: int) -> SABA:
    return SABA(setting.step * scale ** (-2 / 3), setting.ratio, 1)


def _full_batch(setting: Setting, scale: float, size: int) -> SRBA:
    return SRBA(setting.step, setting.ratio, 1, period=1)


def _f2sa(setting: Setting, scale: float, size: int) -> F2SA:
    return F2SA(setting.step, setting.ratio, setting.batch, lambda_0=setting.extra)


def _plain(cls: Callable[..., SolverBase]) -> Maker:
    return lambda setting, scale, size: cls(*setting[:3])


def _neumann(cls: Callable[..., SolverBase]) -> Maker:
    """Use η = 0.5 at Q = 10, as in the paper, and shorter steps for longer series, proportional to √(10/Q)."""

    def make(setting: Setting, scale: float, size: int) -> SolverBase:
        n_neumann = int(setting.extra)
        return cls(*setting[:3], n_neumann=n_neumann, neumann_step=0.5 * (10 / n_neumann) ** 0.5)

    return make


_STEPS, _BATCHES, _Q = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32), (1, 16), (10, 40, 160)
METHODS = (
    Method("SRBA", "N^1/2 ε^-1", 1 / 2, 1, _srba, _grid(_STEPS), passes=300),
    Method("SABA", "N^2/3 ε^-1", 2 / 3, 1, _saba, _grid(_STEPS), passes=300),
    Method("SOBA", "ε^-2", 0, 2, _plain(SOBA), _grid((0.1, 0.3, 1, 3, 10))),
    Method("StocBiO", "ε^-2", 0, 2, _neumann(StocBiO), _grid((0.03, 0.1), (0.1, 1, 10), _BATCHES, _Q)),
    Method("AmIGO", "ε^-2", 0, 2, _plain(AmIGO), _grid((0.01, 0.03, 0.1), (0.1, 0.3, 1, 10), _BATCHES)),
    Method("MRBO", "ε^-3/2", 0, 1.5, _neumann(MRBO), _grid((0.1, 0.3, 1), (0.3, 1), _BATCHES, _Q)),
    Method("VRBO", "ε^-3/2", 0, 1.5, _neumann(VRBO), _grid((0.02, 0.05), (0.1, 0.3, 1), _BATCHES, _Q[:2])),
    Method("F2SA", "ε^-7/2", 0, 3.5, _f2sa, _grid((0.3, 1, 3), (0.1, 1), (1,), (1, 10, 100))),
    Method("full batch", "N ε^-1", 1, 1, _full_batch, _grid((0.25, 0.5, 1)), passes=20_000),
    Method("Exact", "–", 1, 0, lambda setting, scale, size: Exact(), _grid((0,)), passes=1000),
)


def make_quadratic(size: int) -> BilevelProblem:
    """Return a quadratic problem with n = m = size / 2, in float64."""
    if size < 64 or size % 2:
        raise ValueError(f"`size={size}`: must be an even number of at least 64, or the draw is not strongly convex.")
    return quadratic(size // 2, size // 2, DIM_INNER, DIM_OUTER, common_linear=1.0, dtype="float64")


def make_valleys(size: int) -> BilevelProblem:
    """Return :func:`paper.valleys.valleys` with n = m = size / 2, in float64."""
    return valleys(size // 2, size // 2, dtype="float64")


PROBLEMS = {"quadratic": make_quadratic, "valleys": make_valleys}

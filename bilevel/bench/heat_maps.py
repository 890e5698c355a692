"""How much the end depends on the setting: the final metric of a sweep over two parameters of its grid."""

from typing import Any, NamedTuple

import numpy as np

from bilevel.bench.sections import Contender, Section, final_values
from bilevel.bench.select import quantiles, worst_value
from bilevel.bench.store import PARAMETER, Frame

_FIRST = ("step_size", "outer_ratio")  # drawn before others that have as many values


class Spot(NamedTuple):
    """One setting of the two parameters; of the others, the best."""

    median: float  # of the seeds; infinite where too many diverged
    n_diverged: int
    n_seeds: int


class HeatMap(NamedTuple):
    """The final metric of one solver over two parameters; `y` is "" where only one has several values."""

    label: str
    x: str
    y: str
    xs: tuple[Any, ...]
    ys: tuple[Any, ...]
    spots: dict[tuple[Any, Any], Spot]
    selected: tuple[Any, Any]


def make_heat_maps(section: Section) -> list[HeatMap]:
    """Return the map of each solver that was swept over several values of a number."""
    maps = (_make_heat_map(one, section.metric) for one in section.contenders)
    return [one for one in maps if one is not None]


def _make_heat_map(one: Contender, metric: str) -> HeatMap | None:
    counts = {name: one.swept[PARAMETER + name].nunique() for name in _list_numbers(one.swept)}
    varied = [name for name, count in counts.items() if count > 1]
    if not varied:
        return None
    order = {name: place for place, name in enumerate(_FIRST)}
    x, y = (*sorted(varied, key=lambda name: (order.get(name, len(order)), -counts[name])), "")[:2]
    pairs = {(key if y else (key[0], None)): _best_spot(own, metric, [x, y]) for key, own in _group(one.swept, x, y)}
    xs, ys = ({key[place] for key in pairs} for place in (0, 1))
    selected = one.parameters or {}
    return HeatMap(one.label, x, y, _sort(xs), _sort(ys), pairs, (selected.get(x), selected.get(y)))


def _sort(values: set[Any]) -> tuple[Any, ...]:
    return tuple(sorted(values)) if None not in values else (None,)


def _list_numbers(swept: Frame) -> list[str]:
    names = [name for name in swept.columns if name.startswith(PARAMETER) and swept[name].dtype.kind in "fiu"]
    return [name.removeprefix(PARAMETER) for name in names]


def _group(swept: Frame, x: str, y: str) -> Any:
    return swept.groupby([PARAMETER + name for name in (x, y) if name])


def _best_spot(rows: Frame, metric: str, drawn: list[str]) -> Spot:
    parameters = (name for name in rows.columns if name.startswith(PARAMETER))  # options that are words, too
    used = [name for name in parameters if name.removeprefix(PARAMETER) not in drawn and rows[name].nunique() > 1]
    groups = [own for _, own in rows.groupby(used, dropna=False)] if used else [rows]
    sign = np.sign(worst_value(metric))
    return min((_make_spot(own, metric) for own in groups), key=lambda spot: (sign * spot.median, spot.n_diverged))


def _make_spot(rows: Frame, metric: str) -> Spot:
    values = final_values(rows, metric)
    known = np.where(np.isnan(values), worst_value(metric), values)
    diverged = rows.groupby("cell")["status"].last() == "diverged"
    return Spot(float(quantiles(known)[1]), int(diverged.sum()), len(known))

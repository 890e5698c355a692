"""Targets that follow from the data, and what each solver needs to reach them."""

from typing import NamedTuple

import numpy as np

from bilevel.bench.cells import TIMING
from bilevel.bench.sections import Contender, Section, reach
from bilevel.bench.store import list_metrics
from bilevel.bench.verdict import BySeed

SHARES = (0.5, 0.8, 0.9, 0.95, 0.99, 0.999)  # of the way from the start to the best median at the end
MOST = 6
_LEAST_GAP = 1e-3  # of the gap at the start, that is worth a target
AXES = ("seconds", "calls")


class Target(NamedTuple):
    """A value to reach."""

    value: float
    note: str  # what it means, where the number does not say it


class Reached(NamedTuple):
    """What the seeds of a solver need to reach one target, by axis."""

    seeds: dict[str, BySeed]  # infinite where a seed never does

    def median(self, axis: str) -> float:
        return float(np.median([*self.seeds[axis].values()]))

    @property
    def n_arrived(self) -> int:
        return int(np.isfinite([*self.seeds["calls"].values()]).sum())


class Race(NamedTuple):
    """Solvers on their way to the targets of one metric."""

    metric: str
    targets: tuple[Target, ...]
    reached: dict[str, tuple[Reached, ...]]  # by label, one for each target


def run_race(section: Section, metric: str) -> Race:
    """Find targets for a metric, and who reaches them; those that nobody reaches, or all at once, are dropped."""
    timed = [one for one in section.contenders if one.parameters is not None and _is_timed(one, metric)]
    targets, reached = choose_targets(section, metric) if timed else [], {}
    for one in timed:
        reached[one.label] = [_reach(one, metric, target.value) for target in targets]
    useful = [place for place in range(len(targets)) if _tells([own[place] for own in reached.values()])]
    kept = {label: tuple(own[place] for place in useful) for label, own in reached.items()}
    return Race(metric, tuple(targets[place] for place in useful), kept)


def _is_timed(one: Contender, metric: str) -> bool:
    return bool((one.rows["phase"] == TIMING).any()) and metric in list_metrics(one.rows)


def _reach(one: Contender, metric: str, target: float) -> Reached:
    seeds = one.rows.groupby("cell")["seed"].first()  # in the order of `reach`
    return Reached({axis: dict(zip(seeds, reach(one.rows, metric, target, axis), strict=True)) for axis in AXES})


def _tells(reached: list[Reached]) -> bool:
    medians = [one.median("calls") for one in reached]
    return bool(np.isfinite(medians).any() and np.any(np.array(medians) > 0))


def choose_targets(section: Section, metric: str) -> list[Target]:
    """Return powers of ten for a metric that falls over orders of magnitude, else shares of the way to the best."""
    about = section.metrics[metric]
    curves = [one for (name, axis, _), one in section.curves.items() if (name, axis) == (metric, "calls")]
    sign = -1.0 if about.better == "higher" else 1.0
    medians = [sign * one.median[np.isfinite(one.median)] for one in curves]
    if not medians:
        return []
    start, best = max(one[0] for one in medians), min(one.min() for one in medians)
    if metric in section.own:  # the gap to the lowest value seen: it ends at 0 for somebody
        best = max(best, _LEAST_GAP * start)
    if about.log_scale and sign > 0 and best > 0 and start / best >= 100:
        return [Target(value, "") for value in _list_decades(start, best)]
    if not start > best:
        return []
    ways = ((share, best + (1 - share) * (start - best)) for share in SHARES)
    return [Target(sign * float(f"{value:.4g}"), f"{100 * share:g} % of the way") for share, value in ways]


def _list_decades(start: float, best: float) -> list[float]:
    """Return powers of ten between two values, largest first; with 3 times each where they are few."""
    powers = range(int(np.floor(np.log10(start))), int(np.floor(np.log10(best))) - 1, -1)
    digits = (3, 1) if 2 * len(powers) <= MOST + 2 else (1,)
    values = [float(f"{digit}e{power}") for power in powers for digit in digits]
    inside = [value for value in values if best <= value < start]
    few = np.unique(np.linspace(0, len(inside) - 1, min(MOST, len(inside))).round().astype(int))
    return [inside[place] for place in few]

"""Who wins, by how much and how sure: a comparison of solvers seed by seed, and its sentences."""

from collections.abc import Mapping
from math import comb
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from bilevel.bench.sections import Section, final_values
from bilevel.bench.select import quantiles
from bilevel.engine.metrics import Metric

BySeed: TypeAlias = dict[Any, float]  # a number of each seed; infinite where it diverged or never arrived
SURE, LIKELY = 0.05, 0.2  # of the chance that luck alone puts one so far ahead
_SHORT = 0.1  # of the axis, on a log scale: who leads for less is not worth a word
_MOST_LEADS = 4


class Verdict(NamedTuple):
    """The best of some solvers by the median over seeds, the second best, and how often the best is ahead of all."""

    winner: str
    median: float
    better: str  # "lower" or "higher"
    second: str | None  # None where no other has a finite median
    second_median: float
    wins: int  # seeds in which the winner is ahead of the other that comes nearest to it in this count
    n_seeds: int  # that these two have in common, and in which they differ
    n_others: int

    @property
    def chance(self) -> float:
        """How often fair coins would give as many wins, or more: a one-sided sign test."""
        ways = sum(comb(self.n_seeds, wins) for wins in range(self.wins, self.n_seeds + 1))
        return float(ways / 2**self.n_seeds)

    @property
    def level(self) -> str:
        """Return "sure", "likely" or "open"."""
        if self.second is None:
            return "open"
        return "sure" if self.chance <= SURE else "likely" if self.chance <= LIKELY else "open"

    @property
    def margin(self) -> str:
        """By how much, as "6.8 % lower" or "3.1 times lower"."""
        return describe_margin(self.median, self.second_median, self.better)

    @property
    def confidence(self) -> str:
        """How sure, in a sentence."""
        if self.second is None:
            return "No other solver has a finite median."
        if not self.n_seeds:
            return "No seed tells it from another solver."
        whom = " of each other solver" if self.n_others > 1 else ""
        all_of_them, least = self.wins == self.n_seeds > 1, "at least " if self.n_others > 1 else ""
        seeds = f"all {self.n_seeds} seeds" if all_of_them else f"{least}{self.wins} of {self.n_seeds} seeds"
        luck = f"Ahead{whom} in {seeds}; by luck alone that happens {_describe_chance(self.chance)}"
        words = {"sure": "this is sure", "likely": "likely, and more seeds would tell", "open": "too close to call"}
        return f"{luck}: {words[self.level]}."


def decide(values: Mapping[str, BySeed], better: str = "lower") -> Verdict | None:
    """Compare solvers by their medians, and the best with each other seed by seed; None where no median is finite."""
    sign = -1.0 if better == "higher" else 1.0
    medians = {label: float(quantiles(np.array([*own.values()]))[1]) for label, own in values.items() if own}
    ranked = sorted((label for label in medians if np.isfinite(medians[label])), key=lambda one: sign * medians[one])
    if not ranked:
        return None
    first, (second, *_) = ranked[0], (*ranked[1:], None)
    told = Verdict(first, medians[first], better, second, medians.get(second or "", np.nan), 0, 0, len(medians) - 1)
    counts = [_count_wins(values[first], values[other], sign) for other in medians if other != first]
    # The least sure of the comparisons is the one that counts.
    doubts = [told._replace(wins=wins, n_seeds=n_seeds) for wins, n_seeds in counts]
    return max(doubts, key=lambda one: one.chance, default=told)


def _count_wins(ours: BySeed, theirs: BySeed, sign: float) -> tuple[int, int]:
    pairs = [(ours[seed], theirs[seed]) for seed in ours if seed in theirs and ours[seed] != theirs[seed]]
    return sum(bool(sign * (other - own) > 0) for own, other in pairs), len(pairs)


def describe_margin(best: float, other: float, better: str) -> str:
    """Return how far the best is from another, relative where both are positive."""
    if not np.isfinite(other):
        return ""
    low, high = sorted((best, other))
    if low <= 0:
        return f"{high - low:.3g} {better}"
    if high / low >= 2:
        return f"{high / low:.2g} times {better}"
    percent = 100 * abs(best - other) / other
    return f"{percent:.2g} % {better}" if percent >= 0.05 else "the same to 0.1 %"


def _describe_chance(chance: float) -> str:
    return (
        f"one time in {1 / chance:,.0f}"
        if chance <= 0.4
        else "about every other time"
        if chance < 0.6
        else "more often than not"
    )


def seed_finals(section: Section, metric: str) -> dict[str, BySeed]:
    """Return the last value of each seed of each solver at its selected setting."""
    found = {}
    for one in section.contenders:
        if one.parameters is not None and metric in one.rows:
            seeds = one.rows.groupby("cell")["seed"].first()  # in the order of `final_values`
            values = dict(zip(seeds, final_values(one.rows, metric), strict=True))
            found[one.label] = {seed: value for seed, value in values.items() if not np.isnan(value)}
    return found


def headline(verdict: Verdict | None, metric: Metric) -> str:
    """Return who wins by how much, in a sentence."""
    if verdict is None:
        return f"No solver ends with a finite {metric.label}."
    best = "highest" if verdict.better == "higher" else "lowest"
    said = f"{verdict.winner} ends with the {best} {metric.label}: {verdict.median:.3g}"
    if verdict.second is None:
        return f"{said}, the only finite one."
    margin = verdict.margin
    beside = f"{margin} as" if margin.startswith("the same") else f"{margin} than"
    return f"{said}, {beside} {verdict.second} ({verdict.second_median:.3g})."


def describe_leads(section: Section, axis: str = "calls") -> str:
    """Return who is ahead up to where, by the medians of the metric that selects; "" where nobody passes anybody."""
    leads = find_leads(section, axis)
    if len(leads) < 2:
        return ""
    words = {"calls": lambda x: f"{round_count(x)} oracle calls", "seconds": lambda x: f"{x:.2g} seconds"}[axis]
    parts = [
        f"{label} leads up to {words(end)}" if place == 0 else f"{label} up to {words(end)}"
        for place, (label, end) in enumerate(leads[:-1])
    ]
    return f"On the way there, {', '.join(parts)}, then {leads[-1][0]}."


def find_leads(section: Section, axis: str = "calls") -> list[tuple[str, float]]:
    """Return (who leads, up to where) along the stretch that all curves share, without short stretches."""
    own = {key[2]: one for key, one in section.curves.items() if key[:2] == (section.metric, axis) and len(one.x) > 1}
    if len(own) < 2:
        return []
    first, last = max(one.x[0] for one in own.values()), min(one.x[-1] for one in own.values())
    every = np.unique(np.concatenate([one.x for one in own.values()]))
    grid = every[(every >= first) & (every <= last) & (every > 0)]
    if len(grid) < 2:
        return []
    sign = -1.0 if section.metrics[section.metric].better == "higher" else 1.0
    labels, heights = [*own], np.array([sign * np.interp(grid, one.x, one.median) for one in own.values()])
    leaders = [labels[place] for place in np.argmin(heights, axis=0)]
    return _drop_short(leaders, grid)[-_MOST_LEADS:]


def _drop_short(leaders: list[str], grid: np.ndarray) -> list[tuple[str, float]]:
    span = np.log(grid[-1] / grid[0])
    runs: list[list[Any]] = []  # [who, from, to]
    for leader, x in zip(leaders, grid, strict=True):
        if runs and runs[-1][0] == leader:
            runs[-1][2] = x
        else:
            runs.append([leader, runs[-1][2] if runs else x, x])
    kept: list[list[Any]] = []
    for leader, begin, end in runs:
        counts = np.log(end / begin) >= _SHORT * span or end == grid[-1]
        if kept and (not counts or kept[-1][0] == leader):
            kept[-1][2] = end
        elif counts:
            kept.append([leader, begin, end])
    return [(leader, float(end)) for leader, _, end in kept]


def round_count(count: float) -> str:
    """Return a count in two or three digits, as "2.8 million"."""
    for size, word in ((1e9, " billion"), (1e6, " million")):
        if count >= size:
            return f"{count / size:.3g}{word}"
    return f"{float(f'{count:.2g}'):,.0f}"

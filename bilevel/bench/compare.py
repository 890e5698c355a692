"""Two stores side by side: what a change of code, settings or machine did to each solver."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from bilevel._optional import require
from bilevel.bench.sections import Contender, Section
from bilevel.bench.select import quantiles
from bilevel.bench.verdict import BySeed, Verdict, decide, seed_finals

BEFORE, AFTER = "before", "after"


def join_sections(before: Sequence[Section], after: Sequence[Section]) -> list[Section]:
    """Return the sections that both stores have, each solver once as it was before and once as it is after."""
    earlier = {_key(section): section for section in before}
    pairs = [(earlier[_key(section)], section) for section in after if _key(section) in earlier]
    if not pairs:
        there = ", ".join(f"{one.problem} of `{one.experiment}`" for one in before)
        raise ValueError(f"`before`: the two stores share no problem of an experiment; it has {there}.")
    return [_join(*pair) for pair in pairs]


def _key(section: Section) -> tuple[str, str, str]:
    return section.experiment, section.problem, str(sorted(section.arguments.items()))


def _join(before: Section, after: Section) -> Section:
    if before.metric != after.metric:
        raise ValueError(f"`before`: {before.metric} selects there, and {after.metric} here; give `select`.")
    contenders = (*(_mark(one, BEFORE) for one in before.contenders), *(_mark(one, AFTER) for one in after.contenders))
    rows = require("pandas", "bench").concat([before.rows, after.rows], ignore_index=True)
    return replace(after, rows=rows, contenders=tuple(sorted(contenders, key=lambda one: one.label)))


def _mark(one: Contender, when: str) -> Contender:
    return one._replace(label=_label(one.label, when))


def _label(label: str, when: str) -> str:
    return f"{label.removesuffix(')')}, {when})" if label.endswith(")") else f"{label} ({when})"


def compare(section: Section) -> list[dict[str, Any]]:
    """Return, for each solver that a joined section has twice, the metric before and after, and how sure it changed."""
    finals, metric = seed_finals(section, section.metric), section.metrics[section.metric]
    seconds = {one.label: _seconds(one) for one in section.contenders}
    rows = []
    for label in _solvers(section):
        then, now = (finals.get(_label(label, when), {}) for when in (BEFORE, AFTER))
        sides = {BEFORE: then, AFTER: now}
        clocks = {when: seconds[_label(label, when)] for when in sides}
        verdict = decide(sides, metric.better or "lower")
        rows.append(
            {"solver": label, "seconds": clocks, "change": _describe_change(verdict, then, now), "verdict": verdict}
            | {when: quantiles(np.array([*own.values()] or [np.nan]))[1] for when, own in sides.items()}
        )
    return rows


def _solvers(section: Section) -> list[str]:
    labels = {one.label for one in section.contenders}
    names = {_unmark(label) for label in labels}
    return sorted(name for name in names if {_label(name, BEFORE), _label(name, AFTER)} <= labels)


def _unmark(label: str) -> str:
    for when in (BEFORE, AFTER):
        label = label.removesuffix(f" ({when})")
        label = f"{label.removesuffix(f', {when})')})" if label.endswith(f", {when})") else label
    return label


def _seconds(one: Contender) -> float:
    return float(one.rows[one.rows["final"].astype(bool)]["seconds"].median())


def _describe_change(verdict: Verdict | None, before: BySeed, after: BySeed) -> str:
    if verdict is None:
        return "diverges before and after"
    if verdict.second is None:
        return "diverged, and does no more" if verdict.winner == AFTER else "diverges now"
    if before == after:
        return "the same in every seed"
    if verdict.margin.startswith("the same"):
        return verdict.margin
    better = f"better: {verdict.margin} than before"
    return better if verdict.winner == AFTER else f"worse: before, it was {verdict.margin}"


def headline(rows: list[dict[str, Any]]) -> str:
    """Return how many solvers became better or worse beyond doubt, in a sentence."""
    sure = [row["verdict"] for row in rows if row["verdict"] is not None and row["verdict"].level == "sure"]
    better = sum(one.winner == AFTER for one in sure)
    worse, open_ = len(sure) - better, len(rows) - len(sure)
    counts = f"{better} better, {worse} worse, {open_} without a sure difference"
    return f"After against before, of {len(rows)} solvers: {counts}."

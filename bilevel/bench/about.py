"""What a section is about, in words: its problem, its metrics, and what a reader should beware of."""

import inspect
from collections.abc import Iterable

import numpy as np

from bilevel.bench.cells import SIZES, TIMING
from bilevel.bench.sections import Section
from bilevel.problems import PROBLEMS

_VERBS = ("Build ", "Draw ")
_MEANINGS = {
    "value_gap": "how far h(x) is above its minimum",
    "value": "the outer loss F(z*(x), x), where the inner problem is solved exactly",
    "hypergrad_norm_sq": "the squared length of the gradient of h, 0 at a stationary point",
    "test_error": "the share of test rows, which no solver sees, that z gets wrong",
    "validation_error": "the share of validation rows that z gets wrong",
    "weight_auc": "how well the learned weights tell clean rows from corrupted ones, 1 at best",
    "outer_value": "the outer loss at the solver's own z, near h(x) where z is near z*(x)",
}


def describe_problem(section: Section) -> list[str]:
    """Return what the problem is, how large it is, and with which arguments it was built."""
    arguments = ", ".join(f"{name} {value}" for name, value in section.arguments.items() if value is not None)
    called = f"Built with {arguments}." if arguments else ""
    return [text for text in (_read_title(section.problem), _describe_size(section), called) if text]


def _read_title(problem: str) -> str:
    title = (inspect.getdoc(PROBLEMS[problem]) or "").partition("\n")[0] if problem in PROBLEMS else ""
    for verb in _VERBS:
        title = title.removeprefix(verb)
    return (title[:1].upper() + title[1:]).replace("`", "")


def _describe_size(section: Section) -> str:
    rows = section.rows
    known = {name: rows[name].dropna() for name in SIZES if name in rows}
    sizes = [int(known[name].iloc[0]) for name in SIZES if len(known.get(name, ()))]
    if len(sizes) == len(SIZES):
        n, m, p, d = (f"{size:,}" for size in sizes)
        inner = f"The inner problem fits z, {p} number{'s' * (p != '1')}, to {n} rows"
        return f"{inner}; the outer one chooses x, {d} number{'s' * (d != '1')}, by a loss on {m} other rows."
    epochs = rows[rows["epochs"] > 0]
    if not len(epochs):
        return ""
    return f"{float(np.median(epochs['calls'] / epochs['epochs'])):,.0f} rows, inner and outer together."


def explain_metrics(section: Section, names: Iterable[str]) -> list[tuple[str, str]]:
    """Return (label, meaning and which way is better) of each metric."""
    explained = []
    for one in (section.metrics[name] for name in names):
        way = f"{one.better} is better" if one.better else "says nothing about quality"
        meaning = _MEANINGS.get(one.name, "a metric of the problem")
        explained.append((one.label, f"{meaning[:1].upper()}{meaning[1:]}; {way}."))
    return explained


def list_warnings(section: Section) -> list[str]:
    """Return what a reader should beware of: seeds that diverged, and settings at an end of their grid."""
    found = []
    for one in section.contenders:
        ends = one.rows.groupby("cell")["status"].last()
        diverged = int((ends == "diverged").sum())
        if one.parameters is None:
            found.append(f"{one.label}: no setting of its grid has a finite median.")
        elif diverged:
            found.append(f"{one.label}: {diverged} of {len(ends)} seeds diverged at the selected setting.")
        if one.edges:
            found.append(f"{one.label}: {one.edges}, an end of its grid. A better setting may lie beyond.")
    return found


def explain_ends(section: Section) -> str:
    """Return why curves end where they do, and what seconds are."""
    timed = section.rows["phase"] == TIMING
    if not timed.any():
        return "Curves end with the budget of oracle calls. There are no seconds: only a timing phase has a clock."
    return (
        "Seconds are those of the steps alone: compilation and evaluation are left out. Every run ends with its "
        "budget of oracle calls or of seconds, whichever comes first; solvers differ in the seconds that a call takes, "
        "so their curves end at different places. A curve ends early where half of the seeds or more have diverged."
    )

"""How far a loss is above the lowest value that any run of its problem has seen: the natural scale of a loss."""

from dataclasses import replace

import numpy as np

from bilevel.bench.sections import Section
from bilevel.bench.store import Frame
from bilevel.engine.metrics import Metric


def add_gap(section: Section) -> Section:
    """Return a section with one metric more where the one that selects is a loss, and not a distance already."""
    about = section.metrics[section.metric]
    if about.log_scale or about.better != "lower":
        return section
    name, rows = f"{section.metric}_above_lowest", section.rows
    # Seeds may be problems of their own, each with a lowest value of its own.
    finite = rows[np.isfinite(rows[section.metric])]
    lowest = finite.groupby("problem_arguments")[section.metric].min()

    def measure(own: Frame) -> Frame:
        return own.assign(**{name: own[section.metric] - own["problem_arguments"].map(lowest).astype(float)})

    contenders = tuple(one._replace(rows=measure(one.rows), swept=measure(one.swept)) for one in section.contenders)
    label = f"{about.label} − lowest seen"
    return replace(section, rows=measure(rows), contenders=contenders, own={name: Metric(name, label)})

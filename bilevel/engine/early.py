"""Stopping on a metric: where it has not improved for some evaluations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from numbers import Integral
from typing import Any

import numpy as np

from bilevel._types import as_float, is_number
from bilevel.engine.metrics import metric


@dataclass(frozen=True)
class EarlyStopping:
    """Stop a run where a metric has not improved for some evaluations; ``result.best_point`` has its best one.

    It reads the history alone: a resumed run stops where one does that was never interrupted.

    Parameters
    ----------
    metric : a column of the history, such as "test_error", "outer_value" or a metric of your problem
    patience : evaluations of the metric without an improvement after which the run stops
    min_change : what counts as an improvement
    better : "lower" or "higher"; by default as the library knows the metric, and lower for your own
    """

    metric: str
    patience: int = 10
    min_change: float = 0.0
    better: str | None = None

    def __post_init__(self) -> None:
        me = "`EarlyStopping"
        if not isinstance(self.metric, str):
            raise ValueError(f"{me}(metric={self.metric!r})`: must be the name of a column of the history.")
        if not is_number(self.patience, Integral) or self.patience < 1:
            raise ValueError(f"{me}(patience={self.patience!r})`: must be an integer of at least 1.")
        if not isinstance(as_float(self.min_change), float) or not 0 <= self.min_change < inf:
            raise ValueError(f"{me}(min_change={self.min_change!r})`: must be a finite number of at least 0.")
        if self.better not in (None, "lower", "higher"):
            raise ValueError(f"{me}(better={self.better!r})`: must be 'lower', 'higher' or None.")

    def best_row(self, rows: Sequence[Mapping[str, Any]]) -> int:
        """Return the row with the last improvement; -1 where the metric is in none."""
        best, found = np.nan, -1
        for number, row in enumerate(rows):
            value = self._sign() * row.get(self.metric, np.nan)
            if value < best - self.min_change or (np.isnan(best) and not np.isnan(value)):
                best, found = value, number
        return found

    def is_over(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        """Tell whether patience is at its end."""
        later = rows[self.best_row(rows) + 1 :] if self.best_row(rows) >= 0 else ()
        return sum(not np.isnan(row.get(self.metric, np.nan)) for row in later) >= self.patience

    def check_known(self, row: Mapping[str, Any]) -> None:
        """Refuse a metric that the first row of a run does not have."""
        if self.metric not in row:
            raise ValueError(f"`EarlyStopping(metric={self.metric!r})`: the history has {', '.join(row)}.")

    def _sign(self) -> int:
        better = metric(self.metric).better if self.better is None else self.better
        return -1 if better == "higher" else 1

"""Scikit-learn-compatible estimators: penalties and weights of rows learned on validation rows, nothing to tune.

Needs ``pip install 'bilevel[estimators]'``.
"""

from bilevel._optional import require

require("sklearn", "estimators")

from bilevel.estimators.cleaning import DataCleaningClassifier  # noqa: E402
from bilevel.estimators.linear import BilevelLogisticRegression, BilevelRidge  # noqa: E402

__all__ = ["BilevelLogisticRegression", "BilevelRidge", "DataCleaningClassifier"]

"""Scikit-learn-compatible estimators: penalties and weights of rows are learned, nothing is to tune.

Needs ``pip install 'bilevel[estimators]'``.
"""

from bilevel._optional import require

require("sklearn", "estimators")

from bilevel.estimators.cleaning import DataCleaningClassifier  # noqa: E402
from bilevel.estimators.linear import BilevelLogisticRegression, BilevelRidge  # noqa: E402
from bilevel.estimators.regressors import (  # noqa: E402
    BilevelGammaRegressor,
    BilevelHuberRegressor,
    BilevelPoissonRegressor,
)
from bilevel.estimators.sparse import BilevelElasticNet, BilevelSparseLogisticRegression  # noqa: E402
from bilevel.estimators.survival import BilevelCoxPH  # noqa: E402

__all__ = ["BilevelGammaRegressor", "BilevelHuberRegressor", "BilevelLogisticRegression", "BilevelPoissonRegressor"]
__all__ += ["BilevelElasticNet", "BilevelSparseLogisticRegression"]
__all__ += ["BilevelCoxPH", "BilevelRidge", "DataCleaningClassifier"]


def __dir__() -> list[str]:
    return sorted(__all__)

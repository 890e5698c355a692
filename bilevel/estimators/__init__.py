"""Scikit-learn-compatible estimators that learn their penalties and the weights of rows.

Needs ``pip install 'bilevel[estimators]'``.
"""

from bilevel._core.extras import require

require("sklearn", "estimators")

from bilevel.estimators.label_noise import DataCleaningClassifier  # noqa: E402
from bilevel.estimators.linear_model import (  # noqa: E402
    BilevelGammaRegressor,
    BilevelHuberRegressor,
    BilevelLogisticRegression,
    BilevelPoissonRegressor,
    BilevelRidge,
)
from bilevel.estimators.sparse_linear_model import BilevelElasticNet, BilevelSparseLogisticRegression  # noqa: E402
from bilevel.estimators.survival import BilevelCoxPH  # noqa: E402

__all__ = ["BilevelGammaRegressor", "BilevelHuberRegressor", "BilevelLogisticRegression", "BilevelPoissonRegressor"]
__all__ += ["BilevelElasticNet", "BilevelSparseLogisticRegression"]
__all__ += ["BilevelCoxPH", "BilevelRidge", "DataCleaningClassifier"]


def __dir__() -> list[str]:
    return sorted(__all__)

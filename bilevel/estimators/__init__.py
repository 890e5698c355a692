"""Scikit-learn-compatible estimators: penalties and weights of rows are learned, nothing is to tune.

Needs ``pip install 'bilevel[estimators]'``.
"""

from typing import TYPE_CHECKING, Any

from bilevel._optional import require

require("sklearn", "estimators")

from bilevel.estimators.linear import BilevelLogisticRegression, BilevelRidge  # noqa: E402
from bilevel.estimators.regressors import (  # noqa: E402
    BilevelGammaRegressor,
    BilevelHuberRegressor,
    BilevelPoissonRegressor,
)
from bilevel.estimators.sparse import BilevelElasticNet, BilevelSparseLogisticRegression  # noqa: E402

if TYPE_CHECKING:
    from bilevel.estimators.cleaning import DataCleaningClassifier

__all__ = ["BilevelGammaRegressor", "BilevelHuberRegressor", "BilevelLogisticRegression", "BilevelPoissonRegressor"]
__all__ += ["BilevelElasticNet", "BilevelSparseLogisticRegression"]
__all__ += ["BilevelRidge", "DataCleaningClassifier"]


def __getattr__(name: str) -> Any:
    """Import what needs JAX when it is asked for."""
    if name == "DataCleaningClassifier":
        from bilevel.estimators.cleaning import DataCleaningClassifier

        return DataCleaningClassifier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

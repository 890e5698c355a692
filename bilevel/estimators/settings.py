"""Parameters of an estimator, refused in scikit-learn's words when `fit` begins."""

from numbers import Integral, Real
from typing import Any

from bilevel.solvers.base import Solver


def refuse(estimator: Any, name: str, wanted: str) -> None:
    """Raise the error that scikit-learn raises for a parameter out of place."""
    value = getattr(estimator, name)
    raise ValueError(f"The {name!r} parameter of {type(estimator).__name__} must be {wanted}. Got {value!r} instead.")


def check_real(estimator: Any, name: str, low: float, high: float = float("inf"), *, closed: bool = False) -> None:
    """Refuse what is not a number above ``low`` (or at it, where closed) and below ``high``."""
    value = getattr(estimator, name)
    inside = isinstance(value, Real) and not isinstance(value, bool) and low <= float(value) < high
    if not inside or (value == low and not closed):
        refuse(estimator, name, f"a float in the range {'[' if closed else '('}{low}, {high})")


def check_count(estimator: Any, name: str) -> None:
    """Refuse what is not a whole number from 1 on."""
    value = getattr(estimator, name)
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        refuse(estimator, name, "an int in the range [1, inf)")


def check_bool(estimator: Any, name: str) -> None:
    """Refuse what is neither True nor False."""
    if not isinstance(getattr(estimator, name), bool):
        refuse(estimator, name, "an instance of 'bool'")


def check_common(estimator: Any) -> None:
    """Check what all estimators take."""
    check_real(estimator, "validation_fraction", 0.0, 1.0)
    check_real(estimator, "tol", 0.0, closed=True)
    check_count(estimator, "max_iter")
    check_bool(estimator, "fit_intercept")
    check_bool(estimator, "standardize")
    if not isinstance(estimator.verbose, Integral) or estimator.verbose < 0:
        refuse(estimator, "verbose", "an int in the range [0, inf)")
    if estimator.solver is not None and not isinstance(estimator.solver, Solver):
        refuse(estimator, "solver", "None or a solver of `bilevel`, such as bilevel.SRBA(step_size=0.1)")

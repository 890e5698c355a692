"""Validation, groups of features, documentation and scores that all estimators share."""

import copy
import functools
import inspect
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, ClassVar, Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np
import scipy.sparse as sp
from scipy.special import expit, log_expit, log_softmax, softmax
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_array
from sklearn.utils.extmath import safe_sparse_dot
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    check_consistent_length,
    check_is_fitted,
    column_or_1d,
    validate_data,
)

from bilevel.estimators.losses import Array

P = ParamSpec("P")
T = TypeVar("T")

_MAX_ENTRY = 1e150
_MAX_WEIGHT = 1e9  # of a row
_SMALL_TABLE = 200_000  # entries
_ENTRY = re.compile(r"^((\w+) : .*\n(?: {4}.*\n)+)", re.MULTILINE)  # of a section of a docstring
_LOWER_BOUNDS: dict[str, tuple[type, str, float]] = {  # "(" excludes the bound
    "epsilon": (Real, "(", 0.0),
    "tol": (Real, "[", 0.0),
    "max_iter": (Integral, "[", 1),
    "verbose": (Integral, "[", 0),
}
_CHOICES: dict[str, tuple[str, ...]] = {
    "structure": ("auto", "single", "per_group", "per_feature"),
    "sparsity": ("features", "groups"),
}


def document(cls: type[T]) -> type[T]:
    """Describe the parameters and attributes of an estimator, before the examples of its docstring.

    The attribute `_entries` of a class describes those that the class introduces, or to which it gives another meaning.
    """
    start, title, examples = inspect.cleandoc(cls.__doc__ or "").partition("Examples\n")
    entries = dict[str, str]()
    for base in reversed(cls.__mro__):
        entries |= {name: text for text, name in _ENTRY.findall(vars(base).get("_entries", ""))}
    parameters = "".join(entries[name] for name in inspect.signature(cls).parameters)
    attributes = "".join(text for name, text in entries.items() if name.endswith("_"))
    sections = f"Parameters\n----------\n{parameters}\nAttributes\n----------\n{attributes}\n"
    cls.__doc__ = start + sections + title + examples
    return cls


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line outside of this package that called the estimator."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("bilevel.estimators"):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def reject(estimator: Any, name: str, wanted: str) -> None:
    """Raise the error that scikit-learn raises for an invalid parameter."""
    value = getattr(estimator, name)
    raise ValueError(f"The {name!r} parameter of {type(estimator).__name__} must be {wanted}. Got {value!r} instead.")


def check_parameters(estimator: Any, **tables: Any) -> None:
    """Reject parameters of the wrong type or range, and tables with masked entries."""
    for name, table in tables.items():
        if np.ma.is_masked(table):  # scikit-learn would use the values below the mask
            raise ValueError(f"`{name}` has masked values; remove or impute those rows.")
    for parameter in fields(estimator):
        name = parameter.name
        value: Any = getattr(estimator, name, None)
        if parameter.type is bool and not isinstance(value, bool):
            reject(estimator, name, "an instance of 'bool'")
        if name in _CHOICES and not (isinstance(value, str) and value in _CHOICES[name]):
            reject(estimator, name, f"a str among {_CHOICES[name]}")
        if name in _LOWER_BOUNDS:
            kind, left, low = _LOWER_BOUNDS[name]
            is_number = isinstance(value, kind) and (name == "verbose" or not isinstance(value, bool))
            if not (is_number and low <= value <= sys.float_info.max) or (left == "(" and value == low):
                reject(estimator, name, f"{'a float' if kind is Real else 'an int'} in the range {left}{low}, inf)")


def all_or_nothing(fit: Callable[Concatenate[T, P], Any]) -> Callable[Concatenate[T, P], T]:
    """Let `fit` change the estimator only if it succeeds; after an exception all attributes are as before."""

    @functools.wraps(fit)
    def fit_copy(self: T, *args: P.args, **kwargs: P.kwargs) -> T:
        fitted = copy.copy(self)
        fit(fitted, *args, **kwargs)
        self.__dict__ = fitted.__dict__
        return self

    return fit_copy


def check_weights(X: Any, sample_weight: Any) -> Array:
    """Return the weights of rows as floats, ones for None; a number is the weight of each row."""
    n_rows, name = X.shape[0], "`sample_weight`"
    if sample_weight is None or isinstance(sample_weight, Real):
        sample_weight = np.full(n_rows, 1.0 if sample_weight is None else float(sample_weight))
    options: dict[str, Any] = {"dtype": np.float64, "ensure_2d": False, "ensure_non_negative": True}
    weights: Array = check_array(sample_weight, input_name=name, **options)
    if weights.shape != (n_rows,):
        raise ValueError(f"{name} has shape {weights.shape}; it must be ({n_rows},), a weight for each row.")
    if weights.max() > _MAX_WEIGHT:
        found = f"`sample_weight` has a weight of {weights.max():.3g}, where 2 means the same as the row twice"
        raise ValueError(f"{found}; divide the weights by their mean. The maximum is {_MAX_WEIGHT:g}.")
    if not weights.any():
        raise ValueError("`sample_weight` is zero for every row; give a positive weight to some.")
    return weights


def check_range(**tables: Any) -> None:
    """Reject numbers whose squares overflow, because means and variances would not be finite."""
    for name, table in tables.items():
        numbers = np.asarray(table.data if sp.issparse(table) else table)
        if numbers.dtype.kind == "f" and numbers.size and (most := np.abs(numbers).max()) > _MAX_ENTRY:
            raise ValueError(f"{name} has an entry of {most:.3g}, whose square overflows; scale it.")


def check_validation_rows(
    estimator: Any, X_val: Any, y_val: Any, *, y_numeric: bool, many_outputs: bool = False
) -> tuple[Any, Array | None]:
    """Return the validated validation rows of the user, or None twice."""
    if X_val is None and y_val is None:
        return None, None
    if X_val is None or y_val is None:
        missing = "X_val" if X_val is None else "y_val"
        raise ValueError(f"`X_val` and `y_val` must be given together; `{missing}` is missing.")
    check_parameters(estimator, X_val=X_val, y_val=y_val)
    X_val = validate_data(estimator, X_val, reset=False, accept_sparse="csr", dtype=np.float64)
    y_val = check_array(y_val, ensure_2d=False, dtype=np.float64 if y_numeric else None, input_name="y_val")
    y_val = y_val if many_outputs and y_val.ndim == 2 else column_or_1d(y_val, warn=True)
    check_consistent_length(X_val, y_val)
    check_range(X_val=X_val, y_val=y_val)
    return X_val, y_val


def stack_rows(X: Any, X_val: Any) -> Any:
    """Return the rows of both tables, sparse if one of them is."""
    if sp.issparse(X) or sp.issparse(X_val):
        return sp.vstack([sp.csr_array(X), sp.csr_array(X_val)], format="csr")
    return np.vstack([X, X_val])


_limiting = threading.Lock()  # held by the fit that has limited the threads


@contextmanager
def one_thread_if_small(X: Any) -> Iterator[None]:
    """Limit BLAS to one thread while a small table is fitted, and restore the previous limit afterwards.

    A fit of a small table consists of many products of small matrices, in which threads take longer to synchronize than
    to compute. Most BLAS libraries have one limit for the whole process. If several fits run at a time, only the first
    one sets the limit, and restores it when it ends.
    """
    if X.shape[0] * X.shape[1] > _SMALL_TABLE or not _limiting.acquire(blocking=False):
        yield
        return
    try:
        from threadpoolctl import threadpool_limits

        with threadpool_limits(1, user_api="blas"):
            yield
    finally:
        _limiting.release()


class Groups(NamedTuple):
    """Numbers of the penalized features, the number of the group of each of them, and the labels of the groups."""

    penalized: Array
    numbers: Array
    labels: Array


_SEPARATOR = re.compile(r"[_ .=:/|-]+")


def find_groups(X: Any, names: Any, groups: Any, unpenalized: Any) -> Groups:
    """Return the groups of the features; without `groups`, all features form one.

    Parameters
    ----------
    X : dense or sparse, (samples, features), in the units of the user
    names : names of the features, or None
    groups : a label for each feature, a dict from names to labels, "prefix", or None
    unpenalized : names or numbers of features
    """
    size = X.shape[1]
    penalized = np.setdiff1d(np.arange(size), _find_features(names, unpenalized, size))
    every = [""] * size if groups is None else _label_features(X, names, groups)
    labels = [every[number] for number in penalized]
    try:
        known = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    except TypeError as error:  # lists, masked entries
        raise ValueError(f"`groups` must have strings or numbers as labels: {error}.") from error
    return Groups(penalized, np.array([known[label] for label in labels], int), np.array(list(known), dtype=object))


def _find_features(names: Any, wanted: Any, size: int) -> Array:
    """Return the numbers of features that are given by name or number."""
    if wanted is None:
        return np.zeros(0, int)
    places = {} if names is None else {name: number for number, name in enumerate(names)}
    numbers = [places.get(item, item) if isinstance(item, str) else item for item in _as_list(wanted)]
    for item in numbers:
        if isinstance(item, bool) or not isinstance(item, Integral) or not 0 <= int(item) < size:
            known = f"a name of a column or a number below {size}" if names is not None else f"a number below {size}"
            raise ValueError(f"`unpenalized` has {item!r}, which must be {known}.")
    return np.unique(np.array(numbers, int))


def _as_list(wanted: Any) -> list[Any]:
    alone = isinstance(wanted, str) or (isinstance(wanted, Array) and wanted.ndim == 0)
    return list(wanted) if isinstance(wanted, Iterable) and not alone else [wanted]


def _label_features(X: Any, names: Any, groups: Any) -> list[Any]:
    if not isinstance(groups, dict | str):
        if len(labels := _as_list(groups)) != X.shape[1]:
            raise ValueError(f"`groups` must name the group of each of the {X.shape[1]} features, got {len(labels)}.")
        return labels
    if isinstance(groups, str) and groups != "prefix":
        raise ValueError(f"`groups={groups!r}`: must be 'prefix', a dict, or a label for each feature.")
    if names is None:
        raise ValueError("`groups` needs names of columns; give X as a DataFrame, or a label for each feature.")
    if isinstance(groups, str):
        return find_prefixes(X, list(names))
    if unknown := [name for name in groups if name not in list(names)]:
        raise ValueError(f"`groups` names columns that X does not have: {unknown[:5]}.")
    return [groups.get(name, "rest") for name in names]


def find_prefixes(X: Any, names: list[str]) -> list[str]:
    """Return the name of each column up to its last separator; one-hot columns of one source get the same prefix.

    The text before a double underscore is the name of a transformer, and separators in it are ignored. Binary columns
    belong to one source if they share a prefix and no row has two ones among them. The shortest such prefix is used,
    because names of categories may contain separators as well.
    """
    out = [prefixes[-1] if (prefixes := _list_prefixes(name)) else name for name in names]
    squares = X.multiply(X) if sp.issparse(X) else X * X
    binary = np.flatnonzero(np.ravel((squares != X).sum(axis=0)) == 0)
    shared: dict[str, list[int]] = {}
    for number in binary:
        for prefix in _list_prefixes(names[number]):
            shared.setdefault(prefix, []).append(int(number))
    taken: set[int] = set()
    for prefix in sorted(shared, key=len):
        columns = [number for number in shared[prefix] if number not in taken]
        if len(columns) > 1 and X[:, columns].sum(axis=1).max() <= 1:
            taken.update(columns)
            for column in columns:
                out[column] = prefix
    return out


def _list_prefixes(name: str) -> list[str]:
    """Return the text before each separator that follows the name of the transformer, if there is one."""
    transformer, double, rest = name.rpartition("__")
    ends = [match.start() for match in _SEPARATOR.finditer(rest) if match.start() > 0]
    return [transformer + double + rest[:end] for end in ends]


@dataclass(eq=False, repr=False, kw_only=True)
class LinearEstimator(BaseEstimator):
    """A linear model of dense or sparse columns."""

    fit_intercept: bool = True
    standardize: bool = True
    random_state: Any = None
    verbose: int = 0

    coef_: Array = field(init=False)
    intercept_: Any = field(init=False)

    _entries: ClassVar[str] = """
coef_ : ndarray of shape (n_features,) or (n_targets, n_features)
    Coefficients of the features in their original units.
intercept_ : float or ndarray of shape (n_targets,)
    Intercepts.
fit_intercept : bool, default=True
    Whether to fit an intercept, which is not penalized.
standardize : bool, default=True
    Whether penalties act on features that are scaled to unit deviation. Coefficients refer to the original units in
    either case.
random_state : int, RandomState instance or None, default=None
    Seed of the folds.
verbose : int, default=0
    If positive, print one line for each step of the search.
n_features_in_ : int
    Number of features.
feature_names_in_ : ndarray of shape (n_features,)
    Names of the features, if X has string column names.
"""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _print(self, text: str) -> None:
        if self.verbose:
            print(f"{type(self).__name__}: {text}", flush=True)

    def _linear_predictor(self, X: Any) -> Array:
        check_is_fitted(self)
        check_parameters(self, X=X)
        X = validate_data(self, X, reset=False, accept_sparse="csr")
        return safe_sparse_dot(X, self.coef_.T, dense_output=True) + self.intercept_


class LinearClassifier(ClassifierMixin, LinearEstimator):
    """A classifier with one score for two classes, and one score per class for more."""

    _classifies: ClassVar[bool] = True
    classes_: Array

    _entries: ClassVar[str] = """
coef_ : ndarray of shape (1, n_features) or (n_classes, n_features)
    Coefficients of the features in their original units; one row for two classes.
intercept_ : ndarray of shape (1,) or (n_classes,)
    Intercepts.
classes_ : ndarray of shape (n_classes,)
    Labels of the classes, sorted.
"""

    def _encode_classes(self, y: Array, y_val: Array | None, weights: Array) -> tuple[Array, Array | None]:
        """Set `classes_`, and return the numbers of the classes."""
        check_classification_targets(y)
        self.classes_, y = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            name, found = type(self).__name__, self.classes_[0]
            raise ValueError(f"{name} needs at least 2 classes in y, but there is only one class: {found!r}.")
        if np.count_nonzero(np.bincount(y, weights)) < 2:
            raise ValueError("`sample_weight` leaves rows of one class only; at least two classes need weight.")
        if y_val is None:
            return y, None
        if (unknown := np.setdiff1d(y_val, self.classes_)).size:
            raise ValueError(f"y_val contains labels that y does not: {unknown[:5].tolist()}.")
        return y, np.searchsorted(self.classes_, y_val)

    def decision_function(self, X: Any) -> Array:
        """Return the scores, (samples,) for two classes and (samples, classes) for more."""
        scores = self._linear_predictor(X)
        return scores[:, 0] if scores.shape[1] == 1 else scores

    def predict(self, X: Any) -> Array:
        """Return the most probable class of each row."""
        scores = self.decision_function(X)
        return self.classes_[(scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(axis=1)]

    def predict_proba(self, X: Any) -> Array:
        """Return the probability of each class, (samples, classes)."""
        scores = self.decision_function(X)
        return np.column_stack([expit(-scores), expit(scores)]) if scores.ndim == 1 else softmax(scores, axis=1)

    def predict_log_proba(self, X: Any) -> Array:
        """Return the logarithms of the probabilities."""
        scores = self.decision_function(X)
        if scores.ndim == 1:
            return np.column_stack([log_expit(-scores), log_expit(scores)])
        return log_softmax(scores, axis=1)

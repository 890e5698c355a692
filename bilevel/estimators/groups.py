"""Which features share a penalty, and which have none: labels, names of columns, one-hot columns of one source."""

import re
from collections.abc import Iterable
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp

_SEPARATOR = re.compile(r"[_ .=:/|-]+")
_REST = "rest"


class Groups(NamedTuple):
    """Numbers of the penalized features, the group of each of them, and what the groups are called."""

    penalized: np.ndarray
    numbers: np.ndarray
    labels: np.ndarray


def find_groups(X: Any, names: Any, groups: Any, unpenalized: Any) -> Groups:
    """Return the groups that the user gives or that names tell; one group where there are none.

    Parameters
    ----------
    X : dense or sparse, (samples, features), as the user has them
    names : of the features, or None
    groups : a label for each feature, a dict from names to labels, "prefix", or None
    unpenalized : names or numbers of features
    """
    size = X.shape[1]
    penalized = np.setdiff1d(np.arange(size), find_features(names, unpenalized, size))
    if groups is None:
        return Groups(penalized, np.zeros(len(penalized), int), np.array([""], dtype=object))
    every = _label(X, names, groups, size)
    labels = [every[number] for number in penalized]
    try:
        known = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    except TypeError as error:  # lists, masked entries
        raise ValueError(f"`groups` must have strings or numbers as labels: {error}.") from error
    return Groups(penalized, np.array([known[label] for label in labels], int), np.array(list(known), dtype=object))


def find_features(names: Any, wanted: Any, size: int) -> np.ndarray:
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
    alone = isinstance(wanted, str) or (isinstance(wanted, np.ndarray) and wanted.ndim == 0)
    return list(wanted) if isinstance(wanted, Iterable) and not alone else [wanted]


def _label(X: Any, names: Any, groups: Any, size: int) -> list[Any]:
    if isinstance(groups, dict | str):
        if isinstance(groups, str) and groups != "prefix":
            raise ValueError(f"`groups={groups!r}`: must be 'prefix', a dict, or a label for each feature.")
        if names is None:
            raise ValueError("`groups` needs names of columns; give X as a DataFrame, or a label for each feature.")
        return prefixes(X, list(names)) if isinstance(groups, str) else _look_up(list(names), groups)
    labels = _as_list(groups)
    if len(labels) != size:
        raise ValueError(f"`groups` must name the group of each of the {size} features, got {len(labels)}.")
    return labels


def _look_up(names: list[str], groups: dict[str, Any]) -> list[Any]:
    if unknown := [name for name in groups if name not in names]:
        raise ValueError(f"`groups` names columns that X does not have: {unknown[:5]}.")
    return [groups.get(name, _REST) for name in names]


def prefixes(X: Any, names: list[str]) -> list[str]:
    """Return the name of each column up to its last separator; one-hot columns of one source have one prefix.

    What stands before a double underscore is the name of a transformer, which a source is not shared with. Columns of
    zeros and ones belong to one source where no row has two ones among those that share a prefix: the shortest such
    prefix counts, because names of categories may have separators too.
    """
    out = [_cut(name) for name in names]
    binary = _find_binary(X)
    shared: dict[str, list[int]] = {}
    for number in np.flatnonzero(binary):
        for prefix in _prefixes(names[number]):
            shared.setdefault(prefix, []).append(int(number))
    taken: set[int] = set()
    for prefix in sorted(shared, key=len):
        columns = [number for number in shared[prefix] if number not in taken]
        if len(columns) > 1 and X[:, columns].sum(axis=1).max() <= 1:
            taken.update(columns)
            for column in columns:
                out[column] = prefix
    return out


def _cut(name: str) -> str:
    return _prefixes(name)[-1] if _prefixes(name) else name


def _prefixes(name: str) -> list[str]:
    """Return what stands before each separator, the name of a transformer apart."""
    transformer, double, rest = name.rpartition("__")
    ends = [match.start() for match in _SEPARATOR.finditer(rest) if match.start() > 0]
    return [transformer + double + rest[:end] for end in ends]


def _find_binary(X: Any) -> np.ndarray:
    if sp.issparse(X):
        other = sp.csc_array(X)
        odd = (other.data != 0) & (other.data != 1)
        return np.bincount(np.repeat(np.arange(X.shape[1]), np.diff(other.indptr))[odd], minlength=X.shape[1]) == 0
    return np.all((X == 0) | (X == 1), axis=0)

"""Checks of the input of problems, which raise ValueError before anything is computed."""

import os
from numbers import Integral
from typing import Any

import jax
import numpy as np
from numpy.typing import DTypeLike

from bilevel._core import trees
from bilevel._core.compilation import check_concrete
from bilevel._core.types import INT32_MAX, Array, PyTree, as_float, is_number
from bilevel.oracles import HostData
from bilevel.oracles.host_samples import head, is_dataset


def as_array(name: str, given: Any) -> np.ndarray:
    """Return a value as a NumPy array; masked values and lists of unequal lengths raise ValueError."""
    check_concrete(name, given)
    if np.ma.is_masked(given):
        raise ValueError(f"`{name}` has masked values; remove or impute those rows.")
    try:
        return np.asarray(given)
    except (ValueError, TypeError) as error:
        raise ValueError(f"`{name}` is not an array of numbers: {error}") from error


def _arrays(name: str, tree: PyTree, kinds: str, encode: str, way_out: str) -> tuple[list[np.ndarray], Any]:
    """Return the leaves of a tree as finite arrays of the given kinds of dtype, and its structure."""
    leaves, structure = jax.tree.flatten(tree)
    if not leaves:
        raise ValueError(f"`{name}` holds no array; give an array or a pytree of arrays.")
    arrays = [as_array(name, leaf) for leaf in leaves]
    for array in arrays:
        if array.dtype.kind not in kinds:
            raise ValueError(f"`{name}` has a leaf of dtype {array.dtype}; {encode}.")
        if not np.all(np.isfinite(array)):
            raise ValueError(f"`{name}` holds NaN or infinite values; {way_out}.")
    return arrays, structure


def check_data(name: str, data: PyTree, *, on_host: bool = False) -> PyTree:
    """Return the data as finite NumPy arrays with the same first axis, which is not empty.

    A `HostData` is returned unread if ``on_host`` is True.
    """
    if isinstance(data, HostData):
        if not on_host:
            others = "`from_losses` and `penalty_selection`, with other losses, do"
            raise ValueError(f"`{name}`: this problem does not take a `HostData`; {others}. Give arrays.")
        return data
    if is_dataset(data):
        raise ValueError(f"`{name}` returns its rows one by one; give `bilevel.HostData(…)` of it, or arrays.")
    arrays, structure = _arrays(name, data, "fiub", "encode it as numbers first", "remove or impute those rows")
    if any(array.ndim == 0 for array in arrays):
        raise ValueError(f"`{name}` has a leaf without axes; the first axis of each leaf is the samples.")
    lengths = sorted({len(array) for array in arrays})
    if len(lengths) > 1:
        raise ValueError(f"`{name}`: leaves have {lengths} samples; the first axes must agree.")
    if lengths[0] == 0:
        raise ValueError(f"`{name}` is empty; at least one sample is needed.")
    return jax.tree.unflatten(structure, arrays)


def check_variable(name: str, variable: PyTree, dtype: DTypeLike) -> PyTree:
    """Return a variable in ``dtype``; its leaves must be finite floats."""
    encode = "variables are real: use floats"
    if any(callable(leaf) for leaf in jax.tree.leaves(variable)):
        split = "`arrays, rest = eqx.partition(model, eqx.is_inexact_array)` for Equinox, `nnx.split` for Flax"
        encode = f"of a model, give the arrays alone ({split}) and combine them with the rest in the loss"
    arrays, structure = _arrays(name, variable, "f", encode, "give a finite start")
    with np.errstate(over="ignore"):
        cast = [array.astype(dtype) for array in arrays]
    if not all(np.isfinite(array).all() for array in cast):
        raise ValueError(f"`{name}` overflows {np.dtype(dtype)}; give a smaller start.")
    return jax.tree.unflatten(structure, cast)


def check_outer(outer_var: PyTree) -> PyTree:
    """Return an outer variable in float64; it must be finite."""
    arrays, structure = _arrays("outer_var", outer_var, "fiu", "give real numbers", "give a finite point")
    return jax.tree.unflatten(structure, [array.astype(np.float64) for array in arrays])


def check_bounds(bounds: Any, outer_var: PyTree, name: str = "`outer_bounds`") -> tuple[PyTree, PyTree] | None:
    """Return (lower, upper) as pytrees like the outer variable; a number or None is used for all leaves."""
    if bounds is None:
        return None
    if not isinstance(bounds, tuple | list) or len(bounds) != 2:
        raise ValueError(f"{name} must be a pair (lower, upper), each None, a number or like the outer variable.")
    if any(as_array("outer_bounds", leaf).dtype.kind not in "fiu" for leaf in jax.tree.leaves(tuple(bounds))):
        raise ValueError(f"{name}: bounds are numbers, or None for no bound, got {bounds!r}.")
    try:
        lower, upper = _spread(bounds[0], outer_var, -np.inf), _spread(bounds[1], outer_var, np.inf)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: a bound does not have the shape of the outer variable: {error}") from None
    for low, high, start in zip(*map(jax.tree.leaves, (lower, upper, outer_var)), strict=True):
        if not np.all(low <= high):
            raise ValueError(f"{name}: a lower bound exceeds its upper bound, or one is NaN.")
        if not np.all((low <= start) & (start <= high)):
            raise ValueError(f"{name}: the outer variable starts outside; move the start or widen the bounds.")
    return lower, upper


def _spread(bound: Any, x: PyTree, missing: float) -> PyTree:
    bound = missing if bound is None else bound
    if np.ndim(bound) == 0 and not isinstance(bound, dict | list | tuple):
        return jax.tree.map(lambda leaf: np.full_like(leaf, bound), x)
    return jax.tree.map(lambda leaf, part: np.broadcast_to(np.asarray(part, leaf.dtype), leaf.shape), x, bound)


def check_table(
    features_name: str, features: Any, targets_name: str, targets: Any, *, on_host: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return features, (samples, features), and targets, one per row; the values of targets are not checked."""
    rows, column = check_data(features_name, features, on_host=on_host), as_array(targets_name, targets)
    table = head(rows)
    if not isinstance(table, np.ndarray) or table.ndim != 2:
        got = f"shape {table.shape}" if isinstance(table, np.ndarray) else f"a {type(table).__name__}"
        raise ValueError(f"`{features_name}` must be an array with two axes, rows and features, got {got}.")
    if table.shape[1] == 0:
        raise ValueError(f"`{features_name}` has no column; at least one feature is needed.")
    if column.ndim != 1:
        raise ValueError(f"`{targets_name}` must have one axis, got shape {column.shape}.")
    if len(rows) != len(column):
        raise ValueError(f"`{features_name}` has {len(rows)} rows and `{targets_name}` {len(column)}.")
    return rows, targets if isinstance(targets, np.memmap) and isinstance(rows, HostData) else column


def check_tables(
    X_train: Any, y_train: Any, X_val: Any, y_val: Any, *, on_host: bool = False
) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Return features and targets of both levels, with the same number of columns."""
    train = check_table("X_train", X_train, "y_train", y_train, on_host=on_host)
    validation = check_table("X_val", X_val, "y_val", y_val, on_host=on_host)
    check_same_features(("X_train", "X_val"), (X_train, X_val))
    return train, validation


def check_same_columns(names: tuple[str, str], tables: tuple[Any, Any], *, reordered: bool = False) -> None:
    """Raise ValueError for data frames with different columns, or, if ``reordered``, the same in another order."""
    frames = [dict(jax.tree_util.tree_leaves_with_path(table)) for table in tables]
    for path in frames[0].keys() & frames[1].keys():
        columns = [list(getattr(found[path], "columns", ())) for found in frames]
        if all(columns) and columns[0] != columns[1] and (not reordered or set(columns[0]) == set(columns[1])):
            first, second = (name + jax.tree_util.keystr(path) for name in names)
            due = f"`{second}` must have the columns of `{first}` in the same order"
            raise ValueError(f"{due}, got {columns[1][:9]} and {columns[0][:9]}; use `{second}[{first}.columns]`.")


def check_same_features(names: tuple[str, str], tables: tuple[Any, Any]) -> None:
    """Raise ValueError for two tables with different columns."""
    check_same_columns(names, tables)
    widths = [np.shape(head(table))[1] for table in tables]
    if widths[0] != widths[1]:
        raise ValueError(f"`{names[0]}` has {widths[0]} features and `{names[1]}` {widths[1]}; they must agree.")


def check_signs(name: str, labels: np.ndarray) -> np.ndarray:
    """Return labels ±1 as float64."""
    if labels.dtype.kind not in "fiub" or not np.all(np.isin(labels, (-1, 1))):
        seen = _first(labels)
        raise ValueError(f"`{name}` must hold labels -1 and 1, got {seen}; map classes with np.where(y == c, 1, -1).")
    return labels.astype(np.float64)


def _first(labels: np.ndarray) -> list[Any]:
    """Return the first few labels; labels that are objects may have no order."""
    return (labels if labels.dtype.kind == "O" else np.unique(labels))[:5].tolist()


def check_classes(name: str, labels: np.ndarray, n_classes: int | None = None) -> np.ndarray:
    """Return classes 0, 1, … as int32; they must be below ``n_classes`` if it is given."""
    if labels.dtype.kind not in "iub" or labels.min() < 0:
        seen = _first(labels)
        raise ValueError(f"`{name}` must hold classes 0, 1, 2, …, got {seen}; see np.unique(y, return_inverse=True).")
    if n_classes is not None and labels.max() >= n_classes:
        raise ValueError(f"`{name}` holds the class {labels.max()}, but `y_train` only classes 0 to {n_classes - 1}.")
    return labels.astype(np.int32)


def check_groups(groups: Any, n_members: int, member: str = "feature") -> tuple[Array | None, int]:
    """Return the group of each feature or other member, and the number of groups 0, 1, …, none of them empty."""
    if groups is None:
        return None, n_members
    numbers, n_groups = _check_numbers("groups", groups, n_members, member)
    return trees.put(numbers), n_groups


def check_folds(folds: Any, n_rows: int, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Return the fold of each row and the number of folds, from a fold per row or a number of equal random folds."""
    if is_number(folds, Integral):
        if not 2 <= (number := int(folds)) <= n_rows:
            raise ValueError(f"`folds={number}`: must be at least 2 and at most the number of rows, {n_rows}.")
        folds = rng.permutation(np.arange(n_rows) % number)
    numbers, n_folds = _check_numbers("folds", folds, n_rows, "row")
    if n_folds < 2:
        raise ValueError("`folds` holds the fold 0 alone; at least two are needed.")
    return numbers, n_folds


def _check_numbers(name: str, given: Any, n_members: int, member: str) -> tuple[np.ndarray, int]:
    """Return the numbers of all members as int32, which must be 0, 1, … without gaps, and how many differ."""
    numbers = as_array(name, given)
    if numbers.shape != (n_members,) or numbers.dtype.kind not in "iu":
        got = f"{numbers.dtype} of shape {numbers.shape}"
        raise ValueError(f"`{name}` must hold one integer per {member} ({n_members}), got {got}.")
    found = np.unique(numbers)
    if not np.array_equal(found, np.arange(len(found))):
        got = f"got {found[:5].tolist()}…; see np.unique({name}, return_inverse=True)"
        raise ValueError(f"`{name}` must be numbered 0, 1, … without gaps, {got}.")
    return numbers.astype(np.int32), len(found)


def check_range(name: str, data: PyTree, dtype: DTypeLike) -> None:
    """Raise ValueError for floats whose squares are not finite in ``dtype``."""
    if isinstance(data, HostData):
        return
    largest = np.sqrt(np.finfo(dtype).max)
    for leaf in jax.tree.leaves(data):
        if leaf.dtype.kind == "f" and leaf.size and (most := np.abs(leaf).max()) > largest:
            raise ValueError(f"`{name}` holds {most:.3g}, whose square overflows {np.dtype(dtype)}; scale its columns.")


def make_rng(seed: Any) -> np.random.Generator:
    """Return the generator of a seed, which must be a nonnegative integer."""
    if not is_number(seed, Integral) or seed < 0:
        raise ValueError(f"`seed={seed!r}`: must be an integer of at least 0.")
    return np.random.default_rng(int(seed))


def check_sizes(**sizes: Any) -> list[int]:
    """Return sizes as integers of Python; they must be from 1 to 2**31 - 1."""
    for name, size in sizes.items():
        if not is_number(size, Integral) or size < 1:
            raise ValueError(f"`{name}={size!r}`: must be an integer of at least 1.")
        if size > INT32_MAX:
            raise ValueError(f"`{name}={size!r}`: must be below 2**31.")
    return [int(size) for size in sizes.values()]


def check_memory(numbers: int, dtype: DTypeLike, *names: str) -> None:
    """Raise ValueError if arrays of this many numbers exceed the memory; ``names`` are the sizes to be reduced."""
    needed, there = numbers * np.dtype(dtype).itemsize, memory_bytes()
    if needed > there:
        listed = ", ".join(f"`{name}`" for name in names)
        raise ValueError(f"{listed}: {needed / 2**30:.3g} GiB are needed, and this machine has {there / 2**30:.3g}.")


def memory_bytes() -> float:
    """Return the memory of this machine; infinity if it is unknown."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE")) * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return np.inf


def check_flag(**flags: Any) -> None:
    """Raise ValueError for flags that are not True or False."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ValueError(f"`{name}={flag!r}`: must be True or False.")


def check_reals(**numbers: Any) -> list[float]:
    """Return the numbers as floats; they must be finite real numbers."""
    for name, number in numbers.items():
        real = as_float(number)
        if not isinstance(real, float) or not np.isfinite(real):
            raise ValueError(f"`{name}={number!r}`: must be a finite number.")
    return [float(number) for number in numbers.values()]


def check_positive(**numbers: Any) -> list[float]:
    """Return the numbers as floats; they must be above 0 and finite."""
    for (name, given), number in zip(numbers.items(), check_reals(**numbers), strict=True):
        if number <= 0:
            raise ValueError(f"`{name}={given!r}`: must be above 0 and finite.")
    return [float(number) for number in numbers.values()]


def check_choice(name: str, choice: Any, choices: tuple[str, ...]) -> None:
    """Raise ValueError if a value is not one of the choices."""
    if not isinstance(choice, str) or choice not in choices:
        raise ValueError(f"`{name}={choice!r}`: must be one of {', '.join(map(repr, choices))}.")

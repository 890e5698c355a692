"""Checks: input of a problem, refused with a sentence before any work is done, and its derivatives."""

from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from bilevel import _tree as trees
from bilevel._precision import arithmetic
from bilevel._types import Array, Point, PyTree
from bilevel.oracles import Oracles


def _arrays(name: str, tree: PyTree, kinds: str, encode: str, way_out: str) -> tuple[list[np.ndarray], Any]:
    """Return the leaves, all of these kinds of dtype and finite, and the structure of a tree."""
    leaves, structure = jax.tree.flatten(tree)
    if not leaves:
        raise ValueError(f"`{name}` holds no array; give an array or a pytree of arrays.")
    arrays = [np.asarray(leaf) for leaf in leaves]
    for array in arrays:
        if array.dtype.kind not in kinds:
            raise ValueError(f"`{name}` has a leaf of dtype {array.dtype}; {encode}.")
        if not np.all(np.isfinite(array)):
            raise ValueError(f"`{name}` holds NaN or infinite values; {way_out}.")
    return arrays, structure


def check_data(name: str, data: PyTree) -> PyTree:
    """Return the data as NumPy arrays, all with the same first axis, none of it empty, NaN or infinite."""
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
    """Return the variable in ``dtype``, refusing integers and what is not finite."""
    arrays, structure = _arrays(name, variable, "f", "variables are real: use floats", "give a finite start")
    return jax.tree.unflatten(structure, [array.astype(dtype) for array in arrays])


def check_bounds(bounds: Any, outer_var: PyTree) -> tuple[PyTree, PyTree] | None:
    """Return (lower, upper) as pytrees like the outer variable; a number or None stands for all leaves."""
    if bounds is None:
        return None
    if not isinstance(bounds, tuple | list) or len(bounds) != 2:
        raise ValueError("`outer_bounds` must be a pair (lower, upper), each None, a number or like `outer_var`.")
    if any(np.asarray(leaf).dtype.kind not in "fiu" for leaf in jax.tree.leaves(tuple(bounds))):
        raise ValueError(f"`outer_bounds={bounds!r}`: bounds are numbers, or None for no bound.")
    lower, upper = _spread(bounds[0], outer_var, -np.inf), _spread(bounds[1], outer_var, np.inf)
    for low, high, start in zip(*map(jax.tree.leaves, (lower, upper, outer_var)), strict=True):
        if not np.all(low <= high):
            raise ValueError("`outer_bounds`: a lower bound exceeds its upper bound, or one is NaN.")
        if not np.all((low <= start) & (start <= high)):
            raise ValueError("`outer_var` starts outside `outer_bounds`; move the start or widen the bounds.")
    return lower, upper


def _spread(bound: Any, x: PyTree, missing: float) -> PyTree:
    bound = missing if bound is None else bound
    if np.ndim(bound) == 0 and not isinstance(bound, dict | list | tuple):
        return jax.tree.map(lambda leaf: np.full_like(leaf, bound), x)
    try:
        return jax.tree.map(lambda leaf, part: np.broadcast_to(np.asarray(part, leaf.dtype), leaf.shape), x, bound)
    except ValueError as error:
        raise ValueError(f"`outer_bounds` does not have the shape of `outer_var`: {error}") from None


def check_table(features_name: str, features: Any, targets_name: str, targets: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return features, (samples, features), and targets, one per row; what targets hold is not looked at."""
    rows, column = check_data(features_name, features), np.asarray(targets)
    if not isinstance(rows, np.ndarray) or rows.ndim != 2:
        raise ValueError(f"`{features_name}` must be an array with two axes, rows and features, got {np.shape(rows)}.")
    if rows.shape[1] == 0:
        raise ValueError(f"`{features_name}` has no column; at least one feature is needed.")
    if column.ndim != 1:
        raise ValueError(f"`{targets_name}` must have one axis, got shape {column.shape}.")
    if len(rows) != len(column):
        raise ValueError(f"`{features_name}` has {len(rows)} rows and `{targets_name}` {len(column)}.")
    return rows, column


def check_tables(X_train: Any, y_train: Any, X_val: Any, y_val: Any) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Return features and targets of both levels, with the same number of columns."""
    train, validation = check_table("X_train", X_train, "y_train", y_train), check_table("X_val", X_val, "y_val", y_val)
    check_same_features(("X_train", "X_val"), (train[0], validation[0]))
    return train, validation


def check_same_features(names: tuple[str, str], tables: tuple[np.ndarray, np.ndarray]) -> None:
    """Refuse two tables with different numbers of columns."""
    widths = [table.shape[1] for table in tables]
    if widths[0] != widths[1]:
        raise ValueError(f"`{names[0]}` has {widths[0]} features and `{names[1]}` {widths[1]}; they must agree.")


def check_signs(name: str, labels: np.ndarray) -> np.ndarray:
    """Return labels ±1 as float64."""
    if not np.all(np.isin(labels, (-1, 1))):
        seen = np.unique(labels)[:5].tolist()
        raise ValueError(f"`{name}` must hold labels -1 and 1, got {seen}; map classes with np.where(y == c, 1, -1).")
    return labels.astype(np.float64)


def check_classes(name: str, labels: np.ndarray, n_classes: int | None = None) -> np.ndarray:
    """Return classes 0, 1, … as int32, refusing others and those not below ``n_classes``."""
    if labels.dtype.kind not in "iub" or labels.min() < 0:
        seen = np.unique(labels)[:5].tolist()
        raise ValueError(f"`{name}` must hold classes 0, 1, 2, …, got {seen}; see np.unique(y, return_inverse=True).")
    if n_classes is not None and labels.max() >= n_classes:
        raise ValueError(f"`{name}` holds the class {labels.max()}, but `y_train` only classes 0 to {n_classes - 1}.")
    return labels.astype(np.int32)


def check_groups(groups: Any, n_members: int, member: str = "feature") -> tuple[Array | None, int]:
    """Return the group of each feature (or other member), and their number; groups are 0, 1, … and none is empty."""
    if groups is None:
        return None, n_members
    numbers = np.asarray(groups)
    if numbers.shape != (n_members,) or numbers.dtype.kind not in "iu":
        got = f"{numbers.dtype} of shape {numbers.shape}"
        raise ValueError(f"`groups` must hold one integer per {member} ({n_members}), got {got}.")
    found = np.unique(numbers)
    if not np.array_equal(found, np.arange(len(found))):
        got = f"got {found[:5].tolist()}…; see np.unique(groups, return_inverse=True)"
        raise ValueError(f"`groups` must be numbered 0, 1, … without gaps, {got}.")
    return jnp.asarray(numbers.astype(np.int32)), len(found)


def check_range(name: str, data: PyTree, dtype: DTypeLike) -> None:
    """Refuse numbers whose squares are not finite in ``dtype``; integers that stay integers are not looked at."""
    largest = np.sqrt(np.finfo(dtype).max)
    for leaf in jax.tree.leaves(data):
        if leaf.dtype.kind == "f" and (most := np.abs(leaf).max()) > largest:
            raise ValueError(f"`{name}` holds {most:.3g}, whose square overflows {np.dtype(dtype)}; scale its columns.")


def make_rng(seed: Any) -> np.random.Generator:
    """Return the generator of a seed, refusing what is none."""
    if isinstance(seed, bool) or not isinstance(seed, Integral) or seed < 0:
        raise ValueError(f"`seed={seed!r}`: must be an integer of at least 0.")
    return np.random.default_rng(int(seed))


def check_sizes(**sizes: int) -> None:
    """Refuse what is no integer of at least 1."""
    for name, size in sizes.items():
        if not isinstance(size, int | np.integer) or size < 1:
            raise ValueError(f"`{name}={size!r}`: must be an integer of at least 1.")


def check_positive(**numbers: float) -> None:
    """Refuse what is not above 0 and finite."""
    for name, number in numbers.items():
        if not 0 < number < np.inf:
            raise ValueError(f"`{name}={number!r}`: must be above 0 and finite.")


def check_choice(name: str, choice: str, choices: tuple[str, ...]) -> None:
    """Refuse what is none of the choices."""
    if choice not in choices:
        raise ValueError(f"`{name}={choice!r}`: must be one of {', '.join(map(repr, choices))}.")


STEP = TOLERANCE = 1e-5
NEGLIGIBLE = 1e-5  # rounding leaves about 1e-11 in a difference quotient, whatever the derivative's size

# Of each derivative: what it is the derivative of, and along which part of a move.
_PRIMITIVES = {
    "inner_grad": ("inner_value", "inner_var"),
    "inner_grad_outer": ("inner_value", "outer_var"),
    "outer_grad": ("outer_value", "inner_var"),
    "outer_grad_outer": ("outer_value", "outer_var"),
    "hvp": ("inner_grad", "v"),
    "cross": ("inner_grad_outer", "v"),
}


def check_derivatives(oracles: Oracles, start: Point, seed: int = 0) -> dict[str, float]:
    """Return the relative error of each derivative against differences of values or gradients; refuse a wrong one."""
    rng = make_rng(seed)
    with arithmetic(np.float64):
        exact = oracles.astype(np.float64)
        point = jax.tree.map(lambda leaf: leaf + 0.1 * rng.standard_normal(np.shape(leaf)), start)
        point = point._replace(outer_var=exact.project(point.outer_var))
        move = jax.tree.map(lambda leaf: rng.standard_normal(np.shape(leaf)), point)
        errors = {name: _derivative_error(exact, name, point, move) for name in _PRIMITIVES}
    for name, error in errors.items():
        if not error <= TOLERANCE:
            cause = "the loss is not smooth there, has a wrong custom derivative, or is not finite"
            raise ValueError(f"`{name}` differs from finite differences by {error:.1e} of its size: {cause}.")
    return errors


def _derivative_error(oracles: Oracles, name: str, point: Point, move: Point) -> float:
    """Return |claimed - measured| relative to their sizes, by a central difference in float64."""
    of, part = _PRIMITIVES[name]
    claimed = getattr(oracles, name)(point)
    if part == "v":
        changes = {"inner_var": point.v}
    else:
        changes = {part: getattr(move, part)}
        claimed = trees.dot(claimed, changes[part])
    along = trees.scale(STEP, trees.zeros_like(point)._replace(**changes))
    ahead, behind = (getattr(oracles, of)(there) for there in (trees.add(point, along), trees.subtract(point, along)))
    measured = trees.scale(1 / (2 * STEP), trees.subtract(ahead, behind))
    gap, *sizes = (np.sqrt(trees.norm_sq(tree)) for tree in (trees.subtract(claimed, measured), claimed, measured))
    return float(gap / (sum(sizes) + NEGLIGIBLE))

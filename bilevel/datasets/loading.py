"""A data set by its name: from a folder, the cache, scikit-learn, or by download with limits on time and size."""

import bz2
import gzip
import ipaddress
import socket
import threading
import time
import warnings
import zlib
from concurrent.futures import Future, wait
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal
from urllib.parse import urljoin, urlsplit

import numpy as np

from bilevel._io import cache_folder
from bilevel._optional import require
from bilevel._progress import progress_bar
from bilevel.datasets import files
from bilevel.datasets.registry import SETS, Dataset, EmbeddedSet, FileSet, RemoteFile

_CHUNK = 2**16
_PAUSE = 0.1  # seconds between two looks at a download
_MOST_ADDRESSES = 5  # of one file: the first and those it redirects to


class DownloadError(OSError):
    """A data set that is in no folder and could not be had from its source."""


def names() -> tuple[str, ...]:
    """Return the names that `load` knows."""
    return tuple(SETS)


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
    known = _find_entry(name)
    if isinstance(known, EmbeddedSet):
        source = getattr(require("sklearn.datasets", "data"), f"load_{name}")()
        X, y = (source[key].astype(dtype) for key, dtype in known.arrays.items())
        return Dataset(name, X, y, None, None, known.classes, f"{known.citation}; the copy in scikit-learn.")
    path = files.find(name)
    arrays = _download(known, progress) if path is None else files.read(path, known)
    X_train, y_train, *test = (arrays[spec.name] for spec in known.arrays)
    X_test, y_test = test or (None, None)
    return Dataset(name, X_train, y_train, X_test, y_test, known.classes, known.citation)


def locate(name: str) -> Path | Literal["embedded"] | None:
    """Return the file that `load` would read, "embedded" for scikit-learn's sets, or None: it would download."""
    return "embedded" if isinstance(_find_entry(name), EmbeddedSet) else files.find(name)


def _find_entry(name: str) -> FileSet | EmbeddedSet:
    if name not in SETS:
        nearest = get_close_matches(str(name), names(), n=1, cutoff=0.0)[0]
        raise ValueError(f"`name={name!r}`: did you mean '{nearest}'? There are {', '.join(names())}.")
    return SETS[name]


def _download(known: FileSet, progress: bool) -> dict[str, np.ndarray]:
    """Return the verified arrays of a set from its source, and keep them in the cache."""
    path = cache_folder() / f"{known.name}.npz"
    try:
        arrays = {name: array for remote in known.files for name, array in _fetch(remote, progress).items()}
        files.verify(arrays, known)
    except (DownloadError, ValueError) as error:
        reason = error if isinstance(error, DownloadError) else f"its source has changed: {error}"
        text = f"'{known.name}' could not be downloaded: {reason}. Put `{path.name}` with the arrays {known.contents}"
        raise DownloadError(f"{text} into the folder that BILEVEL_DATA names, or into `{path.parent}`.") from error
    try:
        files.write(path, arrays)
    except OSError as error:  # a full disk must not cost what was downloaded
        warnings.warn(f"`{path}` cannot be written ({error}); '{known.name}' will be downloaded again.", stacklevel=3)
    return arrays


def _fetch(remote: RemoteFile, progress: bool) -> dict[str, np.ndarray]:
    """Return the arrays from the first host that serves them: pooch knows only one address of a file."""
    pooch, failures = require("pooch", "data"), []
    for url in remote.urls:
        name, deadline = url.rpartition("/")[2], time.monotonic() + remote.max_seconds
        try:
            # A folder for each host: pooch would take a file that another host left for its own.
            with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                store = pooch.create(folder, "", urls={name: url}, registry={name: remote.digest}, retry_if_failed=2)
                packed = store.fetch(name, downloader=partial(_receive, remote, deadline, progress))
                return _parse(Path(packed), remote)
        except (OSError, ValueError, EOFError, zlib.error) as error:  # of pooch, a host, a decompressor or a parser
            failures.append(f"{url}: {str(error) or type(error).__name__}")
    raise DownloadError("; ".join(failures))


def _receive(remote: RemoteFile, deadline: float, progress: bool, url: str, output_file: str, store: Any) -> None:
    """Download within the limits of time and size, which neither pooch nor requests has."""
    with progress_bar(url.rpartition("/")[2], progress) as report:
        transfer = _Transfer(url, remote, output_file)
        while not wait([transfer.outcome], _PAUSE).done:
            report(transfer.size / transfer.announced, f"{transfer.size / 1e6:.1f} MB")
            if time.monotonic() > deadline:
                transfer.is_wanted, limit = False, f"{remote.max_seconds:g} seconds, the limit for this file"
                raise OSError(f"after {limit}, {transfer.size:,} bytes had come")
        transfer.outcome.result()


class _Transfer:
    """A download in a thread. A host that sends a byte at a time blocks the thread, and not those who wait for it."""

    def __init__(self, url: str, remote: RemoteFile, output_file: str) -> None:
        self.remote, self.size, self.announced, self.is_wanted = remote, 0, remote.max_bytes, True
        self.outcome: Future[None] = Future()
        threading.Thread(target=self._run, args=(url, output_file), daemon=True).start()

    def _run(self, url: str, output_file: str) -> None:
        try:
            self._copy(url, output_file)
            self.outcome.set_result(None)
        except BaseException as error:  # raised again in the thread that waits
            self.outcome.set_exception(error)

    def _copy(self, url: str, output_file: str) -> None:
        with _open_session() as session, _request(session, url, self.remote) as response:
            response.raise_for_status()
            announced = int(response.headers.get("content-length", 0))
            _check_size(announced, self.remote)
            self.announced = announced or self.remote.max_bytes
            with open(output_file, "wb") as file:
                for chunk in response.iter_content(_CHUNK):
                    self.size += len(chunk)
                    _check_size(self.size, self.remote)
                    if not self.is_wanted:
                        return
                    file.write(chunk)


def _open_session() -> Any:
    return require("requests", "data").Session()


def _request(session: Any, url: str, remote: RemoteFile) -> Any:
    """Return the response of the last of some redirects, each to an address that is as safe as the first."""
    first = url
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
    """Return whether a host is in the public internet, as one counts whose name only a proxy can resolve."""
    try:
        found = socket.getaddrinfo(urlsplit(url).hostname, None)
    except (OSError, UnicodeError):
        return True
    return all(ipaddress.ip_address(str(place[0]).partition("%")[0]).is_global for *_, place in found)


def _check_size(size: int, remote: RemoteFile) -> None:
    if size > remote.max_bytes:
        raise OSError(f"more than {remote.max_bytes} bytes, the limit for this file")


def _parse(packed: Path, remote: RemoteFile) -> dict[str, np.ndarray]:
    opener = gzip.open if packed.suffix == ".gz" else bz2.open
    with opener(packed) as stream, packed.with_name("unpacked").open("w+b") as file:
        while chunk := stream.read(_CHUNK):
            _check_size(file.tell() + len(chunk), remote)
            file.write(chunk)
        file.seek(0)
        try:
            values = remote.parse(file, remote.arrays)
        except ValueError as error:
            raise ValueError(f"not in the expected form: {error}") from error
    return {spec.name: array for spec, array in zip(remote.arrays, values, strict=True)}

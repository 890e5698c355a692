"""A data set from its source, with limits on time and size."""

import bz2
import gzip
import urllib.request
import zlib
from collections.abc import Callable
from http.client import HTTPException
from tempfile import TemporaryFile
from typing import IO, Any, BinaryIO, cast

import numpy as np

from bilevel.datasets import files
from bilevel.datasets.records import FileSet, RemoteFile
from bilevel.progress import Reporter, progress_bar

_CHUNK = 2**16
_UNPACK: dict[str, Callable[..., Any]] = {"gz": gzip.open, "bz2": bz2.open}
# What a host, a connection or a decompressor may raise.
_FAILURES = (OSError, HTTPException, EOFError, zlib.error)


class DownloadError(OSError):
    """A data set that is in no folder and could not be had from its source."""


def download(known: FileSet, progress: bool) -> dict[str, np.ndarray]:
    """Return the verified arrays of a set, from its source."""
    arrays: dict[str, np.ndarray] = {}
    for remote in known.files:
        with TemporaryFile() as plain:
            url = _fetch(remote, plain, progress)
            try:
                values = remote.parse(cast(BinaryIO, plain), remote.arrays)
            except ValueError as error:
                raise DownloadError(f"{url} is not in the expected form: {error}") from error
        arrays |= {spec.name: array for spec, array in zip(remote.arrays, values, strict=True)}
    try:
        files.verify(arrays, known)
    except ValueError as error:
        raise DownloadError(f"the source of '{known.name}' has changed: {error}") from error
    return arrays


def _fetch(remote: RemoteFile, plain: IO[bytes], progress: bool) -> str:
    """Write the unpacked file to ``plain`` from the first host that serves it, and return its address."""
    failures = []
    for url in remote.urls:
        plain.seek(0)
        plain.truncate()
        try:
            with TemporaryFile() as packed:
                with progress_bar(url.rpartition("/")[2], progress) as report:
                    _receive(url, remote, packed, report)
                _unpack(url, remote, packed, plain)
            return url
        except _FAILURES as error:
            failures.append(f"{url}: {str(error) or type(error).__name__}")
    raise DownloadError("; ".join(failures))


def _receive(url: str, remote: RemoteFile, packed: IO[bytes], report: Reporter) -> None:
    report(0.0, "connecting")
    with _opener().open(url, timeout=remote.timeout) as answer:
        length = answer.headers.get("Content-Length")
        total = int(length) if length and length.isdecimal() else None
        _check_size(total or 0, remote)
        while chunk := answer.read1(_CHUNK):
            packed.write(chunk)
            _check_size(packed.tell(), remote)
            report(packed.tell() / (total or remote.max_bytes), f"{packed.tell() / 1e6:.1f} MB")
    if total is not None and packed.tell() < total:
        raise EOFError(f"the answer ended after {packed.tell()} of {total} bytes")
    packed.seek(0)


def _unpack(url: str, remote: RemoteFile, packed: IO[bytes], plain: IO[bytes]) -> None:
    with _UNPACK[url.rpartition(".")[2]](packed) as stream:
        while chunk := stream.read(_CHUNK):
            plain.write(chunk)
            _check_size(plain.tell(), remote)
    plain.seek(0)


def _check_size(size: int, remote: RemoteFile) -> None:
    if size > remote.max_bytes:
        raise OSError(f"more than {remote.max_bytes} bytes, the limit for this file")


def _opener() -> urllib.request.OpenerDirector:
    """Return an opener without the file, data and FTP handlers of `urlopen`, to which a redirect might lead."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.UnknownHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPErrorProcessor,
    ):
        opener.add_handler(handler())
    opener.addheaders = [("User-Agent", "bilevel")]
    return opener

"""Files that are complete or do not exist, and foreign files, which are read within limits and never unpickled."""

import os
import stat
import time
import uuid
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from math import prod
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import numpy as np

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

# In seconds: a younger file may not be locked yet, and an older one is not being written any more.
_FRESH, _STALE = 1.0, 3600.0


def as_path(name: str, path: Any) -> Path:
    """Return the path of a file or folder, or raise ValueError if it cannot be one."""
    if not isinstance(path, str | os.PathLike) or "\0" in os.fspath(path) or not Path(path).name:
        raise ValueError(f"`{name}={path!r}`: must be a path, with the name of a file or folder.")
    return Path(path)


def cache_folder() -> Path:
    """Return the folder for data that can be downloaded or compiled again; it may not exist yet."""
    if named := os.environ.get("BILEVEL_CACHE"):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "bilevel"


def read_bounded(path: Path, most: int) -> bytes:
    """Return the bytes of a file; ValueError if it is larger, or not a regular file: a FIFO would block the reader."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is not a regular file")
    if found.st_size > most:
        raise ValueError(f"it has {found.st_size:,} bytes, and at most {most:,} are read")
    return path.read_bytes()


def read_stored_arrays(file: BinaryIO) -> dict[str, np.ndarray]:
    """Return the arrays of an archive written by `np.savez`, which does not compress.

    An archive that would unpack to more bytes than the file has is refused before it is read.
    """
    size = file.seek(0, os.SEEK_END)
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        if any(one.compress_type != zipfile.ZIP_STORED for one in members) or sum(m.file_size for m in members) > size:
            raise ValueError(f"it would unpack to more than its own {size:,} bytes")
        found = {}
        for one in members:
            with archive.open(one) as member:
                found[one.filename.removesuffix(".npy")] = read_array(member, most=one.file_size)
    return found


def read_array(member: IO[bytes], most: int) -> np.ndarray:
    """Return an array in NumPy's format, if its header does not claim more than ``most`` bytes of memory."""
    if np.lib.format.read_magic(member) != (1, 0):
        raise ValueError("an array is not in version 1.0 of NumPy's format")
    shape, _, dtype = np.lib.format.read_array_header_1_0(member)
    if prod(shape) * dtype.itemsize > most:
        raise ValueError(f"an array claims to be {dtype} {shape}, larger than {most:,} bytes")
    member.seek(0)
    return np.lib.format.read_array(member, allow_pickle=False)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that replaces ``path`` if the block succeeds; an OSError contains the path."""
    hidden = path.with_name(f".{uuid.uuid4().hex}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path.parent)
        with ExitStack() as until_renamed:
            with hidden.open("xb") as file:
                until_renamed.enter_context(_locked(file))
                yield cast(BinaryIO, file)
                file.flush()
                os.fsync(file.fileno())
            hidden.replace(path)
    except BaseException as error:
        with suppress(OSError):  # the file does not exist, or the disk is read-only
            hidden.unlink()
        if isinstance(error, OSError) and error.errno is not None:
            raise type(error)(error.errno, error.strerror, str(path)) from error
        raise


@contextmanager
def _locked(file: BinaryIO) -> Iterator[None]:
    """Hold a lock on a file, even after it is closed; the lock ends with the process at the latest."""
    held = os.dup(file.fileno())
    try:
        with suppress(OSError):  # not every file system has locks
            _lock(held)
        yield
    finally:
        os.close(held)


def _lock(file: IO[bytes] | int) -> None:
    """Lock a file, or raise OSError if another process holds the lock, or if there are no locks."""
    if fcntl is None:
        raise OSError("no locks on this system")
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove_leftovers(folder: Path) -> None:
    """Remove the unfinished files of killed processes from a folder."""
    for path in folder.glob(f".{32 * '[0-9a-f]'}.part"):
        with suppress(OSError):  # a process is writing it, or removed it, or the folder belongs to another user
            age = time.time() - path.stat().st_mtime
            if _FRESH < age <= _STALE:
                with path.open("r+b") as file:
                    _lock(file)
            if age > _FRESH:
                path.unlink()

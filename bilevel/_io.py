"""Files that appear whole or not at all, and files of others, which are read within limits."""

import os
import re
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast


def as_path(name: str, path: Any) -> Path:
    """Return the path of a file or folder, refusing what can be none."""
    if not isinstance(path, str | os.PathLike) or "\0" in os.fspath(path) or not Path(path).name:
        raise ValueError(f"`{name}={path!r}`: must be a path, with the name of a file or folder.")
    return Path(path)


def read_bounded(path: Path, most: int) -> bytes:
    """Return the bytes of a regular file; a larger file, or a FIFO, which would block a reader, is a ValueError."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is not a regular file")
    if found.st_size > most:
        raise ValueError(f"it has {found.st_size:,} bytes, and at most {most:,} are read")
    return path.read_bytes()


def cache_folder() -> Path:
    """Return the folder for what can be had again, which need not exist yet."""
    if named := os.environ.get("BILEVEL_CACHE"):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "bilevel"


try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

_PART = re.compile(r"\.[0-9a-f]{32}\.part")  # what is being written; readers of a folder pass such names over
_FRESH, _STALE = 1.0, 3600.0  # seconds: perhaps not locked yet, and longer than any write takes


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file to write to, which takes the place of ``path`` when the block ends well; an OSError names it."""
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
        with suppress(OSError):  # it is not there, or the disk is read-only
            hidden.unlink()
        if isinstance(error, OSError) and error.errno is not None:
            raise type(error)(error.errno, error.strerror, str(path)) from error
        raise


@contextmanager
def _locked(file: BinaryIO) -> Iterator[None]:
    """Hold a lock on a file, also when it is closed; the lock ends with the process, however that ends."""
    if fcntl is None:
        yield
        return
    held = os.dup(file.fileno())
    try:
        with suppress(OSError):  # not every file system has locks
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(held)


def _remove_leftovers(folder: Path) -> None:
    """Remove what killed writers left in a folder."""
    for path in folder.glob(".*.part"):
        with suppress(OSError):  # another process was faster, or the folder is not ours
            age = time.time() - path.stat().st_mtime
            if _PART.fullmatch(path.name) and age > _FRESH and (age > _STALE or _is_abandoned(path)):
                path.unlink()


def _is_abandoned(path: Path) -> bool:
    if fcntl is None:
        return False
    with path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # or raises an OSError
    return True

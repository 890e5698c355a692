"""Compiled programs on disk, so that the next process need not compile them again.

JAX has such a cache, off by default. It writes files in place and reads whatever is there: what a killed process leaves
is refused, with a warning, in every later process. Its bound needs another package. And it does not ask for which
processor a program was made. So the folder is one per kind of processor, and its files are read and written here.
"""

import hashlib
import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

from bilevel._io import cache_folder

SETTING = "BILEVEL_COMPILE_CACHE"  # "off", or a folder
MOST_BYTES = 2**29  # of the files of a folder; those used last are kept
_DIGEST_BYTES = 32
_kept: list[str] = []  # the folder that JAX was told of; empty before and where there is none


class ProgramFiles:
    """A folder of programs by key, each behind the digest of its bytes, as JAX's compilation reads and writes them."""

    def __init__(self, folder: Path) -> None:
        self._path = self.path = folder  # JAX has used both names
        self._bytes = 0
        self._bound()

    def get(self, key: str) -> bytes | None:
        """Return a program, or None where there is none; a damaged file is removed."""
        path = self.path / key
        try:
            found = path.read_bytes()
        except OSError:
            return None
        digest, program = found[:_DIGEST_BYTES], found[_DIGEST_BYTES:]
        whole = hashlib.sha256(program).digest() == digest
        with suppress(OSError):  # another process may have removed it
            os.utime(path) if whole else path.unlink()
        return program if whole else None

    def put(self, key: str, program: bytes) -> None:
        """Keep a program; where it cannot be written, there is one less."""
        path = self.path / key
        try:
            path.write_bytes(hashlib.sha256(program).digest() + program)
        except OSError:
            with suppress(OSError):
                path.unlink()
        self._bytes += _DIGEST_BYTES + len(program)
        if self._bytes > MOST_BYTES:
            self._bound()

    def _bound(self) -> None:
        """Remove what was not used for longest, until half of the space is free."""
        found = list_files(self.path)
        self._bytes = sum(size for _, size, _ in found)
        aim = MOST_BYTES // 2 if self._bytes > MOST_BYTES else MOST_BYTES
        for _, size, path in sorted(found):
            if self._bytes <= aim:
                break
            with suppress(OSError):
                path.unlink()
            self._bytes -= size


def list_files(folder: Path) -> list[tuple[float, int, Path]]:
    """Return time of the last use, bytes and path of each file of a folder; none where it cannot be read."""
    found = []
    for path in folder.glob("*"):
        with suppress(OSError):  # another process may have removed it
            about = path.stat()
            found.append((about.st_mtime, about.st_size, path))
    return found


def program_folder() -> Path | None:
    """Return the folder of compiled programs for this kind of processor, or None where none are to be kept."""
    setting = os.environ.get(SETTING, "")
    if setting.lower() in ("off", "0", "false", "none"):
        return None
    folder = Path(setting).expanduser() if setting else cache_folder() / "programs"
    return folder / hashlib.sha256(_processor().encode()).hexdigest()[:16]


def _processor() -> str:
    """Return what tells processors apart that cannot run the same programs."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith(("flags", "Features")):
                return line
    return f"{platform.machine()} {platform.processor()}"


def keep_programs() -> None:
    """Have JAX keep what it compiles from now on, unless it or the user was told otherwise."""
    told = _config().jax_compilation_cache_dir
    if not _kept:
        _kept.append("" if told is not None else _tell_jax())
    elif _kept[0] and told != _kept[0]:  # the user has named another since
        _kept[0] = ""
        _use(None)


def _tell_jax() -> str:
    folder, config = program_folder(), _config()
    if folder is None or not config.jax_enable_compilation_cache or not is_writable(folder):
        return ""
    config.update("jax_compilation_cache_dir", str(folder))
    if config.jax_persistent_cache_min_compile_time_secs == 1.0:  # JAX's default; most of ours compile faster
        config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    _use(ProgramFiles(folder))
    return str(folder)


def _use(files: ProgramFiles | None) -> None:
    """Have JAX read and write by these files, or by its own; a JAX with other names for them takes its own."""
    with suppress(ImportError, AttributeError):
        from jax._src import compilation_cache

        cache: Any = compilation_cache
        cache.reset_cache()
        if files is not None:
            cache._cache, cache._cache_initialized = files, True


def is_writable(folder: Path) -> bool:
    """Tell whether files can be written to a folder, which is made where it is missing."""
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.access(folder, os.W_OK | os.X_OK)
    return False


def _config() -> Any:
    import jax

    return jax.config

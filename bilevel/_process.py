"""Settings of the whole process, which the library never changes by itself, for programs that own their process.

**Fused loops.** On a CPU XLA runs the body of a loop as some dozens of pieces, each launched by its runtime, which
costs more than the arithmetic of small batches. XLA compiles loops whole if they access at most 1 kB; a step of a
linear model accesses a hundred. This limit can only be raised in the environment, before JAX initializes its backends.

**Kept programs.** JAX keeps compiled programs in a folder if it is given one.
"""

import hashlib
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from bilevel._core.files import cache_folder

_FLAG, _OPTION = "--xla_backend_extra_options=", "xla_cpu_small_while_loop_byte_threshold"
# Larger than a step of a linear model or of the quadratics. Smaller than a step on rows of hundreds of features and
# several classes, whose products are faster in XLA's library, and smaller than a pass over a large data set.
_LIMIT_BYTES = 2**20
_FOLDER, _LEAST_SECONDS = "JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
_MAX_FOLDER_BYTES = 2**29


def fuse_cpu_loops() -> None:
    """Make steps on a CPU up to twice as fast, for this process and those it starts.

    Call it before JAX computes anything. It adds an option to the environment variable ``XLA_FLAGS`` and keeps its
    other flags; if you have set this option yourself, it does nothing.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    if any(_OPTION in flag for flag in flags):
        return
    if _jax_runs():
        or_so = f"or start Python with XLA_FLAGS={_FLAG}{_OPTION}={_LIMIT_BYTES}"
        raise RuntimeError(
            f"`fuse_cpu_loops()` comes too late: JAX is running. Call it before the first array, {or_so}"
        )
    if not all(flag.startswith("--") for flag in flags):
        raise RuntimeError(f"`fuse_cpu_loops()` cannot add to XLA_FLAGS={' '.join(flags)!r}; add {_OPTION} yourself.")
    own = [flag.removeprefix(_FLAG) for flag in flags if flag.startswith(_FLAG)]
    others = [flag for flag in flags if not flag.startswith(_FLAG)]
    os.environ["XLA_FLAGS"] = " ".join([*others, _FLAG + ",".join([*own, f"{_OPTION}={_LIMIT_BYTES}"])])


def _jax_runs() -> bool:
    if "jax" not in sys.modules:
        return False
    from jax._src.xla_bridge import backends_are_initialized

    return backends_are_initialized()


def may_be_fused() -> bool:
    """Return True if the environment variable ``XLA_FLAGS`` makes XLA compile loops whole."""
    flags = os.environ.get("XLA_FLAGS", "")
    return _OPTION in flags and f"{_OPTION}=0" not in flags


def keep_programs(folder: str | Path | None = None) -> Path:
    """Make JAX keep compiled programs in a folder, so that the next process need not compile them again.

    It sets environment variables, so it also applies to the processes that this one starts, and to programs of other
    libraries. A folder that JAX has already been given, as in ``JAX_COMPILATION_CACHE_DIR``, is kept. The oldest
    programs are removed from a folder of more than 512 MB.

    Parameters
    ----------
    folder : where to keep them; by default in the cache folder of this user, in one folder per kind of processor.
        Programs are machine code: a folder that belongs to another user, or that others can write to, is refused

    Returns
    -------
    The folder.
    """
    jax: Any = sys.modules.get("jax")
    given = os.environ.get(_FOLDER) if jax is None else jax.config.jax_compilation_cache_dir
    if folder is None and given:
        return Path(given)
    path = program_folder() if folder is None else Path(folder).expanduser()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = path.stat()
    if hasattr(os, "getuid") and (about.st_uid != os.getuid() or about.st_mode & 0o022):
        raise PermissionError(
            f"`folder={str(path)!r}`: belongs to another user, or others can write to it, and the programs in it would "
            "be run. Give a folder of your own."
        )
    _remove_oldest(path)
    os.environ |= {_FOLDER: str(path), _LEAST_SECONDS: "0"}
    if jax is not None:  # JAX has already read the variables
        jax.config.update(_FOLDER.lower(), str(path))
        jax.config.update(_LEAST_SECONDS.lower(), 0.0)
    return path


def _remove_oldest(folder: Path) -> None:
    """Remove the oldest files of a folder until it holds at most `_MAX_FOLDER_BYTES`."""
    newest_first = sorted(((about.st_mtime, about.st_size, path) for path, about in _files(folder)), reverse=True)
    total = 0
    for _, size, path in newest_first:
        total += size
        if total > _MAX_FOLDER_BYTES:
            path.unlink(missing_ok=True)


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # another process may have removed it
            yield path, path.stat()


def program_folder() -> Path:
    """Return the default folder of compiled programs, for this kind of processor."""
    return cache_folder() / "programs" / hashlib.sha256(_processor().encode()).hexdigest()[:16]


def _processor() -> str:
    """Return what distinguishes processors that cannot run the same programs."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith(("flags", "Features")):
                return line
    return f"{platform.machine()} {platform.processor()}"

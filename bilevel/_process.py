"""Settings of the whole process, which the library never changes by itself, for programs that own their process.

On a CPU XLA runs the body of a loop as some dozens of pieces, each launched by its runtime, which costs more than the
arithmetic of small batches. XLA compiles loops whole if they access at most 1 kB; a step of a linear model accesses a
hundred. This limit can only be raised in the environment, before JAX initializes its backends.
"""

import hashlib
import os
import platform
import sys
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
    option = f"{_OPTION}={_LIMIT_BYTES}"
    if _jax_runs():
        raise RuntimeError(
            "`fuse_cpu_loops()` comes too late: JAX is running. Call it before the first array, or start Python with "
            f"XLA_FLAGS={_FLAG}{option}"
        )
    if not all(flag.startswith("--") for flag in flags):
        raise RuntimeError(f"`fuse_cpu_loops()` cannot add to XLA_FLAGS={' '.join(flags)!r}; add {_OPTION} yourself.")
    own = [flag.removeprefix(_FLAG) for flag in flags if flag.startswith(_FLAG)]
    others = [flag for flag in flags if not flag.startswith(_FLAG)]
    os.environ["XLA_FLAGS"] = " ".join([*others, _FLAG + ",".join([*own, option])])


def _jax_runs() -> bool:
    jax: Any = sys.modules.get("jax")
    if jax is None:
        return False
    given = jax.config.jax_num_cpu_devices
    try:
        jax.config.update("jax_num_cpu_devices", given + 2)  # refused once the backends are initialized
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", given)
    return False


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
    total = 0
    with suppress(FileNotFoundError):  # another process does the same
        for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True):
            total += path.stat().st_size
            if total > _MAX_FOLDER_BYTES:
                path.unlink()


def program_folder() -> Path:
    """Return the default folder of compiled programs, for processors that can run the same programs."""
    features = f"{platform.machine()} {platform.processor()}"
    with suppress(OSError, StopIteration), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        features = next(line for line in lines if line.startswith(("flags", "Features")))
    return cache_folder() / "programs" / hashlib.sha256(features.encode()).hexdigest()[:16]

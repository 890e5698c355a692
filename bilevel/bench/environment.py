"""Where results were made: machine, versions, revision."""

import functools
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def environment() -> dict[str, str]:
    """Return the columns of the store that say how its rows came about."""
    return _fixed() | {"machine": _machine(), "written_at": datetime.now(UTC).isoformat(timespec="seconds")}


@functools.cache
def _fixed() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "jax": version("jax"),
        "bilevel": _own_version(),
        "revision": _revision(),
    }


def _own_version() -> str:
    """Return the version, or nothing where the source is run without being installed."""
    try:
        return version("bilevel")
    except PackageNotFoundError:
        return ""


def _machine() -> str:
    import jax

    (device,) = jax.numpy.zeros(()).devices()
    if device.platform != "cpu":
        return str(device.device_kind)
    return f"{_processor()}, {os.cpu_count()} cores"


@functools.cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _revision() -> str:
    """Return the git revision of the source, with a + where it was changed, or nothing where it is installed."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return ""

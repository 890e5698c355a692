"""What this machine offers: versions, devices, extras, data, caches. It needs no extra itself."""

import os
import platform
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import bilevel
from bilevel._io import cache_folder
from bilevel._process import program_folder

_FOR_DEVELOPERS = ("all", "docs", "dev")
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?:\[(?P<extras>[^\]]*)\])?[^;]*(?:;.*\bextra == ['\"](?P<of>[^'\"]+))?")


def examine() -> Iterator[tuple[str, str]]:
    """Yield what was looked at, and what was found."""
    yield "bilevel", f"{bilevel.__version__} in {Path(bilevel.__file__).parent}"
    yield "Python", f"{platform.python_version()} on {platform.platform()}"
    needed = list_requirements()
    for name in (*needed.get("", ()), "jaxlib"):
        yield name, installed_version(name) or f"missing: pip install {name}"
    yield "devices", _devices()
    yield "float64", "in every problem built with dtype='float64', whatever JAX_ENABLE_X64 says"
    for extra in sorted(needed.keys() - {"", *_FOR_DEVELOPERS}):
        missing = [name for name in needed[extra] if installed_version(name) is None]
        way = f"{', '.join(missing)} missing: pip install 'bilevel[{extra}]'"
        yield f"extra {extra}", way if missing else "installed"
    yield "data", _data()
    yield "compiled programs", _compiled_programs()


def list_requirements() -> dict[str, tuple[str, ...]]:
    """Return the distributions that each extra asks for, by its name; "" is for those that are always needed."""
    try:
        found = [match for line in requires("bilevel") or () if (match := _REQUIREMENT.match(line))]
    except PackageNotFoundError:  # the source is run without being installed
        return {}
    names: dict[str, list[str]] = {}
    for one in found:
        names.setdefault(one["of"] or "", []).append(one["name"])
    within = {one["of"]: one["extras"].split(",") for one in found if one["name"] == "bilevel"}

    def expand(extra: str) -> Iterator[str]:
        yield from (name for name in names.get(extra, ()) if name != "bilevel")
        for other in within.get(extra, ()):
            yield from expand(other.strip())

    return {extra: tuple(dict.fromkeys(expand(extra))) for extra in names}


def installed_version(name: str) -> str | None:
    """Return the version of a distribution, or None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _devices() -> str:
    import jax

    try:
        return ", ".join(f"{device} ({device.device_kind})" for device in jax.devices())
    except RuntimeError as error:  # a driver that does not fit
        return f"JAX finds none: {error}"


def _data() -> str:
    given = os.environ.get("BILEVEL_DATA")
    folders = ["BILEVEL_DATA is not set" if given is None else f"BILEVEL_DATA={given}", f"cache {cache_folder()}"]
    return "; ".join(folders)


def _compiled_programs() -> str:
    if given := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return f"kept in {given}, as JAX_COMPILATION_CACHE_DIR says"
    folder = program_folder()
    megabytes = sum(path.stat().st_size for path in folder.glob("*")) / 1e6
    return f"{megabytes:.1f} MB in {folder}; JAX_ENABLE_COMPILATION_CACHE=0 keeps none"

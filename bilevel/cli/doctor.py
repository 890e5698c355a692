"""What this machine offers: versions, devices, extras, data and caches. This module needs no extra itself."""

import os
import platform
import re
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import bilevel
from bilevel._core.extras import printable
from bilevel._core.files import cache_folder
from bilevel._process import program_folder

_FOR_DEVELOPERS = ("all", "docs", "dev")
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?:\[(?P<extras>[^\]]*)\])?[^;]*(?:;.*\bextra == ['\"](?P<of>[^'\"]+))?")


def answer_without_extras(words: Sequence[str], missing: Sequence[str]) -> int:
    """Run the command line without the extra ``bench``, and return the exit code."""
    if list(words) == ["--version"]:
        print(f"bilevel {bilevel.__version__}")
    elif list(words) == ["doctor"]:
        print(printable("\n".join(f"{what}: {found}" for what, found in examine())))
    else:
        needs = f"the command line needs {', '.join(missing)}: pip install 'bilevel[bench]'"
        print(f"bilevel {bilevel.__version__}: {needs}")
        print("Without it there are `bilevel --version` and `bilevel doctor`; the library works as it is.")
        return 0 if list(words) == ["--help"] else 2
    return 0


def examine() -> Iterator[tuple[str, str]]:
    """Yield what was checked, and what was found."""
    yield "bilevel", f"{bilevel.__version__} in {Path(bilevel.__file__).parent}"
    yield "Python", f"{platform.python_version()} on {platform.platform()}"
    needed = list_requirements()
    for name in (*needed.get("", ()), "jaxlib"):
        yield name, installed_version(name) or f"missing: pip install {name}"
    yield "devices", _describe_devices()
    yield "float64", "in every problem built with dtype='float64', whatever the value of JAX_ENABLE_X64"
    for extra in sorted(needed.keys() - {"", *_FOR_DEVELOPERS}):
        missing = [name for name in needed[extra] if installed_version(name) is None]
        way = f"{', '.join(missing)} missing: pip install 'bilevel[{extra}]'"
        yield f"extra {extra}", way if missing else "installed"
    given = os.environ.get("BILEVEL_DATA")
    named = "BILEVEL_DATA is not set" if given is None else f"BILEVEL_DATA={given}"
    yield "data", f"{named}; cache {cache_folder()}"
    yield "compiled programs", _describe_program_folder()


def list_requirements() -> dict[str, tuple[str, ...]]:
    """Return the distributions that each extra requires, by its name; those that are always required under ""."""
    try:
        found = [match for line in requires("bilevel") or () if (match := _REQUIREMENT.match(line))]
    except PackageNotFoundError:  # run from source
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
    """Return the version of a distribution, or None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _describe_devices() -> str:
    import jax

    try:
        return ", ".join(f"{device} ({device.device_kind})" for device in jax.devices())
    except RuntimeError as error:  # for example, a driver of another version
        return f"JAX finds none: {error}"


def _describe_program_folder() -> str:
    if given := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return f"kept in {given}, as set by JAX_COMPILATION_CACHE_DIR"
    folder = program_folder()
    megabytes = sum(path.stat().st_size for path in folder.glob("*")) / 1e6
    return f"{megabytes:.1f} MB in {folder}; JAX_ENABLE_COMPILATION_CACHE=0 keeps none"

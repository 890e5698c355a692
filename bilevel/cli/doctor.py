"""What this machine offers: versions, devices, extras, data and caches. This module needs no extra itself."""

import itertools
import os
import platform
import re
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import bilevel
from bilevel import datasets
from bilevel._core.extras import printable
from bilevel._core.files import cache_folder
from bilevel._process import program_folder

WILL_BE_DOWNLOADED = "no file: will be downloaded"
_FOR_DEVELOPERS = ("all", "docs", "dev")
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?:\[(?P<extras>[^\]]*)\])?[^;]*(?:;.*\bextra == ['\"](?P<of>[^'\"]+))?")


def answer_without_extras(words: Sequence[str], missing: Sequence[str]) -> int:
    """Describe this machine, or the way to install the command line without its extra; return the exit code."""
    if list(words) == ["doctor"]:
        print(printable("\n".join(f"{what}: {found}" for what, found in examine())))
        return 0
    print(f"bilevel {bilevel.__version__}")
    if list(words) == ["--version"]:
        return 0
    needs = f"The command line needs {', '.join(missing)}: pip install 'bilevel[bench]'"
    print(f"{needs}. Without it, `bilevel doctor` works.")
    return 0 if list(words) == ["--help"] else 2


def examine() -> Iterator[tuple[str, str]]:
    """Yield what was checked, and what was found."""
    yield "bilevel", f"{bilevel.__version__} in {Path(bilevel.__file__).parent}"
    yield "Python", f"{platform.python_version()} on {platform.platform()}"
    for name in (*list_requirements(), "jaxlib"):
        yield name, installed_version(name) or f"missing: pip install {name}"
    yield "devices", _describe_devices()
    for extra in sorted({one["of"] for one in _read_requirements()} - {None, *_FOR_DEVELOPERS}):
        missing = [name for name in list_requirements(extra) if installed_version(name) is None]
        way = f"{', '.join(missing)} missing: pip install 'bilevel[{extra}]'"
        yield f"extra {extra}", way if missing else "installed"
    given = os.environ.get("BILEVEL_DATA")
    named = "BILEVEL_DATA is not set" if given is None else f"BILEVEL_DATA={given}"
    yield "data", f"{named}; cache {cache_folder()}"
    for name in datasets.names():
        yield f"data set {name}", _verify(name)
    yield "compiled programs", os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(program_folder())


def _read_requirements() -> list[re.Match[str]]:
    try:
        return [match for line in requires("bilevel") or () if (match := _REQUIREMENT.match(line))]
    except PackageNotFoundError:  # run from source
        return []


def list_requirements(extra: str | None = None) -> list[str]:
    """Return the distributions that the library requires, or those of an extra and of the extras in it."""
    names: list[str] = []
    for one in _read_requirements():
        if one["of"] == extra and one["name"] == "bilevel":
            names += itertools.chain(*(list_requirements(other.strip()) for other in one["extras"].split(",")))
        elif one["of"] == extra:
            names.append(one["name"])
    return sorted(set(names))


def installed_version(name: str) -> str | None:
    """Return the version of a distribution, or None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _verify(name: str) -> str:
    try:
        place = datasets.locate(name)
        if place is not None:
            datasets.load(name)
    except (ValueError, OSError, ImportError) as error:
        return str(error)
    return f"{place}, verified" if place else WILL_BE_DOWNLOADED


def _describe_devices() -> str:
    import jax

    try:
        return ", ".join(f"{device} ({device.device_kind})" for device in jax.devices())
    except RuntimeError as error:  # for example, a driver of another version
        return f"JAX finds none: {error}"

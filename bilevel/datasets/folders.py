"""Where files lie: the folder BILEVEL_DATA, then the cache."""

import os
from pathlib import Path

from bilevel.datasets.records import FileSet


def data_folder() -> Path | None:
    """Return the folder that BILEVEL_DATA names, if any."""
    named = os.environ.get("BILEVEL_DATA")
    if not named:
        return None
    folder = Path(named).expanduser()
    if not folder.is_dir():
        raise NotADirectoryError(f"`BILEVEL_DATA={named}` is not a folder; correct it or unset it.")
    return folder


def cache_folder() -> Path:
    """Return the folder for downloads, which need not exist yet."""
    if named := os.environ.get("BILEVEL_CACHE"):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "bilevel"


def find(known: FileSet) -> Path | None:
    """Return the file of a set, or None where neither folder has it."""
    candidates = (folder / known.file_name for folder in (data_folder(), cache_folder()) if folder)
    return next((path for path in candidates if path.exists()), None)

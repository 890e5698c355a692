"""A run written down while it goes on: every so many steps or seconds, into a folder that keeps the last few.

Each file is whole or not there, and has all that `bilevel.resume` needs to go on bit for bit. A checkpoint evaluates
nothing: the history of a run that is killed and resumed has the rows of one that was not.
"""

import re
import time
from collections.abc import Callable
from contextlib import suppress
from math import inf
from numbers import Integral
from pathlib import Path
from typing import Any

from bilevel._io import as_path
from bilevel._types import is_number
from bilevel.engine.logs import warn_user

_NAME = re.compile(r"step-(\d{10})\.npz")


class Checkpoints:
    """When to write, and where; without a folder it never does.

    Parameters
    ----------
    folder : of the files, ``step-0000001000.npz``; it is made
    every : steps where it is an integer, seconds of the wall clock where it is a float; None means only at the end
    keep : how many files stay, the latest ones
    """

    def __init__(self, folder: Any = None, every: Any = None, keep: Any = 3) -> None:
        if folder is None and every is not None:
            raise ValueError(f"`checkpoint_every={every!r}`: needs `checkpoint=`, the folder to write to.")
        whole = is_number(every, Integral) and every >= 1
        if not (every is None or whole or (isinstance(every, float) and 0 < every < inf)):
            raise ValueError(f"`checkpoint_every={every!r}`: must be steps, as 1000, or seconds, as 60.0, above 0.")
        if not is_number(keep, Integral) or keep < 1:
            raise ValueError(f"`keep={keep!r}`: must be an integer of at least 1.")
        self.folder = None if folder is None else as_path("checkpoint", folder)
        self._steps: int | None = int(every) if whole else None
        self._seconds: float | None = None if whole else every
        self._keep, self._last, self._done = int(keep), time.monotonic(), -1
        self.save: Callable[[Path], None] | None = None  # given by the run

    def check_owner(self, resumed: Path | None = None) -> None:
        """Refuse a folder that has checkpoints, unless the last of them is what the run is resumed from."""
        found = [] if self.folder is None else written(self.folder)
        if found and (resumed is None or found[-1].resolve() != latest(resumed).resolve()):
            told = f"`checkpoint={str(self.folder)!r}`: the folder has {found[-1].name} of another run"
            raise FileExistsError(f"{told}. `bilevel.resume` goes on with it; delete it or give another folder.")

    def cap(self, step: int, stop: int) -> int:
        """Return where to stop so as not to pass a checkpoint."""
        return stop if self._steps is None else min(stop, step - step % self._steps + self._steps)

    def look(self, step: int) -> None:
        """Write where it is time to."""
        due = self._steps is not None and step % self._steps == 0
        if due or (self._seconds is not None and time.monotonic() - self._last >= self._seconds):
            self.write(step)

    def write(self, step: int) -> None:
        """Write the run as it is after ``step``, once; a full disk costs the file, not the run."""
        if self.folder is None or self.save is None or step == self._done:
            return
        try:
            self.save(self.folder / f"step-{step:010d}.npz")
            self._done = step
            for old in written(self.folder)[: -self._keep]:
                with suppress(FileNotFoundError):
                    old.unlink()
        except OSError as error:
            warn_user(f"`checkpoint`: {error} The run goes on without this one.")
        self._last = time.monotonic()


def written(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, the earliest first."""
    return sorted(path for path in folder.glob("step-*.npz") if _NAME.fullmatch(path.name))


def latest(path: Path) -> Path:
    """Return the path of a file as it is, and of a folder its latest checkpoint."""
    if not path.is_dir():
        return path
    if not (found := written(path)):
        raise FileNotFoundError(f"`{path}` has no checkpoint; `run(…, checkpoint={str(path)!r})` writes some.")
    return found[-1]

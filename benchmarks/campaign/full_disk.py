"""Disks without room.

A disk of a megabyte in memory (tmpfs) is filled up to 0 to 16 kB while a file is written; then there is room again.
What was there stays, no stray file is left, and the message names the file or the folder. With room again, all ends as
if nothing had been.
"""

import random

from benchmarks.campaign import places, workshop
from benchmarks.campaign.table import Counter, Row
from benchmarks.campaign.written import DONE, KINDS

LEFT = (0, 4096, 8192, 16384)  # bytes
LARGE = ("store", "store, two workers", "report", "figure")  # files of more than that
SIZES = {"report": 2**24}  # a page has its scripts in it


def rows(seed, quick):
    rng = random.Random(seed)
    skipped = ("store, two workers",) if quick else ()
    found = [fill(name, rng, 1 if quick else 3) for name in KINDS if name not in skipped]
    return found if quick else [*found, limit_size(3, rng)]


def fill(name, rng, n_times):
    fault = f"disk full: {name}"
    if not places.can_mount():
        return Row(fault, 0, 0, 0, "not tried: no disk can be mounted here")
    counter = Counter(fault, DONE[name])
    for _ in range(n_times):
        left = rng.choice(LEFT) if name in LARGE else 0
        with counter.case(f"{left} bytes left"), places.Disk(SIZES.get(name, places.SIZE)) as disk:
            kind = KINDS[name](disk.folder)
            kind.before()
            with disk.full(left):
                kind.during()
            kind.after()
    return counter.row()


def limit_size(n_times, rng):
    """The system refuses a file that is longer than a limit, in the midst of it."""
    counter = Counter("file-size limit: store", "`prlimit --fsize`: a file ends in the midst")
    for _ in range(n_times):
        folder, limit = workshop.new_folder("limited"), rng.choice((2048, 4096, 8192))
        with counter.case(f"{limit} bytes"):
            process = workshop.start_run(folder, limits=("prlimit", f"--fsize={limit}", "--"))
            said = process.end(code=None)
            assert process.popen.returncode in (1, 2), said
            assert "cannot be written to: File too large" in " ".join(said.split()), said
            workshop.check_whole(folder)
            workshop.finish(folder)
    return counter.row()

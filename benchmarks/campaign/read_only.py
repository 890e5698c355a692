"""Folders that cannot be written to.

A disk in memory (tmpfs) is mounted read-only, which binds root too, while a file is written; then for writing again.
What was there stays, and the message names the file or the folder.
"""

import shutil

from benchmarks.campaign import places, workshop
from benchmarks.campaign.full_disk import SIZES
from benchmarks.campaign.table import Counter, Row
from benchmarks.campaign.written import DONE, KINDS, command


def rows(seed, quick):
    names = [name for name in KINDS if not (quick and name in ("store", "store, two workers"))]
    if not places.can_mount():
        return [Row(f"read-only: {name}", 0, 0, 0, "not tried: no disk can be mounted here") for name in names]
    return [*(refuse(name) for name in names), read_store()]


def refuse(name):
    counter = Counter(f"read-only: {name}", DONE[name])
    with counter.case(name), places.Disk(SIZES.get(name, places.SIZE)) as disk:
        kind = KINDS[name](disk.folder)
        kind.before()
        with disk.read_only():
            kind.during()
        kind.after()
    return counter.row()


def read_store():
    """What only reads, and a run that has nothing to do, need no place to write."""
    counter = Counter(
        "read-only: a store that is read", "`run` with nothing to do, `check`, `select`, `report` elsewhere"
    )
    with places.Disk() as disk:
        store = shutil.copytree(workshop.undisturbed()[0].folder, disk.folder / "store")
        with disk.read_only():
            for words in (
                ("run", workshop.config(), "--store", store),
                ("check", store),
                ("select", store),
                ("report", store, "--out", workshop.new_folder("report")),
            ):
                with counter.case(words[0]):
                    said, code = command(*words)
                    assert code == 0, said
    return counter.row()

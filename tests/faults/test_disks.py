"""On a full or read-only disk nothing is lost, and the message names the file or the folder.

The disk is a tmpfs of a megabyte, filled up to 0 to 16 kB or mounted read-only while a file is written; then it has
room again. Read-only mounts restrict root too. What was there stays, and no stray file is left.
"""

import contextlib
import functools
import os
import shutil
import subprocess
import tempfile

import pytest

from tests.faults import LONG, repeats, rng, sweeps
from tests.faults.files import KINDS, command

SIZES = {"report": 2**24}  # bytes of the disk; a page contains its scripts
SIZE = 2**20
LEFT = (0, 4096, 8192, 16384)  # bytes that are left for files larger than that
LARGE = ("store", "store, two workers", "report", "figure")
NAMES = [name for name in KINDS if LONG or name != "store, two workers"]


def run(*words):
    return subprocess.run(words, capture_output=True, text=True).returncode == 0


@functools.cache
def can_mount():
    """Return True if this process may mount: root, outside of most containers."""
    place = tempfile.mkdtemp(dir=sweeps.folder())
    return run("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", place) and run("umount", place)


@pytest.fixture
def needs_mounts():
    if not can_mount():
        pytest.skip("no disk can be mounted here")


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("needs_mounts")]


class Disk:
    """A small disk in memory."""

    def __init__(self, size=SIZE):
        self.folder, self.size = sweeps.new_folder("disk"), size

    def __enter__(self):
        assert run("mount", "-t", "tmpfs", "-o", f"size={self.size}", "tmpfs", str(self.folder))
        return self

    def __exit__(self, *_):
        run("umount", "--lazy", str(self.folder))

    @contextlib.contextmanager
    def full(self, left):
        """Leave this number of bytes free, rounded down to pages."""
        ballast, state = self.folder / "ballast", os.statvfs(self.folder)
        ballast.write_bytes(bytes(max(0, state.f_bavail * state.f_bsize - left // state.f_bsize * state.f_bsize)))
        yield
        ballast.unlink()

    @contextlib.contextmanager
    def read_only(self):
        assert run("mount", "-o", "remount,ro", str(self.folder))
        yield
        assert run("mount", "-o", "remount,rw", str(self.folder))


@pytest.mark.parametrize("name", NAMES)
def test_a_full_disk_loses_no_file(name):
    random = rng()
    for _ in range(repeats(1, 3)):
        left = random.choice(LEFT) if name in LARGE else 0
        with Disk(SIZES.get(name, SIZE)) as disk:
            kind = KINDS[name](disk.folder)
            kind.before()
            with disk.full(left):
                kind.during()
            kind.after()


@pytest.mark.parametrize("name", [name for name in NAMES if LONG or name != "store"])
def test_a_read_only_disk_loses_no_file(name):
    with Disk(SIZES.get(name, SIZE)) as disk:
        kind = KINDS[name](disk.folder)
        kind.before()
        with disk.read_only():
            kind.during()
        kind.after()


def test_a_finished_store_on_a_read_only_disk_is_read_by_every_command():
    with Disk() as disk:
        store = shutil.copytree(sweeps.undisturbed()[0].folder, disk.folder / "store")
        with disk.read_only():
            for words in (
                ("run", sweeps.config(), "--store", store),
                ("check", store),
                ("select", store),
                ("report", store, "--out", sweeps.new_folder("report")),
            ):
                output, code = command(*words)
                assert code == 0, output


@pytest.mark.skipif(not shutil.which("prlimit"), reason="needs prlimit")
def test_a_file_that_the_system_cuts_off_is_reported_and_no_cell_is_lost():
    random = rng()
    for _ in range(repeats(1, 3)):
        folder, limit = sweeps.new_folder("limited"), random.choice((2048, 4096, 8192))
        process = sweeps.start_run(folder, limits=("prlimit", f"--fsize={limit}", "--"))
        output = process.end(code=None)
        assert process.popen.returncode in (1, 2), output
        assert "cannot be written to: File too large" in " ".join(output.split()), output
        sweeps.check_whole(folder)
        sweeps.finish(folder)

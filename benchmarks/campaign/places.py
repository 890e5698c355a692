"""Disks without room and folders that cannot be written to."""

import contextlib
import functools
import os
import subprocess
import tempfile

from benchmarks.campaign import workshop

SIZE = 2**20  # bytes of a small disk


def _run(*words):
    return subprocess.run(words, capture_output=True, text=True).returncode == 0


@functools.cache
def can_mount():
    """Whether this process may mount: root, outside of most containers."""
    place = tempfile.mkdtemp(dir=workshop.folder())
    return _run("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", place) and _run("umount", place)


class Disk:
    """A small disk of its own, in memory."""

    def __init__(self, size=SIZE):
        self.folder, self.size = workshop.new_folder("disk"), size

    def __enter__(self):
        if not _run("mount", "-t", "tmpfs", "-o", f"size={self.size}", "tmpfs", str(self.folder)):
            raise OSError(f"`{self.folder}`: no disk can be mounted here")
        return self

    def __exit__(self, *_):
        _run("umount", "--lazy", str(self.folder))

    @contextlib.contextmanager
    def full(self, left):
        """With so many bytes left, rounded down to pages."""
        ballast, state = self.folder / "ballast", os.statvfs(self.folder)
        ballast.write_bytes(bytes(max(0, state.f_bavail * state.f_bsize - left // state.f_bsize * state.f_bsize)))
        yield
        ballast.unlink()

    @contextlib.contextmanager
    def read_only(self):
        assert _run("mount", "-o", "remount,ro", str(self.folder))
        yield
        assert _run("mount", "-o", "remount,rw", str(self.folder))

"""Files are written atomically, and temporary files of killed writers are removed."""

import errno
import os
import re
import time
import uuid

import pytest

from bilevel._core import files
from bilevel._core.files import replacing


def write(path, content=b"new"):
    with replacing(path) as file:
        file.write(content)


def leftover(folder, age):
    path = folder / f".{uuid.uuid4().hex}.part"
    path.write_bytes(b"half a file")
    os.utime(path, (time.time() - age,) * 2)
    return path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_next_write_removes_temporary_files_of_a_killed_writer(tmp_path):
    leftover(tmp_path, age=3.0)
    write(tmp_path / "a")
    assert names(tmp_path) == ["a"]


def test_temporary_files_of_a_running_writer_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_FRESH", -1.0)
    rename = os.replace

    def clean_and_rename(*paths):
        files._remove_leftovers(tmp_path)
        rename(*paths)

    with replacing(tmp_path / "slow") as file:
        file.write(b"slow")
        write(tmp_path / "quick")
        monkeypatch.setattr(os, "replace", clean_and_rename)
    assert names(tmp_path) == ["quick", "slow"]


def test_new_temporary_files_stay_before_they_are_locked(tmp_path):
    hidden = leftover(tmp_path, age=0.0)
    write(tmp_path / "a")
    assert hidden.exists()


def test_temporary_files_of_other_programs_stay(tmp_path):
    (tmp_path / ".movie.part").write_bytes(b"x")
    os.utime(tmp_path / ".movie.part", (0, 0))
    write(tmp_path / "a")
    assert names(tmp_path) == [".movie.part", "a"]


@pytest.mark.parametrize("lacking", ["module", "file system"])
def test_without_locks_temporary_files_are_removed_after_an_hour(tmp_path, monkeypatch, lacking):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    if lacking == "module":
        monkeypatch.setattr(files, "fcntl", None)
    else:
        monkeypatch.setattr(files.fcntl, "flock", refuse)
    old, young = leftover(tmp_path, age=3700.0), leftover(tmp_path, age=3500.0)
    write(tmp_path / "a")
    assert young.exists() and not old.exists()
    assert (tmp_path / "a").read_bytes() == b"new"


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_failed_write_leaves_the_previous_file(tmp_path, monkeypatch, moment):
    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "a"
    write(path, b"old")
    monkeypatch.setattr(os, moment, refuse)
    with pytest.raises(OSError, match=re.escape(f"No space left on device: '{path}'")):
        write(path)
    assert names(tmp_path) == ["a"] and path.read_bytes() == b"old"


def test_the_error_of_a_read_only_disk_is_that_of_the_write(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system", ".part")

    monkeypatch.setattr("pathlib.Path.open", refuse)
    monkeypatch.setattr("pathlib.Path.unlink", refuse)
    with pytest.raises(OSError, match=re.escape(f"Read-only file system: '{tmp_path / 'a'}'")):
        write(tmp_path / "a")

"""Compiled programs are kept on disk for the next process, unless told otherwise; no file there can do harm."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bilevel import _program_files
from bilevel._program_files import ProgramFiles, program_folder
from bilevel.cli import doctor

ROOT = Path(__file__).parents[2]
SCRIPT = """
import collections, json, sys
import jax
import bilevel
from tests import cases
seen = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: seen.update([event.rpartition("/")[2]]))
exec(sys.argv[1])
result = bilevel.run(cases.quadratic("float32"), bilevel.SOBA(0.05, 20.0, cases.BATCH), max_steps=20)
compiled = seen["compile_requests_use_cache"] - seen["cache_hits"]
print(json.dumps([compiled, result.history["value"][-1], jax.config.jax_compilation_cache_dir]))
"""


def run(first="", **changes):
    """Programs that a process has compiled, the value at its end, and JAX's folder; it says nothing else."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "BILEVEL_"))}
    command = [sys.executable, "-c", SCRIPT, first]
    options = {"cwd": ROOT, "env": kept | {"JAX_PLATFORMS": "cpu"} | changes, "capture_output": True, "text": True}
    done = subprocess.run(command, check=True, **options)
    assert done.stderr == ""
    return json.loads(done.stdout)


def files(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.slow
def test_the_second_process_compiles_nothing_and_computes_the_same(tmp_path):
    (compiled, value, folder), again = (run(BILEVEL_CACHE=str(tmp_path)) for _ in range(2))
    assert compiled == len(files(tmp_path)) > 5 and Path(folder).parent == tmp_path / "programs"
    assert again == [0, value, folder]
    for path in files(tmp_path):
        path.write_bytes(path.read_bytes()[:-9])
    assert run(BILEVEL_CACHE=str(tmp_path)) == [compiled, value, folder]
    assert run(BILEVEL_CACHE=str(tmp_path)) == [0, value, folder]
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_enable_fast_math=false"
    assert run(BILEVEL_CACHE=str(tmp_path), XLA_FLAGS=flags)[0] == compiled


@pytest.mark.slow
def test_off_is_off_and_a_setting_of_jax_is_left_alone(tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    assert run(BILEVEL_CACHE=str(ours), BILEVEL_COMPILE_CACHE="off")[2] is None
    for first, changes in (
        (f"jax.config.update('jax_compilation_cache_dir', {str(theirs)!r})", {}),
        ("", {"JAX_COMPILATION_CACHE_DIR": str(theirs)}),
    ):
        assert run(first, BILEVEL_CACHE=str(ours), **changes)[2] == str(theirs)
    assert not ours.exists()


def test_a_folder_that_the_user_names_later_is_taken(monkeypatch):
    calls = []
    monkeypatch.setattr(_program_files, "_kept", ["ours"])
    monkeypatch.setattr("jax._src.compilation_cache.reset_cache", lambda: calls.append(1))
    for _ in range(2):
        _program_files.keep_programs()
    assert calls == [1] and _program_files._kept == [""]


def test_a_folder_that_cannot_be_made_is_not_used(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BILEVEL_COMPILE_CACHE", str(tmp_path / "file" / "folder"))
    assert _program_files._tell_jax() == ""


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b"", lambda b: b[:40] + b"?" + b[41:], lambda b: b[1:]])
def test_a_damaged_file_is_removed_and_not_read(tmp_path, damage):
    kept, path = ProgramFiles(tmp_path), tmp_path / "key"
    kept.put("key", b"program" * 10)
    assert kept.get("key") == b"program" * 10
    path.write_bytes(damage(path.read_bytes()))
    assert kept.get("key") is None and not path.exists()


def test_what_cannot_be_written_is_left_out(tmp_path):
    kept = ProgramFiles(tmp_path / "gone")
    kept.put("key", b"program")
    assert kept.get("key") is None


def test_those_used_last_are_kept_within_the_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(_program_files, "MOST_BYTES", 400)
    kept = ProgramFiles(tmp_path)
    for number in range(4):
        kept.put(str(number), b"." * 50)
        os.utime(tmp_path / str(number), (time.time() - 10 + number,) * 2)
    assert kept.get("0")
    for number in range(4, 12):
        kept.put(str(number), b"." * 50)
        assert sum(path.stat().st_size for path in files(tmp_path)) <= 400
    assert (tmp_path / "11").exists() and not (tmp_path / "1").exists()
    monkeypatch.setattr(_program_files, "MOST_BYTES", 100)
    ProgramFiles(tmp_path)
    assert len(files(tmp_path)) == 0


def test_the_doctor_says_where_programs_are_and_how_to_keep_none(monkeypatch, tmp_path):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("BILEVEL_COMPILE_CACHE", str(tmp_path))
    program_folder().mkdir()
    (program_folder() / "one").write_bytes(b"." * 1_500_000)
    found = dict(doctor.examine())["compiled programs"]
    assert f"1.5 MB in {tmp_path}" in found and "BILEVEL_COMPILE_CACHE=off" in found
    monkeypatch.setenv("BILEVEL_COMPILE_CACHE", "off")
    assert program_folder() is None and "not kept" in dict(doctor.examine())["compiled programs"]


def test_doctor_tells_of_a_folder_that_cannot_be_written_to(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("BILEVEL_COMPILE_CACHE", str(tmp_path / "file"))
    assert "cannot be written to" in dict(doctor.examine())["compiled programs"]

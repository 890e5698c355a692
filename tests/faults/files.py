"""Each kind of file that the library writes, written before, during and after a fault.

``before`` writes the file. ``during`` writes it again under the fault, which must give a warning or an error that names
the file or the folder. ``after`` writes it a third time and compares the result with that of an undisturbed run.
"""

import csv
import functools
import os
import shutil
import warnings
from unittest import mock

import numpy as np
from typer.testing import CliRunner

import bilevel
from bilevel.cli.app import app
from bilevel.datasets import loading
from bilevel.datasets.registry import SETS, ArraySpec, FileSet, RemoteFile
from tests.faults import sweeps

STEPS = {"max_steps": 60, "eval_every": 5}


def command(*words):
    """Run a command in this process and return its output and exit code."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert "Traceback" not in result.output, result.output
    return " ".join(result.output.split()), result.exit_code


@functools.cache
def problem():
    return bilevel.problems.quadratic(256, 64, 5, 3)


def solve(**options):
    return bilevel.run(problem(), bilevel.SRBA(0.05, batch_size=8, period=10), **{**STEPS, **options})


@functools.cache
def solved():
    return solve()


def check_same(result):
    """Compare with an undisturbed run. A resumed run may have an additional row where it was stopped."""
    np.testing.assert_array_equal(result.point.outer_var, solved().point.outer_var)
    shared = np.isin(result.history["step"], solved().history["step"])
    np.testing.assert_array_equal(result.history["outer_value"][shared], solved().history["outer_value"])


class Kind:
    """One kind of file, in a folder."""

    def __init__(self, folder):
        self.folder = folder

    def contents(self):
        """Return the bytes of all files, except for the one that fills the disk."""
        paths = (path for path in self.folder.rglob("*") if path.is_file() and path.name != "ballast")
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in paths}


class StoreOfRun(Kind):
    """A store with half of its cells, filled by `bilevel run`."""

    options = ()

    def before(self):
        (self.folder / "store").mkdir()
        for path in sorted(sweeps.undisturbed()[0].folder.iterdir())[::2]:
            shutil.copy(path, self.folder / "store")
        self.there = self.contents()

    def during(self):
        process = sweeps.start_run(self.folder / "store", *self.options)
        output = process.end(code=None)
        assert process.popen.returncode in (1, 2), output
        assert f"`{self.folder / 'store'}` cannot be written to" in " ".join(output.split()), output
        assert self.there.items() <= self.contents().items(), "files that were there have changed"
        sweeps.check_whole(self.folder / "store")

    def after(self):
        sweeps.finish(self.folder / "store")


class StoreOfJobs(StoreOfRun):
    """The same store, filled by two workers."""

    options = ("--jobs", 2)


class Checkpoint(Kind):
    """A saved run. The previous file is kept and can be resumed bit for bit."""

    def before(self):
        half = solve(max_steps=30)
        half.save(self.folder / "run.npz")
        self.there = self.contents()

    def during(self):
        try:
            solved().save(self.folder / "run.npz")
        except OSError as error:
            message = str(error)
        assert "run.npz" in message, message
        assert self.contents() == self.there, "the previous file is gone"

    def after(self):
        check_same(bilevel.resume(self.folder / "run.npz", problem(), **STEPS))
        solved().save(self.folder / "run.npz")
        assert set(self.contents()) == {"run.npz"}


class TextLog(Kind):
    """A log of a run as CSV. The run continues without it, and a resumed run completes the table."""

    def before(self):
        self.half = sweeps.new_folder("half") / "run.npz"
        solve(max_steps=30, log=self.log()).save(self.half)

    def log(self):
        return bilevel.CSVLog(self.folder / "run.csv")

    def during(self):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            check_same(bilevel.resume(self.half, problem(), log=self.log(), **STEPS))
        message = " ".join(str(one.message) for one in caught)
        assert "The run continues without it" in message, message

    def after(self):
        self.check(bilevel.resume(self.half, problem(), log=self.log(), **STEPS))

    def check(self, result):
        with (self.folder / "run.csv").open() as file:
            found = [float(row["outer_value"]) for row in csv.DictReader(file)]
        assert found == result.history["outer_value"].tolist()
        assert set(self.contents()) == {"run.csv"}


class Page(Kind):
    """The page of `bilevel report`. The previous page is kept."""

    words = ("report",)

    def write(self):
        return command(*self.words, sweeps.undisturbed()[0].folder, "--out", self.folder / "out")

    def before(self):
        assert self.write()[1] == 0
        self.there = self.contents()
        assert self.there

    def during(self):
        output, code = self.write()
        assert code == 2 and "out" in output and "error:" in output, output
        assert self.contents() == self.there, "files that were there have changed"

    def after(self):
        assert self.write()[1] == 0
        assert self.contents() == self.there


class Figure(Page):
    """The figures of `bilevel figure`. Previous figures are kept."""

    words = ("figure",)


class Data(Kind):
    """Downloaded data, which are returned although they cannot be cached. A mock replaces the download."""

    def before(self):
        arrays = {"X_train": np.arange(5000.0).reshape(1000, 5), "y_train": np.arange(1000) % 2}
        specs = tuple(ArraySpec(name, one.dtype.str, one.shape) for name, one in arrays.items())
        remote = RemoteFile("https://127.0.0.1/none", None, specs, 2**20)
        self.known = FileSet("made_up", (remote,), loading.checksum(arrays), (0, 1), "Nobody.")
        self.arrays = arrays

    def load(self):
        places = {"BILEVEL_DATA": "", "BILEVEL_CACHE": str(self.folder)}
        received = mock.patch.object(loading, "_fetch", return_value=self.arrays)
        with mock.patch.dict(SETS, made_up=self.known), mock.patch.dict(os.environ, places), received:
            return loading.load("made_up")

    def during(self):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            data = self.load()
        np.testing.assert_array_equal(data.X_train, self.arrays["X_train"])
        message = " ".join(str(one.message) for one in caught)
        assert "made_up" in message, message
        assert not self.contents(), "a stray file"

    def after(self):
        self.load()
        assert set(self.contents()) == {"made_up.npz"}


KINDS = {
    "store": StoreOfRun,
    "store, two workers": StoreOfJobs,
    "checkpoint": Checkpoint,
    "log": TextLog,
    "report": Page,
    "figure": Figure,
    "data": Data,
}

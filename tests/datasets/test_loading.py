"""Names of sets, search order, and sets that need no file."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer, load_digits

from bilevel import datasets
from bilevel.datasets import DamagedFileError
from bilevel.datasets import loading as places
from bilevel.datasets.registry import SETS
from tests.datasets import tiny


def test_every_name_can_be_loaded():
    assert datasets.names() == ("ijcnn1", "mnist", "covtype", "breast_cancer", "digits")


@pytest.mark.parametrize("function", [datasets.load, datasets.locate])
@pytest.mark.parametrize(("name", "nearest"), [("minst", "mnist"), ("ijcnn", "ijcnn1"), ("Digits", "digits")])
def test_an_unknown_name_is_refused_with_a_suggestion(function, name, nearest):
    with pytest.raises(ValueError, match=f"name='{name}'.*did you mean '{nearest}'.*covtype"):
        function(name)


def test_the_folder_comes_before_the_cache_and_the_cache_before_the_network(served, server, folders):
    data, cache = folders
    datasets.load("tiny")
    asked = len(server.requests)
    (cache / "tiny.npz").rename(data / "tiny.npz")
    (cache / "tiny.npz").write_bytes(b"never opened")
    assert datasets.locate("tiny") == data / "tiny.npz"
    datasets.load("tiny")
    (data / "tiny.npz").replace(cache / "tiny.npz")
    assert datasets.locate("tiny") == cache / "tiny.npz"
    datasets.load("tiny")
    assert len(server.requests) == asked
    (cache / "tiny.npz").unlink()
    assert datasets.locate("tiny") is None
    datasets.load("tiny")
    assert len(server.requests) == 2 * asked


def test_a_bad_file_in_the_folder_is_not_skipped_for_a_good_one_in_the_cache(served, folders):
    datasets.load("tiny")
    (folders[0] / "tiny.npz").write_bytes(b"bad")
    with pytest.raises(DamagedFileError, match=str(folders[0])):
        datasets.load("tiny")


def test_a_folder_that_does_not_exist_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("BILEVEL_DATA", str(tmp_path / "typo"))
    with pytest.raises(NotADirectoryError, match=r"BILEVEL_DATA=.*typo"):
        datasets.load("mnist")


def test_environment_variables_set_the_cache_folder(served, monkeypatch, tmp_path):
    monkeypatch.delenv("BILEVEL_DATA")
    monkeypatch.setenv("BILEVEL_CACHE", str(tmp_path / "a" / "b"))
    datasets.load("tiny")
    assert (tmp_path / "a" / "b" / "tiny.npz").exists()
    monkeypatch.delenv("BILEVEL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert places.cache_folder() == tmp_path / "xdg" / "bilevel"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert places.cache_folder() == tmp_path / "home" / ".cache" / "bilevel"


@pytest.fixture
def nothing_but_sklearn(monkeypatch, tmp_path):
    """Disable folder, cache and network."""
    monkeypatch.setenv("BILEVEL_DATA", str(tmp_path / "none"))
    monkeypatch.setenv("BILEVEL_CACHE", str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("name", "source", "values", "classes"),
    [("breast_cancer", load_breast_cancer, "data", 2), ("digits", load_digits, "images", 10)],
)
def test_the_sets_of_scikit_learn_need_no_file(name, source, values, classes, nothing_but_sklearn):
    dataset = datasets.load(name)
    original = source()
    np.testing.assert_array_equal(dataset.X_train, original[values])
    np.testing.assert_array_equal(dataset.y_train, original.target)
    assert dataset.y_train.dtype.itemsize == 1
    assert dataset.X_test is None and dataset.y_test is None
    assert dataset.n_classes == classes and dataset.classes == tuple(np.unique(original.target))
    assert datasets.locate(name) == "embedded"


def test_a_missing_scikit_learn_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'bilevel\[data\]'"):
        datasets.load("digits")


def test_the_repr_of_a_set_is_one_line(served):
    assert repr(datasets.load("tiny")) == "Dataset(name='tiny', classes=(-1, 1))"


def test_importing_the_sets_imports_no_extra():
    script = "import sys, bilevel.datasets; print([m for m in ('sklearn', 'requests') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_every_source_is_an_https_address_of_a_compressed_file_with_limits():
    remotes = [file for name in ("ijcnn1", "mnist", "covtype") for file in SETS[name].files]
    addresses = [file.url for file in remotes]
    assert len(addresses) == len(remotes) == 7
    assert all(url.startswith("https://") and Path(url).suffix in (".gz", ".bz2") for url in addresses)
    assert all(file.max_bytes < 10**8 and file.timeout <= 30 for file in remotes)
    assert all(len(bytes.fromhex(SETS[name].checksum)) == 32 for name in ("ijcnn1", "mnist", "covtype"))


def test_a_loaded_set_may_be_modified_by_the_caller(served):
    first = datasets.load("tiny")
    first.X_train[:] = 0
    np.testing.assert_array_equal(datasets.load("tiny").X_train, tiny.SPLIT["X_train"])

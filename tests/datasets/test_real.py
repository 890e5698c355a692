"""The real sets, if the folder BILEVEL_DATA has them: known counts, and reading of the published formats.

Nothing is downloaded: the published files are written again from the arrays and served on the loopback interface.
"""

import bz2
import gzip
import hashlib
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bilevel import datasets
from bilevel.datasets.registry import SETS
from tests.datasets import tiny

FOLDER = os.environ.get("BILEVEL_DATA")


def load(name):
    if not FOLDER or not (Path(FOLDER) / f"{name}.npz").exists():
        pytest.skip(f"BILEVEL_DATA has no {name}.npz")
    return datasets.load(name)


def counts(labels):
    return np.unique(labels, return_counts=True)[1].tolist()


def test_ijcnn1_has_its_known_rows_and_positives():
    ijcnn1 = load("ijcnn1")
    assert (ijcnn1.X_train.shape, ijcnn1.X_test.shape) == ((49990, 22), (91701, 22))
    assert ijcnn1.y_train.dtype == np.int8 and ijcnn1.classes == tuple(np.unique(ijcnn1.y_train))
    assert [np.sum(y == 1) for y in (ijcnn1.y_train, ijcnn1.y_train[:35000], ijcnn1.y_test)] == [4853, 3415, 8712]
    np.testing.assert_array_equal(ijcnn1.X_train[:, :10].sum(axis=1), 1)


def test_mnist_has_its_known_counts():
    mnist = load("mnist")
    assert mnist.X_train.dtype == np.uint8 and mnist.X_test.shape == (10000, 28, 28)
    assert counts(mnist.y_train) == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert counts(mnist.y_test) == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert abs(mnist.X_train.mean() / 255 - 0.1307) < 1e-4


def test_covtype_has_its_known_counts():
    covtype = load("covtype")
    assert covtype.X_train.dtype == np.int16 and covtype.X_train.shape == (581012, 54)
    assert covtype.X_test is None and covtype.y_test is None
    assert covtype.classes == tuple(np.unique(covtype.y_train))
    assert counts(covtype.y_train) == [211840, 283301, 35754, 2747, 9493, 17367, 20510]


def download_again(name, bodies, server, register, monkeypatch, cache):
    """Load the set from the server only."""
    moved = []
    for file, body in zip(SETS[name].files, bodies, strict=True):
        path = "/" + file.url.rpartition("/")[2]
        server.serve(path, body)
        moved.append(replace(file, url=server.url + path))
    register(replace(SETS[name], files=tuple(moved)))
    monkeypatch.delenv("BILEVEL_DATA")
    monkeypatch.setenv("BILEVEL_CACHE", str(cache))
    found = datasets.load(name)
    assert datasets.locate(name) == cache / f"{name}.npz"
    datasets.load(name)
    return found


@pytest.mark.slow
def test_ijcnn1_in_its_published_form_passes_checksum_and_limits(server, register, monkeypatch, tmp_path):
    own = load("ijcnn1")
    texts = tiny.libsvm_text(own.X_train, own.y_train), tiny.libsvm_text(own.X_test, own.y_test)
    found = download_again("ijcnn1", map(bz2.compress, texts), server, register, monkeypatch, tmp_path)
    np.testing.assert_array_equal(found.X_test, own.X_test)


@pytest.mark.slow
def test_mnist_in_its_published_form_passes_checksum_and_limits(server, register, monkeypatch, tmp_path):
    own = load("mnist")
    bodies = [tiny.idx_bytes(array) for array in (own.X_train, own.y_train, own.X_test, own.y_test)]
    assert [hashlib.sha256(body).hexdigest()[:8] for body in bodies] == ["ba891046", "65a50cbb", "0fa7898d", "ff7bcfd4"]
    packed = [gzip.compress(body, 1) for body in bodies]
    found = download_again("mnist", packed, server, register, monkeypatch, tmp_path)
    np.testing.assert_array_equal(found.X_train, own.X_train)


@pytest.mark.slow
def test_covtype_in_its_published_form_passes_checksum_and_limits(server, register, monkeypatch, tmp_path):
    own = load("covtype")
    text = tiny.csv_text(own.X_train, own.y_train)
    known = "0a9371cef7c964b5475d6053cc3e0894a5aa6f65ad1ed3ecb01c45aa96217945"
    assert hashlib.sha256(text).hexdigest() == known, "not the text that the source publishes"
    found = download_again("covtype", [gzip.compress(text, 1)], server, register, monkeypatch, tmp_path)
    np.testing.assert_array_equal(found.y_train, own.y_train)
    assert (tmp_path / "covtype.npz").stat().st_size < 6e6

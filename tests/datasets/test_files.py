"""Valid and invalid files of a set."""

import io
import os
import pickle
import zipfile

import numpy as np
import pytest

from bilevel import datasets
from bilevel.datasets import DamagedFileError, loading
from tests.datasets import tiny


class Trap:
    """An object that counts how often it is unpickled."""

    sprung = 0

    def __setstate__(self, state):
        Trap.sprung += 1

    def __reduce__(self):
        return Trap, (), {"armed": True}


def archive(**arrays):
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def changed(**changes):
    return archive(**(tiny.SPLIT | changes))


def without(name):
    return archive(**{key: array for key, array in tiny.SPLIT.items() if key != name})


def claiming(shape):
    """Return an archive in which the header of X_train has a shape without data."""
    buffer = io.BytesIO(without("X_train"))
    with zipfile.ZipFile(buffer, "a") as target, target.open("X_train.npy", "w") as member:
        header = {"descr": "<f8", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(member, header)
    return buffer.getvalue()


def other_value():
    X = tiny.SPLIT["X_train"].copy()
    X[0, 0] = np.nextafter(X[0, 0], 9)
    return X


GOOD = archive(**tiny.SPLIT)
BAD = {
    "empty": (b"", "damaged"),
    "not a zip": (b"x_train,y_train\n", "not a zip"),
    "half a file": (GOOD[: len(GOOD) // 2], "not a zip"),
    "a renamed member": (GOOD.replace(b"X_train.npy", b"X_train.npz"), "damaged"),
    "a pickle": (pickle.dumps(tiny.SPLIT), "not a zip"),
    "missing array": (without("y_test"), r"not \['X_test.npy', 'X_train.npy', 'y_test.npy'"),
    "array too many": (changed(z=np.zeros(1)), "z.npy"),
    "wrong shape": (changed(X_train=tiny.SPLIT["X_train"].T), r"`X_train` is float64 \(3, 7\), not float64 \(7, 3\)"),
    "wrong type": (changed(y_train=tiny.SPLIT["y_train"].astype(np.int64)), r"an array claims to be int64 \(7,\)"),
    "wrong value": (changed(X_train=other_value()), "checksum of the contents"),
    "huge claim": (claiming((10**9, 10**6)), r"an array claims to be float64 \(1000000000, 1000000\)"),
    "claim without data": (claiming((7, 3)), "damaged"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("place", [0, 1], ids=["folder", "cache"])
def test_a_wrong_file_is_refused_without_a_request_to_the_source(case, place, served, server, folders):
    body, message = BAD[case]
    path = folders[place] / "tiny.npz"
    path.write_bytes(body)
    with pytest.raises(DamagedFileError, match=message) as caught:
        datasets.load("tiny")
    said = str(caught.value)
    assert str(path) in said and "Delete it, or replace it" in said and "X_train float64 (7, 3)" in said
    assert not server.requests
    assert path.read_bytes() == body


def test_a_fifo_or_a_file_of_many_bytes_is_refused_unread(served, folders, monkeypatch):
    path = folders[0] / "tiny.npz"
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR)  # a reader would wait for data instead of for a writer: a byte ends that
    os.write(writer, b"P")
    try:
        with pytest.raises(DamagedFileError, match=r"tiny\.npz` is not the data set .*: it is not a regular file"):
            datasets.load("tiny")
    finally:
        os.close(writer)
    path.unlink()
    path.write_bytes(bytes(2**21))
    with pytest.raises(DamagedFileError, match=r"it has 2,097,152 bytes, and at most 1,048,\d{3} are read"):
        datasets.load("tiny")


def test_nothing_is_unpickled(served, folders):
    traps = np.array([Trap()], dtype=object)
    (folders[0] / "tiny.npz").write_bytes(changed(y_train=traps))
    with pytest.raises(DamagedFileError, match="an array claims to be object"):
        datasets.load("tiny")
    assert Trap.sprung == 0


def test_no_single_flipped_byte_changes_what_is_read(folders, register):
    known = register(tiny.libsvm_set("http://127.0.0.1:9"))
    path = folders[0] / "tiny.npz"
    refused = 0
    for place in range(0, len(GOOD), 3):
        body = bytearray(GOOD)
        body[place] ^= 0x55
        path.write_bytes(body)
        try:
            found = loading.read(path, known)
        except DamagedFileError:
            refused += 1
        else:
            for name, array in tiny.SPLIT.items():
                np.testing.assert_array_equal(found[name], array)
    assert refused > len(GOOD) // 6


def test_the_checksum_is_that_of_names_types_shapes_and_bytes_in_c_order():
    for arrays in (tiny.SPLIT, tiny.IMAGES, tiny.TABLE):
        assert loading.checksum(arrays) == tiny.digest(arrays)
        fortran = {name: np.asfortranarray(array) for name, array in arrays.items()}
        assert loading.checksum(fortran) == tiny.digest(arrays)


@pytest.mark.parametrize(
    "other",
    [
        {"X": np.zeros((2, 3)), "y": np.ones(2)},
        {"X": np.zeros((3, 2)), "y": np.zeros(2)},
        {"X": np.zeros((2, 3)), "z": np.zeros(2)},
        {"X": np.zeros((2, 3), np.int64), "y": np.zeros(2)},
    ],
    ids=["values", "shape", "name", "type"],
)
def test_the_checksum_sees(other):
    assert loading.checksum(other) != loading.checksum({"X": np.zeros((2, 3)), "y": np.zeros(2)})

"""Downloads of a set over the loopback interface."""

import bz2
import gzip
import socket
import sys
import time

import numpy as np
import pytest
import requests

from bilevel import datasets
from bilevel.datasets import DownloadError, loading
from tests import listening
from tests.datasets import tiny
from tests.datasets.server import Wire

FORMATS = {
    "libsvm": (tiny.libsvm_set, tiny.packed_libsvm, tiny.SPLIT),
    "idx": (tiny.image_set, tiny.packed_images, tiny.IMAGES),
    "csv": (tiny.table_set, tiny.packed_table, tiny.TABLE),
}
BODY = tiny.packed_libsvm()["tiny.bz2"]
OTHER = tiny.libsvm_text(tiny.SPLIT["X_train"] + 1, tiny.SPLIT["y_train"])


def values(dataset):
    arrays = dataset.X_train, dataset.y_train, dataset.X_test, dataset.y_test
    return [array for array in arrays if array is not None]


def assert_same(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("form", FORMATS)
def test_a_download_and_its_cached_copy_equal_the_set(form, server, folders, register):
    make, packed, arrays = FORMATS[form]
    for name, body in packed().items():
        server.serve(f"/{name}", body)
    register(make(server.url))
    assert datasets.locate("tiny") is None
    assert_same(values(datasets.load("tiny")), arrays.values())
    asked = len(server.requests)
    assert datasets.locate("tiny") == folders[1] / "tiny.npz"
    assert_same(values(datasets.load("tiny")), arrays.values())
    assert len(server.requests) == asked, "the cache was passed over"
    assert [path.name for path in folders[1].iterdir()] == ["tiny.npz"]


def test_a_set_of_several_compressed_streams_is_read_to_its_end(served, server):
    text = tiny.libsvm_text(tiny.SPLIT["X_train"], tiny.SPLIT["y_train"])
    server.serve("/tiny.bz2", bz2.compress(text[:80]) + bz2.compress(text[80:]))
    assert_same(values(datasets.load("tiny")), tiny.SPLIT.values())


def test_the_server_of_these_tests_listens_on_the_loopback_interface(server):
    listening.assert_loopback()


def test_a_redirect_to_another_web_address_is_followed(served, server):
    server.answers["/moved.bz2"] = server.answers["/tiny.bz2"]
    server.redirect("/tiny.bz2", f"{server.url}/moved.bz2")
    assert_same(values(datasets.load("tiny")), tiny.SPLIT.values())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda server: server.serve("/tiny.bz2", BODY[:-30], claimed=len(BODY)), "bytes read, .* more expected"),
        (lambda server: server.serve("/tiny.bz2", BODY[:-30]), "ended before"),
        (lambda server: server.serve("/tiny.bz2", b"<html>Sign in"), "Invalid data stream"),
        (lambda server: server.serve("/tiny.bz2", bz2.compress(b"<html>")), "not in the expected form"),
        (lambda server: server.serve("/tiny.bz2", bz2.compress(OTHER)), "has changed: the checksum"),
        (lambda server: server.serve("/tiny.bz2", bz2.compress(OTHER[: OTHER.index(b"\n") + 1])), "`X_train` is"),
        (lambda server: server.serve("/tiny.bz2", BODY, claimed=10_001), "more than 10000 bytes"),
        (lambda server: server.serve_unannounced("/tiny.bz2", BODY + bytes(10**6)), "more than 10000 bytes"),
        (lambda server: server.serve("/tiny.bz2", bz2.compress(bytes(10**7))), "more than 10000 bytes"),
        (lambda server: server.answers.pop("/tiny.bz2"), "404"),
        (lambda server: server.redirect("/tiny.bz2", "ftp://127.0.0.1/tiny.bz2"), "not an https address"),
        (lambda server: server.redirect("/tiny.bz2", "file:///etc/hosts"), "not an https address"),
        (lambda server: server.redirect("/tiny.bz2", "http://example.org/tiny.bz2"), "not an https address"),
        (lambda server: server.redirect("/tiny.bz2", "http://127.0.0.1@example.org/tiny"), "not an https address"),
        (lambda server: server.redirect("/tiny.bz2", f"http://127.0.0.1:{server.port}/tiny.bz2"), "not an https"),
        (lambda server: server.redirect("/tiny.bz2", "/tiny.bz2"), "too many redirects"),
    ],
    ids=[
        "body cut short",
        "archive cut short",
        "no archive",
        "no LIBSVM text",
        "other values",
        "too few rows",
        "announced too large",
        "too large",
        "bomb",
        "404",
        "redirect to FTP",
        "redirect to a file",
        "redirect to http",
        "redirect to http in disguise",
        "redirect to http here",
        "redirects without end",
    ],
)
def test_a_failed_download_gives_the_reason_and_leaves_nothing(spoil, message, served, server, folders):
    spoil(server)
    with pytest.raises(DownloadError, match=message):
        datasets.load("tiny")
    assert not list(folders[1].iterdir())


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "localhost", "[::1]", "10.1.2.3", "192.168.7.1", "169.254.169.254", "[fe80::1]"),
        *("[::ffff:10.0.0.1]", "0.0.0.0", "2130706433", "[fd00::1]", "inside.test"),
    ],
)
def test_a_redirect_into_this_machine_or_a_private_network_is_refused(host, served, server, folders):
    server.redirect("/tiny.bz2", f"https://{host}/tiny.bz2")
    with pytest.raises(DownloadError, match=r"it redirects to `https://.*`, an address of this machine or of a"):
        datasets.load("tiny")
    assert set(server.requests) == {"/tiny.bz2"} and not list(folders[1].iterdir())


def test_a_host_of_a_private_network_may_redirect_within_it(served, server, register, monkeypatch):
    server.answers["/moved.bz2"] = server.answers["/tiny.bz2"]
    server.redirect("/tiny.bz2", "https://inside.test/moved.bz2")

    def open_session():
        session = requests.Session()
        session.mount("https://inside.test", Wire(server.port))
        return session

    monkeypatch.setattr("bilevel.datasets.loading._open_session", open_session)
    register(tiny.libsvm_set("https://inside.test"))
    assert_same(values(datasets.load("tiny")), tiny.SPLIT.values())


@pytest.mark.parametrize("part", ["body", "head"])
def test_a_host_that_sends_a_byte_at_a_time_is_given_up_after_the_time_limit(part, server, folders, register):
    server.drip("/tiny.bz2", 0.02, **({"head": b"HTTP/1.1 200 OK\r\nX: "} if part == "head" else {}))
    register(tiny.libsvm_set(server.url, max_seconds=0.5))
    began = time.monotonic()
    with pytest.raises(DownloadError, match=r"tiny\.bz2: after 0\.5 seconds, the limit for this file, \d+ bytes had"):
        datasets.load("tiny")
    assert time.monotonic() - began < 5
    assert not list(folders[1].iterdir())


def test_a_failure_in_the_last_file_leaves_nothing(served, server, folders):
    server.serve("/tiny.t.bz2", b"")
    with pytest.raises(DownloadError, match=r"tiny\.t\.bz2"):
        datasets.load("tiny")
    assert not list(folders[1].iterdir())


def test_a_gzip_bomb_is_cut(server, folders, register):
    register(tiny.table_set(server.url))
    server.serve("/table.gz", gzip.compress(bytes(10**6)))
    with pytest.raises(DownloadError, match="more than 10000 bytes"):
        datasets.load("tiny")
    assert not list(folders[1].iterdir())


def test_a_damaged_gzip_stream_is_refused(server, folders, register):
    register(tiny.table_set(server.url))
    body = bytearray(tiny.packed_table()["table.gz"])
    body[-8] ^= 1  # its CRC
    server.serve("/table.gz", bytes(body))
    with pytest.raises(DownloadError, match="CRC"):
        datasets.load("tiny")


@pytest.mark.parametrize(
    "body",
    [
        tiny.idx_bytes(tiny.IMAGES["x_train"])[:-1],
        tiny.idx_bytes(tiny.IMAGES["x_train"]) + b"0",
        tiny.idx_bytes(tiny.IMAGES["x_train"].reshape(5, 8)),
        b"\x00\x00\x0d\x03" + tiny.idx_bytes(tiny.IMAGES["x_train"])[4:],
        b"\x00\x00",
    ],
    ids=["too short", "too long", "other shape", "other type", "no header"],
)
def test_an_idx_file_of_another_form_is_refused(body, server, folders, register):
    register(tiny.image_set(server.url))
    server.serve("/x_train.gz", gzip.compress(body))
    with pytest.raises(DownloadError, match=r"x_train\.gz: not in the expected form: the IDX"):
        datasets.load("tiny")


def test_a_stalled_server_is_given_up(server, folders, register):
    for name, body in tiny.packed_libsvm().items():
        server.stall(f"/{name}", body)
    register(tiny.libsvm_set(server.url, timeout=0.1))
    with pytest.raises(DownloadError, match="timed out"):
        datasets.load("tiny")
    assert not list(folders[1].iterdir())


def test_without_a_network_the_error_says_which_file_to_put_where(folders, register, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    register(tiny.libsvm_set(f"https://127.0.0.1:{port}"))
    with pytest.raises(DownloadError) as caught:
        datasets.load("tiny")
    said = str(caught.value)
    assert isinstance(caught.value, OSError)
    for part in (
        "refused",
        "`tiny.npz`",
        "X_train float64 (7, 3)",
        "y_test int8 (4,)",
        "BILEVEL_DATA",
        str(folders[1]),
    ):
        assert part in said


@pytest.mark.parametrize("scheme", ["file", "ftp", "data", "http"])
def test_an_address_without_encryption_is_refused(scheme, folders, register):
    register(tiny.libsvm_set(f"{scheme}://example.org"))
    with pytest.raises(DownloadError, match=f"`{scheme}://example.org/tiny.bz2` is not an https address"):
        datasets.load("tiny")


@pytest.mark.parametrize("where", ["while writing", "in the folder"])
def test_a_cache_that_cannot_be_written_gives_a_warning_and_the_data(where, served, folders, monkeypatch):
    def full(file, **arrays):
        file.write(b"PK")
        raise OSError("No space left on device")

    if where == "in the folder":
        folders[1].rmdir()
        folders[1].write_text("a file")
    else:
        monkeypatch.setattr(loading.np, "savez_compressed", full)
    with pytest.warns(
        UserWarning, match=r"tiny\.npz` cannot be written \(.*\); 'tiny' will be downloaded again"
    ) as told:
        assert_same(values(datasets.load("tiny")), tiny.SPLIT.values())
    assert told[0].filename == __file__
    assert folders[1].is_file() or not list(folders[1].iterdir())


def test_progress_is_printed_only_on_request(served, folders, capsys):
    datasets.load("tiny")
    assert capsys.readouterr().out == ""
    (folders[1] / "tiny.npz").unlink()
    datasets.load("tiny", progress=True)
    assert "tiny.t.bz2" in capsys.readouterr().out


def test_downloading_without_requests_says_how_to_install_it_and_reading_does_not_need_it(
    folders, register, monkeypatch
):
    register(tiny.libsvm_set("https://data.test"))
    monkeypatch.setitem(sys.modules, "requests", None)
    with pytest.raises(ImportError, match=r"pip install 'bilevel\[data\]'"):
        datasets.load("tiny")
    np.savez_compressed(folders[0] / "tiny.npz", **tiny.SPLIT)
    assert_same(values(datasets.load("tiny")), tiny.SPLIT.values())


def test_parsing_libsvm_without_scikit_learn_says_how_to_install_it(served, folders, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'bilevel\[data\]'"):
        datasets.load("tiny")
    assert not list(folders[1].iterdir())

"""The example with wrong labels: its network, its metric, and that learned weights help."""

import base64
import re
import subprocess
import sys
from dataclasses import replace
from xml.etree import ElementTree

import jax
import numpy as np
import pytest
from scipy.signal import correlate2d

from tests.scripts import EXAMPLES, load_example

pytestmark = pytest.mark.slow

EXAMPLE = EXAMPLES / "label_noise.py"


@pytest.fixture(scope="module")
def example():
    return load_example("label_noise")


@pytest.fixture(scope="module")
def data(example):
    return example.load("digits", 500, 250, 0.5)


def test_half_of_the_labels_are_redrawn(data):
    wrong = np.mean(data.train[1] != data.true)
    assert 0.39 < wrong < 0.51, "one in ten is redrawn as it was"


def test_the_network_is_two_convolutions_and_a_product(example, data):
    weights, image = example.weights_of(8), data.test[0][0]

    def convolve(maps, kernels):
        by_output = kernels.transpose(3, 2, 0, 1)
        whole = [sum(correlate2d(one, k, "full") for one, k in zip(maps, kernel, strict=True)) for kernel in by_output]
        # With stride 2, an even side and three taps, XLA pads one at the end.
        return np.maximum([one[2:-1:2, 2:-1:2] for one in whole], 0)

    hidden = convolve(convolve([image], weights["first"]), weights["second"])
    expected = hidden.transpose(1, 2, 0).reshape(-1) @ weights["scores"]
    np.testing.assert_allclose(example.scores_of(weights, image[None])[0], expected, rtol=1e-4, atol=1e-5)


def test_its_derivatives_are_right(example, data):
    assert max(example.build(data).check(tolerance=1e-4).values()) < 1e-4


def test_learned_weights_lower_the_test_error(example, data):
    fewer = replace(data, test=tuple(part[:300] for part in data.test))
    plain, learned = (example.fit(example.build(fewer), 300, reach, 32) for reach in (0.0, 100.0))
    tested = [run.history["test_error"][run.best_row] for run in (plain, learned)]
    assert tested[1] < 0.8 * tested[0]
    assert not np.any(plain.point.outer_var["logit"]), "without reach weights stand still"


def test_it_prints_every_baseline_and_writes_a_page(tmp_path):
    page, figure = tmp_path / "page.html", tmp_path / "figure.svg"
    command = [sys.executable, str(EXAMPLE), "--quick", "--rows", "200", "--steps", "20", "--seeds", "1"]
    command += ["--page", str(page), "--figure", str(figure)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    names = re.findall(r"^(no weights|cleanlab's filter|learned weights|clean labels) .*test error", run.stdout, re.M)
    assert [name for name in names if name != "cleanlab's filter"] == ["no weights", "learned weights", "clean labels"]
    assert re.search(r"^AUC of the learned weights +0\.", run.stdout, re.M)
    text = page.read_text()
    assert text.count("<img ") == 40 and text.count("<svg ") == 2 and "http://www.w3.org" in text
    assert not re.search(r"(src|href)='http", text), "nothing is loaded"
    assert ElementTree.parse(figure).getroot().tag.endswith("svg")


def test_an_image_of_the_page_is_the_row(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    sys.path.insert(0, str(EXAMPLE.parent))
    try:
        from label_noise_page import png
    finally:
        sys.path.remove(str(EXAMPLE.parent))
    row = np.arange(64, dtype=np.float32).reshape(8, 8) / 63
    (tmp_path / "row.png").write_bytes(base64.b64decode(png(row).partition(",")[2]))
    np.testing.assert_allclose(1 - image.imread(tmp_path / "row.png"), row, atol=1 / 255)


def test_its_memory_is_told_beside_plain_training(example, data):
    with jax.numpy_dtype_promotion("standard"):  # optax promotes its counts
        plain, learned = (example.peak_memory(kind, data, 10, 100.0, 64) for kind in ("no weights", "learned weights"))
    held = sum(part.nbytes for part in (*data.train, *data.validation))
    assert held <= plain < held + 2**28 and held <= learned < held + 2**28


def test_the_peak_of_the_process_is_counted_anew(example):
    before = example._reset_peak()
    large = np.ones(2**24)
    del large
    assert 2**27 - 2**22 <= example._status("VmHWM") - before < 2**28  # the system counts in lumps
    assert example._status("VmHWM") - example._reset_peak() > 2**26
    assert example._status("VmHWM") - example._status("VmRSS") < 2**26

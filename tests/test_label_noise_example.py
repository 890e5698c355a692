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
from sklearn.metrics import roc_auc_score

import bilevel
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
        # With stride 2, an even side and kernels of size 3, XLA pads one at the end.
        return np.maximum([one[2:-1:2, 2:-1:2] for one in whole], 0)

    hidden = convolve(convolve([image], weights["first"]), weights["second"])
    expected = hidden.transpose(1, 2, 0).reshape(-1) @ weights["scores"]
    np.testing.assert_allclose(example.scores_of(weights, image[None])[0], expected, rtol=1e-4, atol=1e-5)


def test_its_derivatives_are_right(example, data):
    assert max(example.build(data).check(tolerance=1e-4).values()) < 1e-4


def test_the_slope_of_a_concave_loss_is_the_weight_of_the_row(example, data):
    weights, row = example.weights_of(8), tuple(part[:1] for part in (*data.train, np.arange(500)))
    outer = {"level": np.float32(1.5), "log_slope": np.float32(0.3)}
    plain, bent, rest = (
        jax.grad(loss)(weights)["scores"]
        for loss in (
            lambda weights: example.entropies(weights, *row[:2])[0],
            lambda weights: example.bent_loss(weights, outer, row)[0],
            example.decay,
        )
    )
    entropy = float(example.entropies(weights, *row[:2])[0])
    weight = 1 / (1 + np.exp(np.exp(0.3) * entropy - 1.5))
    np.testing.assert_allclose(np.asarray(bent) - rest, weight * np.asarray(plain), rtol=1e-4, atol=1e-6)
    found = example.row_logits(bilevel.Point(weights, outer, weights), data)
    np.testing.assert_allclose(1 / (1 + np.exp(-found[0])), weight, rtol=1e-4)


def test_learned_weights_lower_the_test_error(example, data):
    fewer = replace(data, test=tuple(part[:300] for part in data.test))
    plain, learned = (example.fit(example.build(fewer), 300, reach, 32) for reach in (0.0, 100.0))
    assert example.tested(learned) < 0.8 * example.tested(plain)
    assert not np.any(plain.point.outer_var["logit"]), "weights do not move without reach"


def test_a_learned_loss_separates_correct_labels_from_wrong_ones(example, data):
    few = replace(data, test=tuple(part[:10] for part in data.test))
    start = example.build(few, by_loss=True)
    learned = example.fit(start, 300, 0.0, 32).point
    right = data.train[1] == data.true
    assert roc_auc_score(right, example.row_logits(learned, data)) > 0.9
    weights = 1 / (1 + np.exp(-example.row_logits(start.start._replace(inner_var=learned.inner_var), data)))
    moved = 1 / (1 + np.exp(-example.row_logits(learned, data)))
    assert moved[~right].mean() / moved[right].mean() < weights[~right].mean() / weights[right].mean()


def test_it_prints_every_baseline_and_writes_a_page(tmp_path):
    page, figure = tmp_path / "page.html", tmp_path / "figure.svg"
    command = [sys.executable, str(EXAMPLE), "--quick", "--rows", "200", "--steps", "20", "--seeds", "1"]
    command += ["--page", str(page), "--figure", str(figure)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    names = re.findall(r"^([a-z' ]+?) +test error", run.stdout, re.M)
    due = ["no weights", "learned weights", "learned loss", "clean labels"]
    assert [name for name in names if name != "cleanlab's filter"] == due
    for name in due[1:3]:
        assert re.search(rf"^{name}, AUC +0\.", run.stdout, re.M)
    text = page.read_text()
    assert text.count("<img ") == 40 and text.count("<svg ") == 3 and "http://www.w3.org" in text
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


@pytest.fixture
def memory(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return load_example("label_noise_memory")


def test_its_memory_is_compared_with_that_of_plain_training(memory, data):
    with jax.numpy_dtype_promotion("standard"):  # optax promotes its counts
        plain, learned = (memory.peak_memory(kind, data, 10, 100.0, 64) for kind in ("no weights", "learned weights"))
    held = sum(part.nbytes for part in (*data.train, *data.validation))
    assert held <= plain < held + 2**28 and held <= learned < held + 2**28


def test_the_peak_of_the_process_is_reset(memory):
    before = memory._reset_peak()
    large = np.ones(2**24)
    del large
    assert 2**27 - 2**22 <= memory._status("VmHWM") - before < 2**28  # the system counts in batches of pages
    assert memory._status("VmHWM") - memory._reset_peak() > 2**26
    assert memory._status("VmHWM") - memory._status("VmRSS") < 2**26

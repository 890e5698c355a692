"""The data sets that the untuned setting is shown on: real ones, and ones made to be hard."""

import numpy as np

import bilevel
from bilevel import problems

COVTYPE_ROWS = 60_000


def binary_covtype():
    """Covertype, class 2 against the rest, standardized; its one-hot columns are collinear and some nearly empty."""
    data = bilevel.datasets.load("covtype")
    rng = np.random.default_rng(0)
    rows = rng.permutation(len(data.X_train))[:COVTYPE_ROWS]
    features, signs = data.X_train[rows].astype(np.float64), np.where(data.y_train[rows] == 2, 1, -1)
    deviation = features.std(0)
    return halves((features - features.mean(0)) / np.where(deviation > 0, deviation, 1), signs)


def odd_digits():
    """The digits of scikit-learn, odd against even: 64 pixels from 0 to 1, some of them constant."""
    data = bilevel.datasets.load("digits")
    return halves(data.X_train.reshape(len(data.X_train), -1) / 16.0, np.where(data.y_train % 2 == 1, 1, -1))


def ten_digits():
    """Softmax selection on all ten digits, a penalty per pixel."""
    data = bilevel.datasets.load("digits")
    order = np.random.default_rng(0).permutation(len(data.X_train))
    images, labels = data.X_train[order].reshape(len(order), -1) / 16.0, data.y_train[order].astype(np.int32)
    cut = 2 * len(order) // 3
    return problems.softmax_selection(
        images[:cut], labels[:cut], images[cut:], labels[cut:], per="feature", dtype="float32"
    )


def useless(n=4000, dim=500, useful=20):
    """Five hundred features of which twenty matter."""
    rng = np.random.default_rng(1)
    truth = np.where(np.arange(dim) < useful, rng.standard_normal(dim), 0)
    return halves(*labeled(rng.standard_normal((n, dim)), truth, rng))


def badly_scaled(n=6000, dim=30):
    """Columns whose scales go from 1e-3 to 1e3; all matter alike."""
    rng = np.random.default_rng(2)
    scales = np.geomspace(1e-3, 1e3, dim)
    return halves(*labeled(scales * rng.standard_normal((n, dim)), rng.standard_normal(dim) / scales, rng))


def one_hots(n=8000, categories=(4, 12, 40)):
    """Three categorical columns as all their one-hots, and a constant: four exact collinearities, rare categories."""
    rng = np.random.default_rng(3)
    blocks = [np.eye(k)[rng.choice(k, n, p=rng.dirichlet(np.full(k, 0.7)))] for k in categories]
    features = np.concatenate([np.ones((n, 1)), *blocks], axis=1)
    return halves(*labeled(features, rng.standard_normal(features.shape[1]), rng))


def separable(n=3000, dim=20, noise=0.05):
    """Training rows that a plane separates, so that without penalties there is no fit; validation labels have noise."""
    rng = np.random.default_rng(4)
    features, truth = rng.standard_normal((n, dim)), rng.standard_normal(dim)
    signs = np.where(features @ truth > 0, 1, -1)
    features += 0.1 * signs[:, None] * truth / np.linalg.norm(truth)
    cut = 2 * n // 3
    noisy = np.where(rng.random(n - cut) < noise, -1, 1) * signs[cut:]
    return problems.logistic_selection(features[:cut], signs[:cut], features[cut:], noisy, dtype="float32")


def halves(features, signs):
    """Logistic penalty selection, two thirds of the rows for training."""
    order = np.random.default_rng(0).permutation(len(features))
    train, val = np.split(order, [2 * len(order) // 3])
    return problems.logistic_selection(features[train], signs[train], features[val], signs[val], dtype="float32")


def labeled(features, truth, rng):
    """Features, and signs by the logistic model."""
    return features, np.where(features @ truth + rng.logistic(size=len(features)) > 0, 1, -1)


SETS = {
    "IJCNN1": problems.ijcnn1,
    "Covertype": binary_covtype,
    "breast cancer": problems.breast_cancer,
    "odd digits": odd_digits,
    "ten digits": ten_digits,
    "useless features": useless,
    "bad scales": badly_scaled,
    "one-hots": one_hots,
    "separable": separable,
}

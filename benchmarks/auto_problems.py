"""The data sets of the comparison of the untuned solver in `auto.py`: real ones and difficult synthetic ones."""

import jax
import jax.numpy as jnp
import numpy as np

import bilevel
from bilevel import problems

COVTYPE_ROWS = 60_000


def split(features, targets, **options):
    """Return penalty selection with two thirds of the rows for training."""
    order = np.random.default_rng(0).permutation(len(features))
    train, val = np.split(order, [2 * len(order) // 3])
    rows = features[train], targets[train], features[val], targets[val]
    return problems.penalty_selection(*rows, dtype="float32", **options)


def labeled(features, truth, rng):
    """Return features, and signs drawn from the logistic model."""
    return features, np.where(features @ truth + rng.logistic(size=len(features)) > 0, 1, -1)


def standardized(features):
    deviation = features.std(0)
    return (features - features.mean(0)) / np.where(deviation > 0, deviation, 1)


def binary_covtype():
    """Covertype, class 2 against the rest, standardized. One-hot columns are collinear, and some are nearly empty."""
    data = bilevel.datasets.load("covtype")
    rng = np.random.default_rng(0)
    rows = rng.permutation(len(data.X_train))[:COVTYPE_ROWS]
    features, signs = data.X_train[rows].astype(np.float64), np.where(data.y_train[rows] == 2, 1, -1)
    return split(standardized(features), signs)


def odd_digits():
    """The digits of scikit-learn, odd against even: 64 pixels from 0 to 1, some constant."""
    data = bilevel.datasets.load("digits")
    return split(data.X_train.reshape(len(data.X_train), -1) / 16.0, np.where(data.y_train % 2 == 1, 1, -1))


def ten_digits():
    """Softmax selection on all ten digits with a penalty per pixel."""
    data = bilevel.datasets.load("digits")
    images, labels = data.X_train.reshape(len(data.X_train), -1) / 16.0, data.y_train.astype(np.int32)
    return split(images, labels, loss="softmax", per="feature")


def useless(n=4000, dim=500, useful=20):
    """Five hundred features, of which twenty are relevant."""
    rng = np.random.default_rng(1)
    truth = np.where(np.arange(dim) < useful, rng.standard_normal(dim), 0)
    return split(*labeled(rng.standard_normal((n, dim)), truth, rng))


def badly_scaled(n=6000, dim=30):
    """Columns with scales from 1e-3 to 1e3, all equally relevant."""
    rng = np.random.default_rng(2)
    scales = np.geomspace(1e-3, 1e3, dim)
    return split(*labeled(scales * rng.standard_normal((n, dim)), rng.standard_normal(dim) / scales, rng))


def one_hots(n=8000, categories=(4, 12, 40)):
    """One-hot columns of three categories and a constant: four exact collinearities, rare categories."""
    rng = np.random.default_rng(3)
    blocks = [np.eye(k)[rng.choice(k, n, p=rng.dirichlet(np.full(k, 0.7)))] for k in categories]
    features = np.concatenate([np.ones((n, 1)), *blocks], axis=1)
    return split(*labeled(features, rng.standard_normal(features.shape[1]), rng))


def separable(n=3000, dim=20, noise=0.05):
    """Separable training rows, which have no fit without penalties; the validation labels are noisy."""
    rng = np.random.default_rng(4)
    features, truth = rng.standard_normal((n, dim)), rng.standard_normal(dim)
    signs = np.where(features @ truth > 0, 1, -1)
    features += 0.1 * signs[:, None] * truth / np.linalg.norm(truth)
    cut = 2 * n // 3
    noisy = np.where(rng.random(n - cut) < noise, -1, 1) * signs[cut:]
    return problems.penalty_selection(features[:cut], signs[:cut], features[cut:], noisy, dtype="float32")


def embedded(name):
    """Return features and targets of a data set of scikit-learn."""
    from sklearn import datasets

    data = getattr(datasets, f"load_{name}")()
    return data.data.astype(np.float64), data.target


# Real data


def wine_raw():
    """Raw chemical measurements of wines: columns from 0.1 to 1700, not centered."""
    features, target = embedded("wine")
    return split(features, np.where(target == 0, 1, -1))


def wine_classes():
    features, target = embedded("wine")
    return split(standardized(features), target.astype(np.int32), loss="softmax", per="feature")


def iris_classes():
    features, target = embedded("iris")
    return split(features, target.astype(np.int32), loss="softmax", per="class")


def breast_cancer_raw():
    """Raw sizes of cells: columns from 0.003 to 4254."""
    features, target = embedded("breast_cancer")
    return split(features, np.where(target == 1, 1, -1))


def diabetes_ridge():
    features, target = embedded("diabetes")
    return split(standardized(features), (target - target.mean()) / target.std(), loss="squared")


def diabetes_products():
    """Ten columns and all products of two of them."""
    features, target = embedded("diabetes")
    columns = standardized(features)
    pairs = [columns[:, i] * columns[:, j] for i in range(10) for j in range(i, 10)]
    features = np.column_stack([columns, *pairs])
    return split(features, (target - target.mean()) / target.std(), loss="squared")


def mnist_pair(rows=3000):
    """Threes against fives in raw pixels, most of which are 0 in most rows."""
    data = bilevel.datasets.load("mnist")
    chosen = np.flatnonzero(np.isin(data.y_train, (3, 5)))[:rows]
    images = data.X_train[chosen].reshape(len(chosen), -1).astype(np.float64)
    return split(images[:, images.std(0) > 0] / 255.0, np.where(data.y_train[chosen] == 3, 1, -1))


def covtype_raw(rows=6000):
    """Raw Covertype, class 2 against the rest: elevations in the thousands next to one-hot columns."""
    data = bilevel.datasets.load("covtype")
    chosen = np.random.default_rng(1).permutation(len(data.X_train))[:rows]
    return split(data.X_train[chosen].astype(np.float64), np.where(data.y_train[chosen] == 2, 1, -1))


def five_folds():
    """Cross-validation: five models with shared penalties, one per feature."""
    features, target = embedded("breast_cancer")
    return problems.cross_validation(standardized(features), np.where(target == 1, 1, -1), 5, dtype="float32")


def cleaning():
    """Digits with many wrong labels and a weight per row."""
    return problems.digits_cleaning(dtype="float32")


# Difficult synthetic data


def large_means(n=3000, dim=40, mean=100.0):
    rng = np.random.default_rng(11)
    features = rng.standard_normal((n, dim))
    _, signs = labeled(features, rng.standard_normal(dim), rng)
    return split(features + mean, signs)


def huge_means(n=3000, dim=10):
    """Columns with means from 10 to 1000 and standard deviations of 1."""
    rng = np.random.default_rng(12)
    features = rng.standard_normal((n, dim))
    _, signs = labeled(features, rng.standard_normal(dim), rng)
    return split(features + np.geomspace(10, 1000, dim), signs)


def polynomial(n=2000, degree=9):
    """Powers of a number from 0 to 1: the eigenvalues of the Hessian span ten orders of magnitude."""
    rng = np.random.default_rng(13)
    t = rng.uniform(size=n)
    powers = t[:, None] ** np.arange(degree + 1)
    return split(powers, np.sin(9 * t) + 0.3 * rng.standard_normal(n), loss="squared")


def heavy_tails(n=4000, dim=20):
    """Columns with infinite variance: Student's t with 1.5 degrees of freedom."""
    rng = np.random.default_rng(14)
    return split(*labeled(rng.standard_t(1.5, (n, dim)), rng.standard_normal(dim), rng))


def duplicates(n=3000, dim=15):
    """Each column four times, twice with the opposite sign."""
    rng = np.random.default_rng(15)
    features, signs = labeled(rng.standard_normal((n, dim)), rng.standard_normal(dim), rng)
    return split(np.concatenate([features, -features, features, -features], axis=1), signs)


def wide(n=150, dim=400, useful=10):
    """Fewer rows than columns."""
    rng = np.random.default_rng(16)
    truth = np.where(np.arange(dim) < useful, 2 * rng.standard_normal(dim), 0)
    return split(*labeled(rng.standard_normal((n, dim)), truth, rng))


def rare_positives(n=8000, dim=20):
    """One row in a hundred is positive."""
    rng = np.random.default_rng(17)
    features, truth = rng.standard_normal((n, dim)), rng.standard_normal(dim)
    scores = features @ truth + rng.logistic(size=n)
    features = np.column_stack([features, np.ones(n)])
    return split(features, np.where(scores > np.quantile(scores, 0.99), 1, -1))


def collinear_ridge(n=1500, dim=30, rank=5):
    """Thirty columns of rank five plus noise of 1e-3."""
    rng = np.random.default_rng(18)
    few = rng.standard_normal((n, rank))
    features = few @ rng.standard_normal((rank, dim)) + 1e-3 * rng.standard_normal((n, dim))
    return split(
        features,
        few @ rng.standard_normal(rank) + 0.5 * rng.standard_normal(n),
        loss="squared",
    )


def own_losses(loss, targets, features, outer_var):
    """Return a problem with user-defined losses and penalties exp(x), one for all columns or one each."""

    def outer(z, x, row):
        return loss(row[0], row[1:] @ z)

    def inner(z, x, row):
        return outer(z, x, row) + 0.5 * jnp.sum(jnp.exp(x) * z * z)

    rows = np.column_stack([targets, features])
    train, val = np.split(rows, [2 * len(rows) // 3])
    start = {"inner_var": np.zeros(features.shape[1]), "outer_var": outer_var, "strongly_convex": True}
    return bilevel.BilevelProblem.from_losses(inner, outer, train, val, **start, dtype="float32")


def own_scales(n=1500, dim=24):
    """A user-defined logistic loss on columns with scales from 1e-2 to 1e2, with a penalty each."""
    rng = np.random.default_rng(19)
    features, signs = labeled(rng.standard_normal((n, dim)), rng.standard_normal(dim), rng)
    features *= rng.permutation(np.geomspace(1e-2, 1e2, dim))
    return own_losses(lambda sign, score: jax.nn.softplus(-sign * score), signs, features, np.full(dim, -4.0))


def own_huber(n=900, dim=12):
    """A user-defined Huber-like loss with outliers, columns with mean 30, and one penalty."""
    rng = np.random.default_rng(20)
    features = rng.standard_normal((n, dim)) + 30
    targets = (features - 30) @ rng.standard_normal(dim) + rng.standard_t(1.5, n)
    return own_losses(lambda y, score: jnp.sqrt(1 + (y - score) ** 2) - 1, targets, features, np.full(1, -3.0))


def few_rows(n=30, dim=6):
    """Twenty training rows and ten validation rows."""
    rng = np.random.default_rng(21)
    return split(*labeled(rng.standard_normal((n, dim)), rng.standard_normal(dim), rng))


FIRST_SETS = {
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
REAL_SETS = {
    "wine raw": wine_raw,
    "wine classes": wine_classes,
    "iris classes": iris_classes,
    "breast cancer raw": breast_cancer_raw,
    "diabetes": diabetes_ridge,
    "diabetes products": diabetes_products,
    "MNIST 3 and 5": mnist_pair,
    "Covertype raw": covtype_raw,
    "five folds": five_folds,
    "digits cleaning": cleaning,
}
HARD_SETS = {
    "means of 100": large_means,
    "means to 1000": huge_means,
    "powers": polynomial,
    "heavy tails": heavy_tails,
    "duplicates": duplicates,
    "fewer rows than columns": wide,
    "rare positives": rare_positives,
    "collinear ridge": collinear_ridge,
    "own losses, scales": own_scales,
    "own Huber loss": own_huber,
    "thirty rows": few_rows,
}
SETS = FIRST_SETS | REAL_SETS | HARD_SETS

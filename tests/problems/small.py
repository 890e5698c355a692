"""Small versions of the problems on real data, each with its losses of one sample."""

import jax
import jax.numpy as jnp
import numpy as np

from bilevel import problems
from bilevel.oracles import AutodiffOracles
from bilevel.problems.penalized_linear import logistic
from tests.cases import N_INNER, N_OUTER, logistic_data

FEATURES, CLASSES, FOLDS = 4, 3, 3
GROUPS = np.array([1, 0, 1, 2])
PRIOR_SCALE = 0.7


def table(n, seed):
    """Rows of three overlapping classes."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, n)
    labels[:CLASSES] = np.arange(CLASSES)
    return rng.standard_normal((n, FEATURES)) + np.eye(FEATURES)[labels], labels


def classes():
    return *table(N_INNER, 0), *table(N_OUTER, 1)


def targets():
    X, y, X_val, y_val = logistic_data()
    return X, y + 0.3 * X[:, 0], X_val, y_val + 0.3 * X_val[:, 0]


def grouped_logistic(**kwargs):
    return problems.penalty_selection(*logistic_data(), groups=GROUPS, **kwargs)


def ridge(**kwargs):
    return problems.penalty_selection(*targets(), loss="squared", **kwargs)


def grouped_ridge(**kwargs):
    return problems.penalty_selection(*targets(), loss="squared", groups=GROUPS, **kwargs)


def softmax_per_class(**kwargs):
    return problems.penalty_selection(*classes(), loss="softmax", per="class", **kwargs)


def softmax_per_feature(**kwargs):
    return problems.penalty_selection(*classes(), loss="softmax", per="feature", **kwargs)


def softmax_per_group(**kwargs):
    return problems.penalty_selection(*classes(), loss="softmax", per="feature", groups=GROUPS, **kwargs)


def cleaning(**kwargs):
    return problems.data_cleaning(*classes(), **kwargs)


def folds(n=N_INNER):
    """Folds of unequal sizes."""
    return np.arange(n) % 7 % FOLDS


def signs():
    """Rows whose penalties have a finite optimum."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((N_INNER, FEATURES))
    return X, np.where(X @ [2.0, 0.5, -1.0, 0.0] + rng.logistic(size=N_INNER) > 0, 1, -1)


def logistic_folds(**kwargs):
    return problems.cross_validation(*signs(), folds(), groups=GROUPS, prior_scale=PRIOR_SCALE, **kwargs)


def squared_folds(**kwargs):
    X, y, *_ = targets()
    return problems.cross_validation(X, y, folds(), loss="squared", prior_scale=PRIOR_SCALE, **kwargs)


def softmax_folds(**kwargs):
    X, y, *_ = classes()
    return problems.cross_validation(X, y, folds(), loss="softmax", prior_scale=PRIOR_SCALE, **kwargs)


def squared(z, x, sample):
    return (sample.features @ z - sample.targets) ** 2 / 2


def entropy(z, x, sample):
    scores = z @ sample.features
    return jax.nn.logsumexp(scores) - scores[sample.labels]


def per_feature(z, x):
    return jnp.sum(jnp.exp(x) * z**2) / 2


def per_group(z, x):
    return jnp.sum(jnp.exp(x)[GROUPS] * z**2) / 2


def penalized(loss, penalty):
    return lambda z, x, sample: loss(z, x, sample) + penalty(z, x)


def weighted(z, x, sample):
    return jax.nn.sigmoid(x[sample.index]) * entropy(z, x, sample) + 0.2 * jnp.sum(z**2)


def signed(z, x, row):
    return logistic(row @ z)


def fitted(loss, penalty):
    """G of one row: its loss in the models of the other folds."""

    def inner_loss(z, x, sample):
        losses = [jnp.where(sample.fold == k, 0, loss(z[k], x, sample.rows)) for k in range(FOLDS)]
        return sum(losses) + sum(penalty(z[k], x) for k in range(FOLDS))

    return inner_loss


def held_out(loss):
    """F of one row: its loss in the model of its fold, and the prior."""

    def outer_loss(z, x, sample):
        prior = jnp.sum((x - jnp.mean(x)) ** 2) / (2 * PRIOR_SCALE**2 * N_INNER)
        return loss(z[sample.fold], x, sample.rows) + prior

    return outer_loss


def per_column(z, x):
    return jnp.sum(jnp.exp(x)[None, :] * z**2) / 2


LOSSES = {
    grouped_logistic: (penalized(signed, per_group), signed),
    ridge: (penalized(squared, per_feature), squared),
    grouped_ridge: (penalized(squared, per_group), squared),
    softmax_per_class: (penalized(entropy, lambda z, x: jnp.sum(jnp.exp(x)[:, None] * z**2) / 2), entropy),
    softmax_per_feature: (penalized(entropy, per_column), entropy),
    softmax_per_group: (penalized(entropy, lambda z, x: jnp.sum(jnp.exp(x)[GROUPS][None, :] * z**2) / 2), entropy),
    cleaning: (weighted, entropy),
    logistic_folds: (fitted(signed, per_group), held_out(signed)),
    squared_folds: (fitted(squared, per_feature), held_out(squared)),
    softmax_folds: (fitted(entropy, per_column), held_out(entropy)),
}
FOLDED = {function.__name__: function for function in (logistic_folds, squared_folds, softmax_folds)}
PROBLEMS = {function.__name__: function for function in LOSSES if function.__name__ not in FOLDED}


def by_autodiff(name, oracles):
    """The same rows in the same layout, differentiated automatically."""
    inner_loss, outer_loss = LOSSES[(PROBLEMS | FOLDED)[name]]
    return AutodiffOracles(
        inner_samples=oracles.inner_samples,
        outer_samples=oracles.outer_samples,
        inner_loss=inner_loss,
        outer_loss=outer_loss,
    )

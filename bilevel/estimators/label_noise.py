"""A classifier for wrong labels, which estimates for each row the probability that its label is correct.

Arrays of probabilities are (rows, classes). A noise matrix is P(given label | true class), (true, given). The evidence
of a row is P(its label | true class), (rows, classes).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from scipy.special import softmax
from sklearn.utils import check_random_state
from sklearn.utils.validation import validate_data

from bilevel.estimators.base import (
    LinearClassifier,
    all_or_nothing,
    check_parameters,
    check_range,
    check_validation_rows,
    check_weights,
    document,
    one_thread_if_small,
    reject,
    stack_rows,
    warn,
)
from bilevel.estimators.losses import Array
from bilevel.estimators.selection import Scaling, run_lbfgs, split

_MARGIN = 0.5  # standard errors by which a general noise matrix must be better than a uniform one
_NO_TRUSTED_ROWS = (
    "No trusted rows (`X_val`, `y_val`) are given, so that labels are compared with each other only: a class that is "
    "mislabeled in most of its rows cannot be recognized."
)
_INTERCEPT_PENALTY = 1e-3  # keeps the intercept of a class without rows in a fold finite
_TINY = np.finfo(float).tiny
_PENALTY_RATIO = 10**0.5  # between successive penalties
_MIN_PENALTY = 1e-6  # per row
_EM_STEPS = 30


def count_confident(probabilities: Array, labels: Array, weights: Array) -> Array:
    """Estimate a noise matrix by confident learning, from out-of-sample probabilities of the given labels.

    A row is assigned to the most probable one of the classes whose probability is at least its mean over the rows with
    that label. Counts are scaled to the numbers of given labels.
    """
    n_classes = probabilities.shape[1]
    given = np.bincount(labels, weights, n_classes)
    given[given == 0] = 1
    mean = np.bincount(labels, weights * probabilities[np.arange(len(labels)), labels], n_classes) / given
    reached = probabilities >= mean
    sure = reached.any(axis=1)
    counts = np.eye(n_classes)  # one correct row per class, so that no row of the matrix is empty
    np.add.at(counts, (np.where(reached, probabilities, -1.0).argmax(axis=1)[sure], labels[sure]), weights[sure])
    counts *= given / counts.sum(axis=0)
    return counts / counts.sum(axis=1, keepdims=True)


def compute_posterior(probabilities: Array, evidence: Array) -> tuple[Array, Array]:
    """Return P(true class | row, label), and log P(label | row)."""
    joint = probabilities * evidence
    total = np.maximum(joint.sum(axis=1), _TINY)
    return joint / total[:, None], np.log(total)


def estimate_noise(
    probabilities: Array, labels: Array, start: Array, weights: Array, *, uniform: bool = False
) -> Array:
    """Estimate the noise matrix by maximum likelihood, with fixed probabilities of the true classes.

    A uniform matrix has one rate of correct labels for all classes, and equal probabilities of all wrong labels. The
    prior of a general one consists of k rows for each of the k classes, distributed like a uniform matrix:
    otherwise a few rows of a class would determine its wrong labels.
    """
    n_classes = len(start)
    for _ in range(_EM_STEPS):
        posterior, _ = compute_posterior(probabilities, start[:, labels].T)
        counts = np.stack([np.bincount(labels, weights * part, n_classes) for part in posterior.T])
        shared = uniform_noise(np.trace(counts) / counts.sum(), n_classes)
        counts += n_classes * shared
        start = shared if uniform else counts / counts.sum(axis=1, keepdims=True)
    return start


def uniform_noise(correct: float, n_classes: int) -> Array:
    """Return the noise matrix with this rate of correct labels and equal probabilities of all wrong labels."""
    matrix = np.full((n_classes, n_classes), (1 - correct) / (n_classes - 1))
    np.fill_diagonal(matrix, correct)
    return matrix


def noisy_softmax_loss(scores: Array, evidence: Array, weights: Array) -> tuple[float, Array]:
    """Return -sum weight_i log sum_t p_i(t) evidence_i(t), with p the softmax of the scores, and its derivative.

    Scores and evidence are (classes, rows). If each row has evidence for one class only, this is the usual log-loss.
    """
    prior = np.exp(scores - scores.max(axis=0))
    joint = prior * evidence
    normalizer, likelihood = prior.sum(axis=0), np.maximum(joint.sum(axis=0), _TINY)
    slope = prior * (weights / normalizer) - joint * (weights / likelihood)
    return float(weights @ np.log(normalizer / likelihood)), slope


def compute_scores(X: Any, coef: Array) -> Array:
    """Return X @ coef, where the last row of coef contains the intercepts."""
    return X @ coef[:-1] + coef[-1]


class CrossFit(NamedTuple):
    """Models of all folds: penalty, coefficients, probabilities of held-out rows, and their summed loss."""

    penalty: float
    coefs: list[Array]
    probabilities: Array
    loss: float


class NoisyRows(NamedTuple):
    """Scaled rows with labels, as class numbers; trusted rows are last.

    Attributes
    ----------
    trusted : whether the label of a row is known to be correct
    intercept : whether models have intercepts
    folds : pairs of row numbers, to fit on and to hold out
    """

    X: Any
    y: Array
    weights: Array
    trusted: Array
    intercept: bool
    folds: Sequence[tuple[Array, Array]] = ()

    def evidence(self, matrix: Array) -> Array:
        """Return P(label of the row | true class), (rows, classes)."""
        return np.where(self.trusted[:, None], np.eye(len(matrix))[self.y], matrix[:, self.y].T)

    def take(self, rows: Array) -> "NoisyRows":
        """Return some of the rows, without folds."""
        return NoisyRows(self.X[rows], self.y[rows], self.weights[rows], self.trusted[rows], self.intercept)

    def fit(
        self, evidence: Array, penalty: float, start: Array | None = None, tol: float = 1e-5, max_iter: int = 100
    ) -> Array:
        """Minimize `noisy_softmax_loss` + penalty/2 ||coef||²; return (features + 1, classes), the intercepts last."""
        shape = self.X.shape[1] + 1, evidence.shape[1]
        ridge = np.full((shape[0], 1), penalty)
        ridge[-1] = _INTERCEPT_PENALTY

        def objective(flat: Array) -> tuple[float, Array]:
            coef = flat.reshape(shape)
            scores = np.ascontiguousarray(compute_scores(self.X, coef).T)
            value, slope = noisy_softmax_loss(scores, by_class, self.weights)
            gradient = np.vstack([self.X.T @ slope.T, self.intercept * slope.sum(axis=1)]) + ridge * coef
            return (value + np.sum(ridge * coef**2) / 2) / total, gradient.ravel() / total

        total, by_class = self.weights.sum(), np.ascontiguousarray(evidence.T)
        first = np.zeros(shape) if start is None else start
        return run_lbfgs(objective, first.ravel(), max_iter=max_iter, ftol=tol, gtol=tol).x.reshape(shape)

    def cross_fit(self, evidence: Array, penalty: float, start: CrossFit | None = None) -> CrossFit:
        """Fit the model without each fold, at one penalty."""
        coefs, probabilities = [], np.empty(evidence.shape)
        for k, (train, test) in enumerate(self.folds):
            coefs.append(self.take(train).fit(evidence[train], penalty, None if start is None else start.coefs[k]))
            probabilities[test] = softmax(compute_scores(self.X[test], coefs[-1]), axis=1)
        loss = -float(self.weights @ compute_posterior(probabilities, evidence)[1])
        return CrossFit(penalty, coefs, probabilities, loss)

    def decrease_penalty(self, evidence: Array, penalty: float, start: CrossFit | None = None) -> CrossFit:
        """Fit at this penalty, and at smaller ones as long as the held-out loss decreases."""
        best = self.cross_fit(evidence, penalty, start)
        while best.penalty > _MIN_PENALTY * self.weights.sum():
            found = self.cross_fit(evidence, best.penalty / _PENALTY_RATIO, best)
            if not found.loss < best.loss:
                break
            best = found
        return best


class NoiseEstimate(NamedTuple):
    """Models of folds, the noise matrix, P(true class | row, label), losses of labels, and their means by round."""

    fits: CrossFit
    matrix: Array
    posterior: Array
    losses: Array
    history: list[float]


@document
@dataclass(eq=False, repr=False, kw_only=True)
class DataCleaningClassifier(LinearClassifier):
    """Softmax regression on rows weighted by the probability that their label is correct.

    Given labels are modeled as draws from a row of a noise matrix, P(given label | true class). Models of the true
    class are fitted without each fold in turn, by the likelihood of the given labels; the noise matrix is estimated on
    held-out rows, from a start by confident learning. Both alternate as long as held-out labels become more probable. A
    matrix with one rate of wrong labels for all classes is used unless a general matrix is clearly better. The weight
    of a row is the probability, by the model without its fold, that its label is correct. The final model is fitted to
    weighted rows.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> from sklearn.utils import shuffle
    >>> from bilevel.estimators import DataCleaningClassifier
    >>> X, y = shuffle(*load_digits(return_X_y=True), random_state=0)
    >>> y[:100] = (y[:100] + 1) % 10
    >>> model = DataCleaningClassifier(random_state=0).fit(X[:1200], y[:1200], X[1200:], y[1200:])
    >>> sum(model.suspicious_[:100] < 100) > 90  # the first 100 of 1200 labels are wrong
    np.True_
    """

    cv: Any = 5
    max_iter: int = 20
    tol: float = 1e-3

    _entries: ClassVar[str] = """
cv : int, splitter or iterable, default=5
    Number of folds (stratified and shuffled), or a splitter of scikit-learn or pairs of arrays of row numbers,
    which must hold out each row once.
max_iter : int, default=20
    Maximum number of rounds of fits and noise matrix.
tol : float, default=0.001
    Stop if a round improves the held-out log-loss by less than this number of nats per row.
sample_weights_ : ndarray of shape (n_samples,)
    Probability that the label of each row of X is correct.
suspicious_ : ndarray of shape (n_samples,)
    Numbers of the rows of X, from the least probable label to the most probable one.
noise_matrix_ : ndarray of shape (n_classes, n_classes)
    P(given label | true class), with one row per true class.
penalty_ : float
    Penalty of the squared coefficients in sum weight_i log-loss_i + penalty/2 ||coef||², chosen over the folds.
history_ : list of float
    Log-loss of the given labels of held-out rows, in nats per row, at the start and after each round.
n_iter_ : int
    Number of rounds.
"""

    @all_or_nothing
    def fit(self, X: Any, y: Any, X_val: Any = None, y_val: Any = None, *, sample_weight: Any = None) -> Self:
        """Estimate the weights of the rows, and fit the model to them.

        Parameters
        ----------
        X : {array-like, sparse matrix} of shape (n_samples, n_features)
            Training rows.
        y : array-like of shape (n_samples,)
            Labels.
        X_val, y_val : array-like, default=None
            Trusted rows, whose labels are correct. The model is fitted to them as well, with weight 1.
        sample_weight : array-like of shape (n_samples,), default=None
            Weights of the rows of X, in the fits, in the loss of held-out rows and in the noise matrix. 2 means the
            same as the row twice, in the same fold; a row of weight 0 only gets a probability.

        Returns
        -------
        self : object
            The fitted estimator.
        """
        check_parameters(self, X=X, y=y)
        if isinstance(self.cv, Real) and (not isinstance(self.cv, Integral) or self.cv < 2):
            reject(self, "cv", "an int of at least 2")
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float64, ensure_min_samples=2)
        check_range(X=X)
        X_val, y_val = check_validation_rows(self, X_val, y_val, y_numeric=False)
        weights = check_weights(X, sample_weight)
        y, y_val = self._encode_classes(y, y_val, weights)
        if y_val is None:
            warn(_NO_TRUSTED_ROWS)
        else:
            X, y, weights = stack_rows(X, X_val), np.concatenate([y, y_val]), np.append(weights, np.ones(len(y_val)))
        trusted = np.arange(len(y)) >= len(y) - (0 if y_val is None else len(y_val))
        scaling = Scaling.fit(X, weights, center=self.fit_intercept, divide=self.standardize)
        with one_thread_if_small(X):
            rows = NoisyRows(scaling.transform(X), y, weights, trusted, self.fit_intercept)
            coef = self._learn(rows._replace(folds=self._split(rows)))
        self.coef_, self.intercept_ = scaling.unscale(coef[:-1].T, coef[-1])
        return self

    def _split(self, rows: NoisyRows) -> list[tuple[Array, Array]]:
        """Return folds of the rows with positive weight; the other rows are held out in turn."""
        rng = check_random_state(self.random_state)
        if not isinstance(self.cv, Integral):
            pairs = split(self.cv, rows.X, rows.y, None, rng, classes=True)
        else:
            used, unused = np.flatnonzero(rows.weights > 0), np.flatnonzero(rows.weights == 0)
            pairs = split(self.cv, rows.X, rows.y[used], None, rng, classes=True)
            pairs = [(used[fit], np.append(used[out], unused[k :: len(pairs)])) for k, (fit, out) in enumerate(pairs)]
        if np.any(np.bincount(np.concatenate([out for _, out in pairs]), minlength=len(rows.y)) != 1):
            raise ValueError(f"`cv={self.cv!r}` must hold out each row once, trusted rows included, which come last.")
        return pairs

    def _learn(self, rows: NoisyRows) -> Array:
        """Set the attributes of weights and noise, and return coefficients, the intercept last."""
        found, matrix, posterior, _, self.history_ = self._choose_noise(rows)
        self.n_iter_ = len(self.history_) - 1
        noisy = np.flatnonzero(~rows.trusted)
        correct = posterior[noisy, rows.y[noisy]]
        others = np.where(np.arange(len(matrix)) == rows.y[noisy, None], 0.0, posterior[noisy]).sum(axis=1)
        self.suspicious_ = np.lexsort((correct, -others))  # by the smaller number, which is more exact if it is tiny
        self.sample_weights_, self.noise_matrix_, self.penalty_ = correct, matrix, found.penalty
        weights = rows.weights.copy()
        weights[noisy] *= correct
        evidence, start = np.eye(len(matrix))[rows.y], np.mean(found.coefs, axis=0)
        coef = rows._replace(weights=weights).fit(evidence, found.penalty, start, tol=1e-9, max_iter=1000)
        return coef[:, 1:] - coef[:, :1] if len(matrix) == 2 else coef

    def _choose_noise(self, rows: NoisyRows) -> NoiseEstimate:
        """Return models with a uniform noise matrix, unless a general one is better by the margin."""
        y, weights = rows.y, rows.weights
        plain = rows.decrease_penalty(np.eye(len(self.classes_))[y], float(weights.sum()))
        matrix = count_confident(plain.probabilities, y, weights * ~rows.trusted)
        # Of two starts, one is below the rate of correct labels if classes overlap, and one above it.
        agreement = float(np.average(plain.probabilities.argmax(axis=1) == y, weights=weights))
        starts = [uniform_noise(rate, len(matrix)) for rate in (np.trace(matrix) / len(matrix), (1 + agreement) / 2)]
        ends = [self._alternate(plain, start, rows, uniform=True) for start in starts]
        uniform = min(ends, key=lambda end: end.history[-1])
        general = self._alternate(plain, matrix, rows, uniform=False)
        gain = uniform.losses - general.losses
        mean = np.average(gain, weights=weights)
        error = np.sqrt(np.average((gain - mean) ** 2, weights=weights) / weights.sum())
        return general if mean > _MARGIN * error else uniform

    def _alternate(self, plain: CrossFit, matrix: Array, rows: NoisyRows, *, uniform: bool) -> NoiseEstimate:
        """Alternate between fits of the models and estimates of the noise matrix."""
        found, best, history = plain, None, [plain.loss / float(rows.weights.sum())]
        for _ in range(self.max_iter):
            found = rows.decrease_penalty(rows.evidence(matrix), found.penalty, found)
            weights = rows.weights * ~rows.trusted
            matrix = estimate_noise(found.probabilities, rows.y, matrix, weights, uniform=uniform)
            posterior, logs = compute_posterior(found.probabilities, rows.evidence(matrix))
            mean = -float(np.average(logs, weights=rows.weights))
            if best is not None and mean >= history[-1]:
                break
            history.append(mean)
            kind = "one rate of wrong labels" if uniform else "a rate for each pair of classes"
            self._print(f"{kind}, round {len(history) - 1}: {history[-1]:.4g} nats per row")
            best = NoiseEstimate(found, matrix, posterior, -logs, history)
            if len(history) > 2 and history[-2] - history[-1] < self.tol:
                break
        assert best is not None
        return best

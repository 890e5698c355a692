"""A classifier for labels of which some are wrong: each row gets the probability that its label is right.

Arrays of probabilities are (rows, classes); a noise matrix is P(given label | true class), (true, given).
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple, Self

import numpy as np
import scipy.sparse as sp
from scipy.optimize import minimize
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
    refuse,
)
from bilevel.estimators.folds import Scaling, split
from bilevel.estimators.threads import one_thread_if_small

_LIMITS = (1e-5, 100), (1e-9, 1000)  # tolerance and iterations of fits without a fold, and of the last one
_MARGIN = 0.5  # standard errors by which a noise matrix must be ahead of an even one
_NO_TRUSTED_ROWS = (
    "No trusted rows (`X_val`, `y_val`) are given, so that labels are compared with each other alone: a class that is "
    "mislabeled more often than not cannot be told."
)
_INTERCEPT = 1e-3  # its penalty: a class without rows in a fold keeps a finite one
_TINY = np.finfo(float).tiny
_PENALTY_RATIO = 10**0.5  # between penalties that are tried
_WEAKEST = 1e-6  # penalty for each row
_EM_STEPS = 30  # of expectation and maximization, for fixed probabilities of the classes


def count_confident(probabilities: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return a noise matrix from probabilities of rows that were not fitted to, which may be those of the given labels.

    As in confident learning, a row counts for the likeliest of the classes that are at least as probable as they are,
    on average, in the rows that have their label. Counts are scaled to those of the labels.
    """
    n_classes = probabilities.shape[1]
    given = np.bincount(labels, weights, n_classes)
    given[given == 0] = 1
    mean = np.bincount(labels, weights * probabilities[np.arange(len(labels)), labels], n_classes) / given
    reached = probabilities >= mean
    sure = reached.any(axis=1)
    counts = np.eye(n_classes)  # one row of each class is right, so that none is empty
    np.add.at(counts, (np.where(reached, probabilities, -1.0).argmax(axis=1)[sure], labels[sure]), weights[sure])
    counts *= given / counts.sum(axis=0)
    return counts / counts.sum(axis=1, keepdims=True)


def weigh(probabilities: np.ndarray, evidence: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return P(true class | row, label), and log P(label | row).

    The evidence is P(label of the row | true class), (rows, classes): columns of a noise matrix, or of the identity
    where a label is known to be right.
    """
    joint = probabilities * evidence
    total = np.maximum(joint.sum(axis=1), np.finfo(float).tiny)
    return joint / total[:, None], np.log(total)


def estimate(
    probabilities: np.ndarray, labels: np.ndarray, start: np.ndarray, weights: np.ndarray, *, even: bool = False
) -> np.ndarray:
    """Return the noise matrix that makes labels most probable, given those of the true classes.

    Where it is even, all classes are right at one rate, and wrong labels are any of the others. Else a class has as
    many rows more as there are classes, spread like the errors of all: few rows of a class would otherwise make up
    which labels it is mistaken for.
    """
    n_classes = len(start)
    for _ in range(_EM_STEPS):
        posterior, _ = weigh(probabilities, start[:, labels].T)
        counts = np.stack([np.bincount(labels, weights * part, n_classes) for part in posterior.T])
        shared = spread_evenly(np.trace(counts) / counts.sum(), n_classes)
        counts += n_classes * shared
        start = shared if even else counts / counts.sum(axis=1, keepdims=True)
    return start


def spread_evenly(right: float, n_classes: int) -> np.ndarray:
    """Return the noise matrix of labels that are right at this rate, and else any of the others."""
    matrix = np.full((n_classes, n_classes), (1 - right) / (n_classes - 1))
    np.fill_diagonal(matrix, right)
    return matrix


class Softmax:
    """Minimizes -sum weight_i log sum_t p_i(t) evidence_i(t) + penalty/2 ||coef||², with p the softmax of X coef.

    Evidence is that of `weigh`; rows of the identity make it the usual regression.

    Parameters
    ----------
    tol : stop where a step gains less than this part of the mean loss
    max_iter : most steps
    """

    def __init__(self, *, intercept: bool = True, tol: float = 1e-5, max_iter: int = 100) -> None:
        self.intercept, self.tol, self.max_iter = intercept, tol, max_iter

    def fit(
        self, X: Any, evidence: np.ndarray, weights: np.ndarray, penalty: float, start: np.ndarray | None = None
    ) -> np.ndarray:
        """Return coefficients, (features + 1, classes), those of the intercept last."""
        shape = X.shape[1] + 1, evidence.shape[1]
        ridge = np.full((shape[0], 1), penalty)
        ridge[-1] = _INTERCEPT

        def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
            coef = flat.reshape(shape)
            value, slope = self._loss(np.ascontiguousarray(self.score(X, coef).T), by_class, weights)
            gradient = np.vstack([X.T @ slope.T, self.intercept * slope.sum(axis=1)]) + ridge * coef
            return (value + np.sum(ridge * coef**2) / 2) / total, gradient.ravel() / total

        total, by_class = weights.sum(), np.ascontiguousarray(evidence.T)
        options = {"maxiter": self.max_iter, "ftol": self.tol, "gtol": self.tol}
        first = np.zeros(shape) if start is None else start
        return minimize(objective, first.ravel(), jac=True, method="L-BFGS-B", options=options).x.reshape(shape)

    def score(self, X: Any, coef: np.ndarray) -> np.ndarray:
        return X @ coef[:-1] + coef[-1]

    @staticmethod
    def _loss(scores: np.ndarray, evidence: np.ndarray, weights: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the summed loss and its derivative in the scores; classes come first, so that sums run along rows."""
        prior = np.exp(scores - scores.max(axis=0))
        joint = prior * evidence
        all_of_it, seen = prior.sum(axis=0), np.maximum(joint.sum(axis=0), _TINY)
        slope = prior * (weights / all_of_it) - joint * (weights / seen)
        return float(weights @ np.log(all_of_it / seen)), slope


class CrossFit(NamedTuple):
    """Models of all folds: penalty, coefficients, probabilities of held-out rows, their summed loss."""

    penalty: float
    coefs: list[np.ndarray]
    probabilities: np.ndarray
    loss: float


class CrossFitter:
    """Fits models without each fold, at penalties that the held-out rows choose."""

    def __init__(
        self, model: Softmax, X: Any, folds: Sequence[tuple[np.ndarray, np.ndarray]], weights: np.ndarray
    ) -> None:
        self.model, self.X, self.folds, self.weights = model, X, folds, weights

    def fit(self, evidence: np.ndarray, penalty: float, start: CrossFit | None = None) -> CrossFit:
        """Fit at one penalty."""
        coefs, probabilities = [], np.empty(evidence.shape)
        for k, (train, test) in enumerate(self.folds):
            near = None if start is None else start.coefs[k]
            coefs.append(self.model.fit(self.X[train], evidence[train], self.weights[train], penalty, near))
            probabilities[test] = softmax(self.model.score(self.X[test], coefs[-1]), axis=1)
        return CrossFit(penalty, coefs, probabilities, -float(self.weights @ weigh(probabilities, evidence)[1]))

    def weaken(self, evidence: np.ndarray, penalty: float, start: CrossFit | None = None) -> CrossFit:
        """Fit at this penalty, and at weaker ones as long as the loss falls."""
        best = self.fit(evidence, penalty, start)
        while best.penalty > _WEAKEST * self.weights.sum():
            found = self.fit(evidence, best.penalty / _PENALTY_RATIO, best)
            if not found.loss < best.loss:
                break
            best = found
        return best


class Labels(NamedTuple):
    """Numbers of the given classes, weights of rows, and whether a label is right for sure."""

    y: np.ndarray
    weights: np.ndarray
    trusted: np.ndarray

    def evidence(self, matrix: np.ndarray) -> np.ndarray:
        """Return P(label of the row | true class), (rows, classes)."""
        return np.where(self.trusted[:, None], np.eye(len(matrix))[self.y], matrix[:, self.y].T)


class Cleaned(NamedTuple):
    """Models of folds, the noise matrix, P(true class | row, label), losses of labels, and their means by round."""

    fits: CrossFit
    matrix: np.ndarray
    posterior: np.ndarray
    losses: np.ndarray
    history: list[float]


@dataclass(eq=False, repr=False, kw_only=True)
class DataCleaningClassifier(LinearClassifier):
    """Softmax regression on rows weighted by the probability that their label is right.

    Labels are taken for draws from a row of a noise matrix, P(given label | true class). Models of the true class are
    fitted without each fold in turn, by the likelihood of the given labels; the matrix is estimated on held-out rows,
    where confident learning starts it; both in turn, as long as held-out labels become more probable. A matrix with one
    rate of wrong labels for all classes is kept unless that of any form is clearly ahead. The weight of a row is the
    probability, by the model without its fold, that its label is right. The last fit is on weighted rows.

    Parameters
    ----------
    cv : number of folds (stratified and shuffled), or a splitter of scikit-learn or pairs of numbers of rows, which
        must hold out each row once
    fit_intercept : whether to fit an intercept
    standardize : whether features are centered and divided by their deviation for the fit
    max_iter : most rounds of fits and noise matrix
    tol : stop where a round gains less than this, in nats per row
    random_state : of the folds
    verbose : print what is done, line by line, where this is not 0

    Attributes
    ----------
    sample_weights_ : (samples,), the probability that the label of each row of X is right
    suspicious_ : numbers of the rows of X, from the least probable label to the most
    noise_matrix_ : (classes, classes), P(given label | true class), a row for each true class
    penalty_ : of the squared coefficients, in sum weight_i log-loss_i + penalty/2 ||coef||², chosen over folds
    history_ : log-loss of the given labels of held-out rows, in nats per row, at first and after each round
    coef_, intercept_, classes_ : as in `BilevelLogisticRegression`
    n_iter_, n_features_in_, feature_names_in_ : as there

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> from sklearn.utils import shuffle
    >>> from bilevel.estimators import DataCleaningClassifier
    >>> X, y = shuffle(*load_digits(return_X_y=True), random_state=0)
    >>> y[:100] = (y[:100] + 1) % 10
    >>> model = DataCleaningClassifier(random_state=0).fit(X[:1200], y[:1200], X[1200:], y[1200:])
    >>> sum(model.suspicious_[:100] < 100) > 90  # of 1200 rows the first 100 are wrong
    np.True_
    """

    cv: Any = 5
    max_iter: int = 20
    tol: float = 1e-3

    @all_or_nothing
    def fit(self, X: Any, y: Any, X_val: Any = None, y_val: Any = None, *, sample_weight: Any = None) -> Self:
        """Weigh the rows, fit the model to them, and return the estimator.

        Parameters
        ----------
        X : dense or sparse, (samples, features)
        y : one label per row
        X_val, y_val : rows with labels to trust; they are fitted to as well, with weight 1
        sample_weight : of the rows of X, in the fits, in the loss of held-out rows and in the noise matrix; 2 means the
            row twice, in the same fold, and 0 that the row is only given a probability
        """
        check_parameters(self, X=X, y=y)
        if isinstance(self.cv, Real) and (not isinstance(self.cv, Integral) or self.cv < 2):
            refuse(self, "cv", "an int of at least 2")
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float64, ensure_min_samples=2)
        check_range(X=X)
        X_val, y_val = check_validation_rows(self, X_val, y_val, y_numeric=False)
        weights = check_weights(X, sample_weight)
        y, y_val = self._encode_classes(y, y_val, weights)
        if y_val is None:
            warnings.warn(_NO_TRUSTED_ROWS, UserWarning, stacklevel=3)
        else:
            X, y, weights = _stack(X, X_val), np.concatenate([y, y_val]), np.append(weights, np.ones(len(y_val)))
        trusted = np.arange(len(y)) >= len(y) - (0 if y_val is None else len(y_val))
        scaling = Scaling.fit(X, weights, center=self.fit_intercept, divide=self.standardize)
        with one_thread_if_small(X):
            coef = self._clean(scaling.transform(X), Labels(y, weights, trusted))
        self.coef_, self.intercept_ = scaling.unscale(coef[:-1].T, coef[-1])
        return self

    def _clean(self, X: Any, labels: Labels) -> np.ndarray:
        """Note weights and noise as attributes, and return coefficients, the intercept last."""
        rough, exact = (Softmax(intercept=self.fit_intercept, tol=tol, max_iter=most) for tol, most in _LIMITS)
        fitter = CrossFitter(rough, X, self._split(X, labels), labels.weights)
        found, matrix, posterior, _, self.history_ = self._choose(fitter, labels)
        self.n_iter_ = len(self.history_) - 1
        rows = np.flatnonzero(~labels.trusted)
        right = posterior[rows, labels.y[rows]]
        others = np.where(np.arange(len(matrix)) == labels.y[rows, None], 0.0, posterior[rows]).sum(axis=1)
        self.suspicious_ = np.lexsort((right, -others))  # what is almost sure differs in the smaller number
        self.sample_weights_, self.noise_matrix_, self.penalty_ = right, matrix, found.penalty
        weights = labels.weights.copy()
        weights[rows] *= right
        coef = exact.fit(X, np.eye(len(matrix))[labels.y], weights, found.penalty, np.mean(found.coefs, axis=0))
        return coef[:, 1:] - coef[:, :1] if len(matrix) == 2 else coef

    def _split(self, X: Any, labels: Labels) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the folds of rows with weight; rows without are held out with them in turn."""
        rng = check_random_state(self.random_state)
        if not isinstance(self.cv, Integral):
            pairs = split(self.cv, X, labels.y, None, rng, classes=True)
        else:
            used, unused = np.flatnonzero(labels.weights > 0), np.flatnonzero(labels.weights == 0)
            pairs = split(self.cv, X, labels.y[used], None, rng, classes=True)
            pairs = [(used[fit], np.append(used[out], unused[k :: len(pairs)])) for k, (fit, out) in enumerate(pairs)]
        if np.any(np.bincount(np.concatenate([out for _, out in pairs]), minlength=len(labels.y)) != 1):
            raise ValueError(f"`cv={self.cv!r}` must hold out each row once, trusted rows included, which come last.")
        return pairs

    def _learned(self) -> tuple[dict[str, str], np.ndarray]:
        wrong = float(np.mean(1 - self.sample_weights_))
        rows = {"labels that are wrong": f"{100 * wrong:.2g} % expected, of {len(self.sample_weights_)} rows"}
        return rows | {"rounds": str(self.n_iter_)}, np.asarray(self.history_)

    def _choose(self, fitter: CrossFitter, labels: Labels) -> Cleaned:
        """Return models with an even noise matrix, unless any other is ahead by more than the margin."""
        y, weights = labels.y, labels.weights
        plain = fitter.weaken(np.eye(len(self.classes_))[y], float(weights.sum()))
        matrix = count_confident(plain.probabilities, y, weights * ~labels.trusted)
        # One start is below the rate of right labels, where classes overlap, and one above it: the better end is kept.
        agreement = float(np.average(plain.probabilities.argmax(axis=1) == y, weights=weights))
        starts = [spread_evenly(right, len(matrix)) for right in (np.trace(matrix) / len(matrix), (1 + agreement) / 2)]
        ends = [self._alternate(fitter, plain, start, labels, even=True) for start in starts]
        even = min(ends, key=lambda end: end.history[-1])
        full = self._alternate(fitter, plain, matrix, labels, even=False)
        gain = even.losses - full.losses
        mean = np.average(gain, weights=weights)
        error = np.sqrt(np.average((gain - mean) ** 2, weights=weights) / weights.sum())
        return full if mean > _MARGIN * error else even

    def _alternate(
        self, fitter: CrossFitter, plain: CrossFit, matrix: np.ndarray, labels: Labels, *, even: bool
    ) -> Cleaned:
        """Fit models and estimate the noise matrix in turn."""
        found, best, history = plain, None, [plain.loss / float(labels.weights.sum())]
        for _ in range(self.max_iter):
            found = fitter.weaken(labels.evidence(matrix), found.penalty, found)
            matrix = estimate(found.probabilities, labels.y, matrix, labels.weights * ~labels.trusted, even=even)
            posterior, logs = weigh(found.probabilities, labels.evidence(matrix))
            mean = -float(np.average(logs, weights=labels.weights))
            if best is not None and mean >= history[-1]:
                break
            history.append(mean)
            kind = "one rate of wrong labels" if even else "a rate for each pair of classes"
            self._say(f"{kind}, round {len(history) - 1}: {history[-1]:.4g} nats per row")
            best = Cleaned(found, matrix, posterior, -logs, history)
            if len(history) > 2 and history[-2] - history[-1] < self.tol:
                break
        assert best is not None
        return best


def _stack(X: Any, X_val: Any) -> Any:
    if sp.issparse(X) or sp.issparse(X_val):
        return sp.vstack([sp.csr_array(X), sp.csr_array(X_val)], format="csr")
    return np.vstack([X, X_val])

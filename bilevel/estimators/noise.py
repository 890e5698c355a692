"""Wrong labels: how often each class is given another's label, and how probable it is that a label is right.

Arrays of probabilities are (rows, classes); a noise matrix is P(given label | true class), (true, given).
"""

import numpy as np

_STEPS = 30  # of expectation and maximization, for fixed probabilities of the classes


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
    for _ in range(_STEPS):
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

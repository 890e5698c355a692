"""A classifier that learns a weight for each training row."""

from dataclasses import dataclass, field

import numpy as np
from scipy.special import expit

from bilevel.estimators.base import DTYPE, LinearClassifier, solve_all
from bilevel.estimators.rows import Split
from bilevel.problems import data_cleaning


@dataclass(eq=False, repr=False, kw_only=True)
class DataCleaningClassifier(LinearClassifier):
    """Softmax regression with a weight in (0, 1) for each training row, learned on validation rows that are trusted.

    The weights minimize the log-loss on validation rows of the model that minimizes, on training rows,
    mean weight_i log-loss_i + regularization ||coef||². Rows with wrong labels end with small weights.

    Parameters
    ----------
    regularization : above 0
    fit_intercept : whether to fit an intercept, which is penalized by a hundredth of the regularization
    standardize : whether features are centered and divided by their deviation for the fit
    validation_fraction : of the rows of X, held out at random with all classes, where `fit` gets no `X_val`; such rows
        may be wrong themselves: give rows that you trust, if you have any
    solver : a solver of `bilevel`; None means SRBA(step_size="auto"), which needs no tuning
    tol : stop where the loss on validation rows changes by less than this part of it, per unit of a logit of a weight
    max_iter, random_state, verbose : as in `BilevelLogisticRegression`

    Attributes
    ----------
    sample_weights_ : (samples,), the weight of each row of X; 1 for rows that were held out
    suspicious_ : numbers of the rows of X that have a learned weight, from the smallest weight to the largest
    held_out_ : numbers of the rows of X that were held out for validation
    coef_, intercept_, classes_ : as in `BilevelLogisticRegression`
    history_, n_calls_, n_iter_, status_, n_features_in_, feature_names_in_ : as there

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> from sklearn.utils import shuffle
    >>> from bilevel.estimators import DataCleaningClassifier
    >>> X, y = shuffle(*load_digits(return_X_y=True), random_state=0)
    >>> y[:100] = (y[:100] + 1) % 10
    >>> model = DataCleaningClassifier(random_state=0).fit(X[:1200], y[:1200], X[1200:], y[1200:])
    >>> sum(model.suspicious_[:100] < 100) > 75  # of 1200 rows the first 100 are wrong
    np.True_
    """

    regularization: float = field(default=0.01, kw_only=False)

    _constant = 10.0  # so that the intercept is penalized by a hundredth of what a coefficient is
    _exact_if_small = False

    def _learn(self, rows: Split, seed: int) -> np.ndarray:
        rows = rows.map_columns(self._add_constant)
        problem = data_cleaning(*rows[:4], regularization=self.regularization, seed=seed, dtype=DTYPE)
        _, logits = self._solve(problem, [problem.start.outer_var], seed)
        self.sample_weights_ = np.ones(len(rows.fitted_on) + len(rows.held_out))
        self.sample_weights_[rows.fitted_on] = expit(logits)
        self.suspicious_ = rows.fitted_on[np.argsort(logits, kind="stable")]
        self.held_out_ = rows.held_out
        inner_var = solve_all(problem, [logits])[0][0].inner_var
        return inner_var[:, 1:] - inner_var[:, :1] if len(self.classes_) == 2 else inner_var

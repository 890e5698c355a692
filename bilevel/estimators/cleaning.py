"""A classifier that learns a weight for each training row."""

from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Self

import numpy as np
from scipy.special import expit

from bilevel.estimators.base import DTYPE, LinearClassifier, check_interval, choose_solver, draw_seed, find_start
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
    max_iter : most steps of the solver
    tol : stop where the loss on validation rows changes by less than this part of it, per unit of a logit of a weight
    random_state : of the split and of the solver's batches
    verbose : 1 shows a bar

    Attributes
    ----------
    coef_ : (1, features), or (classes, features)
    intercept_ : (1,), or (classes,)
    sample_weights_ : (samples,), the weight of each row of X; 1 for rows that were held out
    suspicious_ : numbers of the rows of X that have a learned weight, from the smallest weight to the largest
    held_out_ : numbers of the rows of X that were held out for validation
    classes_ : labels, sorted
    history_, n_calls_, n_iter_, status_, n_features_in_, feature_names_in_ : as in `BilevelLogisticRegression`

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

    def fit(self, X: Any, y: Any, X_val: Any = None, y_val: Any = None) -> Self:
        """Learn the weights of the rows and the model that they make.

        Parameters
        ----------
        X : dense or sparse, (samples, features)
        y : one label per row, some of them wrong
        X_val, y_val : rows with labels to trust; by default `validation_fraction` of the rows of X is held out

        Returns
        -------
        self
        """
        self._check_parameters()
        check_interval(self, "regularization", Real, 0.0, left="(")
        seed = draw_seed(self.random_state)
        rows, scaling = self._prepare(X, y, X_val, y_val, seed)
        rows = rows.map_columns(self._add_constant)
        problem = data_cleaning(*rows.levels, regularization=self.regularization, seed=seed, dtype=DTYPE)
        solver = choose_solver(problem, exact_if_small=False)
        logits = self._solve(find_start(problem, [problem.start.outer_var]), seed, solver)
        self.sample_weights_ = np.ones(len(rows.fitted_on) + len(rows.held_out))
        self.sample_weights_[rows.fitted_on] = expit(logits)
        self.suspicious_ = rows.fitted_on[np.argsort(logits, kind="stable")]
        self.held_out_ = rows.held_out
        assert problem.exact_solver is not None
        inner_var = problem.exact_solver(logits, None).inner_var
        if len(self.classes_) == 2:
            inner_var = inner_var[:, 1:] - inner_var[:, :1]
        self._set_model(*self._part(inner_var), scaling)
        self._report_status()
        return self

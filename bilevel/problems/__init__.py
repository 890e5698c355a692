"""Problems: oracles, a start, and what is known of them in closed form. A model family is one file."""

from collections.abc import Callable

from bilevel.problems.base import BilevelProblem
from bilevel.problems.cross_validation import cross_validation
from bilevel.problems.data_cleaning import data_cleaning
from bilevel.problems.exact import ExactSolution
from bilevel.problems.linear import logistic_selection, ridge_selection
from bilevel.problems.quadratic import quadratic
from bilevel.problems.real_data import (
    breast_cancer,
    breast_cancer_folds,
    corrupted_labels,
    covtype,
    covtype_folds,
    digits_cleaning,
    ijcnn1,
    mnist_cleaning,
)
from bilevel.problems.softmax import softmax_selection
from bilevel.problems.worst_case import worst_case

# Those that need no data to be handed over.
PROBLEMS: dict[str, Callable[..., BilevelProblem]] = {
    builder.__name__: builder
    for builder in (
        *(quadratic, ijcnn1, mnist_cleaning, covtype, covtype_folds, breast_cancer, breast_cancer_folds),
        *(digits_cleaning, worst_case),
    )
}

__all__ = ["PROBLEMS", "BilevelProblem", "ExactSolution", "corrupted_labels"]
__all__ += ["cross_validation", "data_cleaning", "logistic_selection", "quadratic", "ridge_selection"]
__all__ += ["softmax_selection", "worst_case"]
__all__ += [
    "breast_cancer",
    "breast_cancer_folds",
    "covtype",
    "covtype_folds",
    "digits_cleaning",
    "ijcnn1",
    "mnist_cleaning",
]

"""Problems: oracles, a start, and what is known of them in closed form. A model family is one file."""

from collections.abc import Callable

from bilevel.problems.base import BilevelProblem
from bilevel.problems.data_cleaning import data_cleaning
from bilevel.problems.exact import ExactSolution
from bilevel.problems.logistic import logistic_selection
from bilevel.problems.quadratic import quadratic
from bilevel.problems.real_data import breast_cancer, corrupted_labels, covtype, digits_cleaning, ijcnn1, mnist_cleaning
from bilevel.problems.ridge import ridge_selection
from bilevel.problems.softmax_selection import softmax_selection
from bilevel.problems.worst_case import worst_case

# Those that need no data to be handed over.
PROBLEMS: dict[str, Callable[..., BilevelProblem]] = {
    "quadratic": quadratic,
    "ijcnn1": ijcnn1,
    "mnist_cleaning": mnist_cleaning,
    "covtype": covtype,
    "breast_cancer": breast_cancer,
    "digits_cleaning": digits_cleaning,
    "worst_case": worst_case,
}

__all__ = [
    "PROBLEMS",
    "BilevelProblem",
    "ExactSolution",
    "breast_cancer",
    "corrupted_labels",
    "covtype",
    "data_cleaning",
    "digits_cleaning",
    "ijcnn1",
    "logistic_selection",
    "mnist_cleaning",
    "quadratic",
    "ridge_selection",
    "softmax_selection",
    "worst_case",
]

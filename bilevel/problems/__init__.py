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
from bilevel.problems.valleys import valleys
from bilevel.problems.worst_case import worst_case

# Those that need no data to be handed over.
PROBLEMS: dict[str, Callable[..., BilevelProblem]] = {
    builder.__name__: builder
    for builder in (quadratic, ijcnn1, mnist_cleaning, covtype, breast_cancer, digits_cleaning, worst_case, valleys)
}

__all__ = ["PROBLEMS", "BilevelProblem", "ExactSolution", "corrupted_labels"]
__all__ += ["data_cleaning", "logistic_selection", "quadratic", "ridge_selection", "softmax_selection", "worst_case"]
__all__ += ["breast_cancer", "covtype", "digits_cleaning", "ijcnn1", "mnist_cleaning", "valleys"]

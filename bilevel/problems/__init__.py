"""Problems: oracles, a start, and what is known of them in closed form. A model family is one file."""

from collections.abc import Callable

from bilevel.problems.base import BilevelProblem
from bilevel.problems.data_cleaning import data_cleaning
from bilevel.problems.distillation import distillation
from bilevel.problems.exact import ExactSolution
from bilevel.problems.quadratic import quadratic
from bilevel.problems.real_data import (
    breast_cancer,
    breast_cancer_folds,
    corrupted_labels,
    covtype,
    digits_cleaning,
    ijcnn1,
    mnist_cleaning,
)
from bilevel.problems.selection import cross_validation, penalty_selection

__all__ = ["PROBLEMS", "BilevelProblem", "ExactSolution", "corrupted_labels"]
__all__ += ["cross_validation", "data_cleaning", "penalty_selection"]
__all__ += ["breast_cancer", "breast_cancer_folds", "covtype", "digits_cleaning", "distillation", "ijcnn1"]
__all__ += ["mnist_cleaning", "quadratic"]

_READY = quadratic, ijcnn1, mnist_cleaning, covtype, breast_cancer, breast_cancer_folds, digits_cleaning, distillation

# Problems that need no data from the caller.
PROBLEMS: dict[str, Callable[..., BilevelProblem]] = {builder.__name__: builder for builder in _READY}

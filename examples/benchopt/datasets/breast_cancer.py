from typing import ClassVar

from benchopt import BaseDataset

import bilevel


class Dataset(BaseDataset):
    """One penalty per feature for logistic regression on scikit-learn's breast-cancer set."""

    name = "breast_cancer"
    parameters: ClassVar = {"dtype": ["float32"]}

    def get_data(self):
        return {"problem": bilevel.problems.breast_cancer(dtype=self.dtype)}

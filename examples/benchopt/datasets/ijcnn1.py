from typing import ClassVar

from benchopt import BaseDataset

import bilevel


class Dataset(BaseDataset):
    """One penalty per feature for logistic regression on IJCNN1; never downloaded from here."""

    name = "ijcnn1"
    parameters: ClassVar = {"dtype": ["float32"]}

    def get_data(self):
        found = bilevel.datasets.locate("ijcnn1") is not None
        return {"problem": bilevel.problems.ijcnn1(dtype=self.dtype) if found else None}

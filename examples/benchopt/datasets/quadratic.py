from typing import ClassVar

from benchopt import BaseDataset

import bilevel


class Dataset(BaseDataset):
    """Random quadratics with a known solution."""

    name = "quadratic"
    parameters: ClassVar = {
        "n_inner": [2048],
        "n_outer": [1024],
        "dim_inner": [20],
        "dim_outer": [10],
        "dtype": ["float32"],
    }

    def get_data(self):
        sizes = self.n_inner, self.n_outer, self.dim_inner, self.dim_outer
        return {"problem": bilevel.problems.quadratic(*sizes, common_linear=0.5, dtype=self.dtype)}

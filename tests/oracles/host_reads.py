"""A run whose reader fails or blocks, in a process of its own.

python -m tests.oracles.host_reads fail|block READ
"""

import sys
import time

import numpy as np

import bilevel
from tests import cases


class Rows:
    """A function of row numbers that fails or blocks when it is called for the n-th time from `arm` on."""

    def __init__(self, rows, how="fail", at=None):
        self.rows, self.how, self.at, self.calls = rows, how, at, 0

    def __call__(self, numbers):
        self.calls += 1
        if self.at is not None and self.calls >= self.at:
            if self.how == "once":
                self.at = None
            if self.how == "block":
                print("blocked", flush=True)
                time.sleep(1000)
            raise TimeoutError(110, "the storage does not answer")
        return self.rows[numbers]

    def arm(self, at):
        self.calls, self.at = 0, at


def problem(rows, n=None):
    """Logistic selection whose inner features come from a function."""
    X, y, X_val, y_val = cases.logistic_data() if n is None else cases.logistic_data(n, 31)
    rows.rows = X
    return bilevel.problems.penalty_selection(bilevel.HostData(rows, len(X)), y, X_val, y_val, dtype="float64")


def main(how, at):
    rows = Rows(None, how)
    chosen = problem(rows, 2000)
    rows.arm(int(at))
    try:
        bilevel.run(chosen, bilevel.SRBA(0.05, 1.0, 8, period=10), max_steps=10**6, eval_every=20, exact=False)
    except bilevel.StepError as error:
        print(error, np.isfinite(error.result.point.inner_var).all())
    except KeyboardInterrupt:
        print("KeyboardInterrupt")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Seconds to compile each solver on logistic selection with 22 features, everything a run needs together.

python benchmarks/compile_time.py
"""

import numpy as np

import bilevel


def main():
    rng = np.random.default_rng(0)
    X, X_val = rng.standard_normal((5000, 22)), rng.standard_normal((4000, 22))
    data = X, np.sign(X[:, 0] + 0.3), X_val, np.sign(X_val[:, 0] + 0.3)
    for name, cls in bilevel.SOLVERS.items():
        result = bilevel.run(bilevel.problems.logistic_selection(*data), cls(0.01, 10.0), max_steps=1)
        print(f"{name:<8} {result.compile_seconds:5.2f} s", flush=True)


if __name__ == "__main__":
    main()

"""The setting without tuning on networks, beside steps set by hand: loss on validation rows, and what a run says.

    python benchmarks/auto_networks.py [--steps 3000]

A network of 9010 parameters on the digits of scikit-learn with a weight decay per array, and that of
`examples/neural_cleaning.py` with a weight per row, of which 40 % have a redrawn label.
"""

import argparse
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import bilevel

HIDDEN, FIRST = 120, -5.0


def decays():
    """A decay per array of a network with one hidden layer."""
    data, rng = bilevel.datasets.load("digits"), np.random.default_rng(0)
    order = rng.permutation(len(data.X_train))
    rows, labels = data.X_train[order].reshape(-1, 64) / 16, data.y_train[order].astype(np.int32)
    first, last = rng.normal(size=(64, HIDDEN)) / 8, rng.normal(size=(HIDDEN, 10)) / HIDDEN**0.5
    start = {"first": first, "bias": np.zeros(HIDDEN), "last": last, "last bias": np.zeros(10)}

    def outer_loss(weights, log_decay, sample):
        hidden = jnp.tanh(sample[0] @ weights["first"] + weights["bias"])
        scores = hidden @ weights["last"] + weights["last bias"]
        return jax.nn.logsumexp(scores) - scores[sample[1]]

    def inner_loss(weights, log_decay, sample):
        decay = sum(jnp.exp(log_decay[name]) * jnp.sum(weights[name] ** 2) for name in weights) / 2
        return outer_loss(weights, log_decay, sample) + decay

    train, validation = ((rows[part], labels[part]) for part in (slice(1000), slice(1000, 1400)))
    outer_var = {name: np.array(FIRST) for name in start}
    return bilevel.BilevelProblem.from_losses(
        inner_loss, outer_loss, train, validation, start, outer_var, dtype="float32", name="weight decays"
    )


def row_weights():
    """A weight per row of the example."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    from neural_cleaning import build

    return build(0.4)


def describe(problem, solver, steps):
    """The loss on validation rows at the end, and whether the run warned."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        result = bilevel.run(problem, solver, max_steps=steps, eval_every=steps)
    said = "; ".join(str(one.message).partition(".")[0] for one in told) or "nothing"
    return f"{result.history['outer_value'][-1]:.3f} | {said}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    steps = parser.parse_args().steps
    print("| x | solver | validation loss | it says |\n| --- | --- | --- | --- |")
    for problem, ratios in ((decays(), (0.1, 1.0)), (row_weights(), (2e-4, 2e-3))):
        settings = [(step, ratio) for step in (0.1, 0.3) for ratio in ratios]
        solvers = {'SRBA("auto")': bilevel.SRBA("auto", batch_size=32)}
        solvers["the same, diagonal"] = bilevel.SRBA("auto", batch_size=32, preconditioner="diagonal")
        solvers |= {f"SRBA({step:g}, {ratio:g})": bilevel.SRBA(step, ratio, 32) for step, ratio in settings}
        for name, solver in solvers.items():
            print(f"| {problem.name} | `{name}` | {describe(problem, solver, steps)} |", flush=True)


if __name__ == "__main__":
    main()

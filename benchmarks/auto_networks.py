"""The setting without tuning on networks, beside steps set by hand: loss on validation rows, and what a run says.

    python benchmarks/auto_networks.py [--steps 3000]

A network of 9010 parameters on the digits of scikit-learn with a weight decay per array; that of
`examples/neural_cleaning.py` with a weight per row, of which 40 % have a redrawn label; and those of
`examples/label_noise.py --quick` and `examples/weight_decay.py`, beside the settings that these examples have.
"""

import argparse
import importlib
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import bilevel

HIDDEN, FIRST = 120, -5.0
METRICS = {"": {}, ', preconditioner="low_rank"': {"preconditioner": "low_rank"}}


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


def example(name):
    """The module of an example."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    return importlib.import_module(name)


def by_hand(ratios):
    """Four pairs of step and ratio."""
    settings = [(step, ratio) for step in (0.1, 0.3) for ratio in ratios]
    return {f"SRBA({step:g}, {ratio:g})": bilevel.SRBA(step, ratio, 32) for step, ratio in settings}


def list_problems(steps):
    """Each problem with its batch and other settings than "auto"."""
    yield decays(), 32, by_hand((0.1, 1.0))
    yield example("neural_cleaning").build(0.4), 32, by_hand((2e-4, 2e-3))
    noise = example("label_noise")
    problem = noise.build(noise.load("digits", 1000, 250, 0.5))
    yield problem, 64, {"SOBA of the example": noise.solver_of(problem.start.outer_var, steps, 100, 64)}
    decay = example("weight_decay")
    problem = decay.build(decay.digits(400))
    yield problem, decay.BATCH, {"SOBA of the example": decay.solver_of(steps)}


def describe(problem, solver, steps):
    """The loss on validation rows at the end, the test error, and whether the run warned."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        result = bilevel.run(problem, solver, max_steps=steps, eval_every=steps)
    said = "; ".join(str(one.message).partition(".")[0] for one in told) or "nothing"
    error = f"{result.history['test_error'][-1]:.3f}" if "test_error" in result.history else "–"
    return f"{result.history['outer_value'][-1]:.3f} | {error} | {said}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    steps = parser.parse_args().steps
    print("| problem | solver | validation loss | test error | it says |\n| --- | --- | --- | --- | --- |")
    for problem, batch, others in list_problems(steps):
        auto = {f"AutoSRBA({more})": kind for more, kind in METRICS.items()}
        solvers = {name: bilevel.AutoSRBA(batch_size=batch, **kind) for name, kind in auto.items()} | others
        for name, solver in solvers.items():
            print(f"| {problem.name} | `{name}` | {describe(problem, solver, steps)} |", flush=True)


if __name__ == "__main__":
    main()

"""Weight decay of a Flax network, one per array of its parameters, learned on validation rows.

    python examples/flax_weight_decay.py [--rows 300] [--noise 0.3] [--steps 3000]

The digits of scikit-learn, few of them to train on and some with wrong labels, so that a network without weight decay
learns them by heart. The inner problem fits the network with weight decay; the outer problem chooses the logarithms of
the decays, one for each kernel and bias, for a low loss on clean validation rows. Variables are pytrees: Flax's own
parameters inside, a tree of numbers like it outside.

A grid over one decay for all arrays has a fit for each of its points, and one over four would have too many. Decays are
learned in one run, which is not tuned. The inner loss is not convex, so where a run ends depends on where it begins;
three starts are shown. They reach the validation loss of the grid's best or thereabouts, which is what they minimize; a
lower one need not be a lower test error.
"""

import argparse
from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import bilevel

N_VAL = 400
NO_DECAY = 1e-8
GRID = (1e-3, 3e-3, 1e-2, 2e-2, 3e-2)
STARTS = (3e-3, 1e-2, 3e-2)


class Network(nn.Module):
    """Scores of the ten digits."""

    @nn.compact
    def __call__(self, image):
        hidden = nn.tanh(nn.Dense(64, name="hidden")(image))
        return nn.Dense(10, name="scores")(hidden)


def digits(n_train, noise, seed=0):
    """Training rows with noisy labels, clean validation rows, test rows."""
    data = bilevel.datasets.load("digits")
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(data.X_train))
    images, labels = data.X_train[order].reshape(-1, 64) / 16.0, data.y_train[order].astype(np.int32)
    train, val, test = np.split(np.arange(len(order)), [n_train, n_train + N_VAL])
    noisy = bilevel.problems.corrupted_labels(labels[train], 10, noise, rng)
    return (images[train], noisy), (images[val], labels[val]), (images[test], labels[test])


def build(n_train, noise):
    """The problem, with the metric to follow."""
    train, validation, (X_test, y_test) = digits(n_train, noise)
    network = Network()
    weights = network.init(jax.random.key(0), jnp.zeros(64, np.float32))["params"]

    def entropy(weights, image, label):
        scores = network.apply({"params": weights}, image)
        return jax.nn.logsumexp(scores) - scores[label]

    def inner_loss(weights, log_decay, sample):
        decays = jax.tree.map(lambda leaf, log: jnp.exp(log) * jnp.sum(leaf**2) / 2, weights, log_decay)
        return entropy(weights, *sample) + sum(jax.tree.leaves(decays))

    def outer_loss(weights, log_decay, sample):
        return entropy(weights, *sample)

    @jax.jit
    def test_error(point):
        scores = network.apply({"params": point.inner_var}, X_test.astype(np.float32))
        return jnp.mean(jnp.argmax(scores, axis=1) != y_test)

    log_decay = jax.tree.map(lambda leaf: np.log(NO_DECAY), weights)
    metrics = {"test_error": test_error}
    return bilevel.BilevelProblem.from_losses(
        inner_loss,
        outer_loss,
        train,
        validation,
        weights,
        log_decay,
        metrics=metrics,
        dtype="float32",
        name="weight decay",
    )


def run(problem, decay, bounds, steps):
    """Begin at one decay for all arrays, and keep each in bounds."""
    outer_var = jax.tree.map(lambda leaf: np.full_like(leaf, np.log(decay)), problem.start.outer_var)
    problem = replace(problem, start=problem.start._replace(outer_var=outer_var))
    solver = bilevel.SRBA(step_size="auto", batch_size=32, outer_bounds=tuple(np.log(bounds)))
    return bilevel.run(problem, solver, max_steps=steps, eval_every=steps)


def fixed(problem, decay, steps):
    """Bounds that meet hold the decay where it is: a plain fit."""
    return run(problem, decay, (decay, decay), steps)


def report(name, result):
    loss, error = (result.history[column][-1] for column in ("outer_value", "test_error"))
    print(f"{name:18} validation loss {loss:.3f}   test error {error:.3f}")


def described(log_decay):
    arrays = jax.tree_util.tree_leaves_with_path(log_decay)
    return "  ".join(f"{jax.tree_util.keystr(path, simple=True, separator=' ')} {np.exp(x):.0e}" for path, x in arrays)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=300, help="training rows")
    parser.add_argument("--noise", type=float, default=0.3, help="probability that a training label is redrawn")
    parser.add_argument("--steps", type=int, default=3000, help="steps of each run")
    arguments = parser.parse_args()
    problem, steps = build(arguments.rows, arguments.noise), arguments.steps
    report("no decay", fixed(problem, NO_DECAY, steps))
    fits = {decay: fixed(problem, decay, steps) for decay in GRID}
    best = min(fits, key=lambda decay: fits[decay].history["outer_value"][-1])
    report(f"best of {len(GRID)}: {best:g}", fits[best])
    for decay in STARTS:
        learned = run(problem, decay, (NO_DECAY, 1.0), steps)
        report(f"learned from {decay:g}", learned)
        print("    " + described(learned.point.outer_var))


if __name__ == "__main__":
    main()

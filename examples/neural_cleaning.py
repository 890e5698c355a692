"""Find wrong training labels with a small neural network at the inner level.

    python examples/neural_cleaning.py [--corruption 0.4] [--steps 8000]

The data are the digits of scikit-learn with some of the training labels redrawn. The inner problem fits a network to
weighted training rows; the outer problem chooses the weights, one per row, for a low loss on clean validation rows.
Variables are pytrees: the parameters of the network inside, {"logit": one number per row} outside. The inner loss is
not convex, so there is no exact solution; the results are the test error and the separation of clean and corrupted rows
by the weights.
"""

import argparse
from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from sklearn.metrics import roc_auc_score

import bilevel

WEIGHT_DECAY = 1e-3
N_TRAIN, N_VAL = 1000, 400


def digits(corruption, seed=0):
    """Training rows with noisy labels, clean validation rows, test rows, and which labels are wrong."""
    data = bilevel.datasets.load("digits")
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(data.X_train))
    images, labels = data.X_train[order].reshape(-1, 64) / 16.0, data.y_train[order].astype(np.int32)
    train, val, test = np.split(np.arange(len(order)), [N_TRAIN, N_TRAIN + N_VAL])
    noisy = bilevel.problems.corrupted_labels(labels[train], 10, corruption, rng)
    return (images[train], noisy), (images[val], labels[val]), (images[test], labels[test]), noisy != labels[train]


def build(corruption):
    """Return the problem with its metrics."""
    (X, y), (X_val, y_val), (X_test, y_test), wrong = digits(corruption)
    network = eqx.nn.MLP(64, 10, width_size=32, depth=1, activation=jnp.tanh, key=jax.random.key(0))
    weights, architecture = eqx.partition(network, eqx.is_inexact_array)

    def entropy(weights, image, label):
        scores = eqx.combine(weights, architecture)(image)
        return jax.nn.logsumexp(scores) - scores[label]

    def inner_loss(weights, outer, sample):
        image, label, index = sample
        decay = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(weights))
        return jax.nn.sigmoid(outer["logit"][index]) * entropy(weights, image, label) + WEIGHT_DECAY * decay

    def outer_loss(weights, outer, sample):
        return entropy(weights, *sample)

    @jax.jit
    def test_error(point):
        scores = jax.vmap(eqx.combine(point.inner_var, architecture))(X_test.astype(np.float32))
        return jnp.mean(jnp.argmax(scores, axis=1) != y_test)

    problem = bilevel.BilevelProblem.from_losses(
        inner_loss,
        outer_loss,
        (X, y, np.arange(N_TRAIN, dtype=np.int32)),
        (X_val, y_val),
        weights,
        {"logit": np.zeros(N_TRAIN)},
        metrics={"test_error": test_error, "auc": lambda point: roc_auc_score(~wrong, point.outer_var["logit"])},
        dtype="float32",
    )
    return replace(problem, name="neural cleaning")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corruption", type=float, default=0.4, help="probability that a training label is redrawn")
    parser.add_argument("--steps", type=int, default=8000, help="steps of each solver")
    arguments = parser.parse_args()
    problem = build(arguments.corruption)
    # With a ratio this large the outer variable does not move: this is a plain fit to the noisy labels.
    # The last solver is not tuned.
    for name, solver in {
        "plain fit": bilevel.SOBA(0.1, 1e12, 32),
        "SOBA": bilevel.SOBA(0.1, 2e-4, 32),
        "SRBA": bilevel.SRBA(0.1, 2e-4, 32),
        "AutoSRBA": bilevel.AutoSRBA(batch_size=32),
    }.items():
        run = bilevel.run(problem, solver, max_steps=arguments.steps, eval_every=max(1, arguments.steps // 4))
        auc = "" if name == "plain fit" else f"   AUC of the weights {run.history['auc'][-1]:.3f}"
        print(f"{name:12} {run.status.value:14} test error {run.history['test_error'][-1]:.3f}{auc}")


if __name__ == "__main__":
    main()

"""The share of each data source in training: softmax weights of sources, learned for a low loss on a target.

    python examples/data_mixture.py            # four sources of MNIST digits
    python examples/data_mixture.py --quick    # four sources of the digits of scikit-learn
    python examples/data_mixture.py --text     # three sources of text that ship with Python

The inner problem trains a network on a mixture, G = Σ p_k (mean loss of source k); the outer problem chooses p =
softmax(x) for a low loss on rows of the target. Baselines are the uniform mixture and the best of a grid of mixtures by
validation loss; every fit has the same start, optimizer, batches and number of steps.

Digits: clean rows, three times the number of rows of which 60 % have a wrong label, rows with permuted pixels and
random labels, and copies of some clean rows. Text: a model predicts the next character from eight; the sources are few
rows of the help topics of Python, which are the target, the same topics with shuffled characters, and source code of
the standard library.
"""

import argparse
import itertools
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilevel

BATCH, RATE, OUTER_RATE = 64, 3e-3, 1e-2
HIDDEN, CONTEXT, EMBEDDED = 64, 8, 12
MODULES = ("argparse", "inspect", "typing", "datetime", "tarfile")


@dataclass(frozen=True)
class Sources:
    """Names, rows and labels of the sources, validation and test rows of the target, and the number of classes."""

    names: tuple[str, ...]
    train: tuple[tuple[np.ndarray, np.ndarray], ...]
    validation: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    classes: int


def digits(name, size, seed=0):
    """Return sources of images: ``size`` clean rows, 3 ``size`` rows with wrong labels, and ``size`` off-task rows."""
    data, rng = bilevel.datasets.load(name), np.random.default_rng(seed)
    order = rng.permutation(len(data.X_train))
    rows = (data.X_train[order].reshape(len(order), -1) / data.X_train.max()).astype(np.float32)
    labels = data.y_train[order].astype(np.int32)
    clean, wrong, off, validation, test = np.split(np.arange(len(rows)), np.cumsum([size, 3 * size, size, size]))
    copies = clean[: size // 4]
    shuffled = rows[off][:, rng.permutation(rows.shape[1])]
    train = (
        (rows[clean], labels[clean]),
        (rows[wrong], bilevel.problems.corrupted_labels(labels[wrong], 10, 0.6 * 10 / 9, rng).astype(np.int32)),
        (shuffled, rng.integers(0, 10, len(off)).astype(np.int32)),
        (rows[copies], labels[copies]),
    )
    names = ("clean", "60 % wrong labels", "off task", "copies of clean")
    return Sources(names, train, *((rows[part][:4000], labels[part][:4000]) for part in (validation, test)), 10)


def windows(text, alphabet, count, rng):
    """Return contexts of a text as codes, and the character after each."""
    codes = np.array([alphabet.get(letter, 0) for letter in text], np.int32)
    places = rng.integers(0, len(codes) - CONTEXT, count)
    return codes[places[:, None] + np.arange(CONTEXT)], codes[places + CONTEXT]


def texts(size, seed=0):
    """Return sources of text: ``size`` rows of topics, and ten times this number of the others."""
    from pydoc_data.topics import topics

    rng = np.random.default_rng(seed)
    names = rng.permutation(sorted(topics))
    some, validation, test = ("\n".join(topics[name] for name in part) for part in np.array_split(names, 3))
    folder = Path(argparse.__file__).parent
    code = "\n".join((folder / f"{name}.py").read_text(encoding="utf-8") for name in MODULES)
    letters = sorted(set(some))
    alphabet = {letter: number for number, letter in enumerate(letters, start=1)}
    mixed = "".join(rng.permutation(list(some)))
    train = [(some, size), (mixed, 10 * size), (code, 10 * size)]
    rows = [windows(text, alphabet, count, rng) for text, count in [*train, (validation, 2000), (test, 4000)]]
    return Sources(("topics", "shuffled", "source code"), tuple(rows[:3]), *rows[3:], len(letters) + 1)


def weights_of(sources, seed=0):
    """A network with one hidden layer, and for text an embedding of each character."""
    rng, rows = np.random.default_rng(seed), sources.train[0][0]
    is_text = rows.dtype == np.int32
    width = CONTEXT * EMBEDDED if is_text else rows.shape[1]
    sizes = {"hidden": (width, HIDDEN), "scores": (HIDDEN, sources.classes)}
    drawn = {name: rng.normal(size=size) / size[0] ** 0.5 for name, size in sizes.items()}
    if is_text:
        drawn["letters"] = rng.normal(size=(sources.classes, EMBEDDED))
    return {name: array.astype(np.float32) for name, array in drawn.items()}


def entropies(weights, rows, labels):
    """Return the cross-entropy of each row of a batch."""
    if "letters" in weights:
        rows = weights["letters"][rows].reshape(len(rows), -1)
    scores = jnp.tanh(rows @ weights["hidden"]) @ weights["scores"]
    return jax.nn.logsumexp(scores, axis=1) - jnp.take_along_axis(scores, labels[:, None], axis=1)[:, 0]


def build(sources, seed=0):
    """Return the problem, which starts at the uniform mixture."""
    largest, size = max(len(labels) for _, labels in sources.train), len(sources.names)
    # Small sources are repeated, because few rows with large weights would make steps noisy.
    repeated = [[part[np.arange(largest) % len(part)] for part in source] for source in sources.train]
    rows, labels = (np.concatenate(parts) for parts in zip(*repeated, strict=True))
    of_source = np.repeat(np.arange(size), largest).astype(np.int32)

    def inner_loss(weights, logits, batch):
        rows, labels, source = batch
        return size * jax.nn.softmax(logits)[source] * entropies(weights, rows, labels)

    def outer_loss(weights, logits, batch):
        return entropies(weights, *batch)

    @jax.jit
    def test_loss(point):
        return jnp.mean(entropies(point.inner_var, *sources.test))

    problem = bilevel.BilevelProblem.from_losses(
        bilevel.BatchLoss(inner_loss),
        bilevel.BatchLoss(outer_loss),
        (rows, labels, of_source),
        sources.validation,
        weights_of(sources, seed),
        np.zeros(size, np.float32),
        metrics={"test_loss": test_loss},
        dtype="float32",
    )
    return replace(problem, name="mixture")


def fit(problem, steps, mixture=None):
    """Train on a given mixture, or learn the mixture during training, starting from the uniform one."""
    outer = optax.adam(optax.cosine_decay_schedule(OUTER_RATE, steps)) if mixture is None else optax.set_to_zero()
    if mixture is not None:
        logits = np.log(np.maximum(mixture, 1e-6)).astype(np.float32)
        problem = replace(problem, start=problem.start._replace(outer_var=logits))
    inner = optax.adam(optax.cosine_decay_schedule(RATE, steps))
    solver = bilevel.SOBA(0.1, batch_size=BATCH, inner_optimizer=inner, outer_optimizer=outer)
    return bilevel.run(problem, solver, max_steps=steps, eval_every=steps)


def grid(sources):
    """Return mixtures of equal parts of one, two or three sources."""
    size = len(sources.names)
    for count in (1, 2, 3):
        for chosen in itertools.combinations(range(size), count):
            yield np.isin(np.arange(size), chosen) / count


def compare(sources, steps, seed=0):
    """Return mixture and run by name."""
    problem = build(sources, seed)
    uniform = np.full(len(sources.names), 1 / len(sources.names))
    found = [(mixture, fit(problem, steps, mixture)) for mixture in grid(sources)]
    best = min(found, key=lambda pair: pair[1].history["outer_value"][-1])
    learned = fit(problem, steps)
    rows = {"uniform": (uniform, fit(problem, steps, uniform)), f"best of {len(found)} mixtures": best}
    return rows | {"learned": (np.asarray(jax.nn.softmax(learned.point.outer_var)), learned)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="digits of scikit-learn instead of MNIST")
    parser.add_argument("--text", action="store_true", help="text that ships with Python instead of images")
    parser.add_argument("--rows", type=int, help="rows of the clean source; by default 200 for --quick, otherwise 2000")
    parser.add_argument("--steps", type=int, help="steps of each fit; by default 6000 on text, otherwise 2000")
    arguments = parser.parse_args()
    size = arguments.rows or (200 if arguments.quick else 2000)
    sources = texts(size) if arguments.text else digits("digits" if arguments.quick else "mnist", size)
    steps = arguments.steps or (6000 if arguments.text else 2000)
    sizes = [len(labels) for _, labels in sources.train]
    print("sources: " + ", ".join(f"{name} ({size})" for name, size in zip(sources.names, sizes, strict=True)))
    for name, (mixture, run) in compare(sources, steps).items():
        loss, tested = (run.history[column][-1] for column in ("outer_value", "test_loss"))
        print(f"{name:20} validation loss {loss:.3f}   test loss {tested:.3f}   mixture {np.round(mixture, 2)}")


if __name__ == "__main__":
    main()

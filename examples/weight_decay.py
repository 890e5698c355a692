"""Weight decay of a Flax network, one per array of its parameters: learned, or searched for the same time.

    python examples/weight_decay.py [--rows 400] [--steps 3000] [--seeds 3] [--times 10]

The input of the network consists of five images: one of the digit and four of other digits, as from sensors of which
only one is useful. Each image has its own kernel. With few training rows, a network without weight decay learns from
all five images, and a single decay for all arrays weakens the useful kernel together with the others.

The inner problem fits the network with weight decay; the outer problem chooses the logarithms of the decays, one for
each array, for a low loss on validation rows. Variables are pytrees: the parameters of Flax inside, a tree of numbers
with the same structure outside. Searches over one decay for all arrays, and over one for each, have the same seconds as
the steps of that run, or ``--times`` this number. Their fits have the same optimizer and number of steps, without
second derivatives. Compilation is not counted. Searches use Optuna if it is installed and are random otherwise; the fit
with the lowest validation loss is selected.
"""

import argparse
import time
from dataclasses import replace
from statistics import median

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import bilevel

N_VAL, N_IMAGES, BATCH, RATE = 300, 5, 32, 3e-3
BOUNDS = (1e-6, 1.0)
START = 1e-2
NO_DECAY, LEARNED, ONE, EACH = (
    "no decay",
    "learned, one for each array",
    "searched, one for all",
    "searched, one for each",
)


class Network(nn.Module):
    """A network that scores the ten digits from several images."""

    @nn.compact
    def __call__(self, images):
        seen = [nn.Dense(32, use_bias=False, name=f"image {place}")(image) for place, image in enumerate(images)]
        return nn.Dense(10, name="scores")(nn.tanh(sum(seen)))


def entropy(weights, images, label):
    scores = Network().apply({"params": weights}, images)
    return jax.nn.logsumexp(scores) - scores[label]


def inner_loss(weights, log_decay, sample):
    decays = jax.tree.map(lambda leaf, log: jnp.exp(log) * jnp.sum(leaf**2) / 2, weights, log_decay)
    return entropy(weights, *sample) + sum(jax.tree.leaves(decays))


def outer_loss(weights, log_decay, sample):
    return entropy(weights, *sample)


def digits(n_train, seed=0):
    """Return training, validation and test rows: an image of the digit next to images of other digits."""
    data = bilevel.datasets.load("digits")
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(data.X_train))
    images, labels = data.X_train[order].reshape(-1, 64) / 16.0, data.y_train[order].astype(np.int32)
    others = [images[rng.permutation(len(images))] for _ in range(N_IMAGES - 1)]
    rows = np.stack([images, *others], axis=1).astype(np.float32)
    return [(rows[part], labels[part]) for part in np.split(np.arange(len(labels)), [n_train, n_train + N_VAL])]


@jax.jit
def error_of(weights, rows):
    scores = jax.vmap(lambda images: Network().apply({"params": weights}, images))(rows[0])
    return jnp.mean(jnp.argmax(scores, axis=1) != rows[1])


def build(parts, seed=0):
    """Return the problem with its metric."""
    train, validation, test = parts
    weights = Network().init(jax.random.key(seed), jnp.zeros((N_IMAGES, 64), np.float32))["params"]
    problem = bilevel.BilevelProblem.from_losses(
        inner_loss,
        outer_loss,
        train,
        validation,
        weights,
        jax.tree.map(lambda leaf: np.log(START), weights),
        metrics={"test_error": lambda point: error_of(point.inner_var, test)},
        dtype="float32",
    )
    return replace(problem, name="weight decay")


def optimizer(steps):
    return optax.adam(optax.cosine_decay_schedule(RATE, steps))


def solver_of(steps):
    own = {"inner_optimizer": optimizer(steps), "outer_optimizer": "adam", "outer_bounds": tuple(np.log(BOUNDS))}
    return bilevel.SOBA(0.1, batch_size=BATCH, **own)


def learn(problem, steps):
    """Learn the decays while the network is trained."""
    return bilevel.run(problem, solver_of(steps), max_steps=steps, eval_every=steps)


def trainer(problem, parts, steps, seed=0):
    """Return a compiled function from decays to the fitted weights and their validation loss."""
    train, validation, _ = (jax.tree.map(jnp.asarray, part) for part in parts)
    size, change = len(train[1]), optimizer(steps)

    def mean(loss, *given):
        return jnp.mean(jax.vmap(lambda sample: loss(*given[:2], sample))(given[2]))

    @jax.jit
    def fit(log_decay):
        def step(index, carry):
            weights, state, key = carry
            key, one = jax.random.split(key)
            rows = jax.tree.map(lambda leaf: leaf[jax.random.randint(one, (BATCH,), 0, size)], train)
            gradient = jax.grad(lambda weights: mean(inner_loss, weights, log_decay, rows))(weights)
            updates, state = change.update(gradient, state, weights)
            return optax.apply_updates(weights, updates), state, key

        weights = jax.tree.map(jnp.asarray, problem.start.inner_var)
        weights, *_ = jax.lax.fori_loop(0, steps, step, (weights, change.init(weights), jax.random.key(seed)))
        return weights, mean(outer_loss, weights, log_decay, validation)

    return fit


def suggestions(n_decays, seed):
    """Propose decays and record their losses, by Optuna or at random."""
    names, low, high = [str(place) for place in range(n_decays)], *np.log(BOUNDS)
    try:
        import optuna
    except ImportError:
        rng = np.random.default_rng(seed)
        return lambda: (None, rng.uniform(low, high, n_decays)), lambda trial, loss: None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))

    def ask():
        trial = study.ask()
        return trial, np.array([trial.suggest_float(name, low, high) for name in names])

    return ask, study.tell


def search(problem, parts, steps, seconds, one_for_all, seed=0):
    """Return the weights with the lowest validation loss, this loss, and the number of fits (at least one)."""
    structure, best, count = jax.tree.structure(problem.start.outer_var), (None, np.inf), 0
    size, fit = structure.num_leaves, trainer(problem, parts, steps, seed)
    ask, tell = suggestions(1 if one_for_all else size, seed)
    jax.block_until_ready(fit(jax.tree.map(jnp.float32, problem.start.outer_var)))  # compiles
    began = time.perf_counter()
    while count == 0 or time.perf_counter() - began < seconds:
        trial, logs = ask()
        tree = jax.tree.unflatten(structure, [jnp.float32(log) for log in np.broadcast_to(logs, size)])
        weights, loss = fit(tree)
        tell(trial, float(loss) if np.isfinite(loss) else 1e6)
        count += 1
        best = min(best, (weights, float(loss)), key=lambda pair: pair[1])
    return *best, count


def compare(parts, steps, times=1.0, seed=0):
    """Return validation loss, test error and a remark by name, and the learned decays."""
    problem = build(parts, seed)
    learned = learn(problem, steps)
    seconds = learned.history["seconds"][-1]
    loss, error = (float(learned.history[column][-1]) for column in ("outer_value", "test_error"))
    rows = {LEARNED: (loss, error, f"1 fit, {seconds:.1f} s")}
    for name, one_for_all in ((ONE, True), (EACH, False)):
        weights, loss, count = search(problem, parts, steps, times * seconds, one_for_all, seed)
        rows[name] = loss, float(error_of(weights, parts[2])), f"fits: {count}"
    nothing = jax.tree.map(lambda leaf: jnp.float32(-40), problem.start.outer_var)
    weights, loss = trainer(problem, parts, steps, seed)(nothing)
    return rows | {NO_DECAY: (float(loss), float(error_of(weights, parts[2])), "1 fit")}, learned.point.outer_var


def described(log_decay):
    arrays = jax.tree_util.tree_leaves_with_path(log_decay)
    return "  ".join(f"{jax.tree_util.keystr(path, simple=True, separator=' ')} {np.exp(x):.0e}" for path, x in arrays)


def searcher():
    try:
        import optuna
    except ImportError:
        return "random search (Optuna is not installed)"
    return f"Optuna {optuna.__version__}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=400, help="training rows")
    parser.add_argument("--steps", type=int, default=3000, help="steps of each fit")
    parser.add_argument("--seeds", type=int, default=1, help="seeds of rows and starts; medians are reported")
    parser.add_argument("--times", type=float, default=1.0, help="seconds of a search, relative to the learned run")
    arguments = parser.parse_args()
    print(f"searches by {searcher()}")
    found = []
    for seed in range(arguments.seeds):
        rows, decays = compare(digits(arguments.rows, seed), arguments.steps, arguments.times, seed)
        found.append(rows)
        for name, (loss, error, remark) in rows.items():
            print(f"seed {seed}: {name:28} validation loss {loss:.3f}   test error {error:.3f}   {remark}", flush=True)
        print("    learned: " + described(decays))
    print(f"medians of {len(found)} seeds")
    for name in found[0]:
        loss, error = (median(rows[name][place] for rows in found) for place in range(2))
        print(f"{name:28} validation loss {loss:.3f}   test error {error:.3f}")


if __name__ == "__main__":
    main()

"""Images with wrong labels: a convolutional network, and one weight per training row, learned on few clean rows.

    python examples/label_noise.py --seeds 3 --page noise.html    # MNIST, half of its labels redrawn; for a GPU
    python examples/label_noise.py --quick                        # the small digits of scikit-learn, in minutes
    python examples/label_noise.py --memory                       # of the learned weights, beside plain training

The inner problem fits the network to weighted training rows; the outer problem chooses the weights for a low loss on
clean validation rows. Baselines have the same network, optimizer and number of steps: no weights; cleanlab's filter,
which leaves out rows that models of other folds disagree with (where cleanlab is installed); and clean labels, which
nobody has. Of each run the point with the lowest validation error counts, and its test error is told. Learned weights
have seen the validation rows, the baselines have not: the rule is the same for all, and flatters none on test rows.
"""

import argparse
import ctypes
import gc
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.metrics import roc_auc_score

import bilevel

CLASSES, FOLDS = 10, 3
RATE, WEIGHT_DECAY, V_STEP = 3e-3, 1e-4, 0.1
MEMORY_STEPS = 2  # each of them evaluated
PIECE = 500  # rows that a metric reads at a time
PLAIN, FILTER, LEARNED, CLEAN = "no weights", "cleanlab's filter", "learned weights", "clean labels"
SIZES = {"digits": (1000, 250, 2000, 64), "mnist": (59_000, 1000, 8000, 512)}  # rows, clean rows, steps, batch


@dataclass(frozen=True)
class Images:
    """Training rows with noisy labels, clean validation rows, test rows, and the true training labels."""

    train: tuple[np.ndarray, np.ndarray]
    validation: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    true: np.ndarray


def load(name, n_train, n_validation, noise, seed=0):
    """Images of digits; a training label is redrawn with probability ``noise``. Test rows are the source's, if any."""
    data = bilevel.datasets.load(name)
    side, rng = int(np.prod(data.X_train.shape[1:]) ** 0.5), np.random.default_rng(seed)
    order = rng.permutation(len(data.X_train))
    clean, train, rest = np.split(order, [n_validation, n_validation + n_train])

    def take(rows, labels):
        return (rows.reshape(-1, side, side) / data.X_train.max()).astype(np.float32), labels.astype(np.int32)

    parts = {part: take(data.X_train[rows], data.y_train[rows]) for part, rows in (("v", clean), ("t", train))}
    test = take(data.X_train[rest], data.y_train[rest]) if data.X_test is None else take(data.X_test, data.y_test)
    images, true = parts["t"]
    noisy = bilevel.problems.corrupted_labels(true, CLASSES, noise, rng).astype(np.int32)
    return Images((images, noisy), parts["v"], test, true)


def weights_of(side, seed=0):
    """Two convolutions with stride 2, and a linear layer; more channels for larger images."""
    rng = np.random.default_rng(seed)
    first, last = (8, 16) if side < 16 else (16, 32)
    small = -(-side // 4)
    sizes = {"first": (3, 3, 1, first), "second": (3, 3, first, last), "scores": (last * small**2, CLASSES)}
    drawn = {name: rng.normal(size=size) * (2 / np.prod(size[:-1])) ** 0.5 for name, size in sizes.items()}
    return {name: array.astype(np.float32) for name, array in drawn.items()}


def scores_of(weights, images):
    """Scores of a batch of images."""
    hidden, options = images[..., None], {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    for name in ("first", "second"):
        hidden = jax.nn.relu(jax.lax.conv_general_dilated(hidden, weights[name], (2, 2), "SAME", **options))
    return hidden.reshape(len(images), -1) @ weights["scores"]


def entropies(weights, images, labels):
    """Cross-entropy of each row."""
    scores = scores_of(weights, images)
    return jax.nn.logsumexp(scores, axis=1) - jnp.take_along_axis(scores, labels[:, None], axis=1)[:, 0]


def decay(weights):
    return WEIGHT_DECAY * sum(jnp.sum(array**2) for array in jax.tree.leaves(weights))


def inner_loss(weights, outer, batch):
    images, labels, row = batch
    return jax.nn.sigmoid(outer["logit"][row]) * entropies(weights, images, labels) + decay(weights)


def outer_loss(weights, outer, batch):
    return entropies(weights, *batch)


def predict(weights, images):
    """Scores of many images, some at a time: a pass over all of them would take more memory than a step."""
    return jax.lax.map(lambda image: scores_of(weights, image[None])[0], images, batch_size=PIECE)


def errors(images, labels):
    """A metric: the share of wrong answers on these rows."""

    @jax.jit
    def error(point):
        return jnp.mean(jnp.argmax(predict(point.inner_var, images), axis=1) != labels)

    return error


def build(data, kept=None, labels=None, seed=0):
    """The problem, on the rows to keep, with the noisy labels or with others."""
    images, noisy = data.train
    labels = noisy if labels is None else labels
    kept = np.arange(len(images)) if kept is None else kept
    metrics = {"validation_error": errors(*data.validation), "test_error": errors(*data.test)}
    return bilevel.BilevelProblem.from_losses(
        None,
        None,
        (images[kept], labels[kept], np.arange(len(kept), dtype=np.int32)),
        data.validation,
        weights_of(images.shape[1], seed),
        {"logit": np.zeros(len(kept), np.float32)},
        inner_batch_loss=inner_loss,
        outer_batch_loss=outer_loss,
        metrics=metrics,
        dtype="float32",
        name="label noise",
    )


def inner_optimizer(steps):
    return optax.adam(optax.cosine_decay_schedule(RATE, steps))


def solver_of(rows, steps, reach, batch):
    """SOBA, whose logits move by ``reach`` times the mean of their derivatives, however many rows there are."""
    # A row is in one batch of rows / batch, with a weight of 1 / batch: its logit sees 1 / rows of each step.
    outer = optax.sgd(optax.cosine_decay_schedule(reach * rows / steps, steps))
    return bilevel.SOBA(V_STEP, batch_size=batch, inner_optimizer=inner_optimizer(steps), outer_optimizer=outer)


def fit(problem, steps, reach, batch=64, seed=0):
    """A run whose best point is the one with the lowest validation error; without reach the weights stand still."""
    solver = solver_of(len(problem.start.outer_var["logit"]), steps, reach, batch)
    best = bilevel.EarlyStopping("validation_error", patience=steps)
    every = max(1, steps // 20)
    return bilevel.run(problem, solver, max_steps=steps, eval_every=every, early_stopping=best, seed=seed)


def filter_rows(data, steps, batch, seed):
    """The rows that cleanlab keeps, by networks that did not see them; None where it is not installed."""
    try:
        from cleanlab.filter import find_label_issues
    except ImportError:
        return None
    images, noisy = data.train
    fold, found = np.arange(len(images)) % FOLDS, np.zeros((len(images), CLASSES))
    for number in range(FOLDS):
        seen = build(data, np.flatnonzero(fold != number), seed=seed)
        point = fit(seen, steps, 0.0, batch, seed).best_point
        found[fold == number] = jax.nn.softmax(predict(point.inner_var, images[fold == number]))
    return np.flatnonzero(~find_label_issues(noisy, found, n_jobs=1))


def compare(data, steps, reach, batch=64, seed=0):
    """Runs by name, and the area under the curve of the weights."""
    runs = {PLAIN: fit(build(data, seed=seed), steps, 0.0, batch, seed)}
    kept = filter_rows(data, steps, batch, seed)
    if kept is not None:
        runs[FILTER] = fit(build(data, kept, seed=seed), steps, 0.0, batch, seed)
    runs[LEARNED] = fit(build(data, seed=seed), steps, reach, batch, seed)
    runs[CLEAN] = fit(build(data, labels=data.true, seed=seed), steps, 0.0, batch, seed)
    last = runs[LEARNED].point.outer_var["logit"]
    return runs, roc_auc_score(data.train[1] == data.true, last)


def tested(run):
    return float(run.history["test_error"][run.best_row])


def share_closed(runs):
    """How much of the way from no weights to clean labels the learned weights go."""
    plain, learned, clean = (tested(runs[name]) for name in (PLAIN, LEARNED, CLEAN))
    return (plain - learned) / (plain - clean) if plain > clean else float("nan")


def report(seed, runs, auc):
    """Print the runs of one seed."""
    for label, run in runs.items():
        at = f"validation error {run.best_value:.4f} at step {run.history['step'][run.best_row]:,}"
        clock = f"{run.history['seconds'][-1]:.0f} s"
        print(f"seed {seed}: {label:18} test error {tested(run):.4f}   {at}   {clock}", flush=True)
    print(f"seed {seed}: AUC of the learned weights {auc:.3f}, share of the gap closed {share_closed(runs):.2f}")


def summarize(found):
    """Medians over the seeds, by name."""
    names = list(found[0][0])
    rows = {name: f"{median(tested(runs[name]) for runs, _ in found):.4f}" for name in names}
    rows["share of the gap closed"] = f"{median(share_closed(runs) for runs, _ in found):.2f}"
    return rows | {"AUC of the learned weights": f"{median(auc for _, auc in found):.3f}"}


def train_plainly(data, steps, batch, seed=0):
    """The compiled steps of the same network and optimizer without a library, and their arguments."""
    images, labels = (jnp.asarray(part) for part in data.train)
    optimizer, weights = inner_optimizer(steps), jax.tree.map(jnp.asarray, weights_of(images.shape[1], seed))

    def loss(weights, images, labels):
        return jnp.mean(entropies(weights, images, labels)) + decay(weights)

    def step(index, carry):
        weights, state, images, labels = carry
        first = index * batch % (len(images) - batch + 1)
        part = [jax.lax.dynamic_slice_in_dim(whole, first, batch) for whole in (images, labels)]
        change, state = optimizer.update(jax.grad(loss)(weights, *part), state, weights)
        return optax.apply_updates(weights, change), state, images, labels

    def train(weights, state, images, labels, steps):
        return jax.lax.fori_loop(0, steps, step, (weights, state, images, labels))[0]

    return jax.jit(train), (weights, optimizer.init(weights), images, labels, steps)


def peak_memory(kind, data, steps, reach, batch):
    """Bytes at the peak of a GPU; on a CPU the rows, and by how much the process grows in a second run."""
    if kind == PLAIN:
        program, arguments = train_plainly(data, steps, batch)
        train = partial(program, *arguments)
    else:
        train = partial(fit, build(data), steps, reach, batch)
    _wait(train())  # what compiling takes is no matter of the run
    between = _reset_peak() if jax.devices()[0].memory_stats() is None else 0
    _wait(train())
    stats = jax.devices()[0].memory_stats()
    rows = sum(part.nbytes for part in (*data.train, *data.validation))
    return stats["peak_bytes_in_use"] if stats else _status("VmHWM") - between + rows


def _wait(result):
    jax.block_until_ready(jax.tree.leaves(result))


def _reset_peak():
    """Begin anew to count the peak of the process; return what it has now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])


def compare_memory(arguments):
    """Measure each kind in a process of its own, and print the ratio."""
    given = [word for word in arguments if word != "--memory"]
    peaks = {}
    for kind in (PLAIN, LEARNED):
        command = [sys.executable, __file__, *given, "--memory-of", kind]
        peaks[kind] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
        print(f"{kind:18} {peaks[kind] / 2**20:.1f} MiB", flush=True)
    print(f"ratio {peaks[LEARNED] / peaks[PLAIN]:.2f}")


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the digits of scikit-learn in the place of MNIST")
    parser.add_argument("--noise", type=float, default=0.5, help="probability that a training label is redrawn")
    parser.add_argument("--rows", type=int, help="training rows; 1000 of the small digits, 59000 of MNIST")
    parser.add_argument("--steps", type=int, help="of each run; 2000 of the small digits, 8000 of MNIST")
    parser.add_argument("--batch", type=int, help="rows of a batch; 64 of the small digits, 512 of MNIST")
    parser.add_argument("--reach", type=float, default=100.0, help="how far weights move; 0 holds them")
    parser.add_argument("--seeds", type=int, default=1, help="runs of everything; medians are told")
    parser.add_argument("--page", help="write curves, histogram, worst rows and table to this HTML file")
    parser.add_argument("--figure", help="write curves and histogram to this SVG file")
    parser.add_argument("--memory", action="store_true", help="peak memory beside that of plain training")
    parser.add_argument("--memory-of", choices=(PLAIN, LEARNED), help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    arguments = parse()
    name = "digits" if arguments.quick else "mnist"
    rows, clean, steps, batch = SIZES[name]
    rows, steps, batch = arguments.rows or rows, arguments.steps or steps, arguments.batch or batch
    if arguments.memory:
        return compare_memory(sys.argv[1:])
    if arguments.memory_of:
        data = load(name, rows, clean, arguments.noise)
        return print(peak_memory(arguments.memory_of, data, min(steps, MEMORY_STEPS), arguments.reach, batch))
    found = []
    for seed in range(arguments.seeds):
        data = load(name, rows, clean, arguments.noise, seed)
        found.append(compare(data, steps, arguments.reach, batch, seed))
        report(seed, *found[-1])
    print(f"medians of {len(found)} seeds")
    table = summarize(found)
    for label, value in table.items():
        print(f"{label:26} {value}" if label not in found[0][0] else f"{label:18} test error {value}")
    if arguments.page or arguments.figure:
        from label_noise_page import write

        about = f"{rows:,} training rows of {name}, {steps:,} steps"
        write(data, found, table, about, arguments.page, arguments.figure)
    return None


if __name__ == "__main__":
    main()

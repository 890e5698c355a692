"""Images with wrong labels: a convolutional network with weights of training rows, learned from few clean rows.

    python examples/label_noise.py --seeds 3 --page noise.html   # MNIST with half of the labels redrawn; for a GPU
    python examples/label_noise.py --steps 4000 --batch 256      # the same rows, ten minutes on two cores
    python examples/label_noise.py --quick                       # digits of scikit-learn, one minute

The inner problem fits the network to weighted training rows; the outer problem chooses the weights for a low loss on
clean validation rows. There is either one weight for each row, or a function of the loss of a row with two learned
parameters. Baselines with the same network, optimizer and number of steps are: no weights; the filter of cleanlab (if
installed), which removes rows whose labels models of other folds contradict; and clean labels, which are not available
in practice. The test error of each run is that of the point with the lowest validation error. Only learned weights use
the validation rows in training; the selection rule is the same for all runs, and test rows are not used by any.
"""

import argparse
from dataclasses import dataclass, replace
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.metrics import roc_auc_score

import bilevel

CLASSES, FOLDS = 10, 3
RATE, OUTER_RATE, WEIGHT_DECAY, V_STEP = 3e-3, 1e-2, 1e-4, 0.1
EVALUATIONS = 10  # per run; each is a pass over all rows
PIECE = 500  # rows that a metric reads at a time
PLAIN, FILTER, LEARNED, LOSS, CLEAN = (
    "no weights",
    "cleanlab's filter",
    "learned weights",
    "learned loss",
    "clean labels",
)
SIZES = {"digits": (1000, 250, 2000, 64), "mnist": (59_000, 1000, 8000, 512)}  # rows, clean rows, steps, batch


@dataclass(frozen=True)
class Images:
    """Training rows with noisy labels, clean validation rows, test rows, and the true training labels."""

    train: tuple[np.ndarray, np.ndarray]
    validation: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    true: np.ndarray


def load(name, n_train, n_validation, noise, seed=0):
    """Return images of digits, whose training labels are redrawn with probability ``noise``."""
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
    """Return a network of two convolutions with stride 2 and a linear layer; larger images have more channels."""
    rng = np.random.default_rng(seed)
    first, last = (8, 16) if side < 16 else (16, 32)
    small = -(-side // 4)
    sizes = {"first": (3, 3, 1, first), "second": (3, 3, first, last), "scores": (last * small**2, CLASSES)}
    drawn = {name: rng.normal(size=size) * (2 / np.prod(size[:-1])) ** 0.5 for name, size in sizes.items()}
    return {name: array.astype(np.float32) for name, array in drawn.items()}


def scores_of(weights, images):
    """Return the scores of a batch of images."""
    hidden, options = images[..., None], {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    for name in ("first", "second"):
        hidden = jax.nn.relu(jax.lax.conv_general_dilated(hidden, weights[name], (2, 2), "SAME", **options))
    return hidden.reshape(len(images), -1) @ weights["scores"]


def entropies(weights, images, labels):
    """Return the cross-entropy of each row."""
    scores = scores_of(weights, images)
    return jax.nn.logsumexp(scores, axis=1) - jnp.take_along_axis(scores, labels[:, None], axis=1)[:, 0]


def decay(weights):
    return WEIGHT_DECAY * sum(jnp.sum(array**2) for array in jax.tree.leaves(weights))


def weighted_loss(weights, outer, batch):
    images, labels, row = batch
    return jax.nn.sigmoid(outer["logit"][row]) * entropies(weights, images, labels) + decay(weights)


def bent_loss(weights, outer, batch):
    """Return a concave function of the entropy, whose slope sigmoid(level - slope * entropy) is the weight of a row."""
    images, labels, _ = batch
    slope = jnp.exp(outer["log_slope"])
    left = jax.nn.softplus(outer["level"] - slope * entropies(weights, images, labels))
    return (jax.nn.softplus(outer["level"]) - left) / slope + decay(weights)


def outer_loss(weights, outer, batch):
    return entropies(weights, *batch)


def predict(weights, images):
    """Return scores of many images in pieces, because a pass over all would take more memory than a step."""
    return jax.lax.map(lambda image: scores_of(weights, image[None])[0], images, batch_size=PIECE)


def errors(images, labels):
    """Return a metric: the error rate on these rows."""

    @jax.jit
    def error(point):
        return jnp.mean(jnp.argmax(predict(point.inner_var, images), axis=1) != labels)

    return error


def build(data, kept=None, labels=None, seed=0, by_loss=False):
    """Return the problem on some rows, with noisy or other labels, and with weights by row or by loss."""
    images, noisy = data.train
    labels = noisy if labels is None else labels
    kept = np.arange(len(images)) if kept is None else kept
    metrics = {"validation_error": errors(*data.validation), "test_error": errors(*data.test)}
    problem = bilevel.BilevelProblem.from_losses(
        bilevel.BatchLoss(bent_loss if by_loss else weighted_loss),
        bilevel.BatchLoss(outer_loss),
        (images[kept], labels[kept], np.arange(len(kept), dtype=np.int32)),
        data.validation,
        weights_of(images.shape[1], seed),
        {"level": np.float32(2), "log_slope": np.float32(0)} if by_loss else {"logit": np.zeros(len(kept), np.float32)},
        metrics=metrics,
        dtype="float32",
    )
    return replace(problem, name="label noise")


def inner_optimizer(steps):
    return optax.adam(optax.cosine_decay_schedule(RATE, steps))


def outer_optimizer(outer_var, steps, reach):
    """Return the optimizer of x; logits move by ``reach`` times the mean of their derivatives."""
    if "logit" not in outer_var:
        return optax.adam(OUTER_RATE)
    # A row is in one of rows / batch batches with weight 1 / batch, so its mean derivative has the factor 1 / rows.
    return optax.sgd(optax.cosine_decay_schedule(reach * len(outer_var["logit"]) / steps, steps))


def solver_of(outer_var, steps, reach, batch):
    outer = outer_optimizer(outer_var, steps, reach)
    return bilevel.SOBA(V_STEP, batch_size=batch, inner_optimizer=inner_optimizer(steps), outer_optimizer=outer)


def fit(problem, steps, reach, batch=64, seed=0):
    """Return the run with its point of lowest validation error; with ``reach`` 0 the weights of rows are fixed."""
    solver = solver_of(problem.start.outer_var, steps, reach, batch)
    best = bilevel.EarlyStopping("validation_error", patience=steps)
    every = max(1, steps // EVALUATIONS)
    return bilevel.run(problem, solver, max_steps=steps, eval_every=every, stop=best, seed=seed)


def filter_rows(data, steps, batch, seed):
    """Return the rows that cleanlab keeps, by cross-validated networks, or None if it is not installed."""
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
    """Return runs by name, and the area under the ROC curve of each kind of weights."""
    runs = {PLAIN: fit(build(data, seed=seed), steps, 0.0, batch, seed)}
    kept = filter_rows(data, steps, batch, seed)
    if kept is not None:
        runs[FILTER] = fit(build(data, kept, seed=seed), steps, 0.0, batch, seed)
    runs[LEARNED] = fit(build(data, seed=seed), steps, reach, batch, seed)
    runs[LOSS] = fit(build(data, seed=seed, by_loss=True), steps, reach, batch, seed)
    runs[CLEAN] = fit(build(data, labels=data.true, seed=seed), steps, 0.0, batch, seed)
    right = data.train[1] == data.true
    return runs, {name: roc_auc_score(right, row_logits(runs[name].point, data)) for name in (LEARNED, LOSS)}


def row_logits(point, data):
    """Return the logit of the weight of each training row."""
    outer = point.outer_var
    if "logit" in outer:
        return outer["logit"]
    images, labels = data.train
    scores = predict(point.inner_var, images)
    losses = jax.nn.logsumexp(scores, axis=1) - scores[np.arange(len(labels)), labels]
    return np.asarray(outer["level"] - jnp.exp(outer["log_slope"]) * losses)


def tested(run):
    return float(run.history["test_error"][run.best_row])


def share_closed(runs, name):
    """Return the share of the gap between no weights and clean labels that learned weights close."""
    plain, learned, clean = (tested(runs[kind]) for kind in (PLAIN, name, CLEAN))
    return (plain - learned) / (plain - clean) if plain > clean else float("nan")


def report(seed, runs, areas):
    """Print the runs of one seed."""
    for label, run in runs.items():
        at = f"validation error {run.best_value:.4f} at step {run.history['step'][run.best_row]:,}"
        clock = f"{run.history['seconds'][-1]:.0f} s"
        print(f"seed {seed}: {label:18} test error {tested(run):.4f}   {at}   {clock}", flush=True)
    for name, area in areas.items():
        closed = f"share of the gap closed {share_closed(runs, name):.2f}"
        print(f"seed {seed}: {name:18} {closed}, AUC of its weights {area:.3f}", flush=True)


def summarize(found):
    """Return medians over the seeds by name."""
    runs, areas = found[0]
    rows = {name: f"{median(tested(runs[name]) for runs, _ in found):.4f}" for name in runs}
    for name in areas:
        rows[f"{name}, share of the gap"] = f"{median(share_closed(runs, name) for runs, _ in found):.2f}"
        rows[f"{name}, AUC"] = f"{median(areas[name] for _, areas in found):.3f}"
    return rows


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="digits of scikit-learn instead of MNIST")
    parser.add_argument("--noise", type=float, default=0.5, help="probability that a training label is redrawn")
    parser.add_argument("--rows", type=int, help="training rows; by default 1000 for --quick, 59000 of MNIST")
    parser.add_argument("--steps", type=int, help="steps of each run; by default 2000 for --quick, 8000 on MNIST")
    parser.add_argument("--batch", type=int, help="rows of a batch; by default 64 for --quick, 512 on MNIST")
    parser.add_argument("--reach", type=float, default=100.0, help="step of the weights; 0 keeps them fixed")
    parser.add_argument("--seeds", type=int, default=1, help="number of repetitions; medians are reported")
    parser.add_argument("--page", help="write curves, histogram, worst rows and table to this HTML file")
    parser.add_argument("--figure", help="write curves and histogram to this SVG file")
    return parser.parse_args()


def main():
    arguments = parse()
    name = "digits" if arguments.quick else "mnist"
    rows, clean, steps, batch = SIZES[name]
    rows, steps, batch = arguments.rows or rows, arguments.steps or steps, arguments.batch or batch
    found = []
    for seed in range(arguments.seeds):
        data = load(name, rows, clean, arguments.noise, seed)
        found.append(compare(data, steps, arguments.reach, batch, seed))
        report(seed, *found[-1])
    print(f"medians of {len(found)} seeds")
    table = summarize(found)
    for label, value in table.items():
        print(f"{label:34} {value}" if label not in found[0][0] else f"{label:18} test error {value}")
    if arguments.page or arguments.figure:
        from label_noise_page import write

        seeds = f"medians of {len(found)} seeds" if len(found) > 1 else "one seed"
        about = f"{rows:,} training rows of {name}, {steps:,} steps; {seeds}"
        right, last = data.train[1] == data.true, found[-1][0]
        logits = {kind: row_logits(last[kind].point, data) for kind in (LEARNED, LOSS)}
        write(data, last, logits, right, table, about, arguments.page, arguments.figure)


if __name__ == "__main__":
    main()

"""Dataset distillation: a model trained on ten learned images, against one trained on ten real images.

    python examples/dataset_distillation.py [--data digits] [--steps 5000] [--draws 20] [--text]

The inner problem fits a softmax model to ten images, one of each digit; the outer problem changes the pixels of these
images for a low loss of the model on real images. Both kinds of training set have ten images, the same labels and the
same regularization, and both fits are exact. Real images are drawn ``--draws`` times. ``--text`` prints the learned
images with one character for each pixel. Data: the digits of scikit-learn, or MNIST with 20 000 real images.
"""

import argparse

import numpy as np

import bilevel

# Number of real images, and the settings of SRBA, by data.
SETTINGS = {"digits": (1_000, 0.1, 0.003), "mnist": (20_000, 0.02, 0.03)}
SHADES = " .:-=+*#%@"


def build(data):
    return bilevel.problems.distillation(data, n_train=SETTINGS[data][0], dtype="float32")


def learn(problem, data, steps):
    """Return ten learned images."""
    _, step_size, outer_ratio = SETTINGS[data]
    solver = bilevel.SRBA(step_size, outer_ratio, batch_size=64)
    return bilevel.run(problem, solver, max_steps=steps, eval_every=steps).point.outer_var


def draw(problem, rng):
    """Return ten real images, one of each digit, from those of the outer level."""
    rows = problem.oracles.outer_samples.leaves
    labels = np.asarray(rows.labels)
    return np.asarray(rows.features)[[rng.choice(np.flatnonzero(labels == label)) for label in range(10)]]


def score(problem, images):
    """Return the loss on real images and the accuracy on test images of the exact fit to these ten images."""
    solution = problem.exact_solver(images)
    point = problem.start._replace(inner_var=solution.inner_var.astype(problem.dtype))
    return solution.value, 1 - float(problem.metrics["test_error"](point))


def as_text(images):
    """Return the images next to each other, with a character for each pixel from the lowest to the highest."""
    side = round(images.shape[1] ** 0.5)
    low, high = images.min(axis=1, keepdims=True), images.max(axis=1, keepdims=True)
    shades = (len(SHADES) * (images - low) / (high - low) * 0.999).astype(int).reshape(-1, side, side)
    return "\n".join(
        "  ".join("".join(SHADES[shade] for shade in image[row]) for image in shades) for row in range(side)
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=list(SETTINGS), default="digits", help="images")
    parser.add_argument("--steps", type=int, default=5_000, help="steps of SRBA")
    parser.add_argument("--draws", type=int, default=20, help="draws of ten real images")
    parser.add_argument("--text", action="store_true", help="print the learned images")
    arguments = parser.parse_args()
    problem, rng = build(arguments.data), np.random.default_rng(0)
    learned = learn(problem, arguments.data, arguments.steps)
    value, accuracy = score(problem, learned)
    drawn = np.array([score(problem, draw(problem, rng)) for _ in range(arguments.draws)])
    (mean_value, mean), best = drawn.mean(axis=0), drawn[:, 1].max()
    print(f"ten learned images: loss {value:.3f}   test accuracy {accuracy:.3f}")
    print(f"ten real images:    loss {mean_value:.3f}   test accuracy {mean:.3f} (best of {len(drawn)}: {best:.3f})")
    if arguments.text:
        print(as_text(learned))


if __name__ == "__main__":
    main()

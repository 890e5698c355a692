"""The experiments of the paper, and where a clone keeps their results. Imports nothing, so that `--help` is quick."""

from pathlib import Path
from typing import Any, NamedTuple

KEPT = Path("reports") / "reproduction"
PAGE = Path("docs") / "reproduction.md"
NOTICE = "notice.txt"  # in a folder of kept results: what readers of the page and of the audit must know first
QUICK_NOTICE = (
    "These are results of a quick run: small problems, short budgets and few seeds. They show that everything runs, "
    "and decide nothing about the claims."
)
PUBLISHED, WIDER, UNTUNED = "published", "wider", "untuned"  # the grids, called columns in the configs


class Part(NamedTuple):
    """An experiment with a config of the same name in ``bilevel/bench/configs/``.

    Attributes
    ----------
    title : heading of its section on the page
    draws : the metric that its figure shows
    little : arguments of a smaller problem, for ``--quick``
    """

    title: str
    draws: str
    little: dict[str, Any]


_FEW = {"n_train": 600, "n_val": 300}
PARTS = {
    "quadratic": Part(
        "Quadratics", "hypergrad_norm_sq", {"n_inner": 1024, "n_outer": 256, "dim_inner": 10, "dim_outer": 4}
    ),
    "ijcnn1": Part("Selection on IJCNN1", "value", {}),
    "cleaning": Part("Cleaning of MNIST", "test_error", _FEW),
    "cleaning70": Part("Cleaning of MNIST, 70 % of the labels redrawn", "test_error", _FEW),
    "cleaning90": Part("Cleaning of MNIST, 90 % of the labels redrawn", "test_error", _FEW),
}
# Parts without a store of runs, and the measurement that each consists of.
MEASURED = {"complexity": "complexity", "theory": "lower_bound", "condition": "condition"}


def read_notice(kept: Path) -> str:
    """Return the notice of a folder of kept results, or an empty text."""
    path = kept / NOTICE
    return path.read_text(encoding="utf-8").strip() if path.exists() else ""

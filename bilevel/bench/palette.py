"""The look of a solver, the same in every figure and section."""

from collections.abc import Iterable
from dataclasses import dataclass

# At least 3:1 against white and against the dark page, and apart for red-green blind eyes: `test_figures.py` measures.
COLOURS = ("#782dff", "#ff5a00", "#4ba578", "#c31e2d", "#6996d2", "#4b6978", "#8778ff")
# Lengths of marks and gaps, in widths of the line; their number has no divisor in common with that of colors.
DASHES: tuple[tuple[float, ...], ...] = ((), (4, 1.5), (1, 1.2), (5, 1.5, 1, 1.5), (8, 2))


@dataclass(frozen=True)
class Look:
    """Color and dashes of a line."""

    color: str
    dashes: tuple[float, ...]


def looks(solvers: Iterable[str]) -> dict[str, Look]:
    """Give each name a look; up to 35 names get different ones."""
    return {
        solver: Look(COLOURS[place % len(COLOURS)], DASHES[place % len(DASHES)])
        for place, solver in enumerate(sorted(set(solvers)))
    }

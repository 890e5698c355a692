"""Bounds of any strongly convex problem from sampled constants: an indication, no proof."""

import numpy as np

from bilevel import trees
from bilevel.certificate.base import NOTHING, Bounds
from bilevel.constants import constants
from bilevel.problems import BilevelProblem
from bilevel.types import Point


class EstimatedBounds:
    """Bounds from constants sampled at this x, in a ball of z that holds the point."""

    why = "The losses are the user's own: their constants come from a search, and the true ones may be larger."

    def __init__(self, problem: BilevelProblem) -> None:
        self._problem = problem

    def __call__(self, point: Point, direction: Point) -> Bounds:
        """Return the bounds of the whole space, with what the search finds in their place."""
        radius = 1 + float(np.linalg.norm(trees.flat(point.inner_var)))
        try:
            found = constants(self._problem, radius=radius, box=(point.outer_var, point.outer_var))
        except ValueError:
            return NOTHING  # the search met curvature that is not positive
        residual, v_residual = (float(np.linalg.norm(trees.flat(part))) for part in (direction.inner_var, direction.v))
        bend = found.L2_G * float(np.linalg.norm(trees.flat(point.v)))
        delta = residual / found.mu_G
        return Bounds(delta, found.mu_G, v_residual, bend, found.L1_F, bend + found.L1_F, found.L1_G)

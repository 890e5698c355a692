"""Oracles of models in which each row acts only through a few numbers of its own, its terms.

    derivatives = sum_i w_i (row i times its terms) + regularization term

The terms depend on the point, the sum is linear in them, and the regularization term is not a sum over rows. The change
from one point to another therefore needs only one sum, and a table with an entry for each row can store its terms.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from bilevel._core import trees
from bilevel._core.types import Array, InnerPass, OuterPass, Point, PyTree, Rows
from bilevel.oracles.base import Oracles, estimate, join


@dataclass(frozen=True)
class RowwiseOracles(Oracles):
    """A subclass implements the terms and sums of each level, and the inner regularization term.

    The last axis of terms is that of the rows, so that terms broadcast with the weights of rows.
    """

    @abstractmethod
    def _inner_terms(self, point: Point, data: PyTree) -> PyTree:
        """Return the terms of each row."""

    @abstractmethod
    def _inner_sum(self, terms: PyTree, data: PyTree, weights: Array, like: Point) -> InnerPass:
        """Return the weighted sum over rows; ``like`` is a point with the shapes of the variables."""

    @abstractmethod
    def inner_regularization(self, point: Point) -> InnerPass:
        """Return the part of the derivatives that is not a sum over inner rows."""

    @abstractmethod
    def _outer_terms(self, point: Point, data: PyTree) -> PyTree:
        """Return the terms of each row."""

    @abstractmethod
    def _outer_sum(self, terms: PyTree, data: PyTree, weights: Array, like: Point) -> OuterPass:
        """Return the weighted sum over rows."""

    def _inner_changes(self, point: Point, previous: Point, data: PyTree) -> PyTree:
        """Return the terms at one point minus those at another."""
        return trees.subtract(self._inner_terms(point, data), self._inner_terms(previous, data))

    def _outer_changes(self, point: Point, previous: Point, data: PyTree) -> PyTree:
        return trees.subtract(self._outer_terms(point, data), self._outer_terms(previous, data))

    def _inner(self, point: Point, data: PyTree, weights: Array) -> InnerPass:
        total = self._inner_sum(self._inner_terms(point, data), data, weights, point)
        return trees.add(total, self.inner_regularization(point))

    def _inner_apart(self, point: Point, data: PyTree, weights: Array) -> InnerPass:
        """Return the same derivatives in a form in which each can be computed without the others."""
        return self._inner(point, data, weights)

    def inner_grad(self, point: Point, rows: Any = None) -> PyTree:
        return estimate(self._inner_apart, point, self.inner_samples, rows).grad

    def hvp(self, point: Point, rows: Any = None) -> PyTree:
        return estimate(self._inner_apart, point, self.inner_samples, rows).hvp

    def cross(self, point: Point, rows: Any = None) -> PyTree:
        return estimate(self._inner_apart, point, self.inner_samples, rows).cross

    def _diagonal_regularization(self, point: Point) -> PyTree:
        # Regularization terms are sums of functions of one coordinate each.
        return self.inner_regularization(point._replace(v=trees.ones_like(point.inner_var))).hvp

    def _outer(self, point: Point, data: PyTree, weights: Array) -> OuterPass:
        total = self._outer_sum(self._outer_terms(point, data), data, weights, point)
        return trees.add(total, self.outer_regularization(point))

    def difference(self, point: Point, previous: Point, rows: Rows) -> Point:
        # Subtracted row by row, so that each level is summed once.
        train, weights = self.inner_samples.take(rows.inner)
        validation, outer_weights = self.outer_samples.take(rows.outer)
        inner = self._inner_sum(self._inner_changes(point, previous, train), train, weights, point)
        outer_changes = self._outer_changes(point, previous, validation)
        outer = self._outer_sum(outer_changes, validation, outer_weights, point)
        regularization = trees.subtract(self.inner_regularization(point), self.inner_regularization(previous))
        outer_term = trees.subtract(self.outer_regularization(point), self.outer_regularization(previous))
        return join(trees.add(inner, regularization), trees.add(outer, outer_term))

    def inner_terms(self, point: Point, rows: Any) -> PyTree:
        """Return the terms of each drawn inner row."""
        return self._inner_terms(point, self.inner_samples.take(rows)[0])

    def inner_sum(self, terms: PyTree, rows: Any, like: Point) -> InnerPass:
        """Return the estimate from the drawn inner rows with these terms, without the regularization term."""
        return self._inner_sum(terms, *self.inner_samples.take(rows), like)

    def outer_terms(self, point: Point, rows: Any) -> PyTree:
        return self._outer_terms(point, self.outer_samples.take(rows)[0])

    def outer_sum(self, terms: PyTree, rows: Any, like: Point) -> OuterPass:
        return self._outer_sum(terms, *self.outer_samples.take(rows), like)

    def outer_regularization(self, point: Point) -> OuterPass:
        """Return the part of the derivatives that is not a sum over outer rows, which is 0 by default."""
        return OuterPass(*trees.zeros_like((point.inner_var, point.outer_var)))

"""Penalties that are not smooth at zero: absolute values of coefficients, and norms of groups, beside squares."""

from abc import ABC, abstractmethod

import numpy as np

from bilevel.estimators.quadratic import group_norms, minimize_groups, minimize_l1, norm_curvature

_NEW_VARIABLES = 200  # that enter the working set in one step, or as many as are in it


class Penalty(ABC):
    """Strengths for the flat array of coefficients: `norms` of what is not smooth, `squares` of the rest."""

    norms: np.ndarray
    squares: np.ndarray

    @abstractmethod
    def value(self, w: np.ndarray) -> float:
        """Return the part that is not smooth."""

    @abstractmethod
    def residual(self, w: np.ndarray, gradient: np.ndarray) -> np.ndarray:
        """Return what is left of the optimality conditions; the gradient is that of the smooth part."""

    @abstractmethod
    def working_set(self, w: np.ndarray, residual: np.ndarray) -> np.ndarray:
        """Return the variables to move: those that are not zero, and those that should not be."""

    def support(self, w: np.ndarray) -> np.ndarray:
        """Return the variables that are not zero, or whose group is not."""
        return self.working_set(w, np.zeros_like(w))

    @abstractmethod
    def minimize(self, Q: np.ndarray, q: np.ndarray, chosen: np.ndarray, w: np.ndarray) -> np.ndarray:
        """Minimize ½ w'Qw − q'w and the part that is not smooth over the chosen variables."""

    @abstractmethod
    def bend(self, w: np.ndarray, support: np.ndarray) -> np.ndarray | float:
        """Return the Hessian on the support of the part that is not smooth elsewhere."""

    @abstractmethod
    def direction(self, w: np.ndarray) -> np.ndarray:
        """Return the gradient of the part that is not smooth elsewhere, each strength being 1; zero off the support."""

    @abstractmethod
    def spread(self, norms: np.ndarray) -> np.ndarray:
        """Return what belongs to a strength of `norms`, for each of its variables."""

    @abstractmethod
    def gather(self, of_variables: np.ndarray) -> np.ndarray:
        """Transpose `spread`."""

    def push_forward(self, w: np.ndarray, move: np.ndarray) -> np.ndarray:
        """Return the derivative of the gradient along a move of log strengths: of norms, then of all squares."""
        norms, squares = np.split(move, [len(self.norms)])
        return self.spread(self.norms * norms) * self.direction(w) + self.squares * squares * w

    def pull_back(self, w: np.ndarray, adjoint: np.ndarray) -> np.ndarray:
        """Transpose `push_forward`."""
        norms = self.norms * self.gather(self.direction(w) * adjoint)
        return np.concatenate([norms, self.squares * w * adjoint])


class Absolute(Penalty):
    """Σ a_j |w_j|."""

    def __init__(self, norms: np.ndarray, squares: np.ndarray) -> None:
        self.norms, self.squares = norms, squares

    def value(self, w: np.ndarray) -> float:
        return float(self.norms @ np.abs(w))

    def residual(self, w: np.ndarray, gradient: np.ndarray) -> np.ndarray:
        beyond = np.sign(gradient) * np.maximum(np.abs(gradient) - self.norms, 0)
        return np.where(w == 0, beyond, gradient + self.norms * np.sign(w))

    def working_set(self, w: np.ndarray, residual: np.ndarray) -> np.ndarray:
        inside = np.flatnonzero(w)
        entering = np.flatnonzero((w == 0) & (residual != 0))
        largest = np.argsort(-np.abs(residual[entering]))[: max(_NEW_VARIABLES, len(inside))]
        return np.sort(np.concatenate([inside, entering[largest]]))

    def minimize(self, Q: np.ndarray, q: np.ndarray, chosen: np.ndarray, w: np.ndarray) -> np.ndarray:
        return minimize_l1(Q, q, self.norms[chosen], w)

    def bend(self, w: np.ndarray, support: np.ndarray) -> float:
        return 0.0

    def direction(self, w: np.ndarray) -> np.ndarray:
        return np.sign(w)

    def spread(self, norms: np.ndarray) -> np.ndarray:
        return norms

    def gather(self, of_variables: np.ndarray) -> np.ndarray:
        return of_variables


class GroupNorm(Penalty):
    """Σ_g a_g ‖w_g‖; groups number the variables."""

    def __init__(self, norms: np.ndarray, squares: np.ndarray, groups: np.ndarray) -> None:
        self.norms, self.squares, self.groups = norms, squares, groups

    def _norms_of(self, w: np.ndarray) -> np.ndarray:
        return group_norms(w, self.groups, len(self.norms))

    def value(self, w: np.ndarray) -> float:
        return float(self.norms @ self._norms_of(w))

    def residual(self, w: np.ndarray, gradient: np.ndarray) -> np.ndarray:
        size, slope = self._norms_of(w), self._norms_of(gradient)
        beyond = np.maximum(1 - self.norms / np.maximum(slope, 1e-300), 0)[self.groups] * gradient
        return np.where(size[self.groups] == 0, beyond, gradient + self.norms[self.groups] * self.direction(w))

    def working_set(self, w: np.ndarray, residual: np.ndarray) -> np.ndarray:
        used = (self._norms_of(w) > 0) | (self._norms_of(residual) > 0)
        return np.flatnonzero(used[self.groups])

    def minimize(self, Q: np.ndarray, q: np.ndarray, chosen: np.ndarray, w: np.ndarray) -> np.ndarray:
        used, groups = np.unique(self.groups[chosen], return_inverse=True)
        return minimize_groups(Q, q, self.norms[used], groups, w)

    def bend(self, w: np.ndarray, support: np.ndarray) -> np.ndarray:
        used, groups = np.unique(self.groups[support], return_inverse=True)
        return norm_curvature(w[support], self.norms[used], groups)

    def direction(self, w: np.ndarray) -> np.ndarray:
        size = self._norms_of(w)
        return w / np.where(size == 0, 1, size)[self.groups]

    def spread(self, norms: np.ndarray) -> np.ndarray:
        return norms[self.groups]

    def gather(self, of_variables: np.ndarray) -> np.ndarray:
        return np.bincount(self.groups, of_variables, len(self.norms))

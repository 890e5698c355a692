"""Reversible SGD with momentum: the inner steps are undone one by one, so that their path is not stored.

Maclaurin, Duvenaud, Adams. Gradient-based Hyperparameter Optimization through Reversible Learning. ICML 2015. Undoing a
step divides by the momentum, which would amplify rounding errors. Positions and velocities are therefore integers, the
momentum is a ratio of integers, and what its multiplication loses is kept in one growing integer per coordinate.

The term of ∇x F is not in the paper, whose F does not depend on x.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np

from .problems import Array, Problem, Rows

RADIX = 2**52
DENOMINATOR = 2**16
State = tuple[Array, Array]  # z and the velocity u


class Exact:
    """Multiples of 1/radix as integers of Python, and the digits that the multiplications by γ have lost.

    A product with γ = up/down is exact only to down/radix, which is 1e-11 in the paper.
    """

    def __init__(self, start: Array, momentum: float, radix: int = RADIX) -> None:
        self.radix = radix
        ratio = Fraction(round(momentum * DENOMINATOR), DENOMINATOR)
        self.up, self.down = ratio.numerator, ratio.denominator
        self.momentum = float(ratio)
        self.z = self.to_integers(start)
        self.u = np.zeros_like(self.z)
        self.lost = np.zeros_like(self.z)

    def to_integers(self, vector: Array) -> Array:
        return np.array([round(Fraction(float(number)) * self.radix) for number in vector], dtype=object)

    def state(self) -> State:
        """Return z and u in float64."""
        return tuple(np.array([number / self.radix for number in part]) for part in (self.z, self.u))

    def multiply(self) -> None:
        """u ← γ u without a loss of information: u = q down + r becomes q up + (a digit below up)."""
        self.lost = self.lost * self.down + self.u % self.down
        self.u = self.u // self.down * self.up + self.lost % self.up
        self.lost = self.lost // self.up

    def divide(self) -> None:
        """Undo `multiply`."""
        self.lost = self.lost * self.up + self.u % self.up
        self.u = self.u // self.up * self.down + self.lost % self.down
        self.lost = self.lost // self.down

    def advance(self, gradient: Array, step_size: float) -> None:
        self.multiply()
        self.u = self.u - self.to_integers((1 - self.momentum) * gradient)
        self.z = self.z + self.to_integers(step_size * self.state()[1])

    def retreat(self, gradient: Callable[[Array], Array], step_size: float) -> Array:
        """Undo `advance`, and return z before it."""
        self.z = self.z - self.to_integers(step_size * self.state()[1])
        before = self.state()[0]
        self.u = self.u + self.to_integers((1 - self.momentum) * gradient(before))
        self.divide()
        return before

    def bits_per_coordinate(self) -> float:
        """Return the mean length of the integers that keep what was lost."""
        return float(np.mean([int(number).bit_length() for number in self.lost]))


class Rounded(Exact):
    """The same steps in float64."""

    def __init__(self, start: Array, momentum: float) -> None:
        super().__init__(start, momentum)
        self.z, self.u = np.array(start), np.zeros_like(start)

    def to_integers(self, vector: Array) -> Array:
        return vector

    def state(self) -> State:
        return self.z, self.u

    def multiply(self) -> None:
        self.u = self.momentum * self.u

    def divide(self) -> None:
        self.u = self.u / self.momentum


def reversible_gradient(
    problem: Problem, numbers: Exact, x: Array, inner_loop: Sequence[Rows], outer: Rows, step_size: float
) -> tuple[Array, Array, Array]:
    """Return z_T, the gradient of F(z_T(x), x) in x, and the start as it was recovered."""
    for rows in inner_loop:
        numbers.advance(problem.gz(numbers.state()[0], x, rows), step_size)
    end = numbers.state()[0]
    w, g, q = problem.fz(end, x, outer), problem.fx(end, x, outer), np.zeros_like(end)
    for rows in reversed(inner_loop):
        q = q + step_size * w
        z = numbers.retreat(lambda z, rows=rows: problem.gz(z, x, rows), step_size)
        w = w - (1 - numbers.momentum) * problem.hv(z, x, q, rows)
        g = g - (1 - numbers.momentum) * problem.cr(z, x, q, rows)
        q = numbers.momentum * q
    return end, g, numbers.state()[0]
